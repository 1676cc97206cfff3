"""What a step takes into its forward, and what becomes of slots. The steps are run by hand: no thread, no clock."""

import math
import time
from collections.abc import Sequence

import grpc
import pytest
import torch

from foredraft.engine.engine import Engine
from foredraft.errors import RequestError
from foredraft.sampling.params import Method, SamplingParams
from target_service import scheduler as scheduler_module
from target_service.scheduler import Scheduler
from target_service.session import Limits, Session, Verdict
from tests import tiny

CHUNK = 16
EOS = tiny.tokenizer().eos_token_id


class Bench:
    """A scheduler over a tiny model, and the verdicts that came so far."""

    def __init__(self, max_sessions: int = 4) -> None:
        self.engine = Engine(tiny.model(dtype=torch.float64), max_model_len=256, max_sessions=max_sessions)
        limits = Limits(tiny.VOCABULARY_SIZE, 256, frozenset({EOS}))
        self.scheduler = Scheduler(self.engine, limits, prefill_chunk=CHUNK, wake=lambda: None)
        self.verdicts: dict[Session, list[Verdict | RequestError]] = {}

    def submit(self, session: Session, draft: Sequence[int] = (), *, late_s: float = 0.0) -> None:
        reply = self.verdicts.setdefault(session, []).append
        self.scheduler.submit(session, draft, None, reply, received=time.perf_counter() + late_s)

    def step(self) -> tuple[int, int]:
        """Sessions and tokens of one forward."""
        assert self.scheduler.step()
        return self.scheduler.counters.last_batch_rows, self.scheduler.counters.last_batch_tokens

    def finish(self) -> None:
        while self.scheduler.step():
            pass


def session(prompt: Sequence[int], max_new_tokens: int = 100, **params: object) -> Session:
    return Session(list(prompt), len(prompt), 0, SamplingParams(temperature=0, max_new_tokens=max_new_tokens, **params))


def prompt(length: int, first: int = 10) -> list[int]:
    return [10 + (first + 7 * i) % 300 for i in range(length)]


def test_a_long_prompt_holds_up_no_round_of_another_session() -> None:
    bench = Bench()
    short, long = session(prompt(4)), session(prompt(10 * CHUNK, first=20))
    bench.submit(short)
    bench.finish()
    bench.submit(long)
    for count in range(2, 8):
        bench.submit(short, draft=[5, 6])
        assert bench.step() == (2, 3 + CHUNK)
        assert len(bench.verdicts[short]) == count
    assert not bench.verdicts[long]


def test_long_prompts_take_turns_and_a_step_reads_no_more_than_a_chunk() -> None:
    bench = Bench()
    sessions = [session(prompt(2 * CHUNK, first)) for first in (10, 20, 30)]
    for each in sessions:
        bench.submit(each)
    for step in range(6):
        assert bench.step() == (1, CHUNK)
        assert [len(bench.verdicts[each]) for each in sessions] == [int(step >= 3 + i) for i in range(3)]


def test_logits_that_are_no_numbers_are_the_servers_fault_and_stay_with_their_session() -> None:
    bench = Bench(max_sessions=1)
    embedding = bench.engine.model.get_input_embeddings().weight
    good, bad = session(prompt(20)), session([*prompt(40), 300])
    bench.submit(good)
    bench.finish()
    bench.scheduler.close(good)
    row = embedding[300].clone()
    with torch.no_grad():
        embedding[300] = torch.nan
    bench.submit(bad)
    bench.finish()
    (error,) = bench.verdicts[bad]
    assert isinstance(error, RequestError)
    assert error.status is grpc.StatusCode.INTERNAL
    assert "the request is not at fault" in error.message
    bench.scheduler.close(bad)
    with torch.no_grad():
        embedding[300] = row
    again = session(prompt(20))
    bench.submit(again)
    bench.finish()
    (first,), (second,) = bench.verdicts[good], bench.verdicts[again]
    assert isinstance(first, Verdict)
    assert isinstance(second, Verdict)
    assert first.tokens == second.tokens


def test_a_session_that_has_no_token_to_draw_is_rolled_back_and_told_why() -> None:
    bench = Bench()
    masked = session(prompt(4), logit_bias=dict.fromkeys(range(tiny.VOCABULARY_SIZE), -math.inf))
    bench.submit(masked)
    bench.finish()
    (error,) = bench.verdicts[masked]
    assert isinstance(error, RequestError)
    assert error.status is grpc.StatusCode.INVALID_ARGUMENT
    # Another round of it would be computed like the first.
    bench.submit(masked)
    bench.finish()
    assert len(bench.verdicts[masked]) == 2


