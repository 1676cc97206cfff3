"""What a session emits: the target's own text, whatever was drafted, until a rule ends it."""

import asyncio
import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch

from foredraft.v1 import common_pb2
from tests import tiny
from tests.target_service.kit import CHUNK, CONTEXT, Client, Service, generate

EOS = tiny.tokenizer().eos_token_id
PROMPT = tiny.tokenizer().encode("The quick brown fox")
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.3, "ignore_eos": True}


@cache
def reference() -> torch.nn.Module:
    return tiny.model(dtype="float64", padding_rows=8)


@torch.inference_mode()
def reference_logits(token_ids: Sequence[int]) -> torch.Tensor:
    return reference()(torch.tensor([token_ids])).logits[0, :, : tiny.VOCABULARY_SIZE]


def by_transformers(token_ids: Sequence[int], max_new_tokens: int) -> list[int]:
    padding = list(range(tiny.VOCABULARY_SIZE, tiny.VOCABULARY_SIZE + 8))
    output = reference().generate(
        torch.tensor([token_ids]), do_sample=False, max_new_tokens=max_new_tokens, suppress_tokens=padding
    )
    return output[0].tolist()


@pytest.mark.parametrize("text", [tiny.TEXT[0], tiny.TEXT[1], "x"])
async def test_greedy_plain_rounds_emit_what_transformers_generates(service: Service, text: str) -> None:
    prompt = tiny.tokenizer().encode(text)
    client = await generate(service, prompt)
    assert client.text == by_transformers(prompt, 24)


def right(rest: Sequence[int]) -> list[int]:
    return list(rest[:4])


def wrong(rest: Sequence[int]) -> list[int]:
    return [(token + 1) % tiny.VOCABULARY_SIZE for token in rest[:3]]


def right_then_wrong(rest: Sequence[int]) -> list[int]:
    return [*rest[:2], *wrong(rest[2:]), 5]


@pytest.mark.parametrize("draft", [right, wrong, right_then_wrong])
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
async def test_the_text_does_not_depend_on_the_draft(
    service: Service, draft: Callable[[Sequence[int]], list[int]], sampling: dict[str, float]
) -> None:
    plain = await generate(service, PROMPT, **sampling)
    client = Client(service.stub)
    verdicts = [await client.open(PROMPT, **sampling)]
    while not client.finish_reason:
        verdicts.append(await client.round(draft(plain.text[len(client.text) :])))
    await client.close()
    assert client.text == plain.text
    assert client.finish_reason == plain.finish_reason
    accepted = {verdict.accepted for verdict in verdicts[1:-1]}
    assert accepted == {right: {4}, wrong: {0}, right_then_wrong: {2}}[draft]


async def test_samples_differ_in_their_index_alone(service: Service) -> None:
    texts = [(await generate(service, PROMPT, sample_index=index, **SAMPLED)).text for index in (0, 1, 0)]
    assert texts[0] == texts[2] != texts[1]


async def test_a_resumed_session_goes_on_as_if_it_had_not_been_interrupted(service: Service) -> None:
    sampling = {**SAMPLED, "repetition_penalty": 1.3, "min_new_tokens": 12, "ignore_eos": False}
    whole = await generate(service, PROMPT, **sampling)
    for cut in (1, 7, len(whole.output) - 1):
        token_ids = whole.text[: len(PROMPT) + cut]
        resumed = await generate(service, token_ids, prompt_length=len(PROMPT), **sampling)
        assert (resumed.text, resumed.finish_reason) == (whole.text, whole.finish_reason)


async def test_concurrent_sessions_emit_what_each_emits_alone(service: Service) -> None:
    prompts = [tiny.tokenizer().encode(text)[: 5 + 9 * i] for i, text in enumerate(tiny.TEXT * 2)]
    alone = [(await generate(service, prompt, **SAMPLED)).text for prompt in prompts]
    with service.gate() as forwards:
        sessions = [asyncio.create_task(generate(service, prompt, **SAMPLED)) for prompt in prompts]
        forwards.release(10_000)
        together = [(await session).text for session in sessions]
    assert together == alone


