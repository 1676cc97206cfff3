"""The combined drafter, step by step, against looking up and drafting without an index or a cache."""

import random
from dataclasses import replace

import pytest

from draft_service.combined import CombinedDrafter
from draft_service.model_drafter import ModelDrafter
from foredraft.engine.engine import Engine
from foredraft.sampling.params import Method
from tests.draft_service.conftest import CHUNK
from tests.draft_service.reference import (
    COUPLED,
    DRAFT,
    EOS,
    PARAMETERS,
    CombinedReference,
    Reference,
    look_up,
    opening,
)
from tests.draft_service.schedule import Client, Schedule, finish, run, same_q

pytestmark = pytest.mark.usefixtures("one_thread")

REPEATING = [70, 71, 72, 73, 74, 75, 76, 70, 71]
REJECTION = replace(PARAMETERS["rejection"], ignore_eos=True)


@pytest.fixture(scope="module")
def reference() -> CombinedReference:
    return CombinedReference(**DRAFT)


@pytest.fixture
def combined(drafter: ModelDrafter) -> CombinedDrafter:
    return CombinedDrafter(drafter, shortest=1, longest=3)


@pytest.mark.parametrize("name", PARAMETERS)
def test_whatever_happens_every_answer_is_looked_up_or_else_drafted_by_the_model(
    name: str,
    combined: CombinedDrafter,
    drafter: ModelDrafter,
    reference: CombinedReference,
    target: Reference,
) -> None:
    # A text in few tokens repeats itself now and then.
    letters = [81, 82, 83, 84, 85, 86]
    bias = dict.fromkeys(letters, 9.0) | dict(PARAMETERS[name].logit_bias)
    params = replace(PARAMETERS[name], max_new_tokens=80, logit_bias=bias)
    schedules = []
    for seed in (1, 2, 3):
        rng = random.Random(f"{name} {seed}")
        text = [rng.choice([*letters, EOS]) for _ in range(30)]
        client = Client(combined, replace(opening(params, text), sample_index=seed))
        schedules.append(Schedule(client, reference, target, rng))
    run(drafter, schedules, random.Random(name), turns=60)
    texts = [text for schedule in schedules for text in schedule.known]
    looked_up = sum(bool(look_up(list(text), 1)) for text in texts)
    assert 5 < looked_up < len(texts) - 5
    assert combined.counters.hits >= sum(schedule.hits for schedule in schedules) > 0


def test_what_the_text_repeats_is_proposed_at_no_forward(combined: CombinedDrafter, engine: Engine) -> None:
    client = Client(combined, opening(COUPLED, REPEATING))
    client.commit([], k=2)
    assert client.proposal().token_ids == [72, 73]
    client.commit([], k=4)
    assert client.proposal().token_ids == [72, 73, 74, 75]
    client.commit([72, 73, 74], k=3)
    proposal = client.proposal()
    assert (proposal.token_ids, proposal.prepared_count, proposal.q) == ([75, 76, 70], 0, None)
    assert engine.forwards == 0


def test_what_the_text_ends_with_is_not_drafted_beyond(combined: CombinedDrafter) -> None:
    params = replace(COUPLED, stop_token_ids=(73,))
    client = Client(combined, opening(params, REPEATING))
    client.commit([], k=4)
    assert client.proposal().token_ids == [72, 73]


def test_a_single_token_that_comes_again_is_not_looked_up(
    combined: CombinedDrafter, drafter: ModelDrafter, draft: Reference
) -> None:
    client = Client(combined, opening(COUPLED, [70, 71, 72, 70]))
    client.commit([], k=3)
    finish(drafter)
    assert client.proposal().token_ids == draft.draft(client.opened, client.text, 3)[0]


@pytest.mark.parametrize("method", [Method.REJECTION, Method.BLOCK])
def test_q_is_certain_of_what_was_looked_up(
    method: Method, combined: CombinedDrafter, drafter: ModelDrafter, reference: CombinedReference
) -> None:
    params = replace(REJECTION, method=method)
    client = Client(combined, opening(params, REPEATING))
    client.commit([], k=3)
    q = client.proposal().q
    assert q is not None
    assert (q.token_ids.tolist(), q.probabilities.tolist()) == ([[72], [73], [74]], [[1.0], [1.0], [1.0]])
    client.verifying(1, [72, 73, 74], 3)
    finish(drafter)
    supports = set()
    for answer in client.prepared():
        text = [*client.text, *[72, 73, 74][: answer.accepted], answer.next_token]
        tokens, expected = reference.draft(client.opened, text, 3)
        assert answer.token_ids == tokens
        assert same_q(answer.q, expected)
        assert answer.q is not None
        supports.add(answer.q.token_ids.shape[1])
    assert supports >= {params.q_support}


def test_the_verdict_that_the_text_goes_on_repeating_is_answered_at_once_and_only_once(
    combined: CombinedDrafter, drafter: ModelDrafter
) -> None:
    client = Client(combined, opening(replace(COUPLED, logit_bias={75: 50.0}), REPEATING))
    client.verifying(1, [72, 73, 74], 3)
    (answer,) = client.prepared()
    assert (answer.accepted, answer.next_token, answer.token_ids) == (3, 75, [76, 70, 71])
    finish(drafter)
    assert all((answer.accepted, answer.next_token) != (3, 75) for answer in client.prepared())


