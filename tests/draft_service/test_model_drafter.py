"""The model drafter, step by step, against drafting token by token without a cache."""

import random
from dataclasses import replace

import pytest

from draft_service.drafter import Proposal
from draft_service.model_drafter import PATIENCE, ModelDrafter
from foredraft.engine.engine import Engine
from foredraft.sampling.params import Method, SamplingParams
from tests.draft_service.conftest import BRANCHES, CHUNK
from tests.draft_service.reference import COUPLED, EOS, MAX_MODEL_LEN, PARAMETERS, PROMPT, Reference, opening
from tests.draft_service.schedule import Client, Schedule, finish, run, same_q

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", PARAMETERS)
def test_proposals_are_what_the_draft_model_samples_token_by_token(
    name: str, drafter: ModelDrafter, draft: Reference
) -> None:
    clients = [Client(drafter, replace(opening(PARAMETERS[name]), sample_index=i)) for i in range(3)]
    for rounds in range(3):
        for i, client in enumerate(clients):
            client.commit([60 + i, 61] if rounds else [], k=4)
        finish(drafter)
        for client in clients:
            proposal = client.proposal()
            tokens, q = draft.draft(client.opened, client.text, 4)
            assert (proposal.base, proposal.token_ids) == (len(client.text), tokens)
            assert same_q(proposal.q, q)


@pytest.mark.parametrize(
    "names", [("coupled", "greedy", "warped", "rejection"), ("coupled", "coupled", "minimum length", "block warped")]
)
def test_sessions_that_share_a_pass_draft_by_their_own_parameters(
    names: tuple[str, ...], drafter: ModelDrafter, engine: Engine, draft: Reference
) -> None:
    clients = [
        Client(drafter, opening(replace(PARAMETERS[name], seed=seed, ignore_eos=True, stop_token_ids=())))
        for seed, name in enumerate(names)
    ]
    finish(drafter)
    forwards = engine.forwards
    for client in clients:
        client.commit([60], k=3)
    finish(drafter)
    assert engine.forwards == forwards + 3
    for client in clients:
        proposal = client.proposal()
        tokens, q = draft.draft(client.opened, client.text, 3)
        assert proposal.token_ids == tokens
        assert same_q(proposal.q, q)


@pytest.mark.parametrize("name", PARAMETERS)
def test_whatever_happens_every_answer_is_what_a_fresh_proposal_would_be(
    name: str, drafter: ModelDrafter, draft: Reference, target: Reference
) -> None:
    params = replace(PARAMETERS[name], max_new_tokens=40)
    seeds = (1, 2, 3)
    schedules = [
        Schedule(Client(drafter, replace(opening(params), sample_index=seed)), draft, target, random.Random(seed))
        for seed in seeds
    ]
    run(drafter, schedules, random.Random(name))
    assert drafter.counters.hits >= sum(schedule.hits for schedule in schedules) > 0


def test_a_commit_is_idempotent(drafter: ModelDrafter, engine: Engine) -> None:
    client = Client(drafter, opening(COUPLED))
    client.commit([60], k=4)
    finish(drafter)
    first = client.proposal()
    computed = engine.computed_tokens
    client.commit([60], k=4, base=len(PROMPT))
    finish(drafter)
    again = client.proposal()
    assert (again.base, again.token_ids) == (first.base, first.token_ids)
    assert engine.computed_tokens == computed


def test_every_commit_gets_exactly_one_proposal_even_if_another_comes_before_it(drafter: ModelDrafter) -> None:
    client = Client(drafter, opening(COUPLED))
    client.commit([60], k=4)
    client.commit([61], k=0)
    client.commit([62], k=2)
    finish(drafter)
    bases = [(answer.base, len(answer.token_ids)) for answer in client.take() if isinstance(answer, Proposal)]
    assert bases == [(len(PROMPT) + 1, 0), (len(PROMPT) + 3, 2)]


def announced(drafter: ModelDrafter, params: SamplingParams = COUPLED) -> tuple[Client, Proposal]:
    """A session with a proposal, which has just been said to be verified."""
    client = Client(drafter, opening(params))
    client.commit([60], k=4)
    finish(drafter)
    proposal = client.proposal()
    client.verifying(1, proposal.token_ids, 4)
    return client, proposal


