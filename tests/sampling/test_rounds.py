"""Whole texts of several rounds with the real random numbers, against their exact probability under the target.

Seeds are fixed, so the outcome is too: for correct code, p-values below 1e-3 had that probability when the seeds were
chosen. The models are ones on which using a random number in two rounds biases the text most: then p is below 1e-9.
"""

from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from unittest.mock import patch

import pytest
import torch

from foredraft.sampling import noise, proposal, verification
from foredraft.sampling.params import Method, SamplingParams
from foredraft.sampling.proposal import SparseQ, propose
from foredraft.sampling.verification import verify
from tests.sampling.reference import chi_square_p_value, sequences


def markov(after_0, after_1):
    """A model of two tokens: 16 times the probability of token 0 after a 0 (and at the start) and after a 1."""

    def distribution(history):
        p = Fraction(after_1 if history[-1:] == (1,) else after_0, 16)
        return p, 1 - p

    return distribution


@dataclass(frozen=True)
class Setting:
    target: object
    draft: object
    drafted: int
    length: int
    texts: int


WITHOUT_MEMORY = Setting(markov(8, 8), markov(14, 14), drafted=2, length=4, texts=1500)
WITH_MEMORY = Setting(markov(3, 12), markov(12, 12), drafted=3, length=6, texts=1000)


def scores(model, history):
    return torch.tensor([float(p) for p in model(history)], dtype=torch.float64).log()


def decode(setting, params):
    """The first tokens after an empty prompt; the last round may draft beyond them."""
    text = ()
    while len(text) < setting.length:
        base, draft, rows = len(text), [], []
        for i in range(setting.drafted):
            row = scores(setting.draft, (*text, *draft))
            token, *distribution = propose(row, params, sample_index=0, base=base, position=base + i)
            draft.append(token)
            rows.append(distribution)
        warped = torch.stack([scores(setting.target, (*text, *draft[:i])) for i in range(len(draft) + 1)])
        verified = verify(warped, draft, SparseQ.stack(rows), params, sample_index=0, base=base)
        text = (*text, *draft[: verified.accepted], verified.next_token)
    return text[: setting.length]


def p_value(method, setting):
    texts = Counter(decode(setting, SamplingParams(method=method, seed=seed)) for seed in range(setting.texts))
    return chi_square_p_value(texts, sequences(setting.target, setting.length, 2))


@pytest.mark.parametrize(
    ("method", "setting"),
    [
        (Method.COUPLED, replace(WITH_MEMORY, texts=400)),
        (Method.REJECTION, WITH_MEMORY),
        (Method.BLOCK, WITH_MEMORY),
        (Method.BLOCK, WITHOUT_MEMORY),
    ],
)
def test_texts_of_several_rounds_have_the_probability_the_target_gives_them(method, setting):
    assert p_value(method, setting) > 1e-3


def without_base(seed, sample_index, position, purpose, base=0):
    return noise.uniform(seed, sample_index, position, purpose)


@pytest.mark.parametrize(
    ("module", "setting"), [(verification, WITHOUT_MEMORY), (proposal, WITH_MEMORY)], ids=["coins", "proposals"]
)
def test_numbers_used_in_two_rounds_of_block_verification_would_be_noticed(module, setting):
    with patch.object(module, "uniform", without_base):
        assert p_value(Method.BLOCK, setting) < 1e-9


@pytest.mark.parametrize("method", [Method.REJECTION, Method.BLOCK])
def test_no_random_number_is_used_for_two_things_in_a_text(method):
    used = []

    def recorded(*arguments):
        used.append(arguments)
        return noise.uniform(*arguments)

    with patch.object(verification, "uniform", recorded), patch.object(proposal, "uniform", recorded):
        for seed in range(20):
            decode(WITH_MEMORY, SamplingParams(method=method, seed=seed))
    assert len(set(used)) == len(used)
    assert len({noise.uniform(*arguments) for arguments in used}) == len(used)