def answered_together(bench: Bench) -> tuple[Session, Session]:
    """Two sessions whose last rounds shared a forward."""
    a, b = session(prompt(4)), session(prompt(4, first=20))
    bench.submit(a)
    bench.submit(b)
    assert bench.step() == (2, 8)
    bench.scheduler._forward_s = 1000.0  # However slow the machine, the wait is as long as it may be.
    return a, b


def test_sessions_answered_together_are_waited_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    a, b = answered_together(bench)
    bench.submit(a)
    monkeypatch.setattr(scheduler_module, "GATHER_MOST_S", 1000.0)
    monkeypatch.setattr(scheduler_module.time, "sleep", lambda seconds: bench.submit(b))
    assert bench.step() == (2, 2)


def test_a_session_that_comes_back_late_is_no_longer_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    a, b = answered_together(bench)
    waits: list[float] = []
    monkeypatch.setattr(scheduler_module, "GATHER_MOST_S", 0.01)
    monkeypatch.setattr(scheduler_module.time, "sleep", waits.append)
    bench.submit(a)
    assert bench.step() == (1, 1)
    assert waits
    bench.submit(a)
    bench.submit(b, late_s=0.03)
    assert bench.step() == (2, 2)
    waits.clear()
    bench.scheduler._forward_s = 1000.0
    bench.submit(a)
    assert bench.step() == (1, 1)
    assert not waits, "it waited for a session that always comes later"


def test_a_session_that_was_closed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    a, b = answered_together(bench)
    bench.scheduler.close(b)
    bench.submit(a)
    monkeypatch.setattr(scheduler_module.time, "sleep", lambda seconds: pytest.fail("it waited"))
    assert bench.step() == (1, 1)


def test_short_prompts_share_a_step() -> None:
    bench = Bench()
    for first in (10, 20, 30):
        bench.submit(session(prompt(4, first)))
    assert bench.step() == (3, 12)


def test_samples_of_one_prompt_read_it_once() -> None:
    bench = Bench()
    sessions = [session(prompt(100)) for _ in range(3)]
    before = bench.engine.computed_tokens
    for each in sessions:
        bench.submit(each)
    bench.finish()
    assert bench.engine.computed_tokens - before == 100 + 2
    assert len({each.text[-1] for each in sessions}) == 1


def test_a_prompt_whose_first_reader_left_is_read_all_the_same() -> None:
    bench = Bench()
    first, second = session(prompt(100)), session(prompt(100))
    bench.submit(first)
    bench.submit(second)
    bench.step()
    bench.scheduler.close(first)
    bench.finish()
    assert len(bench.verdicts[second]) == 1
    assert not bench.verdicts[first]


def test_sessions_closed_at_any_stage_free_their_slots_at_the_next_step() -> None:
    bench = Bench()
    never_started, in_prefill, decoding, idle = (session(prompt(n, n)) for n in (5, 6 * CHUNK, 8, 9))
    for each in (decoding, idle):
        bench.submit(each)
    bench.finish()
    bench.submit(in_prefill)
    bench.step()
    bench.submit(decoding)
    bench.submit(never_started)
    for each in (never_started, in_prefill, decoding, idle):
        bench.scheduler.close(each)
        bench.scheduler.close(each)
    assert not bench.scheduler.step()
    assert bench.scheduler.sessions == bench.scheduler.slots_used == 0
    assert [len(bench.verdicts[each]) for each in (never_started, in_prefill, decoding, idle)] == [0, 0, 1, 1]


def test_a_session_gets_the_slot_of_one_closed_just_before() -> None:
    bench = Bench(max_sessions=1)
    first, second = session(prompt(5)), session(prompt(6, first=20))
    bench.submit(first)
    bench.finish()
    bench.scheduler.close(first)
    bench.submit(second)
    bench.finish()
    assert len(bench.verdicts[second]) == 1
    assert bench.scheduler.sessions == bench.scheduler.slots_used == 1


