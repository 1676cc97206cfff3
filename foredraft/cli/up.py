"""`foredraft up`: target, draft and orchestrator as processes of this machine."""

import asyncio
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self, TypeAlias

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from foredraft.cli.flags import Config, with_settings
from foredraft.cli.supervisor import Child, ChildError, Report, Supervisor, ignore
from foredraft.config import ENV_PREFIX, ConfigError, build, collect
from foredraft.settings import DraftSettings, OrchestratorSettings, TargetSettings

Pin = Annotated[bool, typer.Option("--pin", help="Keep the target and the other two on CPU cores of their own.")]
Measure = Annotated[
    bool, typer.Option("--measure", help="First measure for a minute or so whether speculation pays here, and say so.")
]
METRICS = ("metrics_listen", "target_metrics_listen", "draft_metrics_listen")
HEALTH = {"target": "target_health", "draft": "draft_health", "orchestrator": "health"}
COLOURS = {"target": "blue", "draft": "green", "orchestrator": "magenta"}


class Stack:
    """The three services as child processes; leave it to stop them, the orchestrator first.

        async with Stack({"model": "path/to/model", "draft_model": "path/to/draft"}) as stack:
            client = AsyncClient(stack.address)

    `options` are those of all three services by name, as `foredraft.config.collect` returns them. Target and draft
    listen on Unix sockets unless told otherwise. Port 0 of `listen` and of metrics becomes a free port. With `pin`, the
    target runs on the first of the CPU cores, as many as it has threads, and the other two on the rest. Raises
    ConfigError at once, and ChildError on entry if a service ends instead of serving. `threads` are the target's CPU
    threads, and `metrics` where metrics are served, by option.
    """

    def __init__(
        self, options: Mapping[str, Any], *, pin: bool = False, on_line: Report = ignore, on_state: Report = ignore
    ) -> None:
        for name in ("target", "draft"):
            if options.get(name) is not None:
                raise ConfigError(
                    f"{name} is the address of a server that already runs, but up starts its own; leave {name} out, or "
                    "run `foredraft orchestrator`"
                )
        target, draft = build(TargetSettings, options), build(DraftSettings, options)
        orchestrator = build(OrchestratorSettings, options)
        self.threads, draft_threads = share_cores(target, draft)
        self.address = with_port(orchestrator.listen)
        self._with_draft = orchestrator.speculation_enabled
        self._cores = divide_cores(self.threads) if pin else None
        self._directory = tempfile.TemporaryDirectory(prefix="foredraft-")
        self._target_address = str(options.get("target_listen") or f"unix:{self._directory.name}/target.sock")
        self._draft_address = str(options.get("draft_listen") or f"unix:{self._directory.name}/draft.sock")
        wanted = METRICS if self._with_draft else METRICS[:2]
        self.metrics = {name: with_port(options[name]) for name in wanted if options.get(name) is not None}
        # Where the services tell this process their health, whatever their own addresses want from clients.
        self._health = {
            name: with_port(str(options.get(f"{name}_listen") or f"unix:{self._directory.name}/{name}.sock"))
            for name in HEALTH.values()
        }
        self.options = {
            **options,
            **self.metrics,
            **{f"{name}_listen": address for name, address in self._health.items()},
            "threads": self.threads,
            "draft_threads": draft_threads,
            "listen": self.address,
            "target_listen": self._target_address,
            "draft_listen": self._draft_address,
            "target": self._target_address,
            "draft": self._draft_address if self._with_draft else None,
        }
        self.supervisor = Supervisor(
            on_line=on_line,
            on_state=on_state,
            environment=child_environment(),
            # A server that has used up its grace period still has to cut its calls off.
            kill_after_s=orchestrator.grace_s + 10,
        )

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.supervisor.stop()
        self._directory.cleanup()

    async def _start(self) -> None:
        target_cores, other_cores = self._cores or (None, None)
        models = [self._child("target", "target-server", self._target_address, target_cores)]
        if self._with_draft:
            models.append(self._child("draft", "draft-server", self._draft_address, other_cores))
        # The orchestrator needs the target's tokenizer before it can serve.
        for children in (models, [self._child("orchestrator", "orchestrator", self.address, other_cores)]):
            for child in children:
                await self.supervisor.start(child)
            await self.supervisor.wait_healthy(*children)

    def _child(self, name: str, command: str, address: str, cores: set[int] | None) -> Child:
        config = Path(self._directory.name) / "options.yaml"
        config.write_text(json.dumps(self.options))
        arguments = ["-m", "foredraft.cli", command, "--config", str(config), "--stop-with-parent"]
        # Drafting may use all that is left of a CPU, but the messages that everybody waits for go first.
        yields = name == "draft"
        return Child(name, [sys.executable, *arguments], address, cores, self._health[HEALTH[name]], yields)


# Called with every stack before it starts.
OnStack: TypeAlias = Callable[[Stack], None]
# What runs before the services, with what to call about services of its own.
First: TypeAlias = Callable[[OnStack], Awaitable[None]]


