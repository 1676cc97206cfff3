"""What the orchestrator and its client may load."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "left_out"),
    [
        ("orchestrator.server", {"torch", "transformers"}),
        ("orchestrator.client", {"torch", "transformers", "tokenizers", "numpy", "pydantic", "jinja2"}),
    ],
)
def test_importing_leaves_heavy_packages_out(module: str, left_out: set[str]) -> None:
    assert left_out.isdisjoint(loaded(f"import {module}"))


def test_using_a_tokenizer_leaves_torch_out(tmp_path) -> None:
    from tests.orchestrator.edge import TOKENIZER_FILES

    for name, data in TOKENIZER_FILES.items():
        (tmp_path / name).write_bytes(data)
    modules = loaded(
        f"""
import asyncio, pathlib
import orchestrator.server
from orchestrator.tokenizer import Tokenizer
tokenizer = Tokenizer({{path.name: path.read_bytes() for path in pathlib.Path({str(tmp_path)!r}).iterdir()}})
asyncio.run(tokenizer.encode_chat([{{"role": "user", "content": "Hi"}}]))
"""
    )
    assert "transformers" in modules
    assert "torch" not in modules


def loaded(program: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after running the program."""
    program += "\nimport sys; print(*sys.modules, sep='\\n')"
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in process.stdout.split()}
