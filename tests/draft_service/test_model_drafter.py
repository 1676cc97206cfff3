"""The model drafter, step by step, against drafting token by token without a cache."""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from draft_service.drafter import Opening, Prepared, Proposal
from draft_service.model_drafter import PATIENCE, ModelDrafter
from draft_service.model_session import ModelSession
from foredraft.engine.engine import Engine
from foredraft.sampling.params import Method, SamplingParams
from foredraft.sampling.proposal import SparseQ
from tests.draft_service.reference import DRAFT, MAX_MODEL_LEN, PARAMETERS, PROMPT, TARGET, Reference, opening
from tests.tiny import VOCABULARY_SIZE, model

# Without an end of text, drafts have the length that is asked for.
COUPLED = replace(PARAMETERS["coupled"], ignore_eos=True)
BRANCHES = 4
TREE_SIZE = 16
CHUNK = 16


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def draft() -> Reference:
    return Reference(**DRAFT)


@pytest.fixture(scope="module")
def target() -> Reference:
    return Reference(**TARGET)


@pytest.fixture
def engine() -> Engine:
    return Engine(model(**DRAFT), max_model_len=MAX_MODEL_LEN, max_sessions=4, tree_size=TREE_SIZE)


@pytest.fixture
def drafter(engine: Engine) -> ModelDrafter:
    return ModelDrafter(engine, vocabulary_size=VOCABULARY_SIZE, branches=BRANCHES, prefill_chunk=CHUNK)


class Client:
    """A session and what it has answered; `text` is what has been committed."""

    def __init__(self, drafter: ModelDrafter, opened: Opening) -> None:
        self.opened = opened
        self.text = list(opened.text)
        self.answers: list[Proposal | Prepared] = []
        self.session: ModelSession = drafter.open(opened, self.answers.append)

    def commit(self, tokens: Sequence[int], k: int, base: int | None = None) -> None:
        base = len(self.text) if base is None else base
        self.text = [*self.text[:base], *tokens]
        self.session.commit(base, list(tokens), k, time.perf_counter())

    def verifying(self, round_id: int, tokens: Sequence[int], k: int) -> None:
        self.session.verifying(round_id, len(self.text), list(tokens), k)

    def take(self) -> list[Proposal | Prepared]:
        """The answers since the last call."""
        answers, self.answers[:] = list(self.answers), []
        return answers

    def proposal(self) -> Proposal:
        (proposal,) = [answer for answer in self.take() if isinstance(answer, Proposal)]
        return proposal

    def prepared(self) -> list[Prepared]:
        return [answer for answer in self.take() if isinstance(answer, Prepared)]


def finish(drafter: ModelDrafter) -> None:
    while drafter.step():
        pass


def same_q(a: SparseQ | None, b: SparseQ | None) -> bool:
    if a is None or b is None:
        return a is b
    dense_a, dense_b = (
        torch.zeros(len(q.token_ids), 512).scatter_add_(1, q.token_ids, q.probabilities) for q in (a, b)
    )
    return torch.allclose(dense_a, dense_b)


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


