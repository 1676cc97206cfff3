"""One set of services on tiny models for all measurements: starting them takes longer than measuring them."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import pytest

from foredraft.cli.up import Stack
from tests import tiny


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft. In float64, no two tokens tie."""
    directory = tmp_path_factory.mktemp("models")
    target = tiny.save_model(directory / "target", dtype="float64")
    return target, tiny.save_model(directory / "draft", dtype="float64", noise=0.05)


@pytest.fixture(scope="session")
async def address(models: tuple[Path, Path]) -> AsyncIterator[str]:
    """Of services with these models."""
    target, draft = models
    options: dict[str, Any] = {
        "model": str(target),
        "draft_model": str(draft),
        "dtype": "float64",
        "draft_dtype": "float64",
    }
    options |= {"listen": "127.0.0.1:0", "threads": 1, "draft_threads": 1}
    async with Stack(options) as stack:
        yield stack.address


@pytest.fixture
def reused(address: str) -> type[Stack]:
    """In place of Stack: checks its options like that, and is the services that run already."""

    class Reused(Stack):
        def __init__(self, options: Any, **flags: Any) -> None:
            super().__init__(options, **flags)
            self.address = address

        async def __aenter__(self) -> Self:
            return self

    return Reused
