"""Rejection and block verification through three processes draw from the target's own distribution."""

import asyncio
from collections import Counter
from itertools import product

import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM

from orchestrator.client import AsyncClient
from tests import tiny
from tests.e2e.conftest import Tiny

SAMPLES, LENGTH, TOP_K = 1600, 3, 3
PROMPT = "Once upon a time"


@torch.inference_mode()
def exact(model: torch.nn.Module, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """The probability of every output of LENGTH tokens under top-k sampling at temperature 1."""
    result = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for output, probability in result.items():
            logits = model(torch.tensor([[*prompt, *output]])).logits[0, -1, : tiny.VOCABULARY_SIZE]
            top = logits.topk(TOP_K)
            for token, p in zip(top.indices.tolist(), top.values.softmax(0).tolist(), strict=True):
                longer[*output, token] = probability * p
        result = longer
    return result


@pytest.mark.parametrize("method", ["rejection", "block"])
@pytest.mark.parametrize("mode", ["sequential", "overlapped"])
async def test_outputs_are_distributed_as_the_targets(stacks: Tiny, method: str, mode: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(stacks.target_model, dtype=torch.float64)
    ids = tiny.tokenizer()(PROMPT)["input_ids"]
    expected = exact(model, ids)
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    async with AsyncClient(stacks.orchestrators["poor"].address) as client:
        limit = asyncio.Semaphore(4)

        async def draw(seed: int) -> None:
            nonlocal accepted
            async with limit:
                # One token more than is compared, so that the last compared one can still be drafted.
                result = await client.generate(
                    ids,
                    seed=seed,
                    max_new_tokens=LENGTH + 1,
                    top_k=TOP_K,
                    method=method,
                    mode=mode,
                    sample_count=16,
                    draft_tokens=2,
                    ignore_eos=True,
                )
            for completion in result.completions:
                counts[tuple(completion.token_ids[:LENGTH])] += 1
                accepted += completion.statistics.accepted

        await asyncio.gather(*(draw(seed) for seed in range(SAMPLES // 16)))
    assert accepted > 0
    assert set(counts) <= set(expected)
    outputs = sorted(product(*[sorted({o[i] for o in expected}) for i in range(LENGTH)]))
    rare = [o for o in outputs if o in expected and expected[o] * SAMPLES < 5]
    common = [o for o in outputs if o in expected and expected[o] * SAMPLES >= 5]
    observed = [counts[o] for o in common] + [sum(counts[o] for o in rare)]
    wanted = [expected[o] * SAMPLES for o in common] + [sum(expected[o] for o in rare) * SAMPLES]
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    # The seeds are fixed, so this is no coin toss: right code passes always, and wrong code fails far below this bound.
    assert chisquare(observed, wanted).pvalue > 1e-4
