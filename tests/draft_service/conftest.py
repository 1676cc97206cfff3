from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

from draft_service.model_drafter import ModelDrafter
from foredraft.engine.engine import Engine
from tests import tiny
from tests.draft_service.kit import Service, running
from tests.draft_service.reference import DRAFT, MAX_MODEL_LEN, TARGET, Reference

BRANCHES = 4
TREE_SIZE = 16
CHUNK = 16


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def draft() -> Reference:
    return Reference(**DRAFT)


@pytest.fixture(scope="session")
def target() -> Reference:
    return Reference(**TARGET)


@pytest.fixture
def engine() -> Engine:
    return Engine(tiny.model(**DRAFT), max_model_len=MAX_MODEL_LEN, max_sessions=4, tree_size=TREE_SIZE)


@pytest.fixture
def drafter(engine: Engine) -> ModelDrafter:
    return ModelDrafter(engine, vocabulary_size=tiny.VOCABULARY_SIZE, branches=BRANCHES, prefill_chunk=CHUNK)


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
