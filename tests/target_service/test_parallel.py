"""A target split over two processes, as a user starts it: the same text, and no part outlives the others."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import torch
from torch import Tensor, distributed

from foredraft.serving.channel import channel
from foredraft.serving.server import StartError
from foredraft.settings import TargetSettings
from foredraft.v1 import target_pb2_grpc
from target_service.server import main
from tests import tiny
from tests.e2e.processes import Server
from tests.e2e.processes import target as start_target_server
from tests.target_service.kit import CONTEXT, Client

PROMPT = tiny.tokenizer().encode("The quick brown fox")
TIMEOUT_S = 120.0


class Impatient(Server):
    """A target server that soon takes a step of the model for one that hangs."""

    def start(self) -> None:
        script = "from foredraft import cli; from target_service import ranks; ranks.STEP_TIMEOUT_S = 2; cli.main()"
        self._command[1:3] = ["-c", script]
        super().start()


def start_impatient(log: Path, **options: Any) -> Server:
    return Impatient("target-server", log, "target_listen", **{"threads": 1, **options})


class Split:
    """A target server of two ranks."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.leader = psutil.Process(server.process.pid)

    @property
    def follower(self) -> psutil.Process:
        (follower,) = [p for p in self.leader.children() if "target_service.follower" in p.cmdline()]
        return follower

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        async with channel(self.server.address) as connection:
            yield Client(target_pb2_grpc.TargetServiceStub(connection))

    async def end(self) -> int:
        """The exit code, once the server has ended."""
        return await asyncio.to_thread(self.server.process.wait, TIMEOUT_S)


@asynccontextmanager
async def split(
    model: Path, log: Path, start: Callable[..., Server] = start_target_server, **options: Any
) -> AsyncIterator[Split]:
    options = {"max_model_len": CONTEXT, "tensor_parallel_size": 2, **options}
    server = start(log, model=model, **options)
    try:
        await asyncio.to_thread(server.wait_ready)
        yield Split(server)
    finally:
        if server.process.poll() is None:
            # One that is suspended would not see its leader's end.
            for follower in psutil.Process(server.process.pid).children():
                follower.kill()
            server.process.kill()
            server.process.wait()


async def gone(process: psutil.Process) -> None:
    await asyncio.to_thread(process.wait, TIMEOUT_S)


@torch.no_grad()
def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        logits: Tensor = model(torch.tensor([text])).logits[0, -1, : tiny.VOCABULARY_SIZE]
        text.append(int(logits.argmax()))
    return text[len(prompt) :]


async def finish(client: Client, expected: Sequence[int]) -> None:
    """Goes on in rounds with two right draft tokens and a wrong one, until the text ends as expected."""
    while not client.finish_reason:
        done = len(client.output)
        draft = expected[done : done + 3]
        await client.round([*draft[:-1], (draft[-1] + 1) % 300] if len(draft) == 3 else [])
    assert client.output == expected
    await client.close()


async def test_two_ranks_say_what_one_says_and_drain_on_sigterm(tmp_path: Path) -> None:
    model = tiny.save_model(tmp_path / "model")
    expected = greedy(tiny.model(), PROMPT, 20)
    async with split(model, tmp_path / "log", dtype="float32") as target, target.client() as client:
        follower = target.follower
        await client.open(PROMPT, max_new_tokens=20, ignore_eos=True)
        target.leader.send_signal(signal.SIGTERM)
        await finish(client, expected)
        assert await target.end() == 0
        await gone(follower)
    assert "error" not in (tmp_path / "log").read_text().lower()


async def test_when_a_follower_dies_calls_get_unavailable_and_the_server_ends(tmp_path: Path) -> None:
    model = tiny.save_model(tmp_path / "model", dtype="float64")
    # Too long for one message to the other rank.
    prompt = PROMPT * 40
    expected = greedy(tiny.model(dtype="float64"), prompt, 20)
    async with (
        split(model, tmp_path / "log", dtype="float64", max_model_len=512) as target,
        target.client() as client,
        target.client() as other,
    ):
        await other.open(prompt, max_new_tokens=20, ignore_eos=True)
        await finish(other, expected)
        await client.open(PROMPT, max_new_tokens=100, ignore_eos=True)
        target.follower.kill()
        code, message, _ = await client.error()
        assert code == grpc.StatusCode.UNAVAILABLE
        assert "going down" in message
        assert await target.end() == 1
    assert "rank 1 of the target was ended by signal 9" in (tmp_path / "log").read_text()


async def test_when_a_follower_hangs_calls_get_unavailable_and_the_server_ends(tmp_path: Path) -> None:
    model = tiny.save_model(tmp_path / "model")
    async with (
        split(model, tmp_path / "log", start_impatient, dtype="float32") as target,
        target.client() as client,
    ):
        follower = target.follower
        follower.suspend()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await client.open(PROMPT, max_new_tokens=20, ignore_eos=True)
        assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
        assert await target.end() == 1
        await gone(follower)
    assert "one of its ranks hangs" in (tmp_path / "log").read_text()


def test_a_follower_ends_when_its_leader_is_gone() -> None:
    store = distributed.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    ranks = {"RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    settings = TargetSettings(model="never loaded", tensor_parallel_size=2).model_dump_json()
    command = [sys.executable, "-m", "target_service.follower", settings]
    # Nobody else joins: it waits in a collective, as it does while the leader is busy.
    follower = subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, **ranks})
    follower.stdin.close()  # type: ignore[union-attr]
    assert follower.wait(TIMEOUT_S) == 1


@pytest.mark.parametrize(
    ("kind", "size", "reason"),
    [
        ("gpt2", 2, "Transformers has no plan for splitting gpt2"),
        ("llama", 3, "4 attention heads with 2 key/value heads cannot be split evenly over 3 devices.* one of 1, 2"),
    ],
)
async def test_what_cannot_be_split_is_refused_with_the_reason(
    kind: str, size: int, reason: str, tmp_path: Path
) -> None:
    model = tiny.save_model(tmp_path / "model", kind)
    settings = TargetSettings(model=str(model), tensor_parallel_size=size, listen=f"unix:{tmp_path}/socket")
    with pytest.raises(StartError, match=reason):
        await main(settings)
    assert not [p for p in psutil.Process(os.getpid()).children() if "target_service.follower" in p.cmdline()]
