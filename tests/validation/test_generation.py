"""Requests of the public API: every bad field is named, with what was wrong and what would be right."""

import pytest

from foredraft.v1 import common_pb2, generation_pb2
from foredraft.validation import (
    GenerationLimits,
    check_detokenize,
    check_generate,
    check_prompt_length,
    check_tokenize,
)
from tests.validation.common import CONTEXT, V, violations

LIMITS = GenerationLimits(vocabulary_size=V, context_length=CONTEXT, max_new_tokens=50)
Sampling = common_pb2.Sampling
GenerateRequest, Speculation = generation_pb2.GenerateRequest, generation_pb2.Speculation
Chat, ChatMessage, TokenIds = generation_pb2.Chat, generation_pb2.ChatMessage, generation_pb2.TokenIds


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (GenerateRequest(), "prompt: is not set; must be one of text, token_ids or chat"),
        (GenerateRequest(text=""), "text: is empty; must have at least one character"),
        (GenerateRequest(token_ids=TokenIds()), "token_ids.token_ids: is empty; must have at least one token"),
        (
            GenerateRequest(token_ids=TokenIds(token_ids=[V])),
            "token_ids.token_ids[0]: is 100; must be in [0, 100), the vocabulary",
        ),
        (
            GenerateRequest(token_ids=TokenIds(token_ids=[1] * 8)),
            "token_ids: has 8 tokens; must have at most 7, to leave room for output in the context of 8",
        ),
        (GenerateRequest(chat=Chat()), "chat.messages: is empty; must have at least one message"),
        (
            GenerateRequest(chat=Chat(messages=[ChatMessage(role="user", content="x"), ChatMessage(content="x")])),
            "chat.messages[1].role: is empty; must not be empty",
        ),
        (GenerateRequest(text="x", request_id="a" * 129), "request_id: has 129 characters; must have at most 128"),
        (GenerateRequest(text="x", request_id="a\n"), "request_id: has other characters; must be printable ASCII"),
        (GenerateRequest(text="x", request_id="é"), "request_id: has other characters; must be printable ASCII"),
        (GenerateRequest(text="x", sampling=Sampling(min_p=2)), "sampling.min_p: is 2.0; must be in [0, 1]"),
        (
            GenerateRequest(text="x", sampling=Sampling(max_new_tokens=51)),
            "sampling.max_new_tokens: is 51; must be at most 50, this server's limit",
        ),
        (GenerateRequest(text="x", stop_strings=["a"] * 17), "stop_strings: has 17 entries; must have at most 16"),
        (GenerateRequest(text="x", stop_strings=["a", ""]), "stop_strings[1]: has 0 bytes; must have 1 to 256"),
        (GenerateRequest(text="x", stop_strings=["é" * 129]), "stop_strings[0]: has 258 bytes; must have 1 to 256"),
        (GenerateRequest(text="x", sample_count=0), "sample_count: is 0; must be in [1, 16]"),
        (GenerateRequest(text="x", sample_count=17), "sample_count: is 17; must be in [1, 16]"),
        (GenerateRequest(text="x", logprobs=21), "logprobs: is 21; must be in [0, 20]"),
        (
            GenerateRequest(text="x", speculation=Speculation(mode=4)),
            "speculation.mode: is 4; must be one of MODE_PLAIN, MODE_SEQUENTIAL, MODE_OVERLAPPED",
        ),
        (
            GenerateRequest(text="x", speculation=Speculation(drafter=9)),
            "speculation.drafter: is 9; must be one of DRAFTER_MODEL, DRAFTER_NGRAM, DRAFTER_COMBINED",
        ),
        (
            GenerateRequest(text="x", speculation=Speculation(draft_tokens=65)),
            "speculation.draft_tokens: is 65; must be in [0, 64]",
        ),
        (
            GenerateRequest(text="x", speculation=Speculation(max_draft_tokens=65)),
            "speculation.max_draft_tokens: is 65; must be in [0, 64]",
        ),
        (
            GenerateRequest(text="x", speculation=Speculation(draft_tokens=0, max_draft_tokens=0)),
            "speculation.max_draft_tokens: is set, and so is draft_tokens; must not be set together with it",
        ),
    ],
)
def test_a_bad_request_is_refused(request_: GenerateRequest, expected: str) -> None:
    assert violations(check_generate, request_, LIMITS) == [expected]


@pytest.mark.parametrize(
    "request_",
    [
        GenerateRequest(text="x"),
        GenerateRequest(token_ids=TokenIds(token_ids=[0, V - 1] * 3)),
        GenerateRequest(chat=Chat(messages=[ChatMessage(role="user", content="x"), ChatMessage(role="assistant")])),
        GenerateRequest(
            text="x",
            request_id="from ~ here",
            sampling=Sampling(temperature=0, max_new_tokens=50, min_new_tokens=50),
            stop_strings=["é" * 128] * 16,
            sample_count=16,
            logprobs=0,
            speculation=Speculation(mode=generation_pb2.MODE_OVERLAPPED, draft_tokens=64),
        ),
    ],
)
def test_a_good_request_passes(request_: GenerateRequest) -> None:
    check_generate(request_, LIMITS)


@pytest.mark.parametrize("field", ["text", "chat", "token_ids"])
def test_a_prompt_without_room_for_output_is_refused_by_its_field(field: str) -> None:
    request = GenerateRequest()
    getattr(request, field).SetInParent() if field != "text" else setattr(request, "text", "x")
    check_prompt_length(request, CONTEXT - 1, LIMITS)
    description = "has 8 tokens; must have at most 7, to leave room for output in the context of 8"
    assert violations(check_prompt_length, request, CONTEXT, LIMITS) == [f"{field}: {description}"]
    assert violations(check_prompt_length, request, 0, LIMITS) == [f"{field}: has no tokens; must have at least one"]


def test_a_prompt_beyond_the_servers_limit_is_refused_by_its_field() -> None:
    limits = GenerationLimits(V, CONTEXT, max_prompt_tokens=4)
    ids = GenerateRequest(token_ids=TokenIds(token_ids=[1] * 5))
    expected = ["token_ids: has 5 tokens; must have at most 4, this server's limit"]
    assert violations(check_generate, ids, limits) == expected
    assert violations(check_prompt_length, ids, 5, limits) == expected
    check_prompt_length(ids, 4, limits)


def test_bad_tokenize_and_detokenize_requests_are_refused() -> None:
    tokenize, detokenize = generation_pb2.TokenizeRequest, generation_pb2.DetokenizeRequest
    assert violations(check_tokenize, tokenize()) == ["prompt: is not set; must be one of text or chat"]
    assert violations(check_detokenize, detokenize(), vocabulary_size=V) == [
        "token_ids: is empty; must have at least one token"
    ]
    assert violations(check_detokenize, detokenize(token_ids=[V]), vocabulary_size=V) == [
        "token_ids[0]: is 100; must be in [0, 100), the vocabulary"
    ]
