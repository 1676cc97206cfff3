from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests import tiny
from tests.draft_service.kit import Service, running
from tests.draft_service.reference import DRAFT


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("draft"), **DRAFT)


@pytest.fixture(scope="session")
async def shared(model: Path) -> AsyncIterator[Service]:
    async with running(model) as service:
        yield service


@pytest.fixture
async def service(shared: Service) -> AsyncIterator[Service]:
    """A service that the test has to leave without sessions."""
    yield shared
    await shared.until((0, 0, 0))


@pytest.fixture(scope="session")
async def ngrams() -> AsyncIterator[Service]:
    """A service without a model."""
    async with running(None) as service:
        yield service
        await service.until((0, 0, 0))
