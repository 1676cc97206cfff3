from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from tests import tiny
from tests.target_service.kit import Service, running

# The models are too small for more.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in float64 whose embedding has more rows than the tokenizer has tokens."""
    return tiny.save_model(tmp_path_factory.mktemp("target"), dtype="float64", padding_rows=8)


@pytest.fixture(scope="session")
async def shared(model: Path) -> AsyncIterator[Service]:
    async with running(model) as service:
        yield service


@pytest.fixture
async def service(shared: Service) -> AsyncIterator[Service]:
    """A service that the test has to leave without sessions."""
    yield shared
    await shared.until_empty()
