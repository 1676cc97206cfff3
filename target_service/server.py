"""`foredraft target-server`: loads the target model, serves it, drains and stops."""

import asyncio
import logging
from dataclasses import dataclass

import torch

from foredraft.config import TargetSettings
from foredraft.engine.emulated import load_emulated
from foredraft.engine.engine import Engine
from foredraft.engine.errors import ModelError
from foredraft.engine.loading import LoadedModel, load
from foredraft.serving.model_thread import ModelThread
from foredraft.serving.server import Server, StartError
from foredraft.v1 import common_pb2, target_pb2, target_pb2_grpc
from target_service.metrics import TargetMetrics
from target_service.places import Places
from target_service.scheduler import Scheduler
from target_service.service import TargetServicer
from target_service.session import Limits

logger = logging.getLogger(__name__)

SERVICE_NAME = target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name
# What a model with a long context gets unless more is asked for: memory is taken for all of it.
DEFAULT_MAX_MODEL_LEN = 4096
QUEUE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Target:
    """The parts of a running target service; `server.metrics` knows of `scheduler` and `places`."""

    identity: common_pb2.Model
    scheduler: Scheduler
    places: Places
    servicer: TargetServicer
    thread: ModelThread

    async def stop(self) -> None:
        """Ends the model thread once its forward is done. Call it when no session is left."""
        await asyncio.to_thread(self.thread.stop)


async def main(settings: TargetSettings) -> int:
    """Serves until a signal or the model's failure; returns the exit code. Raises StartError."""
    server = Server.configured(settings, [SERVICE_NAME])
    await server.start()
    try:
        target = await start_target(settings, server)
    except Exception:
        await server.stop()
        raise
    await server.set_serving()
    exit_code = await server.wait()
    await target.stop()
    return exit_code


async def start_target(settings: TargetSettings, server: Server, *, queue_timeout_s: float = QUEUE_TIMEOUT_S) -> Target:
    """Loads the model, which blocks no handler, starts its thread and adds the service to `server`.

    If the model fails later, all sessions end with INTERNAL and the server shuts down with exit code 1. Raises
    StartError for settings or a model that cannot be served.
    """
    if settings.tensor_parallel_size > 1:
        raise StartError("tensor_parallel_size > 1 is not available in this build yet; use one device")
    threads = settings.threads or torch.get_num_threads()
    try:
        model, engine, tokenizer_files = await asyncio.to_thread(_load, settings, threads)
    except ModelError as error:
        raise StartError(str(error)) from error
    identity = _identity(model, engine)
    _log(identity, model, threads)
    loop = asyncio.get_running_loop()

    def fail(error: Exception) -> None:
        loop.call_soon_threadsafe(servicer.fail)
        loop.call_soon_threadsafe(server.shut_down, 1)

    thread = ModelThread(
        # The number of threads belongs to the thread that sets it.
        lambda: scheduler.step(),
        name="target model",
        prepare=lambda: torch.set_num_threads(threads),
        on_failure=fail,
    )
    limits = Limits(identity.vocabulary_size, identity.context_length, frozenset(identity.eos_token_ids))
    scheduler = Scheduler(engine, limits, prefill_chunk=settings.prefill_chunk, wake=thread.wake)
    places = Places(settings.max_sessions, queue_timeout_s)
    servicer = TargetServicer(
        identity,
        model.vocabulary,
        tokenizer_files,
        limits,
        scheduler,
        places,
        idle_timeout_s=settings.idle_timeout_s,
    )
    server.add(target_pb2_grpc.add_TargetServiceServicer_to_server, servicer)
    server.metrics.register(TargetMetrics(scheduler, places, thread))
    thread.start()
    return Target(identity, scheduler, places, servicer, thread)


def _load(settings: TargetSettings, threads: int) -> tuple[LoadedModel, Engine, dict[str, bytes]]:
    torch.set_num_threads(threads)
    if (cost := settings.emulation.target) is not None:
        model, engine = load_emulated(
            cost,
            max_model_len=settings.max_model_len or DEFAULT_MAX_MODEL_LEN,
            max_sessions=settings.max_sessions,
        )
        return model, engine, model.tokenizer_files()
    model = load(settings.model, dtype=settings.dtype, device=settings.device)
    max_model_len = settings.max_model_len or min(model.context_length, DEFAULT_MAX_MODEL_LEN)
    if max_model_len > model.context_length:
        raise ModelError(f"max_model_len is {max_model_len}; {model.name} has a context of {model.context_length}")
    engine = Engine(
        model.model,
        max_model_len=max_model_len,
        max_sessions=settings.max_sessions,
        batch_invariant=settings.batch_invariant,
    )
    return model, engine, model.tokenizer_files()


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


def _log(identity: common_pb2.Model, model: LoadedModel, threads: int) -> None:
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.model.parameters())
    logger.info(
        "loaded %s: %.1f million parameters, %.2f GiB in %s on %s with %d threads, weights hash %s",
        identity.name,
        identity.parameter_count / 1e6,
        weights / 2**30,
        identity.dtype,
        identity.device,
        threads,
        identity.weights_hash[:12],
    )
    logger.info(
        "%d sessions of %d tokens; results %s on what else is computed with them",
        identity.max_sessions,
        identity.context_length,
        "do not depend" if identity.batch_invariant else "may depend in their last bits",
    )