def test_sessions_batched_together_emit_what_each_emits_alone() -> None:
    def texts(sessions: Sequence[Session], together: bool) -> list[list[int]]:
        bench = Bench(max_sessions=8)
        for batch in [sessions] if together else [[each] for each in sessions]:
            for _ in range(12):
                for each in batch:
                    bench.submit(each)
                bench.finish()
        return [each.text for each in sessions]

    def make() -> list[Session]:
        params = SamplingParams(temperature=0.8, max_new_tokens=100, ignore_eos=True, presence_penalty=0.5)
        return [Session(prompt(5 + 6 * i, 10 + i), 5 + 6 * i, i, params) for i in range(8)]

    assert texts(make(), together=True) == texts(make(), together=False)


def test_the_cache_holds_the_final_text_but_its_last_token_after_every_verdict() -> None:
    bench = Bench()
    reference, drafted = session(prompt(5), ignore_eos=True), session(prompt(5), ignore_eos=True)
    for _ in range(10):
        bench.submit(reference)
        bench.finish()
    bench.submit(drafted)
    bench.finish()
    bench.submit(drafted, draft=[*reference.text[6:9], reference.text[9] + 1, 3])
    bench.finish()
    assert drafted.text == reference.text[:10]
    [slot] = [slot for each, slot in bench.scheduler._slots.items() if each is drafted]
    assert slot.tokens == drafted.text[:-1]


def test_drafts_after_the_end_of_a_text_are_not_counted() -> None:
    bench = Bench()
    reference = session(prompt(5), ignore_eos=True)
    for _ in range(4):
        bench.submit(reference)
        bench.finish()
    before = bench.scheduler.counters.drafted
    stopped = session(prompt(5), ignore_eos=True, stop_token_ids=(reference.text[7],))
    bench.submit(stopped)
    bench.finish()
    bench.submit(stopped, draft=[*reference.text[6:9], 3, 4])
    bench.finish()
    counters = bench.scheduler.counters
    assert (counters.drafted - before, counters.accepted) == (2, 2)
    assert stopped.text == reference.text[:8]


def test_parameters_that_leave_no_token_end_their_session_and_no_other() -> None:
    bench = Bench()
    bad = session(prompt(5), min_new_tokens=50, stop_token_ids=tuple(range(tiny.VOCABULARY_SIZE)))
    good = session(prompt(6))
    bench.submit(bad)
    bench.submit(good)
    bench.finish()
    assert isinstance(bench.verdicts[bad][0], RequestError)
    assert isinstance(bench.verdicts[good][0], Verdict)


def test_rounds_drawn_together_get_the_verdicts_they_get_alone() -> None:
    def sampled(seed: int, temperature: float, **params: object) -> Session:
        chosen = SamplingParams(temperature=temperature, seed=seed, max_new_tokens=30, **params)
        return Session(prompt(4, first=10 * seed), 4, seed, chosen)

    def make() -> list[Session]:
        return [
            sampled(1, 0.7),
            sampled(2, 1.3, top_k=5),
            sampled(3, 0),
            sampled(4, 1.0, method=Method.REJECTION),
            sampled(5, 1.0, repetition_penalty=1.3),
        ]

    alone, together, bench = make(), make(), Bench(max_sessions=5)
    for each in alone:
        single = Bench(max_sessions=1)
        while len(each.text) < 4 + 12:
            single.submit(each, draft=[] if len(each.text) == 4 else [5, 6])
            single.finish()
    while any(len(each.text) < 4 + 12 for each in together):
        for each in together:
            bench.submit(each, draft=[] if len(each.text) == 4 else [5, 6])
        rows, _ = bench.step()
        bench.finish()
    assert rows == 5
    assert [each.text[: 4 + 12] for each in together] == [each.text[: 4 + 12] for each in alone]


def test_a_round_that_leaves_nothing_to_draw_ends_alone() -> None:
    bench = Bench()
    fine, tiny_temperature = (
        session(prompt(4)),
        Session(prompt(4), 4, 0, SamplingParams(temperature=5e-324, repetition_penalty=5e-324, max_new_tokens=9)),
    )
    other = Session(prompt(4), 4, 0, SamplingParams(temperature=1.0, max_new_tokens=9))
    for each in (fine, tiny_temperature, other):
        bench.submit(each)
    bench.finish()
    assert isinstance(bench.verdicts[tiny_temperature][0], RequestError)
    assert all(isinstance(bench.verdicts[each][0], Verdict) for each in (fine, other))
