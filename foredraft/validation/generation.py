"""Requests of the public API."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from foredraft.errors import Violation
from foredraft.v1 import common_pb2, generation_pb2
from foredraft.validation.checks import MAX_DRAFT_TOKENS, MAX_LOGPROBS, at_most, known, refuse, token_ids
from foredraft.validation.sampling import sampling_violations

MAX_SAMPLES = 16
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256
MAX_REQUEST_ID = 128


@dataclass(frozen=True, slots=True)
class GenerationLimits:
    """What a request has to fit: the target model, and the operator's limits on output and prompt; None: no limit."""

    vocabulary_size: int
    context_length: int
    max_new_tokens: int | None = None
    max_prompt_tokens: int | None = None


def check_generate(request: generation_pb2.GenerateRequest, limits: GenerationLimits) -> None:
    """Checks all that can be checked before the prompt is tokenized.

    Raises RequestError (INVALID_ARGUMENT) naming every bad field.
    """
    refuse(_generate_violations(request, limits))


def check_prompt_length(
    request: generation_pb2.GenerateRequest, prompt_token_count: int, limits: GenerationLimits
) -> None:
    """Checks the tokenized prompt: it must have a token, no more than allowed, and leave room for one in the context.

    Raises RequestError (INVALID_ARGUMENT) naming the field that held the prompt.
    """
    field = request.WhichOneof("prompt") or "prompt"
    refuse(_length_violations(prompt_token_count, limits, field))


def check_tokenize(request: generation_pb2.TokenizeRequest) -> None:
    """Raises RequestError (INVALID_ARGUMENT) naming every bad field."""
    refuse(_prompt_violations(request, "text or chat"))


def check_detokenize(request: generation_pb2.DetokenizeRequest, *, vocabulary_size: int) -> None:
    """Raises RequestError (INVALID_ARGUMENT) naming every bad field."""
    if not request.token_ids:
        refuse([Violation("token_ids", "is empty; must have at least one token")])
    refuse(token_ids(request.token_ids, vocabulary_size, "token_ids"))


def _generate_violations(request: generation_pb2.GenerateRequest, limits: GenerationLimits) -> Iterator[Violation]:
    yield from _request_id_violations(request.request_id)
    yield from _prompt_violations(request, "text, token_ids or chat")
    if request.WhichOneof("prompt") == "token_ids" and request.token_ids.token_ids:
        ids = request.token_ids.token_ids
        yield from token_ids(ids, limits.vocabulary_size, "token_ids.token_ids")
        yield from _length_violations(len(ids), limits, "token_ids")
    yield from sampling_violations(request.sampling, limits.vocabulary_size, "sampling")
    wanted, most = request.sampling.max_new_tokens, limits.max_new_tokens
    if most is not None and wanted > most:
        yield Violation("sampling.max_new_tokens", f"is {wanted}; must be at most {most}, this server's limit")
    yield from _stop_string_violations(request.stop_strings)
    if request.HasField("sample_count") and not 1 <= request.sample_count <= MAX_SAMPLES:
        yield Violation("sample_count", f"is {request.sample_count}; must be in [1, {MAX_SAMPLES}]")
    yield from at_most(request.logprobs, MAX_LOGPROBS, "logprobs")
    yield from _speculation_violations(request.speculation)


def _request_id_violations(request_id: str) -> Iterator[Violation]:
    if len(request_id) > MAX_REQUEST_ID:
        yield Violation("request_id", f"has {len(request_id)} characters; must have at most {MAX_REQUEST_ID}")
    elif not (request_id.isascii() and request_id.isprintable()):
        yield Violation("request_id", "has other characters; must be printable ASCII")


def _prompt_violations(
    request: generation_pb2.GenerateRequest | generation_pb2.TokenizeRequest, choice: str
) -> Iterator[Violation]:
    kind = request.WhichOneof("prompt")
    if kind is None:
        yield Violation("prompt", f"is not set; must be one of {choice}")
    elif kind == "text" and not request.text:
        yield Violation("text", "is empty; must have at least one character")
    elif kind == "token_ids" and isinstance(request, generation_pb2.GenerateRequest):
        if not request.token_ids.token_ids:
            yield Violation("token_ids.token_ids", "is empty; must have at least one token")
    elif kind == "chat":
        if not request.chat.messages:
            yield Violation("chat.messages", "is empty; must have at least one message")
        for index, message in enumerate(request.chat.messages):
            # No content is fine: a model may well answer with nothing, and the conversation goes on.
            if not message.role:
                yield Violation(f"chat.messages[{index}].role", "is empty; must not be empty")


def _length_violations(count: int, limits: GenerationLimits, field: str) -> Iterator[Violation]:
    context_length, most = limits.context_length, limits.max_prompt_tokens
    if count == 0:
        yield Violation(field, "has no tokens; must have at least one")
    elif most is not None and count > most:
        yield Violation(field, f"has {count} tokens; must have at most {most}, this server's limit")
    elif count >= context_length:
        room = f"at most {context_length - 1}, to leave room for output in the context of {context_length}"
        yield Violation(field, f"has {count} tokens; must have {room}")


def _stop_string_violations(stop_strings: Sequence[str]) -> Iterator[Violation]:
    if len(stop_strings) > MAX_STOP_STRINGS:
        yield Violation("stop_strings", f"has {len(stop_strings)} entries; must have at most {MAX_STOP_STRINGS}")
        return
    for index, text in enumerate(stop_strings):
        size = len(text.encode())
        if not 1 <= size <= MAX_STOP_STRING_BYTES:
            yield Violation(f"stop_strings[{index}]", f"has {size} bytes; must have 1 to {MAX_STOP_STRING_BYTES}")


def _speculation_violations(speculation: generation_pb2.Speculation) -> Iterator[Violation]:
    yield from known(speculation.mode, generation_pb2.Mode, "speculation.mode")
    yield from known(speculation.drafter, common_pb2.Drafter, "speculation.drafter")
    for name in ("draft_tokens", "max_draft_tokens"):
        yield from at_most(getattr(speculation, name), MAX_DRAFT_TOKENS, f"speculation.{name}")
    if speculation.HasField("draft_tokens") and speculation.HasField("max_draft_tokens"):
        description = "is set, and so is draft_tokens; must not be set together with it"
        yield Violation("speculation.max_draft_tokens", description)
