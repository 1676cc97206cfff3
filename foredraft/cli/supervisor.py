"""Starts processes that serve gRPC, waits until they are healthy, notices when one dies, and stops them in order."""

import asyncio
import contextlib
import os
import sys
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

# Seconds between two questions whether a process that is starting serves already.
POLL_INTERVAL_S = 0.1
# gRPC would wait longer and longer until it tries again.
RECONNECT_SOON = [(f"grpc.{which}_reconnect_backoff_ms", 200) for which in ("initial", "min", "max")]
# Lines of a process's output that are repeated when it dies.
TAIL_LINES = 15
# The priority of a process that gives way.
NICE = 10
# A line that never ends is cut into pieces of this many bytes.
LONGEST_LINE = 65536


# Called with the name of a child and a text.
Report = Callable[[str, str], None]


def ignore(name: str, text: str) -> None:
    """The report that nobody reads."""


class ChildError(RuntimeError):
    """A process ended or did not become healthy; the message names it and has its last output."""


@dataclass
class Child:
    """One process. `health_address`, or else `address`, answers health checks; `cores` are its CPUs, None for all.

    With `yields` it gives way to the other processes when they want the same CPU.
    """

    name: str
    command: Sequence[str]
    address: str
    cores: Collection[int] | None = None
    health_address: str | None = None
    yields: bool = False
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))


class Supervisor:
    """Runs children until `stop`.

    `on_line(name, line)` gets every line of a child's output, and `on_state(name, state)` what becomes of it. Every
    child has a pipe as its standard input that nobody writes to: it ends when this process is gone, however it ended,
    and that tells a child to end too.
    """

    def __init__(
        self,
        *,
        on_line: Report = ignore,
        on_state: Report = ignore,
        environment: Mapping[str, str] = os.environ,
        kill_after_s: float = 40.0,
    ) -> None:
        self._on_line = on_line
        self._on_state = on_state
        self._environment = dict(environment)
        self._kill_after_s = kill_after_s
        self._running: list[tuple[Child, asyncio.subprocess.Process, asyncio.Task[None]]] = []

    async def start(self, child: Child) -> None:
        """Start a child."""
        self._on_state(child.name, "starting")
        process = await asyncio.create_subprocess_exec(
            *child.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self._environment,
            # Ctrl-C reaches a whole process group; the children are to be stopped in order instead.
            start_new_session=True,
        )
        self._running.append((child, process, asyncio.create_task(self._run(child, process))))
        if child.cores is not None and sys.platform == "linux":
            os.sched_setaffinity(process.pid, child.cores)
        if child.yields and sys.platform != "win32":
            # Who has less already may not take more again.
            os.setpriority(os.PRIO_PROCESS, process.pid, max(NICE, os.getpriority(os.PRIO_PROCESS, process.pid)))

    async def wait_healthy(self, *children: Child, timeout_s: float = 3600.0) -> None:
        """Return when all these serve. Raises ChildError as soon as any process has ended, or after the timeout."""
        healthy: asyncio.Future[Any] = asyncio.gather(*(self._healthy(child) for child in children))
        ended: asyncio.Future[Any] = asyncio.create_task(self.wait())
        try:
            done, _ = await asyncio.wait({healthy, ended}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if ended in done:
                await ended
            if not done:
                names = " and ".join(child.name for child in children)
                raise ChildError(f"{names} did not serve within {timeout_s:g} s")
        finally:
            for task in (healthy, ended):
                task.cancel()
            await asyncio.gather(healthy, ended, return_exceptions=True)

    async def wait(self) -> None:
        """Raises ChildError when the first process has ended."""
        await asyncio.wait([task for _, _, task in self._running], return_when=asyncio.FIRST_COMPLETED)
        child, process = next((child, process) for child, process, task in self._running if task.done())
        code = process.returncode
        how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        last = "".join(f"\n  {line}" for line in child.tail)
        raise ChildError(f"{child.name} {how}" + (f"; its last output:{last}" if last else ""))

    async def stop(self) -> None:
        """Stop the processes, the last started first, each with SIGTERM and then with SIGKILL."""
        for child, process, task in reversed(self._running):
            terminate(process)
            await asyncio.wait([task], timeout=self._kill_after_s)
            if not task.done():
                process.kill()
                await task
            self._on_state(child.name, "stopped")

    def hurry(self) -> None:
        """Send every process another SIGTERM, which ends its running calls at once."""
        for _, process, _ in self._running:
            terminate(process)

    async def _healthy(self, child: Child) -> None:
        async with grpc.aio.insecure_channel(child.health_address or child.address, RECONNECT_SOON) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    response = await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
                    if response.status == health_pb2.HealthCheckResponse.SERVING:
                        self._on_state(child.name, f"serving on {child.address}")
                        return
                await asyncio.sleep(POLL_INTERVAL_S)

    async def _run(self, child: Child, process: asyncio.subprocess.Process) -> None:
        """Pass on the output of a child until it ends."""
        output = cast(asyncio.StreamReader, process.stdout)
        rest = b""
        while chunk := await output.read(LONGEST_LINE):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > LONGEST_LINE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._line(child, line)
        if rest:
            self._line(child, rest)
        await process.wait()

    def _line(self, child: Child, line: bytes) -> None:
        # Of a progress bar, which is redrawn after carriage returns, the last state.
        text = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
        child.tail.append(text)
        self._on_line(child.name, text)


def terminate(process: asyncio.subprocess.Process) -> None:
    """Send SIGTERM to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
