"""Drafting by looking up first: what the text repeats is drafted at no forward, and the rest by the model."""

from draft_service.drafter import Counters, Emit, Opening
from draft_service.model_drafter import ModelDrafter
from draft_service.model_session import ModelSession
from draft_service.ngram import NgramIndex

# A single token comes again too often for what followed it to be better than the model's draft (bench/drafters.py).
SHORTEST = 2


class CombinedDrafter:
    """The model drafter with a lookup of runs of `shortest` to `longest` tokens, each at least SHORTEST.

    Its sessions are the model drafter's, which does their work along with its own.
    """

    def __init__(self, model: ModelDrafter, shortest: int, longest: int) -> None:
        self.counters = Counters()
        self._model = model
        self._shortest = max(SHORTEST, shortest)
        self._longest = max(SHORTEST, longest)

    def open(self, opening: Opening, emit: Emit) -> ModelSession:
        """See Drafter."""
        return self._model.open(opening, emit, NgramIndex(self._shortest, self._longest), self.counters)

    def step(self) -> bool:
        """See Drafter. There is never any work that is not the model drafter's."""
        return False
