"""The locked install, as the images do it, in an environment of its own. Slow: `make install-test`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docker.files import ROOT

pytestmark = pytest.mark.skipif("INSTALL_TEST" not in os.environ, reason="slow: make install-test")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("extra", ["[tracing]", "[models,tracing]"], ids=["orchestrator", "models"])
def test_the_locked_install_works_in_a_fresh_environment(tmp_path: Path, extra: str) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python, command = (tmp_path / "venv" / "bin" / name for name in ("python", "foredraft"))
    constraints = ROOT / "constraints.txt"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    wheel = [*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path / "wheels"), str(ROOT)]
    subprocess.run(wheel, cwd=tmp_path, check=True)
    [built] = (tmp_path / "wheels").glob("*.whl")
    subprocess.run([*pip, "install", "--quiet", "-c", str(constraints), f"{built}{extra}"], cwd=tmp_path, check=True)
    subprocess.run([*pip, "check"], check=True)
    installed = subprocess.run([*pip, "freeze", "--exclude", "foredraft"], check=True, capture_output=True, text=True)
    pinned = {line.lower() for line in constraints.read_text().splitlines()}
    assert {line.split("+")[0].lower() for line in installed.stdout.splitlines()} <= pinned
    help_text = subprocess.run([command, "--help"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert all(name in help_text for name in ("target-server", "draft-server", "orchestrator"))
    # What fetches models in the containers.
    assert (tmp_path / "venv" / "bin" / "hf").exists()
    modules = ["orchestrator.server"]
    if "models" in extra:
        modules += ["target_service.server", "draft_service.server", "foredraft.distill.prompts"]
    for module in modules:
        subprocess.run([python, "-c", f"import {module}"], cwd=tmp_path, check=True)
