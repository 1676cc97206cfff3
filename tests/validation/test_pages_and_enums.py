"""Vocabulary pages, enums, and what may be imported."""

import subprocess
import sys

import pytest

from foredraft.sampling.params import Method
from foredraft.v1 import common_pb2, generation_pb2
from foredraft.validation import (
    DRAFTER_VALUES,
    DRAFTERS,
    METHOD_VALUES,
    METHODS,
    MODE_VALUES,
    MODES,
    vocabulary_page,
)
from tests.validation.common import V, violations


@pytest.mark.parametrize("page_size", [0, 1, 7, 12_345, 2**31 - 1])
def test_pages_cover_the_vocabulary_once(page_size: int) -> None:
    size, seen, token = 25_000 if page_size != 1 else 3, [], ""
    while True:
        page, token = vocabulary_page(common_pb2.ListVocabularyRequest(page_size=page_size, page_token=token), size)
        assert len(page) <= min(page_size or 10_000, 10_000)
        seen += page
        if not token:
            break
    assert seen == list(range(size))


@pytest.mark.parametrize("token", ["-1", "0", "100", "x", "9" * 10_000, "²"])
def test_an_unknown_page_token_is_refused(token: str) -> None:
    request = common_pb2.ListVocabularyRequest(page_token=token, page_size=-1)
    assert violations(vocabulary_page, request, V) == [
        "page_size: is -1; must not be negative",
        "page_token: is unknown; must be empty or the next_page_token of a page",
    ]


def test_every_enum_value_has_a_word_and_back() -> None:
    for enum, words, values in (
        (common_pb2.Drafter, DRAFTERS, DRAFTER_VALUES),
        (generation_pb2.Mode, MODES, MODE_VALUES),
    ):
        assert {enum.Name(value).partition("_")[2].lower(): value for value in enum.values() if value} == values
        assert {word: value for value, word in words.items()} == values
    assert METHODS.keys() == set(common_pb2.Method.values()) - {0}
    assert METHOD_VALUES.keys() == set(Method)


def test_serving_and_validation_need_no_torch() -> None:
    modules = "foredraft.serving.server, foredraft.serving.logs, foredraft.serving.model_thread, foredraft.validation"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
