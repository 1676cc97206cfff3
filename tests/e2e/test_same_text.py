"""The promise of coupled sampling, through three processes: no draft, mode or timing changes a single token."""

import asyncio
import random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from foredraft.backends import manual
from foredraft.engine.loading import load
from foredraft.sampling.params import SamplingParams
from orchestrator.client import AsyncClient, Completion
from tests import tiny
from tests.e2e.conftest import DRAFTS, Tiny

REQUESTS_PER_DRAFT = 25
ALPHABET = "The quick brown fox, or 你好 and 🙂!\n"


def random_request(rng: random.Random) -> dict[str, Any]:
    """A request with a few parameters set to something unusual."""
    choices: dict[str, Any] = {
        "temperature": rng.choice([0, 0.5, 1.0, 1.5]),
        "top_k": rng.choice([1, 5, 50]),
        "top_p": rng.choice([0.5, 0.9]),
        "min_p": rng.choice([0.02, 0.2]),
        "repetition_penalty": rng.choice([0.9, 1.3]),
        "presence_penalty": rng.choice([-0.5, 1.0]),
        "frequency_penalty": rng.choice([0.3, -0.2]),
        "logit_bias": {rng.randrange(320): rng.uniform(-5, 5) for _ in range(3)},
        "min_new_tokens": rng.randrange(10),
        "stop_token_ids": [rng.randrange(320) for _ in range(3)],
        "ignore_eos": True,
        "stop": rng.sample(["e", "qu", "\n", "ox j"], 2),
        "logprobs": rng.randrange(4),
        "sample_count": rng.choice([2, 3]),
    }
    request = {name: choices[name] for name in rng.sample(list(choices), rng.randrange(6))}
    prompt = "".join(rng.choice(ALPHABET) for _ in range(rng.randrange(1, 120)))
    return {
        "prompt": prompt,
        "seed": rng.getrandbits(64),
        "max_new_tokens": rng.randrange(10, 34),
        "temperature": rng.choice([0, 0.7, 1.0]),
        **request,
    }


def essence(completion: Completion) -> tuple[Any, ...]:
    """All of a completion that must not depend on how it was decoded."""
    logprobs = [
        (p.chosen.token_id, round(p.chosen.logprob, 5), [(t.token_id, round(t.logprob, 5)) for t in p.top])
        for p in completion.logprobs
    ]
    return (
        completion.token_ids,
        completion.text,
        completion.finish_reason,
        completion.stop_string,
        completion.completion_token_count,
        logprobs,
    )


@pytest.mark.parametrize("quality", DRAFTS)
async def test_overlapped_equals_sequential_equals_plain(stacks: Tiny, quality: str) -> None:
    rng = random.Random(quality)
    drafted = accepted = hits = 0
    async with AsyncClient(stacks.orchestrators[quality].address) as client:

        async def check(request: dict[str, Any], draft_tokens: int) -> list[Completion]:
            prompt = request.pop("prompt")
            plain = await client.generate(prompt, mode="plain", **request)
            assert all(completion.statistics.drafted == 0 for completion in plain.completions)
            speculative = []
            for mode in ("sequential", "overlapped"):
                result = await client.generate(prompt, mode=mode, draft_tokens=draft_tokens, **request)
                assert [essence(c) for c in result.completions] == [essence(c) for c in plain.completions], request
                speculative += result.completions
            return speculative

        remaining = [(random_request(rng), rng.randrange(9)) for _ in range(REQUESTS_PER_DRAFT)]
        while remaining:
            concurrency = rng.randrange(1, 9)
            group, remaining = remaining[:concurrency], remaining[concurrency:]
            for completions in await asyncio.gather(*(check(*each) for each in group)):
                for completion in completions:
                    assert not completion.statistics.degraded_reason
                    drafted += completion.statistics.drafted
                    accepted += completion.statistics.accepted
                    hits += completion.statistics.hits
    rate = accepted / drafted
    expected = {"good": (0.7, 1.0), "fair": (0.25, 0.85), "poor": (0.03, 0.5), "useless": (0.0, 0.15)}[quality]
    assert expected[0] <= rate <= expected[1], f"the {quality} draft has acceptance {rate:.2f}"
    assert hits > 0 or quality == "useless", "no verdict was foreseen: overlap was not exercised"


async def test_text_is_what_the_algorithm_of_the_papers_gives(stacks: Tiny) -> None:
    target = load(str(stacks.target_model), dtype="float64", device="cpu")
    draft = load(str(stacks.draft_models["fair"]), dtype="float64", device="cpu")
    prompt = tiny.tokenizer()("Once upon a time")["input_ids"]
    async with AsyncClient(stacks.orchestrators["fair"].address) as client:
        for seed, temperature in ((1, 0.0), (2, 0.7), (2**64 - 1, 1.0)):
            params = SamplingParams(temperature=temperature, seed=seed, max_new_tokens=30, frequency_penalty=0.2)
            expected = manual.generate(target, draft, prompt, params, k=4)
            result = await client.generate(
                prompt, temperature=temperature, seed=seed, max_new_tokens=30, frequency_penalty=0.2
            )
            assert result.completions[0].token_ids == expected.token_ids
            assert result.seed == seed


@pytest.mark.parametrize("mode", ["plain", "sequential", "overlapped"])
async def test_greedy_equals_transformers_plain_and_assisted(stacks: Tiny, mode: str) -> None:
    target = AutoModelForCausalLM.from_pretrained(stacks.target_model, dtype=torch.float64)
    draft = AutoModelForCausalLM.from_pretrained(stacks.draft_models["fair"], dtype=torch.float64)
    async with AsyncClient(stacks.orchestrators["fair"].address) as client:
        for text in ("Once upon a time", "def fibonacci(n):", "你好"):
            ids = tiny.tokenizer()(text, return_tensors="pt")["input_ids"]
            common = {
                "max_new_tokens": 40,
                "do_sample": False,
                "attention_mask": torch.ones_like(ids),
                "pad_token_id": 0,
            }
            plain = target.generate(ids, **common)[0, ids.shape[1] :].tolist()
            assisted = target.generate(ids, assistant_model=draft, **common)[0, ids.shape[1] :].tolist()
            result = await client.generate(text, temperature=0, max_new_tokens=40, mode=mode)
            assert result.completions[0].token_ids == plain == assisted


async def test_a_seed_that_the_server_chose_repeats_the_output(stacks: Tiny) -> None:
    async with AsyncClient(stacks.orchestrators["fair"].address) as client:
        first = await client.generate("Once", max_new_tokens=30, sample_count=3)
        again = await client.generate("Once", max_new_tokens=30, sample_count=3, seed=first.seed)
        other = await client.generate("Once", max_new_tokens=30, sample_count=3)
    texts = [[c.token_ids for c in result.completions] for result in (first, again, other)]
    assert texts[0] == texts[1] != texts[2]
    assert len({tuple(tokens) for tokens in texts[0]}) == 3, "samples of one request must differ"