def test_a_hit_computes_nothing_again(drafter: ModelDrafter, engine: Engine) -> None:
    client, proposal = announced(drafter)
    finish(drafter)
    answer = client.prepared()[0]
    computed = engine.computed_tokens
    client.commit([*proposal.token_ids[: answer.accepted], answer.next_token], k=len(answer.token_ids))
    again = client.proposal()
    assert (again.token_ids, again.prepared_count) == (answer.token_ids, len(answer.token_ids))
    assert engine.computed_tokens == computed
    # Of the next round only the last draft token has never been run; with it the first tokens of answers are drafted.
    client.verifying(2, answer.token_ids, 4)
    assert client.session.preparation is not None
    started = len(client.session.preparation.branches)
    drafter.step()
    assert engine.computed_tokens == computed + 1 + started
    counters = drafter.counters
    assert (counters.hits, counters.misses, counters.used_tokens) == (1, 0, len(answer.token_ids))


def test_after_a_miss_only_what_is_new_is_computed(drafter: ModelDrafter, engine: Engine) -> None:
    client, proposal = announced(drafter)
    finish(drafter)
    prepared = {(answer.accepted, answer.next_token) for answer in client.prepared()}
    token = next(token for token in range(3, 20) if (2, token) not in prepared and token != proposal.token_ids[2])
    computed = engine.computed_tokens
    client.commit([*proposal.token_ids[:2], token], k=1)
    finish(drafter)
    assert engine.computed_tokens == computed + 1
    assert drafter.counters.misses == 1


def test_tokens_of_several_plain_rounds_are_caught_up_in_one_pass(drafter: ModelDrafter, engine: Engine) -> None:
    client = Client(drafter, opening(COUPLED))
    finish(drafter)
    forwards = engine.forwards
    for token in (60, 61, 62):
        client.commit([token], k=0)
        finish(drafter)
    assert engine.forwards == forwards
    client.commit([63, 64], k=1)
    finish(drafter)
    assert engine.forwards == forwards + 1
    assert client.proposal().base == len(PROMPT) + 5


@pytest.mark.parametrize("k", [0, 2])
def test_preparing_stops_with_the_commit_that_makes_it_useless(drafter: ModelDrafter, engine: Engine, k: int) -> None:
    client, proposal = announced(drafter)
    drafter.step()
    drafter.step()
    forwards = engine.forwards
    client.commit([*proposal.token_ids, 90], k)
    finish(drafter)
    assert engine.forwards == forwards + k


def test_closing_stops_preparing_and_frees_the_slot(drafter: ModelDrafter, engine: Engine) -> None:
    client, _ = announced(drafter)
    drafter.step()
    forwards = engine.forwards
    client.session.close()
    assert not drafter.step()
    assert (engine.forwards, engine.slots_used, drafter.counters.sessions) == (forwards, 0, 0)


def test_a_branch_cut_short_is_continued_by_the_proposal_for_its_verdict(
    drafter: ModelDrafter, engine: Engine, draft: Reference
) -> None:
    client, proposal = announced(drafter)
    drafter.step()  # the last token of the round, and one token for every branch that begins before it
    assert client.session.preparation is not None
    branch = client.session.preparation.branches[0]
    forwards = engine.forwards
    client.commit([*proposal.token_ids[: branch.accepted], branch.next_token], k=4)
    finish(drafter)
    continued = client.proposal()
    assert continued.token_ids == draft.draft(client.opened, client.text, 4)[0]
    assert (proposal.prepared_count, continued.prepared_count) == (0, 1)
    assert engine.forwards == forwards + 3