@dataclass
class Schedule:
    """A client that does everything a session allows, at random, and checks every answer."""

    client: Client
    draft: Reference
    target: Reference
    random: random.Random
    commits: int = 0
    proposals_due: list[tuple[int, list[int], int]] = field(default_factory=list)
    rounds: dict[int, tuple[list[int], list[int], int]] = field(default_factory=dict)
    prepared: dict[tuple[int, int], Prepared] = field(default_factory=dict)
    proposal: list[int] = field(default_factory=list)
    known: dict[tuple[int, ...], tuple[list[int], SparseQ | None]] = field(default_factory=dict)
    hits: int = 0

    def expected(self, text: Sequence[int], k: int) -> tuple[list[int], SparseQ | None]:
        key = tuple(text)
        if key not in self.known:
            self.known[key] = self.draft.draft(self.client.opened, text, 4)
        tokens, q = self.known[key]
        if q is not None:
            q = SparseQ(q.token_ids[:k], q.probabilities[:k])
        return tokens[:k], q if k else None

    def act(self) -> None:
        client, roll = self.client, self.random.random()
        k = self.random.randint(0, 4)
        if roll < 0.4:
            self.announce(self.random.choice([self.proposal, self.proposal[:2], [], [70, 71]]), k)
        elif roll < 0.5:
            client.session.verifying(99, len(client.text) - 1, [70], 3)  # stale
        elif roll < 0.6:
            self.commit(client.text[-1:], k, base=len(client.text) - 1)  # again
        elif roll < 0.65:
            back = max(client.opened.prompt_length, len(client.text) - 3)
            self.commit([80], k, base=back)
        elif roll < 0.7:
            self.commit([81, 82, 83], k)
        else:
            self.verdict(k)

    def announce(self, tokens: list[int], k: int) -> None:
        round_id = len(self.rounds) + 1
        self.rounds[round_id] = (list(self.client.text), list(tokens), k)
        self.prepared.clear()
        self.client.verifying(round_id, tokens, k)

    def verdict(self, k: int) -> None:
        """The target's, or any other, on the last round; a prepared answer becomes the next proposal."""
        text, drafted, _ = self.rounds.get(len(self.rounds), (None, [], 0))
        if text != self.client.text:
            drafted = []
        accepted: list[int] = []
        next_token = self.target.draw(self.client.opened, self.client.text)
        for token in drafted:
            if token != next_token:
                break
            accepted.append(token)
            next_token = self.target.draw(self.client.opened, [*self.client.text, *accepted])
        if self.prepared and self.random.random() < 0.4:
            prepared = self.random.choice(list(self.prepared.values()))
            accepted, next_token = drafted[: prepared.accepted], prepared.next_token
        hit = self.prepared.get((len(accepted), next_token))
        self.hits += hit is not None
        self.commit([*accepted, next_token], 0 if hit else k)
        if hit is not None:
            self.proposal = list(hit.token_ids)

    def commit(self, tokens: list[int], k: int, base: int | None = None) -> None:
        room = self.client.opened.prompt_length + self.client.opened.params.max_new_tokens - len(self.client.text)
        if room < len(tokens):
            return
        self.client.commit(tokens, k, base)
        self.prepared.clear()
        self.proposal = []
        self.commits += 1
        if k > 0:
            self.proposals_due.append((self.commits, list(self.client.text), k))

    def check(self, *, at_rest: bool) -> None:
        for answer in self.client.take():
            if isinstance(answer, Proposal):
                commit, text, k = self.proposals_due.pop(0)
                is_superseded = commit < self.commits
                tokens, q = self.expected(text, len(answer.token_ids) if is_superseded else k)
                assert (answer.base, answer.token_ids) == (len(text), tokens)
                assert same_q(answer.q, q)
                if text == self.client.text:
                    self.proposal = list(answer.token_ids)
            else:
                self.check_prepared(answer)
        if at_rest:
            assert not self.proposals_due

    def check_prepared(self, answer: Prepared) -> None:
        text, drafted, k = self.rounds[answer.round_id]
        verdict = [*text, *drafted[: answer.accepted], answer.next_token]
        is_current = answer.round_id == len(self.rounds) and text == self.client.text
        tokens, q = self.expected(verdict, k if is_current else len(answer.token_ids))
        assert answer.token_ids == tokens
        assert tokens
        assert same_q(answer.q, q)
        assert drafted[answer.accepted : answer.accepted + 1] != [answer.next_token]
        if is_current:
            self.prepared[answer.accepted, answer.next_token] = answer


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
    pace = random.Random(name)
    for _ in range(30):
        for schedule in schedules:
            schedule.act()
            schedule.check(at_rest=False)
        for _ in range(pace.choice([0, 0, 1, 2, 5, 50])):
            drafter.step()
            for schedule in schedules:
                schedule.check(at_rest=False)
    finish(drafter)
    for schedule in schedules:
        schedule.check(at_rest=True)
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
    # Of the next round only the last draft token has never been run.
    client.verifying(2, answer.token_ids, 4)
    drafter.step()
    assert engine.computed_tokens == computed + 1
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
    drafter.step()  # the last token of the round
    drafter.step()  # one token for every branch
    assert client.session.preparation is not None
    branch = client.session.preparation.branches[0]
    forwards = engine.forwards
    client.commit([*proposal.token_ids[: branch.accepted], branch.next_token], k=4)
    finish(drafter)
    continued = client.proposal()
    assert continued.token_ids == draft.draft(client.opened, client.text, 4)[0]
    assert (proposal.prepared_count, continued.prepared_count) == (0, 1)
    assert engine.forwards == forwards + 3


def test_a_branch_cut_short_is_returned_at_its_length_if_no_proposal_is_wanted(drafter: ModelDrafter) -> None:
    client, proposal = announced(drafter)
    drafter.step()
    drafter.step()
    drafter.step()
    assert client.session.preparation is not None
    branch = client.session.preparation.branches[0]
    client.commit([*proposal.token_ids[: branch.accepted], branch.next_token], k=0)
    (prepared,) = client.prepared()
    assert (prepared.accepted, prepared.next_token, len(prepared.token_ids)) == (branch.accepted, branch.next_token, 2)


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
