"""Drafting without a model: the text goes on as it did after the latest earlier occurrence of its last tokens."""

import time
from collections.abc import Sequence

from draft_service.drafter import Continuation, Counters, Emit, Opening, Prepared, Proposal
from foredraft.sampling.proposal import SparseQ, one_hot


class NgramIndex:
    """A text and, for each run of `shortest` to `longest` tokens, where the text went on after it the last time.

    Appending and truncating cost a constant number of dictionary operations a token.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self.tokens: list[int] = []
        self._lengths = range(longest, shortest - 1, -1)
        self._next: dict[tuple[int, ...], int] = {}
        self._replaced: list[list[tuple[tuple[int, ...], int | None]]] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        for token in tokens:
            end = len(self.tokens)
            runs = [tuple(self.tokens[end - n :]) for n in self._lengths if n <= end]
            self._replaced.append([(run, self._next.get(run)) for run in runs])
            self._next.update(dict.fromkeys(runs, end))
            self.tokens.append(token)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, as if the others had never come."""
        while len(self.tokens) > length:
            self.tokens.pop()
            for run, previous in self._replaced.pop():
                if previous is None:
                    del self._next[run]
                else:
                    self._next[run] = previous

    def continuation(self, count: int) -> list[int]:
        """The next `count` tokens if the text repeats itself, by the longest run found; none if no run is found."""
        runs = (tuple(self.tokens[-n:]) for n in self._lengths if n <= len(self.tokens))
        start = next((self._next[run] for run in runs if run in self._next), None)
        if start is None:
            return []
        copied = self.tokens[start : start + count]
        # A repetition that reaches the end of the text goes on with its own copy.
        return [copied[i % len(copied)] for i in range(count)]


class NgramSession:
    """A session that answers at once."""

    def __init__(self, opening: Opening, emit: Emit, index: NgramIndex, counters: Counters) -> None:
        self._opening = opening
        self._emit = emit
        self._index = index
        self._counters = counters
        self._prepared: Continuation | None = None
        self._verified: list[int] | None = None
        index.extend(opening.text)

    def commit(self, base: int, token_ids: list[int], max_tokens: int, received: float) -> None:
        """See DraftSession."""
        started = time.perf_counter()
        index = self._index
        prepared_count = self._count_verdict(base, token_ids)
        if index.tokens[base:] != token_ids:
            index.truncate(base)
            index.extend(token_ids)
        if max_tokens == 0:
            return
        tokens = self._draft(max_tokens)
        self._counters.proposals += 1
        self._counters.proposed_tokens += len(tokens)
        compute = time.perf_counter() - started
        prepared_count = min(prepared_count, len(tokens))
        self._emit(Proposal(len(index.tokens), tokens, self._q(tokens), compute, started - received, prepared_count))

    def verifying(self, round_id: int, base: int, token_ids: list[int], max_tokens: int, min_tokens: int) -> None:
        """See DraftSession. One verdict is prepared for: all is accepted, and the text goes on repeating itself."""
        index = self._index
        if base != len(index.tokens):
            return
        self._verified, self._prepared = token_ids, None
        index.extend(token_ids)
        next_tokens = [] if token_ids and self._opening.ends(token_ids[-1]) else index.continuation(1)
        if next_tokens and not self._opening.ends(next_tokens[0]):
            index.extend(next_tokens)
            tokens = self._draft(max_tokens)
            if tokens:
                self._prepared = Continuation(len(token_ids), next_tokens[0], tokens, self._q(tokens))
        index.truncate(base)
        if self._prepared is not None:
            self._counters.prepared += 1
            self._counters.prepared_tokens += len(self._prepared.token_ids)
            self._emit(Prepared(round_id, [self._prepared]))

    def close(self) -> None:
        """See DraftSession."""
        self._counters.sessions -= 1

    def _draft(self, max_tokens: int) -> list[int]:
        count = min(max_tokens, self._opening.room(len(self._index.tokens)))
        return self._opening.until_end(self._index.continuation(count)) if count > 0 else []

    def _q(self, tokens: list[int]) -> SparseQ | None:
        return one_hot(tokens) if self._opening.needs_q else None

    def _count_verdict(self, base: int, token_ids: list[int]) -> int:
        """How many tokens were prepared for this verdict."""
        if self._verified is None or base != len(self._index.tokens):
            return 0
        prepared = self._prepared
        hit = prepared is not None and token_ids == [*self._verified, prepared.next_token]
        used = len(prepared.token_ids) if hit and prepared is not None else 0
        self._counters.hits += hit
        self._counters.misses += not hit
        self._counters.used_tokens += used
        self._verified = self._prepared = None
        return used


class NgramDrafter:
    """Prompt lookup (Saxena 2023): needs no model, and pays where the output repeats parts of the text."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.counters = Counters()
        self._shortest = shortest
        self._longest = longest

    def open(self, opening: Opening, emit: Emit) -> NgramSession:
        """See Drafter."""
        self.counters.sessions += 1
        return NgramSession(opening, emit, NgramIndex(self._shortest, self._longest), self.counters)

    def step(self) -> bool:
        """See Drafter. Sessions answer at once, so there is never any work left."""
        return False
