"""The other ranks of a target that several devices share: started, watched, and told to go.

This process is rank 0: it serves and leads. The others are processes of its own that follow. None outlives the others:
each follower has a pipe as its standard input, which ends when this process is gone, however it ended; and the end of a
follower fulfils `lost`, as does a step that never ends, because one of them hangs. The ranks find one another on
loopback.
"""

import asyncio
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
from torch import distributed

from foredraft.engine import parallel
from foredraft.engine.loading import parallel_device
from foredraft.serving.model_thread import ModelThread
from foredraft.serving.server import StartError
from foredraft.settings import TargetSettings

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

HOST = "127.0.0.1"
# What followers need to end when they are dismissed.
STOP_TIMEOUT_S = 15.0
# A step of the model that takes longer than this never ends: its ranks are in different collectives, or one hangs.
STEP_TIMEOUT_S = 60.0
# How often that is looked at.
WATCH_S = 1.0


class RankLostError(StartError):
    """A follower ended while the model was being loaded; this process can only `leave`."""


async def start_ranks(settings: TargetSettings) -> "Ranks":
    """Starts the followers of a target. Raises ModelError, before anything is loaded, if it cannot be split."""
    size = settings.tensor_parallel_size
    device = await asyncio.to_thread(parallel_device, settings.model, device=settings.device, tensor_parallel_size=size)
    ranks = Ranks(settings, device)
    await ranks.start()
    return ranks


class Ranks:
    """The followers of one target. `device` is "cpu" or "cuda"."""

    def __init__(self, settings: TargetSettings, device: str) -> None:
        self.size = settings.tensor_parallel_size
        # What happened, once a follower has ended before it was told to, or does not go on.
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._settings, self._device = settings, device
        # By itself it would listen on all interfaces, and whoever can write to it speaks to the ranks.
        listener = socket.create_server((HOST, 0))
        self._store = distributed.TCPStore(  # type: ignore[attr-defined]
            HOST,
            listener.getsockname()[1],
            self.size,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._processes: list[asyncio.subprocess.Process] = []
        self._watches: list[asyncio.Task[None]] = []
        self._leaving = False

    async def start(self) -> None:
        """Starts the followers, which load their parts once `join` is called."""
        # As torchrun does: each rank would otherwise take all cores.
        threads = self._settings.threads or max(1, torch.get_num_threads() // self.size)
        common = {"WORLD_SIZE": str(self.size), "MASTER_ADDR": HOST, "MASTER_PORT": str(self._store.port)}
        settings = self._settings.model_copy(update={"threads": threads}).model_dump_json()
        for rank in range(1, self.size):
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "target_service.follower",
                settings,
                stdin=asyncio.subprocess.PIPE,
                # Ctrl-C and SIGTERM are for this process, which drains first.
                start_new_session=True,
                env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            self._processes.append(process)
            self._watches.append(asyncio.create_task(self._watch(rank, process)))

    def join(self) -> parallel.Group:
        """Waits until all ranks are there; blocks, so call it in a thread."""
        return parallel.join(self._device, 0, self.size, self._store)

    async def during(self, load: Callable[[], Result]) -> Result:
        """What `load` returns, called in a thread that nobody waits for if a rank ends: then RankLostError is raised.

        A lost rank may leave the thread in a collective that never ends.
        """
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[Result] = loop.create_future()

        def run() -> None:
            try:
                result = load()
            except BaseException as error:
                loop.call_soon_threadsafe(_fail, loaded, error)
            else:
                loop.call_soon_threadsafe(_succeed, loaded, result)

        threading.Thread(target=run, name="loading", daemon=True).start()
        either: set[asyncio.Future[Any]] = {loaded, self.lost}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            # A collective that fails is the consequence.
            if loaded.done() and isinstance(loaded.exception(), RuntimeError):
                await asyncio.wait({self.lost}, timeout=STOP_TIMEOUT_S)
            if self.lost.done():
                raise RankLostError(self.lost.result())
            return loaded.result()
        except BaseException:
            self.kill()
            raise

    def guard(self, on_loss: Callable[[str], None], thread: ModelThread) -> None:
        """Calls `on_loss` if a follower ends or hangs, and wakes `thread` now and then, to keep the others waiting."""
        self.lost.add_done_callback(lambda lost: None if lost.cancelled() else on_loss(lost.result()))
        self._watches.append(asyncio.create_task(self._keep_waiting(thread.wake)))
        self._watches.append(asyncio.create_task(self._watch_steps(thread)))

    async def stop(self, dismiss: Callable[[], None]) -> bool:
        """Has `dismiss`, which may block, end the followers.

        Returns False if one had to be killed: what waits for it in this process never ends.
        """
        self._leaving = True
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await asyncio.to_thread(dismiss)
                await asyncio.gather(*(process.wait() for process in self._processes))
        except TimeoutError:
            logger.error("a rank of the target has not ended within %g s of its dismissal", STOP_TIMEOUT_S)
            self.kill()
            return False
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        if distributed.is_initialized():
            distributed.destroy_process_group()
        return True

    def kill(self) -> None:
        """Ends the followers at once."""
        self._leaving = True
        for process in self._processes:
            if process.returncode is None:
                process.kill()

    async def _keep_waiting(self, wake: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(parallel.HEARTBEAT_S)
            wake()

    async def _watch(self, rank: int, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self._lose(f"rank {rank} of the target {how}; its last output says why")

    async def _watch_steps(self, thread: ModelThread) -> None:
        while not self.lost.done():
            await asyncio.sleep(WATCH_S)
            if thread.step_s > STEP_TIMEOUT_S:
                self._lose(f"a step of the target has not ended within {STEP_TIMEOUT_S:g} s; one of its ranks hangs")

    def _lose(self, what: str) -> None:
        if not self._leaving and not self.lost.done():
            logger.error("%s", what)
            self.lost.set_result(what)


def _succeed(future: "asyncio.Future[Result]", result: Result) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: "asyncio.Future[Result]", error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


def leave(exit_code: int) -> NoReturn:
    """Ends this process at once: a collective that waits for a lost rank holds a thread that nothing else can end."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
