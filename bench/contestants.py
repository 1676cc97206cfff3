"""The contestants of `bench.compare`: each decodes a prompt and notes when its tokens came."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from foredraft.engine.loading import LoadedModel
from orchestrator.client import Client, Options, Statistics

# Transformers has no default for this one; its documentation uses 10.
PROMPT_LOOKUP_TOKENS = 10


@dataclass(frozen=True, slots=True)
class Work:
    """What to decode; `number` counts the prompts."""

    number: int
    prompt: list[int]
    temperature: float
    seed: int
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class Run:
    """One output of `rounds` passes of the target, the one over the prompt included.

    `timed_tokens` came in `seconds` after the first tokens did: reading the prompt is left out, since the services find
    keys and values of a prompt that they had before; `total_seconds` have it. `statistics` are the services'.
    """

    work: Work
    token_ids: list[int]
    timed_tokens: int
    seconds: float
    total_seconds: float
    rounds: int
    statistics: Statistics | None = None


@dataclass(frozen=True, slots=True)
class Contestant:
    """A way to decode. `cores` says what it may use."""

    name: str
    cores: str
    decode: Callable[[Work], Run]


class Arrivals:
    """Notes when how many tokens came."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._started = time.perf_counter()
        self._times: list[float] = []
        self._first = 0

    def add(self, token_ids: list[int]) -> None:
        """Tokens have come."""
        self._times.append(time.perf_counter())
        self._first = self._first or len(token_ids)
        self._token_ids += token_ids

    def run(self, work: Work, statistics: Statistics | None = None) -> Run:
        """What came; without `statistics`, every arrival was a round."""
        return Run(
            work=work,
            token_ids=self._token_ids,
            timed_tokens=len(self._token_ids) - self._first,
            seconds=self._times[-1] - self._times[0],
            total_seconds=self._times[-1] - self._started,
            rounds=statistics.rounds if statistics else len(self._times),
            statistics=statistics,
        )


class Streamer(BaseStreamer):
    """Notes what Transformers puts: the prompt first, then the tokens of every round."""

    def __init__(self) -> None:
        self.arrivals = Arrivals()
        self._prompt_came = False

    def put(self, value: Tensor) -> None:
        """Tokens [1, n] or [n]."""
        if self._prompt_came:
            self.arrivals.add(value.flatten().tolist())
        self._prompt_came = True

    def end(self) -> None:
        """The output ends."""


def transformers_plain(target: LoadedModel) -> Callable[[Work], Run]:
    """`generate` of Transformers."""
    return lambda work: _generate(target, work)


def transformers_assisted(target: LoadedModel, draft: LoadedModel, k: int | None) -> Callable[[Work], Run]:
    """`generate(assistant_model=draft)` with `k` draft tokens a round, None: as Transformers likes."""
    if k is not None:
        assistant: Any = draft.model.generation_config
        assistant.num_assistant_tokens, assistant.num_assistant_tokens_schedule = k, "constant"
        assistant.assistant_confidence_threshold = 0.0
    return lambda work: _generate(target, work, assistant_model=draft.model)


def transformers_prompt_lookup(target: LoadedModel, k: int | None) -> Callable[[Work], Run]:
    """`generate` that drafts with the n-grams of the text, as long as those of the services."""
    options = {"prompt_lookup_num_tokens": k or PROMPT_LOOKUP_TOKENS, "max_matching_ngram_size": 3}
    return lambda work: _generate(target, work, options)


def service(client: Client, mode: Literal["plain", "sequential", "overlapped"], k: int | None) -> Callable[[Work], Run]:
    """The services, with `k` draft tokens a round, None: as the server likes."""

    def decode(work: Work) -> Run:
        options: Options = {"temperature": work.temperature, "seed": work.seed, "max_new_tokens": work.max_new_tokens}
        options["mode"] = mode
        if k is not None and mode != "plain":
            options["draft_tokens"] = k
        arrivals = Arrivals()
        with client.stream(work.prompt, **options) as stream:
            for chunk in stream:
                if chunk.token_ids:
                    arrivals.add(chunk.token_ids)
        return arrivals.run(work, stream.result.completions[0].statistics)

    return decode


def _generate(target: LoadedModel, work: Work, options: dict[str, Any] | None = None, **assistant: Any) -> Run:
    # What is unset here, the model's own file or Transformers would set, such as a top_k of 50.
    sampling = {"temperature": work.temperature, "top_k": 0, "top_p": 1.0} if work.temperature > 0 else {}
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=work.temperature > 0,
        repetition_penalty=1.0,
        max_new_tokens=work.max_new_tokens,
        eos_token_id=list(target.eos_token_ids) or None,
        pad_token_id=0,
        **sampling,
        **(options or {}),
    )
    model: Any = target.model
    ids, streamer = torch.tensor([work.prompt], device=model.device), Streamer()
    torch.manual_seed(work.seed)
    model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=streamer, **assistant)
    return streamer.arrivals.run(work)
