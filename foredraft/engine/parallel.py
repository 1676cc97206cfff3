"""A model split over several ranks: one leads, the others do what it does.

Transformers splits the model (`tp_plan="auto"`); its layers meet in collectives, so all ranks must run the same
forwards in the same order. The leader has the engine. The others have a runner alone, and get each call to it as one
message, broadcast over a group of their own on CPUs, so that waiting for the next one occupies no GPU.
"""

import pickle
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from transformers import PreTrainedModel

from foredraft.engine.batch import Batch
from foredraft.engine.runner import Runner

Group = distributed.ProcessGroup

# A message that fits here, header included, is one broadcast; a decode step of 16 sessions does.
MESSAGE_BYTES = 2048
HEADER_BYTES = 8
# How long followers wait for a message before they give the leader up, and how often it sends one when idle.
SILENCE = timedelta(minutes=30)
HEARTBEAT_S = 60.0
# Loading a large model takes as long, and ranks may finish far apart.
LOADING = timedelta(hours=2)


def join(device: str, rank: int, size: int, store: "torch._C._distributed_c10d.Store") -> Group:
    """Joins the `size` ranks that meet in `store` to share a model; returns the group for messages.

    `device`: cpu or cuda.
    """
    backend = "nccl" if device == "cuda" else "gloo"
    distributed.init_process_group(backend, rank=rank, world_size=size, store=store, timeout=LOADING)
    group: Group = distributed.new_group(backend="gloo", timeout=SILENCE)
    return group


class Leader:
    """Calls the runners of all ranks, made with the same arguments. The methods are the runner's."""

    def __init__(self, model: PreTrainedModel, group: Group, **arguments: Any) -> None:
        self._group = group
        self._sent = 0.0
        self._send("", arguments)
        self._runner = Runner(model, **arguments)
        self.stride = self._runner.stride

    def run(self, batch: Batch) -> Tensor:
        """See Runner."""
        self._send("run", batch)
        return self._runner.run(batch)

    def copy_rows(self, source: int, target: int, count: int) -> None:
        """See Runner."""
        self._send("copy_rows", source, target, count)
        self._runner.copy_rows(source, target, count)

    def gather_rows(self, sources: Sequence[int], target: int) -> None:
        """See Runner."""
        self._send("gather_rows", sources, target)
        self._runner.gather_rows(sources, target)

    def clear_rows(self, first: int, count: int) -> None:
        """See Runner."""
        self._send("clear_rows", first, count)
        self._runner.clear_rows(first, count)

    def plain_logits(self, text: Sequence[int]) -> Tensor:
        """See Runner."""
        self._send("plain_logits", text)
        return self._runner.plain_logits(text)

    def heartbeat(self) -> None:
        """Tells the followers to wait on, if they have not heard anything for `HEARTBEAT_S`. For the calling thread."""
        if time.perf_counter() >= self._sent + HEARTBEAT_S:
            self._send("heartbeat")

    def dismiss(self) -> None:
        """Ends the followers' loops."""
        self._send("dismiss")

    def _send(self, method: str, *arguments: Any) -> None:
        self._sent = time.perf_counter()
        content = pickle.dumps((method, arguments))
        message = bytearray(max(MESSAGE_BYTES, HEADER_BYTES + len(content)))
        message[:HEADER_BYTES] = len(content).to_bytes(HEADER_BYTES, "little")
        message[HEADER_BYTES : HEADER_BYTES + len(content)] = content
        whole = torch.frombuffer(message, dtype=torch.uint8)
        distributed.broadcast(whole[:MESSAGE_BYTES], src=0, group=self._group)
        if len(whole) > MESSAGE_BYTES:
            distributed.broadcast(whole[MESSAGE_BYTES:], src=0, group=self._group)


def follow(model: PreTrainedModel, group: Group) -> None:
    """Does what the leader does with its part of the model until it says that it is over.

    Raises RuntimeError if the leader is gone, and ModelError as the runner does.
    """
    _, (parameters,) = _receive(group)
    runner = Runner(model, **parameters)
    while True:
        method, arguments = _receive(group)
        if method == "dismiss":
            return
        if method != "heartbeat":
            getattr(runner, method)(*arguments)


def _receive(group: Group) -> tuple[str, tuple[Any, ...]]:
    message = torch.empty(MESSAGE_BYTES, dtype=torch.uint8)
    distributed.broadcast(message, src=0, group=group)
    length = int.from_bytes(message[:HEADER_BYTES].numpy().tobytes(), "little")
    if missing := max(0, HEADER_BYTES + length - MESSAGE_BYTES):
        rest = torch.empty(missing, dtype=torch.uint8)
        distributed.broadcast(rest, src=0, group=group)
        message = torch.cat((message, rest))
    # The sender is a rank of this very model, started with it.
    received: tuple[str, tuple[Any, ...]] = pickle.loads(
        message[HEADER_BYTES : HEADER_BYTES + length].numpy().tobytes()
    )
    return received
