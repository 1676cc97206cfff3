"""Clients of drafters, called step by step: one that does what it is told, and one that does everything at random."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from draft_service.combined import CombinedDrafter
from draft_service.drafter import Continuation, Drafter, Opening, Prepared, Proposal
from draft_service.model_drafter import ModelDrafter
from foredraft.sampling.proposal import SparseQ
from tests.draft_service.reference import Reference


class Client:
    """A session and what it has answered; `text` is what has been committed."""

    def __init__(self, drafter: ModelDrafter | CombinedDrafter, opened: Opening) -> None:
        self.opened = opened
        self.text = list(opened.text)
        self.answers: list[Proposal | Prepared] = []
        self.session = drafter.open(opened, self.answers.append)

    def commit(self, tokens: Sequence[int], k: int, base: int | None = None) -> None:
        base = len(self.text) if base is None else base
        self.text = [*self.text[:base], *tokens]
        self.session.commit(base, list(tokens), k, time.perf_counter())

    def verifying(self, round_id: int, tokens: Sequence[int], k: int, least: int = 0) -> None:
        self.session.verifying(round_id, len(self.text), list(tokens), k, least)

    def take(self) -> list[Proposal | Prepared]:
        """The answers since the last call."""
        answers, self.answers[:] = list(self.answers), []
        return answers

    def proposal(self) -> Proposal:
        (proposal,) = [answer for answer in self.take() if isinstance(answer, Proposal)]
        return proposal

    def prepared(self) -> list[Continuation]:
        return [c for answer in self.take() if isinstance(answer, Prepared) for c in answer.continuations]


def finish(drafter: Drafter) -> None:
    while drafter.step():
        pass


def same_q(a: SparseQ | None, b: SparseQ | None) -> bool:
    if a is None or b is None:
        return a is b
    dense_a, dense_b = (
        torch.zeros(len(q.token_ids), 512).scatter_add_(1, q.token_ids, q.probabilities) for q in (a, b)
    )
    return torch.allclose(dense_a, dense_b)


@dataclass
class Schedule:
    """A client that does everything a session allows, at random, and checks every answer."""

    client: Client
    draft: Reference
    target: Reference
    random: random.Random
    commits: int = 0
    proposals_due: list[tuple[int, list[int], int]] = field(default_factory=list)
    rounds: dict[int, tuple[list[int], list[int], int, int]] = field(default_factory=dict)
    prepared: dict[tuple[int, int], Continuation] = field(default_factory=dict)
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
            client.session.verifying(99, len(client.text) - 1, [70], 3, 1)  # stale
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
        least = self.random.randint(0, 4)
        self.rounds[round_id] = (list(self.client.text), list(tokens), k, least)
        self.prepared.clear()
        self.client.verifying(round_id, tokens, k, least)

    def verdict(self, k: int) -> None:
        """The target's, or any other, on the last round; a prepared answer becomes the next proposal."""
        text, drafted, *_ = self.rounds.get(len(self.rounds), (None, []))
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
        self.check_slot()
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
                for continuation in answer.continuations:
                    self.check_continuation(answer.round_id, continuation)
        if at_rest:
            assert not self.proposals_due
            self.check_complete()

    def check_slot(self) -> None:
        """What has been read is the text, as far as both go."""
        session = self.client.session
        held = session.slot.tokens if session.slot is not None else []
        assert held[: len(session.text)] == session.text[: len(held)]

    def check_continuation(self, round_id: int, answer: Continuation) -> None:
        text, drafted, k, least = self.rounds[round_id]
        full, _ = self.expected([*text, *drafted[: answer.accepted], answer.next_token], k)
        tokens, q = self.expected([*text, *drafted[: answer.accepted], answer.next_token], len(answer.token_ids))
        assert answer.token_ids == tokens
        assert tokens
        assert same_q(answer.q, q)
        assert len(tokens) >= min(least or k, len(full))
        assert drafted[answer.accepted : answer.accepted + 1] != [answer.next_token]
        verdict = (answer.accepted, answer.next_token)
        if round_id == len(self.rounds) and text == self.client.text:
            assert verdict not in self.prepared or len(self.prepared[verdict].token_ids) < len(tokens)
            self.prepared[verdict] = answer

    def check_complete(self) -> None:
        """What was prepared for the round in progress has all its tokens."""
        for (accepted, next_token), answer in self.prepared.items():
            text, drafted, k, _ = self.rounds[len(self.rounds)]
            assert answer.token_ids == self.expected([*text, *drafted[:accepted], next_token], k)[0]


def run(drafter: Drafter, schedules: Sequence[Schedule], pace: random.Random, turns: int = 30) -> None:
    """Let all act in turns, with some steps of `drafter` or none between."""
    for _ in range(turns):
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
