"""Hands the messages of all sessions to their drafters, in the model thread and in the order in which they came."""

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

from draft_service.drafter import Counters, Drafter, DraftSession, Emit, Opening
from foredraft.v1 import common_pb2


class Scheduler:
    """The drafters of a server, each with its sessions. Messages are taken between forwards, so none waits longer."""

    def __init__(self, drafters: Mapping[common_pb2.Drafter, Drafter], wake: Callable[[], None]) -> None:
        self._drafters = drafters
        self._wake = wake
        self._inbox: deque[Callable[[], None]] = deque()

    @property
    def counters(self) -> dict[common_pb2.Drafter, Counters]:
        """What each drafter has done."""
        return {kind: drafter.counters for kind, drafter in self._drafters.items()}

    def open(self, kind: common_pb2.Drafter, opening: Opening, emit: Emit) -> "Session":
        """Start a session; what it answers goes to `emit`, in the model thread."""
        return Session(partial(self._drafters[kind].open, opening, emit), self.post)

    def post(self, command: Callable[[], None]) -> None:
        """Have `command` called in the model thread."""
        self._inbox.append(command)
        self._wake()

    def step(self) -> bool:
        """Take the inbox, then let every drafter do a piece of work; False if there was none. In the model thread."""
        while self._inbox:
            self._inbox.popleft()()
        # Not any(): each is to have its turn.
        return sum(drafter.step() for drafter in self._drafters.values()) > 0


class Session:
    """The event loop's side of a session: has things done to it in the model thread. See DraftSession."""

    _drafting: DraftSession

    def __init__(self, start: Callable[[], DraftSession], post: Callable[[Callable[[], None]], None]) -> None:
        self._start = start
        self._post = post
        self._posted = 0
        self._handled = 0
        post(self._begin)

    @property
    def waiting(self) -> int:
        """How many commits and rounds the model thread has not taken yet."""
        return self._posted - self._handled

    def commit(self, base: int, token_ids: list[int], max_tokens: int, received: float) -> None:
        """See DraftSession."""
        self._posted += 1
        self._post(partial(self._commit, base, token_ids, max_tokens, received))

    def verifying(self, round_id: int, base: int, token_ids: list[int], max_tokens: int, min_tokens: int) -> None:
        """See DraftSession."""
        self._posted += 1
        self._post(partial(self._verifying, round_id, base, token_ids, max_tokens, min_tokens))

    def close(self) -> None:
        """See DraftSession. What the session holds is free before a session that is opened later needs it."""
        self._post(lambda: self._drafting.close())

    def _begin(self) -> None:
        self._drafting = self._start()

    def _commit(self, base: int, token_ids: list[int], max_tokens: int, received: float) -> None:
        self._handled += 1
        self._drafting.commit(base, token_ids, max_tokens, received)

    def _verifying(self, round_id: int, base: int, token_ids: list[int], max_tokens: int, min_tokens: int) -> None:
        self._handled += 1
        self._drafting.verifying(round_id, base, token_ids, max_tokens, min_tokens)