def test_a_verdict_after_which_the_text_repeats_itself_is_answered_at_once_if_its_token_is_known(
    combined: CombinedDrafter, drafter: ModelDrafter
) -> None:
    # The model drafts 80 with the alternative 71, after which the text has gone on before.
    params = replace(PARAMETERS["greedy"], logit_bias={80: 100.0, 71: 90.0})
    client = Client(combined, opening(params, [70, 71, 72, 73, 74, 90, 70]))
    client.commit([], k=1)
    finish(drafter)
    assert client.proposal().token_ids == [80]
    client.verifying(1, [80], 3)
    (answer,) = client.prepared()
    assert (answer.accepted, answer.next_token, answer.token_ids) == (0, 71, [72, 73, 74])


def test_nothing_is_answered_after_a_round_that_ends_the_text(combined: CombinedDrafter) -> None:
    client = Client(combined, opening(replace(COUPLED, stop_token_ids=(73,)), REPEATING))
    client.verifying(1, [72, 73], 3)
    client.verifying(2, [72], 3)
    assert client.prepared() == []


def test_after_a_hit_on_what_was_looked_up_the_model_reads_it_before_it_drafts(
    combined: CombinedDrafter, drafter: ModelDrafter, engine: Engine, draft: Reference
) -> None:
    params = replace(COUPLED, logit_bias={75: 50.0})
    client = Client(combined, opening(params, REPEATING))
    client.verifying(1, [72, 73, 74], 3)
    finish(drafter)
    client.take()
    client.commit([72, 73, 74, 75], k=0)
    slot = client.session.slot
    assert slot is not None
    assert combined.counters.hits == 1
    assert slot.tokens == client.text[:-1]
    assert slot.tree_tokens == []
    computed = engine.computed_tokens
    client.commit([76, 70, 90], k=3)
    finish(drafter)
    proposal = client.proposal()
    assert proposal.token_ids == draft.draft(client.opened, client.text, 3)[0]
    assert slot.tokens == [*client.text, *proposal.token_ids[:-1]]
    # Four of the text that no forward has seen, and two of the three drafted.
    assert engine.computed_tokens == computed + 4 + 2


def test_a_late_hit_on_what_was_looked_up_is_told(combined: CombinedDrafter, drafter: ModelDrafter) -> None:
    client = Client(combined, opening(replace(COUPLED, logit_bias={75: 50.0}), REPEATING))
    client.verifying(1, [72, 73, 74], 2)
    finish(drafter)
    client.take()
    client.commit([72, 73, 74, 75], k=3)
    proposal = client.proposal()
    assert (proposal.token_ids, proposal.prepared_count) == ([76, 70, 71], 2)


def test_a_text_that_never_repeats_is_drafted_as_by_the_model_alone(
    combined: CombinedDrafter, drafter: ModelDrafter, engine: Engine
) -> None:
    def answers(kind: ModelDrafter | CombinedDrafter) -> tuple[list[object], int]:
        client = Client(kind, opening(COUPLED, list(range(60, 80))))
        given: list[object] = []
        finish(drafter)
        forwards = engine.forwards
        for round_id, token in enumerate(range(80, 84), start=1):
            client.commit([token], k=3)
            finish(drafter)
            proposal = client.proposal()
            client.verifying(round_id, proposal.token_ids, 3)
            finish(drafter)
            prepared = client.prepared()
            assert prepared
            assert not look_up(client.text, 1)
            for answer in prepared:
                assert not look_up([*client.text, *proposal.token_ids[: answer.accepted], answer.next_token], 1)
            given += [(proposal.base, proposal.token_ids), *((a.accepted, a.next_token, a.token_ids) for a in prepared)]
        client.session.close()
        return given, engine.forwards - forwards

    assert answers(combined) == answers(drafter)


def test_one_pass_serves_both_kinds_of_sessions(
    combined: CombinedDrafter, drafter: ModelDrafter, engine: Engine
) -> None:
    clients = [Client(combined, opening(COUPLED, [70, 71])), Client(drafter, opening(COUPLED, [70, 72]))]
    finish(drafter)
    forwards = engine.forwards
    for client in clients:
        client.commit([60], k=3)
    finish(drafter)
    assert [len(client.proposal().token_ids) for client in clients] == [3, 3]
    assert engine.forwards == forwards + 3
    assert (combined.counters.sessions, drafter.counters.sessions) == (1, 1)


def test_text_that_was_only_looked_up_is_read_in_parts(
    combined: CombinedDrafter, drafter: ModelDrafter, engine: Engine
) -> None:
    client = Client(combined, opening(COUPLED, REPEATING))
    finish(drafter)
    for _ in range(3 * CHUNK):
        client.commit(client.session.text[-7:-6], k=2)
        assert len(client.proposal().token_ids) == 2
        computed = engine.computed_tokens
        finish(drafter)
        assert engine.computed_tokens - computed <= CHUNK
    assert client.session.unread < CHUNK


def test_commits_of_any_length_keep_the_index_in_step(combined: CombinedDrafter, drafter: ModelDrafter) -> None:
    client = Client(combined, opening(COUPLED, REPEATING, prompt_length=2))
    client.commit([90], k=2, base=4)
    finish(drafter)
    client.take()
    client.commit([70, 71], k=3)
    assert client.proposal().token_ids == [72, 73, 90]