@pytest.mark.parametrize("name", ["coupled", "greedy", "rejection"])
def test_continuations_are_sent_again_whenever_they_are_longer_from_the_least_length_on(
    name: str, drafter: ModelDrafter
) -> None:
    client = Client(drafter, opening(replace(PARAMETERS[name], ignore_eos=True)))
    client.verifying(1, [], 4, least=2)
    lengths = []
    while drafter.step():
        answers = client.take()
        assert len(answers) <= 1  # one message a pass
        lengths += [{len(c.token_ids) for c in answer.continuations} for answer in answers]  # type: ignore[union-attr]
    assert lengths == [{2}, {3}, {4}]
    assert client.session._counters.prepared_tokens == 4 * BRANCHES


@pytest.mark.parametrize("name", ["coupled", "greedy", "rejection"])
def test_answers_take_as_many_passes_as_tokens_and_one_more_if_all_is_accepted(
    name: str, drafter: ModelDrafter, engine: Engine
) -> None:
    client, proposal = announced(drafter, replace(PARAMETERS[name], ignore_eos=True))
    k = len(proposal.token_ids)
    forwards = engine.forwards
    for _ in range(k):
        drafter.step()
    assert engine.forwards == forwards + k
    refused = client.prepared()
    assert refused
    assert all(answer.accepted < k and len(answer.token_ids) == 4 for answer in refused)
    finish(drafter)
    assert engine.forwards == forwards + k + 1
    late = client.prepared()
    assert any(answer.accepted == k for answer in late)
    assert all(len(answer.token_ids) == 4 for answer in late)
    assert len(refused) + len(late) == BRANCHES


def test_a_round_that_is_the_beginning_of_a_longer_draft_needs_no_pass_of_its_own(
    drafter: ModelDrafter, engine: Engine
) -> None:
    client, proposal = announced(drafter)
    client.verifying(2, proposal.token_ids[:2], 3)
    forwards = engine.forwards
    finish(drafter)
    assert engine.forwards == forwards + 3
    assert {answer.accepted for answer in client.prepared()} >= {2}


def test_all_branches_of_all_sessions_advance_in_one_pass(drafter: ModelDrafter, engine: Engine) -> None:
    first, _ = announced(drafter)
    second, _ = announced(drafter)
    finish(drafter)
    assert len(first.prepared()) == len(second.prepared()) == BRANCHES
    forwards = engine.forwards
    for client in (first, second):
        client.verifying(2, [70], 4)
    finish(drafter)
    assert engine.forwards == forwards + 5
    assert len(first.prepared()) == len(second.prepared()) == BRANCHES


def test_a_proposal_goes_before_reading_and_reading_before_preparing(drafter: ModelDrafter, engine: Engine) -> None:
    preparing, _ = announced(drafter)
    reading = Client(drafter, opening(COUPLED, [70] * (CHUNK + 1)))
    proposing = Client(drafter, opening(COUPLED, [71]))
    proposing.commit([60], k=2)
    drafter.step()
    drafter.step()
    assert proposing.proposal().token_ids
    assert reading.session.unread == CHUNK
    drafter.step()
    assert reading.session.unread == 0
    assert preparing.take() == []
    finish(drafter)
    assert len(preparing.prepared()) == BRANCHES


def test_a_new_text_is_read_even_if_proposals_never_pause(drafter: ModelDrafter) -> None:
    busy = Client(drafter, opening(COUPLED, [70]))
    reading = Client(drafter, opening(COUPLED, [71] * (CHUNK + 1)))
    for _ in range(PATIENCE + 1):
        busy.commit([60], k=1)
        drafter.step()
    assert reading.session.unread == 0


def test_reading_takes_a_bounded_number_of_tokens_a_pass(drafter: ModelDrafter, engine: Engine) -> None:
    clients = [Client(drafter, opening(COUPLED, [70 + i] * 40)) for i in range(3)]
    while any(client.session.unread for client in clients):
        computed = engine.computed_tokens
        drafter.step()
        assert engine.computed_tokens - computed <= CHUNK


def test_samples_of_one_prompt_read_it_once(drafter: ModelDrafter, engine: Engine) -> None:
    text = [70 + i for i in range(60)]
    clients = [Client(drafter, replace(opening(COUPLED, text), sample_index=i)) for i in range(4)]
    finish(drafter)
    assert engine.computed_tokens == len(text) - 1
    assert [client.session.unread for client in clients] == [0] * 4


