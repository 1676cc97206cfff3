"""Generate `foredraft/v1/` from `protos/`. Usage: python tools/generate_stubs.py [OUTPUT_DIRECTORY]"""

import os
import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
SERVICES = ("draft", "generation", "target")
# protoc looks for protoc-gen-mypy_grpc on the path, where an environment that was not activated is not.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def generate(output: Path) -> None:
    """Write the stubs of every proto under `output`; raises RuntimeError if the compiler fails."""
    protos = sorted((ROOT / "protos").rglob("*.proto"))
    services = [proto for proto in protos if proto.stem in SERVICES]
    include = [f"-I{ROOT / 'protos'}", f"-I{files('grpc_tools') / '_proto'}"]
    for flags, sources in (
        ([f"--python_out={output}", f"--pyi_out={output}"], protos),
        ([f"--grpc_python_out={output}", f"--mypy_grpc_out=quiet:{output}"], services),
    ):
        if protoc.main(["protoc", *include, *flags, *map(str, sources)]) != 0:
            raise RuntimeError("protoc failed; its message is above")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