async def test_an_eos_inside_an_accepted_block_ends_the_text_there(service: Service) -> None:
    sampling = {"logit_bias": {EOS: 1000.0}, "min_new_tokens": 4}
    plain = await generate(service, PROMPT, logprobs=0, **sampling)
    assert plain.output[4:] == [EOS]
    client = Client(service.stub)
    await client.open(PROMPT, logprobs=0, **sampling)
    verdict = await client.round([*plain.output[1:], EOS, 20, 21])
    assert (verdict.accepted, verdict.HasField("next_token"), len(verdict.logprobs)) == (4, False, 4)
    assert verdict.finish_reason == common_pb2.FINISH_REASON_EOS
    assert (client.text, client.logprobs) == (plain.text, plain.logprobs)
    await client.close()


async def test_a_drafted_eos_that_the_target_rejects_ends_nothing(service: Service) -> None:
    plain = await generate(service, PROMPT, ignore_eos=True)
    client = Client(service.stub)
    await client.open(PROMPT)
    verdict = await client.round([plain.output[1], EOS, 20])
    assert (verdict.accepted, verdict.next_token, verdict.finish_reason) == (1, plain.output[2], 0)
    await client.close()


async def test_ignore_eos_emits_it_and_goes_on(service: Service) -> None:
    client = await generate(service, PROMPT, logit_bias={EOS: 1000.0}, ignore_eos=True, max_new_tokens=5)
    assert (client.output, client.finish_reason) == ([EOS] * 5, common_pb2.FINISH_REASON_MAX_TOKENS)


@pytest.mark.parametrize("ignore_eos", [False, True])
async def test_no_eos_and_no_stop_token_comes_before_min_new_tokens(service: Service, ignore_eos: bool) -> None:
    stop = 50
    client = await generate(
        service,
        PROMPT,
        logit_bias={EOS: 900.0, stop: 1000.0},
        min_new_tokens=6,
        stop_token_ids=[40, stop],
        ignore_eos=ignore_eos,
    )
    assert not {EOS, 40, stop} & set(client.output[:6])
    assert (client.output[6:], client.finish_reason) == ([stop], common_pb2.FINISH_REASON_STOP_TOKEN)


async def test_a_stop_token_inside_an_accepted_block_is_the_last_token(service: Service) -> None:
    plain = await generate(service, PROMPT, ignore_eos=True)
    stop = next(token for index, token in enumerate(plain.output) if index >= 2 and token not in plain.output[:index])
    index = plain.output.index(stop)
    client = Client(service.stub)
    await client.open(PROMPT, ignore_eos=True, stop_token_ids=[stop])
    verdict = await client.round(plain.output[1:])
    assert (verdict.accepted, verdict.HasField("next_token")) == (index, False)
    assert client.finish_reason == common_pb2.FINISH_REASON_STOP_TOKEN
    assert client.output == plain.output[: index + 1]
    await client.close()


@pytest.mark.parametrize("length", [1, 2, 5])
async def test_draft_tokens_beyond_max_new_tokens_are_ignored(service: Service, length: int) -> None:
    plain = await generate(service, PROMPT, ignore_eos=True)
    client = Client(service.stub)
    await client.open(PROMPT, ignore_eos=True, max_new_tokens=length)
    if length > 1:
        verdict = await client.round(plain.output[1:20])
        assert verdict.accepted == length - 2
        assert verdict.timing.batch_tokens == length - 1
    assert (client.output, client.finish_reason) == (plain.output[:length], common_pb2.FINISH_REASON_MAX_TOKENS)
    await client.close()


async def test_a_text_that_fills_the_context_ends_even_inside_a_block(service: Service) -> None:
    prompt = (PROMPT * CONTEXT)[: CONTEXT - 4]
    sampling = {"max_new_tokens": 100, "ignore_eos": True}
    plain = await generate(service, prompt, **sampling)
    assert (len(plain.text), plain.finish_reason) == (CONTEXT, common_pb2.FINISH_REASON_CONTEXT_LENGTH)
    client = Client(service.stub)
    await client.open(prompt, **sampling)
    await client.round([*plain.output[1:], 20, 21, 22])
    assert (client.text, client.finish_reason) == (plain.text, plain.finish_reason)
    await client.close()


