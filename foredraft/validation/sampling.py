"""Sampling messages."""

from collections.abc import Iterator
from dataclasses import dataclass

from foredraft.errors import Violation
from foredraft.sampling.params import Method, SamplingParams
from foredraft.v1 import common_pb2
from foredraft.validation.checks import known, refuse, token_ids
from foredraft.validation.enums import METHOD_VALUES, METHODS

MAX_BIAS_ENTRIES = 1024
MAX_STOP_TOKEN_IDS = 64


@dataclass(frozen=True, slots=True)
class Range:
    """[low, high], or (low, high] if `low_excluded`. NaN lies in no range."""

    low: float
    high: float
    low_excluded: bool = False

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high and not (self.low_excluded and value == self.low)

    def __str__(self) -> str:
        return f"{'(' if self.low_excluded else '['}{self.low:g}, {self.high:g}]"


RANGES = {
    "temperature": Range(0, 100),
    "top_p": Range(0, 1, low_excluded=True),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0, 10, low_excluded=True),
    "presence_penalty": Range(-100, 100),
    "frequency_penalty": Range(-100, 100),
    "q_support": Range(1, 1024),
}
BIAS_RANGE = Range(-1000, 1000)

_SCALARS = (*RANGES, "top_k", "seed", "max_new_tokens", "min_new_tokens")
_DEFAULTS = SamplingParams()


def sampling_params(
    sampling: common_pb2.Sampling, *, vocabulary_size: int | None, field_prefix: str = "sampling"
) -> SamplingParams:
    """Converts a message with seed and max_new_tokens; what else is unset gets the default of the contract.

    Raises RequestError (INVALID_ARGUMENT) naming every bad field.
    """
    refuse(session_sampling_violations(sampling, vocabulary_size, field_prefix))
    return converted(sampling)


def sampling_proto(params: SamplingParams) -> common_pb2.Sampling:
    """The message that `sampling_params` converts back; every field is set."""
    return common_pb2.Sampling(
        **{name: getattr(params, name) for name in _SCALARS},
        logit_bias=params.logit_bias,
        method=METHOD_VALUES[params.method],
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
    )


def converted(sampling: common_pb2.Sampling) -> SamplingParams:
    """Converts a message that has been checked."""
    scalars = {name: getattr(sampling if sampling.HasField(name) else _DEFAULTS, name) for name in _SCALARS}
    return SamplingParams(
        **scalars,
        logit_bias=dict(sampling.logit_bias),
        method=METHODS.get(sampling.method, Method.COUPLED),
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
    )


def session_sampling_violations(
    sampling: common_pb2.Sampling, vocabulary_size: int | None, prefix: str
) -> Iterator[Violation]:
    """As `sampling_violations`, and nothing is left to a default that a session has not."""
    for name in ("seed", "max_new_tokens"):
        if not sampling.HasField(name):
            yield Violation(f"{prefix}.{name}", "is not set; a session has no default for it")
    yield from sampling_violations(sampling, vocabulary_size, prefix)


def sampling_violations(sampling: common_pb2.Sampling, vocabulary_size: int | None, prefix: str) -> Iterator[Violation]:
    """What is wrong with a message whose fields may all be unset."""
    for name, allowed in RANGES.items():
        value = getattr(sampling, name)
        if sampling.HasField(name) and value not in allowed:
            yield Violation(f"{prefix}.{name}", f"is {value}; must be in {allowed}")
    yield from known(sampling.method, common_pb2.Method, f"{prefix}.method")
    yield from _length_violations(sampling, prefix)
    yield from _bias_violations(sampling, vocabulary_size, f"{prefix}.logit_bias")
    stop_count = len(sampling.stop_token_ids)
    if stop_count > MAX_STOP_TOKEN_IDS:
        yield Violation(f"{prefix}.stop_token_ids", f"has {stop_count} entries; must have at most {MAX_STOP_TOKEN_IDS}")
    else:
        yield from token_ids(sampling.stop_token_ids, vocabulary_size, f"{prefix}.stop_token_ids")


def _length_violations(sampling: common_pb2.Sampling, prefix: str) -> Iterator[Violation]:
    if not sampling.HasField("max_new_tokens"):
        return
    most, least = sampling.max_new_tokens, sampling.min_new_tokens
    if most == 0:
        yield Violation(f"{prefix}.max_new_tokens", "is 0; must be at least 1")
    elif least > most:
        yield Violation(f"{prefix}.min_new_tokens", f"is {least}; must be at most max_new_tokens, which is {most}")


def _bias_violations(sampling: common_pb2.Sampling, vocabulary_size: int | None, field: str) -> Iterator[Violation]:
    count = len(sampling.logit_bias)
    if count > MAX_BIAS_ENTRIES:
        yield Violation(field, f"has {count} entries; must have at most {MAX_BIAS_ENTRIES}")
        return
    for token, value in sorted(sampling.logit_bias.items()):
        if value not in BIAS_RANGE:
            yield Violation(f"{field}[{token}]", f"is {value}; must be in {BIAS_RANGE}")
        if vocabulary_size is not None and token >= vocabulary_size:
            yield Violation(f"{field}[{token}]", f"has key {token}; must be in [0, {vocabulary_size}), the vocabulary")
