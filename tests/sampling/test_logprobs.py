import math

import pytest
import torch

from foredraft.sampling.logprobs import token_logprobs


def test_logprobs_are_those_of_the_raw_logits_without_padding():
    logits = torch.tensor([[0.0, math.log(2), math.log(5), 100.0], [math.log(6), 0.0, 0.0, 0.0]])
    (first, first_top), (second, second_top) = token_logprobs(logits, [1, 2], top=2, vocabulary_size=3)
    assert first == pytest.approx(math.log(2 / 8))
    assert [token for token, _ in first_top] == [2, 1]
    assert [math.exp(logprob) for _, logprob in first_top] == pytest.approx([5 / 8, 2 / 8])
    assert second == pytest.approx(math.log(1 / 8))
    # Tokens 1 and 2 tie.
    assert [token for token, _ in second_top] == [0, 1]


def test_no_alternatives_are_listed_unless_asked_for():
    assert [top for _, top in token_logprobs(torch.zeros(2, 4), [0, 3], top=0, vocabulary_size=4)] == [[], []]


def test_more_alternatives_than_tokens_lists_all_tokens():
    ((_, top),) = token_logprobs(torch.zeros(1, 4), [0], top=20, vocabulary_size=3)
    assert [token for token, _ in top] == [0, 1, 2]


def test_rows_without_a_chosen_token_are_refused():
    with pytest.raises(ValueError, match="2 rows of logits for 1 chosen"):
        token_logprobs(torch.zeros(2, 4), [0], top=0, vocabulary_size=4)
