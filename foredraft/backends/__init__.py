"""Other ways to speculate with the same two models in one process, for comparison with the services."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Result:
    """Output tokens, end-of-sequence or stop token included, and how many draft tokens were verified and accepted.

    `drafted` and `accepted` are None where the backend does not tell.
    """

    token_ids: list[int]
    seconds: float
    drafted: int | None = None
    accepted: int | None = None
