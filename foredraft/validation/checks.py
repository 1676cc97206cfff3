"""Checks that several messages share. Each yields what it finds wrong."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from foredraft.errors import MAX_VIOLATIONS, Violation, invalid

MAX_DRAFT_TOKENS = 64
MAX_LOGPROBS = 20


def refuse(violations: Iterable[Violation]) -> None:
    """Raises RequestError (INVALID_ARGUMENT) if there are any."""
    found = list(violations)
    if found:
        raise invalid(found)


def at_most(value: int, limit: int, field: str) -> Iterator[Violation]:
    """An unsigned number lies in [0, limit]."""
    if value > limit:
        yield Violation(field, f"is {value}; must be in [0, {limit}]")


def known(value: int, enum: Any, field: str) -> Iterator[Violation]:
    """A value of a proto enum is one that this version knows."""
    if value not in enum.values():
        yield Violation(field, f"is {value}; must be one of {', '.join(enum.keys()[1:])}")


def token_ids(ids: Sequence[int], vocabulary_size: int | None, field: str) -> Iterator[Violation]:
    """All ids lie below the vocabulary size; None: it is not known, and every id passes."""
    # One pass in C for the usual case: prompts are long.
    if vocabulary_size is None or not ids or max(ids) < vocabulary_size:
        return
    bad = ((index, token) for index, token in enumerate(ids) if token >= vocabulary_size)
    for index, token in islice(bad, MAX_VIOLATIONS):
        yield Violation(f"{field}[{index}]", f"is {token}; must be in [0, {vocabulary_size}), the vocabulary")
