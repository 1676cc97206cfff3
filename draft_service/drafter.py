"""What a drafter is: it opens sessions and drafts for all of them, one step at a time, in the model thread."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from foredraft.sampling.params import Method, SamplingParams
from foredraft.sampling.proposal import SparseQ


@dataclass(frozen=True, slots=True)
class Opening:
    """How a session begins: its text so far, of which `prompt_length` tokens are prompt, and how it is sampled."""

    text: list[int]
    prompt_length: int
    sample_index: int
    params: SamplingParams
    eos_token_ids: frozenset[int]

    @property
    def needs_q(self) -> bool:
        """Whether verification needs the distributions that draft tokens were drawn from."""
        return self.params.method is not Method.COUPLED and self.params.temperature > 0

    def ends(self, token: int) -> bool:
        """Whether the text ends with this token, so that drafting beyond it is useless."""
        return token in self.params.stop_token_ids or (not self.params.ignore_eos and token in self.eos_token_ids)

    def until_end(self, tokens: list[int]) -> list[int]:
        """The tokens up to the first with which the text ends, and that one."""
        count = next((i for i, token in enumerate(tokens, start=1) if self.ends(token)), len(tokens))
        return tokens[:count]

    def room(self, base: int) -> int:
        """How many draft tokens after `base` tokens can be of use: one place is for the target's own next token."""
        return self.prompt_length + self.params.max_new_tokens - base - 1


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens that follow the first `base` tokens of the text; times in seconds.

    The first `prepared_count` had been drafted for just this verdict before the commit came.
    """

    base: int
    token_ids: list[int]
    q: SparseQ | None
    compute_s: float
    queue_s: float
    prepared_count: int = 0


@dataclass(frozen=True, slots=True)
class Continuation:
    """Draft tokens that follow one possible verdict on a round."""

    accepted: int
    next_token: int
    token_ids: list[int]
    q: SparseQ | None


@dataclass(frozen=True, slots=True)
class Prepared:
    """Continuations for verdicts on a round, each in place of any that was emitted for the same verdict before."""

    round_id: int
    continuations: list[Continuation]


Emit = Callable[[Proposal | Prepared], None]


@dataclass(slots=True)
class Counters:
    """What happened since the start; written by the model thread, read by anybody."""

    sessions: int = 0
    forwards: int = 0
    forward_rows: int = 0
    forward_tokens: int = 0
    proposals: int = 0
    proposed_tokens: int = 0
    prepared: int = 0
    prepared_tokens: int = 0
    hits: int = 0
    misses: int = 0
    used_tokens: int = 0


class DraftSession(Protocol):
    """One session. Bases have been checked: none is beyond the text."""

    def commit(self, base: int, token_ids: list[int], max_tokens: int, received: float) -> None:
        """Truncate the text to `base` and append final tokens; emit one proposal for it if `max_tokens` > 0.

        `received` is the time of the request on time.perf_counter.
        """

    def verifying(self, round_id: int, base: int, token_ids: list[int], max_tokens: int, min_tokens: int) -> None:
        """Prepare continuations of at most `max_tokens` for likely verdicts; ignored if `base` is not the length.

        They are emitted when they are complete and, with `min_tokens` > 0, whenever they have grown to that or beyond.
        """

    def close(self) -> None:
        """Free what the session holds and emit nothing more."""


class Drafter(Protocol):
    """Drafts for many sessions."""

    counters: Counters

    def open(self, opening: Opening, emit: Emit) -> DraftSession:
        """Start a session, whose answers go to `emit`."""

    def step(self) -> bool:
        """Do the most urgent piece of work of all sessions; False if there is none."""
