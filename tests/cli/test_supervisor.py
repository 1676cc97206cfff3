"""Processes that belong together: started, watched, and stopped in order."""

import asyncio
import os
import sys
from pathlib import Path

import psutil
import pytest

from foredraft.cli.supervisor import Child, ChildError, Supervisor

# Serves health checks, and on SIGTERM writes its name to a file.
SERVER = """
import asyncio, signal, sys, threading, os
import grpc
from grpc_health.v1 import health, health_pb2_grpc

async def main(name, address, log):
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    server.add_insecure_port(address)
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await server.start()
    await stopped.wait()
    with open(log, "a") as file:
        file.write(name + "\\n")
    await server.stop(0)

asyncio.run(main(*sys.argv[1:]))
"""


def server(name: str, directory: Path) -> Child:
    address = f"unix:{directory}/{name}.sock"
    return Child(name, [sys.executable, "-c", SERVER, name, address, str(directory / "log")], address)


def script(name: str, code: str) -> Child:
    return Child(name, [sys.executable, "-c", code], "unix:/nonexistent/socket")


async def test_children_are_stopped_in_reverse_order_of_their_start(tmp_path: Path) -> None:
    supervisor = Supervisor()
    try:
        for name in ("target", "draft", "orchestrator"):
            child = server(name, tmp_path)
            await supervisor.start(child)
            await supervisor.wait_healthy(child)
    finally:
        await supervisor.stop()
    assert (tmp_path / "log").read_text().split() == ["orchestrator", "draft", "target"]


async def test_a_child_that_dies_is_named_with_its_exit_code_and_last_output(tmp_path: Path) -> None:
    supervisor = Supervisor()
    await supervisor.start(server("target", tmp_path))
    await supervisor.start(script("draft", "import sys; print('no such model', file=sys.stderr); sys.exit(3)"))
    with pytest.raises(ChildError) as caught:
        await supervisor.wait()
    await supervisor.stop()
    assert str(caught.value) == "draft ended with exit code 3; its last output:\n  no such model"


async def test_a_child_that_dies_before_it_is_healthy_ends_the_wait(tmp_path: Path) -> None:
    supervisor = Supervisor()
    slow, dying = script("target", "import time; time.sleep(600)"), script("draft", "raise SystemExit(4)")
    await supervisor.start(slow)
    await supervisor.start(dying)
    with pytest.raises(ChildError, match="draft ended with exit code 4"):
        await supervisor.wait_healthy(slow, dying)
    await supervisor.stop()


async def test_a_child_killed_by_a_signal_is_said_to_be(tmp_path: Path) -> None:
    supervisor = Supervisor()
    await supervisor.start(script("target", "import os; os.kill(os.getpid(), 9)"))
    with pytest.raises(ChildError, match="target was ended by signal 9"):
        await supervisor.wait()
    await supervisor.stop()


async def test_a_child_that_ignores_sigterm_is_killed() -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    up = asyncio.Event()
    supervisor = Supervisor(on_line=lambda *_: up.set(), kill_after_s=0.5)
    await supervisor.start(script("target", code))
    await up.wait()
    await supervisor.stop()
    with pytest.raises(ChildError, match="target was ended by signal 9"):
        await supervisor.wait()


async def test_output_is_passed_on_line_by_line_with_the_child_s_name() -> None:
    lines: list[tuple[str, str]] = []
    supervisor = Supervisor(on_line=lambda name, line: lines.append((name, line)))
    await supervisor.start(script("target", "import sys; sys.stdout.write('10%\\r100%\\nloaded\\nno end')"))
    with pytest.raises(ChildError, match="exit code 0"):
        await supervisor.wait()
    await supervisor.stop()
    assert lines == [("target", "100%"), ("target", "loaded"), ("target", "no end")]


async def test_a_server_stops_when_the_process_that_started_it_is_killed(tmp_path: Path) -> None:
    code = f"""
import asyncio, sys
from foredraft.cli.supervisor import Child, Supervisor
async def main():
    supervisor = Supervisor(on_line=lambda name, line: print(line, flush=True))
    command = [sys.executable, "-m", "foredraft.cli", "orchestrator", "--listen", "unix:{tmp_path}/o.sock"]
    await supervisor.start(Child("orchestrator", [*command, "--stop-with-parent"], "unix:{tmp_path}/o.sock"))
    await supervisor.wait()
asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    while b"listening" not in await parent.stdout.readline():
        pass
    [child] = psutil.Process(parent.pid).children()
    parent.kill()
    await parent.wait()
    gone, alive = await asyncio.to_thread(psutil.wait_procs, [child], timeout=30)
    assert gone, f"{alive} outlived its parent {os.getpid()}"
