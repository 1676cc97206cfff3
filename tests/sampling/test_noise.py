import math
import random

import pytest
import scipy.stats
import torch

from foredraft.sampling.noise import Purpose, gumbel, philox, pool_gumbel, uniform

FULL = 0xFFFFFFFF
# Random123, kat_vectors, philox4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((FULL, FULL, FULL, FULL), (FULL, FULL), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers_for_ints_and_tensors(counter, key, expected):
    assert philox(counter, key) == expected
    as_tensors = philox(tuple(torch.tensor([word]) for word in counter), key)
    assert tuple(word.item() for word in as_tensors) == expected


def test_philox_of_tensors_never_overflows():
    words = random.Random(0)
    counters = [tuple(words.choice((words.getrandbits(32), FULL, 1 << 31, 0)) for _ in range(4)) for _ in range(500)]
    together = philox(tuple(torch.tensor(column) for column in zip(*counters, strict=True)), (FULL, 0x80000000))
    assert list(zip(*(word.tolist() for word in together), strict=True)) == [
        philox(counter, (FULL, 0x80000000)) for counter in counters
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_noise_is_the_same_on_a_gpu():
    ids = torch.arange(50_000)
    torch.testing.assert_close(gumbel(1, 2, 3, ids.cuda()).cpu(), gumbel(1, 2, 3, ids), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("sample", [3, FULL])
def test_noise_is_the_documented_function_of_the_hash(sample):
    seed, position, token = 0x0123456789ABCDEF, 1000, 49_151
    word = philox((token >> 2, position, sample, Purpose.TOKEN), (0x89ABCDEF, 0x01234567))[token & 3]
    expected = -math.log(-math.log1p(-(word + 0.5) / 2**32))
    assert gumbel(seed, sample, position, torch.tensor([token])).item() == pytest.approx(expected, rel=1e-14)


def test_noise_of_a_token_does_not_depend_on_which_others_are_asked_for():
    everything = gumbel(7, 0, 12, torch.arange(1000))
    some = torch.tensor([999, 3, 500, 501])
    assert torch.equal(gumbel(7, 0, 12, some), everything[some])
    assert torch.equal(gumbel(7, 0, torch.tensor([[11], [12]]), some)[1], everything[some])


def test_noise_differs_between_seeds_samples_positions_and_tokens():
    arguments = [(s, n, p) for s in (0, 1, 1 << 32, 1 << 63) for n in (0, 1) for p in (0, 1)]
    values = torch.cat([gumbel(*a, torch.arange(100)) for a in arguments])
    assert len(values.unique()) == len(values)


def test_noise_is_gumbel_distributed():
    values = torch.cat([gumbel(5, 0, position, torch.arange(2000)) for position in range(10)])
    assert scipy.stats.kstest(values.numpy(), "gumbel_r").pvalue > 1e-3
    pooled = [pool_gumbel(5, 0, position) for position in range(5000)]
    assert scipy.stats.kstest(pooled, "gumbel_r").pvalue > 1e-3


def test_noise_is_finite_with_full_resolution_at_the_winning_end(monkeypatch):
    words = torch.tensor([0, 1, FULL - 1, FULL])
    monkeypatch.setattr("foredraft.sampling.noise.philox", lambda counter, key: (words,) * 4)
    values = gumbel(0, 0, 0, torch.zeros(4, dtype=torch.int64))
    expected = [-math.log(-math.log1p(-(word + 0.5) / 2**32)) for word in words.tolist()]
    assert values.tolist() == pytest.approx(expected, rel=1e-12)
    assert values[0] - values[1] == pytest.approx(math.log(3))


@pytest.mark.parametrize("purpose", [Purpose.PROPOSE, Purpose.ACCEPT, Purpose.NEXT])
def test_uniform_numbers_are_uniform_over_seeds_positions_and_bases(purpose):
    for numbers in (
        [uniform(seed, 0, 10, purpose, 8) for seed in range(5000)],
        [uniform(3, 0, position, purpose, 8) for position in range(5000)],
        [uniform(3, 0, 5000, purpose, base) for base in range(5000)],
    ):
        assert scipy.stats.kstest(numbers, "uniform").pvalue > 1e-3


def test_uniform_numbers_of_different_purposes_and_rounds_are_unrelated():
    columns = [
        [uniform(seed, 0, 10, purpose, base) for seed in range(3000)]
        for purpose in (Purpose.PROPOSE, Purpose.ACCEPT, Purpose.NEXT)
        for base in (9, 10)
    ]
    correlations = torch.corrcoef(torch.tensor(columns)) - torch.eye(len(columns))
    # Standard error 1 / sqrt(3000) = 0.018.
    assert correlations.abs().max() < 0.075


@pytest.mark.parametrize("word", [0, FULL])
def test_uniform_numbers_exclude_0_and_1(monkeypatch, word):
    monkeypatch.setattr("foredraft.sampling.noise.philox", lambda counter, key: (word,) * 4)
    assert 0 < uniform(0, 0, 0, Purpose.ACCEPT) < 1