async def test_logprobs_are_those_of_the_raw_model_and_the_same_for_every_draft(service: Service) -> None:
    sampling = {"temperature": 0.7, "top_k": 5, "frequency_penalty": 0.5, "ignore_eos": True}
    plain = await generate(service, PROMPT, logprobs=3, **sampling)
    client = Client(service.stub)
    await client.open(PROMPT, logprobs=3, **sampling)
    while not client.finish_reason:
        await client.round(right_then_wrong(plain.text[len(client.text) :]))
    await client.close()
    expected = reference_logits(plain.text)[len(PROMPT) - 1 : -1].log_softmax(-1)
    for of in (plain.logprobs, client.logprobs):
        assert [entry.chosen.token_id for entry in of] == plain.output
        for entry, row in zip(of, expected, strict=True):
            values, ids = row.topk(3)
            assert [top.token_id for top in entry.top] == ids.tolist()
            assert [top.logprob for top in entry.top] == pytest.approx(values.tolist(), abs=1e-5)
            assert entry.chosen.logprob == pytest.approx(float(row[entry.chosen.token_id]), abs=1e-5)


async def test_without_asking_there_are_no_logprobs_and_zero_gives_the_chosen_tokens_alone(service: Service) -> None:
    assert not (await generate(service, PROMPT)).logprobs
    client = await generate(service, PROMPT, logprobs=0)
    assert len(client.logprobs) == len(client.output)
    assert not any(entry.top for entry in client.logprobs)


async def test_tokens_beyond_the_vocabulary_are_never_emitted(service: Service) -> None:
    clients = [await generate(service, PROMPT, temperature=100, seed=seed, logprobs=20) for seed in range(8)]
    entries = [entry for client in clients for entry in client.logprobs]
    assert max(token for client in clients for token in client.output) < tiny.VOCABULARY_SIZE
    assert max(top.token_id for entry in entries for top in entry.top) < tiny.VOCABULARY_SIZE


async def test_timing_tells_what_shared_the_forward(service: Service) -> None:
    client = Client(service.stub)
    prompt = list(range(100, 100 + 3 * CHUNK + 5))
    opening = await client.open(prompt)
    assert (opening.timing.batch_rows, opening.timing.batch_tokens) == (1, 5)
    verdict = await client.round([1, 2, 3])
    assert (verdict.timing.batch_rows, verdict.timing.batch_tokens) == (1, 4)
    assert opening.timing.compute_us > 0
    await client.close()


CHOICES = [30, 40, 50, 60]
UNIFORM = common_pb2.SparseDistributions(
    support=4,
    token_ids=np.array(CHOICES * 2, "<u4").tobytes(),
    probabilities=np.full(8, 0.25, "<f4").tobytes(),
)


@cache
def choice_probabilities(text: tuple[int, ...]) -> list[float]:
    return reference_logits(text)[-1, CHOICES].mul(0.5).softmax(-1).tolist()


@pytest.mark.parametrize("method", ["METHOD_REJECTION", "METHOD_BLOCK"])
async def test_drawn_drafts_leave_the_distribution_as_it_is(service: Service, method: str) -> None:
    random = np.random.default_rng(1)
    sampling = {"temperature": 2, "logit_bias": dict.fromkeys(CHOICES, 1000.0), "method": method}

    async def sample(seed: int, draft: list[int]) -> list[int]:
        client = Client(service.stub)
        await client.open(PROMPT, seed=seed, **sampling)
        await client.round(draft, UNIFORM)
        await client.close()
        return client.text

    drafts = random.choice(CHOICES, (240, 2)).tolist()
    texts = []
    for start in range(0, len(drafts), 8):
        texts += await asyncio.gather(*(sample(start + i, draft) for i, draft in enumerate(drafts[start : start + 8])))
    for choice in range(4):
        excess = variance = 0.0
        for text in texts:
            for length in range(len(PROMPT) + 1, len(text)):
                p = choice_probabilities(tuple(text[:length]))[choice]
                excess += (text[length] == CHOICES[choice]) - p
                variance += p * (1 - p)
        assert abs(excess) < 4.5 * math.sqrt(variance)


async def test_rounds_are_answered_in_order_with_growing_counters(service: Service) -> None:
    counters = service.target.scheduler.counters
    seen = []
    client = Client(service.stub)
    await client.open(PROMPT, ignore_eos=True)
    for _ in range(3):
        seen.append((counters.forwards, counters.verdicts, counters.rows, counters.tokens))
        await client.round([1])
    await client.close()
    assert [tuple(b - a for a, b in zip(*pair, strict=True)) for pair in pairwise(seen)] == [(1, 1, 1, 2)] * 2
