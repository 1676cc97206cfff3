"""Messages of target and draft sessions. Whether a base fits the session's text is the session's to check."""

from collections.abc import Collection, Iterator
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from foredraft.errors import Violation
from foredraft.sampling.params import Method, SamplingParams
from foredraft.v1 import common_pb2, draft_pb2, target_pb2
from foredraft.validation.checks import MAX_DRAFT_TOKENS, MAX_LOGPROBS, at_most, known, refuse, token_ids
from foredraft.validation.sampling import RANGES, converted, session_sampling_violations

DecodedQ: TypeAlias = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Token ids and probabilities, [k, support] each."""

MAX_SUPPORT = int(RANGES["q_support"].high)
# float32 probabilities of MAX_SUPPORT tokens add up to 1 far better than this.
SUM_TOLERANCE = 1e-3


def check_open_target(
    request: target_pb2.OpenTarget, *, vocabulary_size: int, context_length: int, field_prefix: str = "open"
) -> SamplingParams:
    """Checks the opening of a target session: at least one token must still fit the context after the prompt.

    Raises RequestError (INVALID_ARGUMENT) naming every bad field.
    """
    violations = list(_text_violations(request, vocabulary_size, context_length, field_prefix))
    if request.prompt_length == context_length and not violations:
        description = f"is {context_length}, the context's length; must be less, so that there is room for output"
        violations.append(Violation(f"{field_prefix}.prompt_length", description))
    violations += at_most(request.logprobs, MAX_LOGPROBS, f"{field_prefix}.logprobs")
    violations += session_sampling_violations(request.sampling, vocabulary_size, f"{field_prefix}.sampling")
    refuse(violations)
    return converted(request.sampling)


def check_open_draft(
    request: draft_pb2.OpenDraft,
    *,
    vocabulary_size: int | None,
    context_length: int | None,
    drafters: Collection[common_pb2.Drafter],
    field_prefix: str = "open",
) -> SamplingParams:
    """Checks the opening of a draft session. `drafters` are those on offer; None for a limit: there is none.

    Raises RequestError (INVALID_ARGUMENT) naming every bad field.
    """
    violations = list(_text_violations(request, vocabulary_size, context_length, field_prefix))
    violations += session_sampling_violations(request.sampling, vocabulary_size, f"{field_prefix}.sampling")
    violations += token_ids(request.eos_token_ids, vocabulary_size, f"{field_prefix}.eos_token_ids")
    unknown = list(known(request.drafter, common_pb2.Drafter, f"{field_prefix}.drafter"))
    violations += unknown
    if request.drafter and not unknown and request.drafter not in drafters:
        name, offered = common_pb2.Drafter.Name(request.drafter), map(common_pb2.Drafter.Name, sorted(drafters))
        description = f"is {name}; must be one that this server offers: {', '.join(offered)}"
        violations.append(Violation(f"{field_prefix}.drafter", description))
    refuse(violations)
    return converted(request.sampling)


def check_round(
    request: target_pb2.Round, params: SamplingParams, *, vocabulary_size: int, field_prefix: str = "round"
) -> DecodedQ | None:
    """Checks a round; returns its q, or None if its draft tokens are not to be judged by probabilities.

    Entries of probability 0, which fill up short rows, get token id 0.

    Raises RequestError (INVALID_ARGUMENT) naming every bad field.
    """
    field = f"{field_prefix}.q"
    refuse(_draft_violations(request.token_ids, vocabulary_size, field_prefix))
    needed = params.method is not Method.COUPLED and params.temperature > 0 and len(request.token_ids) > 0
    if needed and not request.HasField("q"):
        reason = f"{params.method.value} verification needs what each draft token was drawn from"
        refuse([Violation(field, f"is not set; must be set: {reason}")])
    if not needed and request.HasField("q"):
        reason = "only draft tokens of rejection or block verification at a temperature above 0 have it"
        refuse([Violation(field, f"is set; must not be set: {reason}")])
    return _decode(request, vocabulary_size, field) if needed else None


def check_commit(request: draft_pb2.Commit, *, vocabulary_size: int | None, field_prefix: str = "commit") -> None:
    """Raises RequestError (INVALID_ARGUMENT) naming every bad field."""
    refuse(
        chain(
            _base_violations(request.base, field_prefix),
            token_ids(request.token_ids, vocabulary_size, f"{field_prefix}.token_ids"),
            at_most(request.max_tokens, MAX_DRAFT_TOKENS, f"{field_prefix}.max_tokens"),
        )
    )


def check_verifying(
    request: draft_pb2.Verifying, *, vocabulary_size: int | None, field_prefix: str = "verifying"
) -> None:
    """Raises RequestError (INVALID_ARGUMENT) naming every bad field."""
    refuse(
        chain(
            _base_violations(request.base, field_prefix),
            _draft_violations(request.token_ids, vocabulary_size, field_prefix),
            at_most(request.max_tokens, MAX_DRAFT_TOKENS, f"{field_prefix}.max_tokens"),
            at_most(request.commit.max_tokens, 0, f"{field_prefix}.commit.max_tokens"),
        )
    )
    if request.HasField("commit"):
        check_commit(request.commit, vocabulary_size=vocabulary_size, field_prefix=f"{field_prefix}.commit")


def _text_violations(
    request: target_pb2.OpenTarget | draft_pb2.OpenDraft,
    vocabulary_size: int | None,
    context_length: int | None,
    prefix: str,
) -> Iterator[Violation]:
    length, prompt_length = len(request.token_ids), request.prompt_length
    if length == 0:
        yield Violation(f"{prefix}.token_ids", "is empty; must have at least one token")
        return
    if context_length is not None and length > context_length:
        yield Violation(f"{prefix}.token_ids", f"has {length} tokens; must fit the context of {context_length}")
    else:
        yield from token_ids(request.token_ids, vocabulary_size, f"{prefix}.token_ids")
    if not 1 <= prompt_length <= length:
        description = f"is {prompt_length}; must be in [1, {length}], the length of token_ids"
        yield Violation(f"{prefix}.prompt_length", description)


def _base_violations(base: int, prefix: str) -> Iterator[Violation]:
    if base == 0:
        yield Violation(f"{prefix}.base", "is 0; must be at least 1, for a text has at least one token")


def _draft_violations(ids: Collection[int], vocabulary_size: int | None, prefix: str) -> Iterator[Violation]:
    field = f"{prefix}.token_ids"
    if len(ids) > MAX_DRAFT_TOKENS:
        yield Violation(field, f"has {len(ids)} tokens; must have at most {MAX_DRAFT_TOKENS}")
    else:
        yield from token_ids(list(ids), vocabulary_size, field)


def _decode(request: target_pb2.Round, vocabulary_size: int, field: str) -> DecodedQ:
    q, rows = request.q, len(request.token_ids)
    if not 1 <= q.support <= MAX_SUPPORT:
        refuse([Violation(f"{field}.support", f"is {q.support}; must be in [1, {MAX_SUPPORT}]")])
    size = 4 * rows * q.support
    refuse(
        Violation(
            f"{field}.{name}", f"has {len(data)} bytes; must have {rows} rows of {q.support} numbers, {size} bytes"
        )
        for name, data in (("token_ids", q.token_ids), ("probabilities", q.probabilities))
        if len(data) != size
    )
    ids = np.frombuffer(q.token_ids, "<u4").astype(np.int64).reshape(rows, q.support)
    probabilities = np.frombuffer(q.probabilities, "<f4").astype(np.float32).reshape(rows, q.support)
    draft = np.fromiter(request.token_ids, np.int64, rows)
    refuse(_q_violations(ids, probabilities, draft, vocabulary_size, field))
    return np.where(probabilities > 0, ids, 0), probabilities


def _q_violations(
    ids: NDArray[np.int64],
    probabilities: NDArray[np.float32],
    draft: NDArray[np.int64],
    vocabulary_size: int,
    field: str,
) -> Iterator[Violation]:
    """At most one violation a row: the first of these checks that it fails."""
    finite = (np.isfinite(probabilities) & (probabilities >= 0)).all(1)
    sums = np.where(finite, probabilities.sum(1, dtype=np.float64, where=np.isfinite(probabilities)), np.nan)
    used = probabilities > 0
    # Fillers become distinct numbers below every id.
    sorted_ids = np.sort(np.where(used, ids, -1 - np.arange(ids.shape[1])), axis=1)
    checks: tuple[tuple[Any, str, str], ...] = (
        (finite, "probabilities", "has a number that is negative or not finite; must be probabilities"),
        (np.isclose(sums, 1, rtol=0, atol=SUM_TOLERANCE), "probabilities", "adds up to {sum:g}; must add up to 1"),
        ((~used | (ids < vocabulary_size)).all(1), "token_ids", f"must lie in [0, {vocabulary_size}), the vocabulary"),
        ((np.diff(sorted_ids, axis=1) > 0).all(1), "token_ids", "has a token twice; must have distinct tokens"),
        (
            (used & (ids == draft[:, None])).any(1),
            "probabilities",
            "gives draft token {token} no chance; must be what the token was drawn from",
        ),
    )
    for row, total in enumerate(sums):
        for passed, name, description in checks:
            if not passed[row]:
                yield Violation(f"{field}.{name}[{row}]", description.format(sum=total, token=draft[row]))
                break
