"""`foredraft target-server`: loads the target model, serves it, drains and stops."""

import asyncio
import logging
import sys
from dataclasses import dataclass
from functools import partial

import grpc
import torch

from foredraft.engine.emulated import load_emulated
from foredraft.engine.engine import Engine
from foredraft.engine.errors import ModelError
from foredraft.engine.loading import LoadedModel, load
from foredraft.engine.parallel import Leader
from foredraft.serving.model_thread import ModelThread
from foredraft.serving.server import Server, StartError
from foredraft.settings import TargetSettings
from foredraft.v1 import common_pb2, target_pb2, target_pb2_grpc
from target_service.metrics import TargetMetrics
from target_service.places import Places
from target_service.ranks import RankLostError, Ranks, leave, start_ranks
from target_service.scheduler import Scheduler
from target_service.service import TargetServicer
from target_service.session import Limits

logger = logging.getLogger(__name__)

SERVICE_NAME = target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name
# What a model with a long context gets unless more is asked for: memory is taken for all of it.
DEFAULT_MAX_MODEL_LEN = 4096


@dataclass(frozen=True, slots=True)
class Target:
    """The parts of a running target service; `server.metrics` knows of `scheduler` and `places`."""

    identity: common_pb2.Model
    scheduler: Scheduler
    places: Places
    servicer: TargetServicer
    thread: ModelThread
    ranks: Ranks | None = None
    leader: Leader | None = None

    async def stop(self) -> bool:
        """Ends the model thread once its forward is done, then the other ranks. Call it when no session is left.

        Returns False if a thread is left behind that nothing can end; this process can only `leave` then.
        """
        if self.ranks is None:
            if not await asyncio.to_thread(self.thread.stop):
                return False
        elif self.ranks.lost.done() or not await asyncio.to_thread(self.thread.stop) or self.thread.failure is not None:
            self.ranks.kill()
            return False
        elif self.leader is not None and not await self.ranks.stop(self.leader.dismiss):
            return False
        counters = self.scheduler.counters
        logger.info(
            "%d passes over %d tokens for %d rounds; the model computed %.3f s of the %.3f s that they took in all",
            counters.forwards,
            counters.tokens,
            counters.verdicts,
            counters.compute_s,
            counters.span_s,
        )
        return True


async def main(settings: TargetSettings) -> int:
    """Serves until a signal or the model's failure; returns the exit code. Raises StartError."""
    server = Server.configured(settings, [SERVICE_NAME])
    await server.start()
    try:
        target = await start_target(settings, server)
    except RankLostError as error:
        await server.stop()
        print(f"error: {error}", file=sys.stderr)
        leave(1)
    except Exception:
        await server.stop()
        raise
    await server.set_serving()
    exit_code = await server.wait()
    if not await target.stop():
        leave(exit_code or 1)
    return exit_code


async def start_target(settings: TargetSettings, server: Server) -> Target:
    """Loads the model, which blocks no handler, starts its thread and adds the service to `server`.

    If the model fails later, all sessions end with INTERNAL, or with UNAVAILABLE if it has several ranks, of which
    one may be lost or hang, and the server shuts down with exit code 1. Raises StartError for settings or a model that
    cannot be served.
    """
    try:
        ranks = await start_ranks(settings) if settings.tensor_parallel_size > 1 else None
        threads = settings.threads or max(1, torch.get_num_threads() // settings.tensor_parallel_size)
        loading = partial(_load, settings, threads, ranks)
        model, engine, tokenizer_files = await (asyncio.to_thread(loading) if ranks is None else ranks.during(loading))
    except ModelError as error:
        raise StartError(str(error)) from error
    identity = _identity(model, engine)
    _log(identity, model, threads)
    loop = asyncio.get_running_loop()

    def fail(error: object) -> None:
        # Of a model in parts one is lost or cannot be reached; another replica can go on.
        status = grpc.StatusCode.INTERNAL if ranks is None else grpc.StatusCode.UNAVAILABLE
        loop.call_soon_threadsafe(servicer.fail, status)
        loop.call_soon_threadsafe(server.shut_down, 1)

    def step() -> bool:
        if engine.leader is not None:
            engine.leader.heartbeat()
        return scheduler.step()

    thread = ModelThread(
        step,
        # The number of threads belongs to the thread that sets it.
        name="target model",
        prepare=lambda: torch.set_num_threads(threads),
        on_failure=fail,
    )
    limits = Limits(identity.vocabulary_size, identity.context_length, frozenset(identity.eos_token_ids))
    scheduler = Scheduler(engine, limits, prefill_chunk=settings.prefill_chunk, wake=thread.wake)
    places = Places(settings.max_sessions, settings.queue_timeout_s)
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
    if ranks is not None:
        ranks.guard(fail, thread)
    return Target(identity, scheduler, places, servicer, thread, ranks, engine.leader)


def _load(settings: TargetSettings, threads: int, ranks: Ranks | None) -> tuple[LoadedModel, Engine, dict[str, bytes]]:
    torch.set_num_threads(threads)
    if (cost := settings.emulation.target) is not None:
        model, engine = load_emulated(
            cost,
            max_model_len=settings.max_model_len or DEFAULT_MAX_MODEL_LEN,
            max_sessions=settings.max_sessions,
        )
        return model, engine, model.tokenizer_files()
    group = None if ranks is None else ranks.join()
    model = load(
        settings.model,
        dtype=settings.dtype,
        device=settings.device,
        tensor_parallel_size=settings.tensor_parallel_size,
    )
    max_model_len = settings.max_model_len or min(model.context_length, DEFAULT_MAX_MODEL_LEN)
    if max_model_len > model.context_length:
        raise ModelError(f"max_model_len is {max_model_len}; {model.name} has a context of {model.context_length}")
    engine = Engine(
        model.model,
        max_model_len=max_model_len,
        max_sessions=settings.max_sessions,
        batch_invariant=settings.batch_invariant,
        group=group,
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
