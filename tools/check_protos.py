"""Check `protos/`: style, and compatibility with a git reference. Usage: python tools/check_protos.py [REFERENCE]

REFERENCE is what clients out there were built from, by default the branch main.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUF = Path(sys.executable).parent / "buf"


def lint(directory: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs `buf lint` on a directory with buf.yaml."""
    return _buf("lint", str(directory))


def breaking(reference: str = "main", directory: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs `buf breaking` on a directory with buf.yaml, against a git reference of this repository."""
    return _buf("breaking", str(directory), "--against", f"{ROOT / '.git'}#ref={reference}")


def _buf(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BUF, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    results = [lint(), breaking(sys.argv[1] if len(sys.argv) > 1 else "main")]
    print("".join(result.stdout + result.stderr for result in results), end="")
    sys.exit(any(result.returncode for result in results))
