"""The public API over a real socket with a decoder that does as a test says."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from foredraft.serving.server import Server
from foredraft.settings import OrchestratorSettings
from foredraft.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from orchestrator.decode import DecodeRequest, Emission
from orchestrator.metrics import Metrics
from orchestrator.server import SERVICE
from orchestrator.service import GenerationServicer
from orchestrator.tokenizer import Tokenizer
from tests import tiny

CONTEXT_LENGTH = 64
TOKENIZER_FILES = {
    "tokenizer.json": tiny.tokenizer().backend_tokenizer.to_str().encode(),
    "tokenizer_config.json": b'{"eos_token": "<|im_end|>"}',
    "chat_template.jinja": (
        "{% if messages[0].role not in ('system', 'user') %}{{ raise_exception('begin with the user') }}{% endif %}"
        + tiny.CHATML
    ).encode(),
}
TOKENIZER = Tokenizer(TOKENIZER_FILES)
MODEL = common_pb2.Model(
    name="tiny", context_length=CONTEXT_LENGTH, vocabulary_size=tiny.VOCABULARY_SIZE, eos_token_ids=[2]
)
EOS = tiny.tokenizer().eos_token_id


def tokens(text: str) -> list[int]:
    ids: list[int] = tiny.tokenizer().encode(text)
    return ids


def emission(
    token_ids: list[int],
    *,
    accepted: int = 0,
    finish: common_pb2.FinishReason = common_pb2.FINISH_REASON_UNSPECIFIED,
    logprobs: bool = False,
) -> Emission:
    stops = finish in (common_pb2.FINISH_REASON_EOS, common_pb2.FINISH_REASON_STOP_TOKEN)
    return Emission(
        token_ids=token_ids,
        drafted=[i < accepted for i in range(len(token_ids))],
        proposed=accepted,
        logprobs=[common_pb2.TokenLogprobs(chosen=common_pb2.Logprob(token_id=t)) for t in token_ids if logprobs],
        finish_reason=finish,
        stop_token_id=token_ids[-1] if stops else None,
    )


def in_rounds(text: str, size: int = 3) -> list[Emission]:
    """The text in rounds of `size` tokens, all but the last one of each accepted, ended by max_new_tokens."""
    ids = tokens(text)
    rounds = [ids[i : i + size] for i in range(0, len(ids), size)]
    last = common_pb2.FINISH_REASON_MAX_TOKENS
    return [
        emission(r, accepted=len(r) - 1, finish=last if i == len(rounds) - 1 else common_pb2.FINISH_REASON_UNSPECIFIED)
        for i, r in enumerate(rounds)
    ]


Script = Callable[[DecodeRequest], AsyncGenerator[Emission, None]]


def saying(*emissions: Emission) -> Script:
    async def script(request: DecodeRequest) -> AsyncGenerator[Emission, None]:
        for item in emissions:
            yield item

    return script


@dataclass
class FakeDecoder:
    """Runs `script`. `requests` are all that came; `running` those whose generator has not been closed."""

    script: Script = field(default_factory=lambda: saying(*in_rounds("Hello, world!")))
    requests: list[DecodeRequest] = field(default_factory=list)
    running: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    async def decode(
        self, request: DecodeRequest, statistics: generation_pb2.SpeculationStatistics
    ) -> AsyncGenerator[Emission, None]:
        self.requests.append(request)
        self.running += 1
        self.idle.clear()
        script = self.script(request)
        try:
            async for item in script:
                drafted = sum(item.drafted)
                statistics.rounds += 1
                statistics.drafted += drafted
                statistics.accepted += drafted
                missing = drafted - len(statistics.drafted_per_position)
                statistics.drafted_per_position.extend([0] * missing)
                statistics.accepted_per_position.extend([0] * missing)
                for position in range(drafted):
                    statistics.drafted_per_position[position] += 1
                    statistics.accepted_per_position[position] += 1
                yield item
        finally:
            await script.aclose()
            self.running -= 1
            if self.running == 0:
                self.idle.set()


@dataclass
class Edge:
    address: str
    decoder: FakeDecoder
    backends: Any


@asynccontextmanager
async def serving(directory: Path, **settings: Any) -> AsyncIterator[Edge]:
    decoder = FakeDecoder()
    backends: Any = SimpleNamespace(target_model=MODEL, draft=None, degraded_reason="there is no draft")
    address = f"unix:{directory}/edge"
    server = Server(address, [SERVICE])
    await server.start()
    options = OrchestratorSettings(listen=address, **settings)
    metrics = Metrics(server.metrics)
    servicer = GenerationServicer(TOKENIZER, decoder, backends, options, metrics)  # type: ignore[arg-type]
    server.add(generation_pb2_grpc.add_GenerationServiceServicer_to_server, servicer)
    await server.set_serving()
    try:
        yield Edge(address, decoder, backends)
    finally:
        await server.stop()


async def soon(condition: Awaitable[Any]) -> None:
    """Fail after ten seconds rather than hang."""
    await asyncio.wait_for(condition, 10)