def test_with_rejection_an_end_is_sent_no_sooner_than_other_draws(drafter: ModelDrafter) -> None:
    # A verdict may come after any pass: what has been sent by then must not depend on what was drawn.
    for seed in range(20):
        params = replace(PARAMETERS["rejection"], seed=seed, logit_bias={EOS: 6.0})
        client = Client(drafter, opening(params))
        client.verifying(1, [], 4)
        finish(drafter)
        prepared = client.prepared()
        ended = [EOS in answer.token_ids[:-1] for answer in prepared]
        assert {len(answer.token_ids) for answer in prepared} == {4}
        client.commit([60], k=4)
        finish(drafter)
        assert len(client.proposal().token_ids) == 4
        client.session.close()
        if any(ended):
            break
    else:
        pytest.fail("no draft drew an end before its last token")


def test_drafting_ends_with_a_token_that_ends_the_text(drafter: ModelDrafter, draft: Reference) -> None:
    tokens, _ = draft.draft(opening(COUPLED), [*PROMPT, 60], 4)
    stopping = Client(drafter, opening(replace(COUPLED, stop_token_ids=(tokens[1],))))
    stopping.commit([60], k=4)
    finish(drafter)
    proposal = stopping.proposal()
    assert proposal.token_ids == tokens[:2]
    stopping.verifying(1, proposal.token_ids, 4)
    finish(drafter)
    prepared = stopping.prepared()
    assert prepared
    # Nothing follows an accepted stop token, nor a stop token that the target draws itself.
    assert all(answer.accepted < 2 and answer.next_token != tokens[1] for answer in prepared)


def test_a_text_that_outgrows_the_draft_gets_empty_proposals(drafter: ModelDrafter, engine: Engine) -> None:
    client = Client(drafter, opening(replace(COUPLED, max_new_tokens=1000), [70] * (MAX_MODEL_LEN - 3)))
    client.commit([60], k=4)
    finish(drafter)
    proposal = client.proposal()
    assert len(proposal.token_ids) == 2
    client.verifying(1, proposal.token_ids, 4)
    client.commit([*proposal.token_ids, 61, 62], k=4)
    client.verifying(2, [], 4)
    finish(drafter)
    assert client.proposal().token_ids == []
    too_long = Client(drafter, opening(COUPLED, [70] * (MAX_MODEL_LEN + 50)))
    too_long.commit([60], k=4)
    finish(drafter)
    assert too_long.proposal().token_ids == []
    too_long.session.close()


def test_no_token_is_drafted_that_the_request_has_no_place_for(drafter: ModelDrafter) -> None:
    client = Client(drafter, opening(replace(COUPLED, max_new_tokens=4)))
    client.commit([60], k=4)
    finish(drafter)
    proposal = client.proposal()
    assert len(proposal.token_ids) == 2
    client.verifying(1, proposal.token_ids, 4)
    finish(drafter)
    assert all(len(answer.token_ids) + answer.accepted <= 1 for answer in client.prepared())


def test_most_verdicts_of_a_similar_target_are_foreseen(drafter: ModelDrafter, target: Reference) -> None:
    params = SamplingParams(temperature=0.7, seed=5, max_new_tokens=60, method=Method.COUPLED)
    client = Client(drafter, opening(params))
    proposal: list[int] = []
    while len(client.text) < len(PROMPT) + 56:
        client.verifying(len(client.text), proposal, 3)
        finish(drafter)
        prepared = {(answer.accepted, answer.next_token): answer for answer in client.prepared()}
        accepted: list[int] = []
        token = target.draw(client.opened, client.text)
        while len(accepted) < len(proposal) and token == proposal[len(accepted)]:
            accepted.append(token)
            token = target.draw(client.opened, [*client.text, *accepted])
        hit = prepared.get((len(accepted), token))
        client.commit([*accepted, token], k=0 if hit else 3)
        finish(drafter)
        proposal = hit.token_ids if hit else client.proposal().token_ids
    counters = drafter.counters
    assert counters.hits > counters.misses