def available_cores() -> list[int]:
    """The CPU cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else list(range(os.cpu_count() or 1))


def share_cores(target: TargetSettings, draft: DraftSettings) -> tuple[int, int]:
    """CPU threads of target and draft: two models that both take all cores stand in each other's way.

    A draft model gets a quarter of the cores. The n-gram drafter hardly computes, so it and the orchestrator get one.
    """
    cores = len(available_cores())
    draft_threads = draft.threads or (max(1, cores // 4) if draft.draft_model else 1)
    return target.threads or max(1, cores - draft_threads), draft_threads


def divide_cores(threads: int) -> tuple[set[int], set[int]]:
    """The cores of a target with this many threads, and those of the rest. Raises ConfigError if nothing is left."""
    cores = available_cores()
    if len(cores) <= threads or sys.platform != "linux":
        raise ConfigError(f"pin needs Linux and more CPU cores than the target's {threads} threads, not {len(cores)}")
    return set(cores[:threads]), set(cores[threads:])


def with_port(address: str) -> str:
    """The address with a free port in place of port 0."""
    host, _, port = address.rpartition(":")
    if address.startswith("unix:") or port != "0":
        return address
    with socket.create_server((host.strip("[]"), 0), family=socket.AF_INET6 if "[" in host else socket.AF_INET) as free:
        return f"{host}:{free.getsockname()[1]}"


def child_environment() -> dict[str, str]:
    """This process's environment without options: the children get those in a file."""
    kept = {"FOREDRAFT_CACHE"}
    return {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX) or name in kept}


class Display:
    """Shows what the services do: a line per service while it starts, and their output with their names."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._tasks: dict[str, TaskID] = {}
        self.progress = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )

    def on_line(self, name: str, line: str) -> None:
        """Print a line of a service's output."""
        self._console.print(Text(f"{name:>12} ", COLOURS[name]).append(line, "none"), soft_wrap=True)

    def on_state(self, name: str, state: str) -> None:
        """Show the state of a service."""
        if name not in self._tasks:
            self._tasks[name] = self.progress.add_task(name, total=1)
        self.progress.update(self._tasks[name], description=f"{name}: {state}")
        if state != "starting":
            self.progress.update(self._tasks[name], completed=1)
            self._console.print(Text(f"{name:>12} ", COLOURS[name]).append(state, "bold"), soft_wrap=True)


@with_settings(TargetSettings, DraftSettings, OrchestratorSettings, without=("target", "draft"))
def up(
    flags: dict[str, Any],
    config: Config = None,
    pin: Pin = False,
    measure: Measure = False,
) -> None:
    """Start target, draft and orchestrator on this machine. Without a draft model, the text's n-grams draft."""
    display = Display(Console(stderr=True))
    options = {**dict.fromkeys(METRICS, "127.0.0.1:0"), **collect(flags, config)}
    stack = Stack(options, pin=pin, on_line=display.on_line, on_state=display.on_state)
    raise typer.Exit(asyncio.run(run(stack, display, partial(measured, options, pin) if measure else None)))


async def run(stack: Stack, display: Display, first: First | None) -> int:
    """Run the stack, after `first`, until SIGINT, SIGTERM or the death of a service; returns the exit code.

    A second signal hurries the services, those that `first` has started too.
    """
    stacks = [stack]
    life = asyncio.create_task(live(stack, display, partial(first, stacks.append) if first else None))
    stopping = False

    def stop() -> None:
        nonlocal stopping
        if stopping:
            for each in stacks:
                each.supervisor.hurry()
        else:
            stopping = life.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        await life
    except ChildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except asyncio.CancelledError:
        return 0
    return 0


async def live(stack: Stack, display: Display, first: Callable[[], Awaitable[None]] | None) -> None:
    """Start the stack and wait until a service dies (ChildError) or this is cancelled; stops all services."""
    from foredraft.cli import advice

    if first:
        await first()
    with display.progress:
        async with stack:
            display.progress.stop()
            print(f"foredraft serves on {stack.address}; try: foredraft chat --address {stack.address}", flush=True)
            if stack.metrics:
                flags = (f"--{n.removesuffix('_listen').replace('_', '-')} {at}" for n, at in stack.metrics.items())
                print(f"to watch it: foredraft top {' '.join(flags)}", flush=True)
            if not first and (hint := advice.hint(stack.options)):
                print(hint, flush=True)
            await stack.supervisor.wait()


async def measured(options: Mapping[str, Any], pin: bool, on_stack: OnStack) -> None:
    """Measure whether speculation pays here, and say so; `on_stack` gets the services for that. Raises ChildError."""
    from foredraft.cli import advice
    from orchestrator.client import GenerationError

    print("measuring whether speculation pays here ...", file=sys.stderr, flush=True)
    try:
        print(advice.advice(await advice.measure(options, pin=pin, on_stack=on_stack)), flush=True)
    except GenerationError as error:
        print(f"it could not be measured: {error}", file=sys.stderr, flush=True)
