"""`foredraft draft-server`: loads what drafts, serves it, drains and stops."""

import asyncio
import logging
from dataclasses import dataclass

import torch

from draft_service.combined import CombinedDrafter
from draft_service.drafter import Drafter
from draft_service.metrics import DraftMetrics
from draft_service.model_drafter import ModelDrafter
from draft_service.ngram import NgramDrafter
from draft_service.scheduler import Scheduler
from draft_service.service import DraftServicer
from draft_service.stream import Offer, Places
from foredraft.engine.emulated import load_emulated
from foredraft.engine.engine import Engine
from foredraft.engine.errors import ModelError
from foredraft.engine.loading import LoadedModel, load
from foredraft.serving.model_thread import ModelThread
from foredraft.serving.server import Server, StartError
from foredraft.settings import DraftSettings
from foredraft.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from foredraft.validation import DRAFTER_VALUES

logger = logging.getLogger(__name__)

SERVICE_NAME = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name
# What a model with a long context gets unless more is asked for: memory is taken for all of it.
DEFAULT_MAX_MODEL_LEN = 4096
# Long drafts get fewer branches: the tree has room for this many tokens a branch.
TREE_TOKENS_PER_BRANCH = 16


@dataclass(frozen=True, slots=True)
class Draft:
    """The parts of a running draft service; `server.metrics` knows of them. No engine: no model."""

    engine: Engine | None
    scheduler: Scheduler
    places: Places
    servicer: DraftServicer
    thread: ModelThread

    async def stop(self) -> None:
        """End the model thread once its forward is done. Call it when no session is left."""
        await asyncio.to_thread(self.thread.stop)


async def main(settings: DraftSettings) -> int:
    """Serve until a signal or the drafter's failure; returns the exit code. Raises StartError."""
    server = Server.configured(settings, [SERVICE_NAME])
    await server.start()
    try:
        draft = await start_draft(settings, server)
    except Exception:
        await server.stop()
        raise
    await server.set_serving()
    exit_code = await server.wait()
    await draft.stop()
    return exit_code


async def start_draft(settings: DraftSettings, server: Server) -> Draft:
    """Load the model, which blocks no handler, start its thread and add the service to `server`.

    If the drafter fails later, all sessions end with INTERNAL and the server shuts down with exit code 1. Raises
    StartError for settings or a model that cannot be served.
    """
    threads = settings.threads or torch.get_num_threads()
    drafters: dict[common_pb2.Drafter, Drafter] = {
        common_pb2.DRAFTER_NGRAM: NgramDrafter(settings.ngram_min, settings.ngram_max)
    }
    model, engine = None, None
    if settings.draft_model is not None:
        try:
            model, engine = await asyncio.to_thread(_load, settings, settings.draft_model, threads)
        except ModelError as error:
            raise StartError(str(error)) from error
        drafter = ModelDrafter(
            engine,
            vocabulary_size=model.vocabulary_size,
            branches=settings.branches,
            prefill_chunk=settings.prefill_chunk,
        )
        drafters[common_pb2.DRAFTER_MODEL] = drafter
        drafters[common_pb2.DRAFTER_COMBINED] = CombinedDrafter(drafter, settings.ngram_min, settings.ngram_max)
    loop = asyncio.get_running_loop()

    def fail(error: Exception) -> None:
        loop.call_soon_threadsafe(servicer.fail)
        loop.call_soon_threadsafe(server.shut_down, 1)

    thread = ModelThread(
        # The number of threads belongs to the thread that sets it.
        lambda: scheduler.step(),
        name="drafter",
        prepare=lambda: torch.set_num_threads(threads),
        on_failure=fail,
    )
    scheduler = Scheduler(drafters, thread.wake)
    places = Places(settings.max_sessions)
    identity = _identity(model, engine) if model is not None and engine is not None else None
    servicer = DraftServicer(
        identity,
        model.vocabulary if model is not None else (),
        Offer(
            vocabulary_size=model.vocabulary_size if model is not None else None,
            drafters=sorted(drafters),
            default_drafter=DRAFTER_VALUES[settings.drafter or "ngram"],
        ),
        scheduler,
        places,
        idle_timeout_s=settings.idle_timeout_s,
    )
    server.add(draft_pb2_grpc.add_DraftServiceServicer_to_server, servicer)
    server.metrics.register(DraftMetrics(engine, scheduler, places, thread))
    thread.start()
    _log(identity, threads)
    return Draft(engine, scheduler, places, servicer, thread)


def _load(settings: DraftSettings, name: str, threads: int) -> tuple[LoadedModel, Engine]:
    torch.set_num_threads(threads)
    tree_size = TREE_TOKENS_PER_BRANCH * max(settings.branches, 4)
    if (cost := settings.emulation.draft) is not None:
        return load_emulated(
            cost,
            settings.emulation.accept,
            max_model_len=settings.max_model_len or DEFAULT_MAX_MODEL_LEN,
            max_sessions=settings.max_sessions,
            tree_size=tree_size,
        )
    model = load(name, dtype=settings.dtype, device=settings.device, layers=settings.draft_layers)
    max_model_len = settings.max_model_len or min(model.context_length, DEFAULT_MAX_MODEL_LEN)
    if max_model_len > model.context_length:
        raise ModelError(
            f"draft_max_model_len is {max_model_len}; {model.name} has a context of {model.context_length}"
        )
    engine = Engine(
        model.model,
        max_model_len=max_model_len,
        max_sessions=settings.max_sessions,
        tree_size=tree_size,
    )
    return model, engine


def _identity(model: LoadedModel, engine: Engine) -> common_pb2.Model:
    return common_pb2.Model(
        name=model.name,
        weights_hash=model.weights_hash,
        dtype=model.dtype,
        device=model.device,
        context_length=engine.max_model_len,
        vocabulary_size=model.vocabulary_size,
        vocabulary_hash=model.vocabulary_hash,
        eos_token_ids=model.eos_token_ids,
        parameter_count=model.parameter_count,
        batch_invariant=engine.batch_invariant,
        max_sessions=engine.max_sessions,
    )


def _log(identity: common_pb2.Model | None, threads: int) -> None:
    if identity is None:
        logger.info("drafting with n-grams of the text")
        return
    logger.info(
        "drafting with %s: %.3g parameters in %s on %s with %d threads; %d sessions of %d tokens",
        identity.name,
        identity.parameter_count,
        identity.dtype,
        identity.device,
        threads,
        identity.max_sessions,
        identity.context_length,
    )
