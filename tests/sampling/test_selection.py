import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foredraft.sampling.selection import largest, leading, pick

# Few values, so that ties are everywhere.
SCORES = st.lists(st.sampled_from([-math.inf, -1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=100)


def selected(values_and_ids):
    """What was selected from the only row, without what fills it up."""
    (values,), (ids,) = values_and_ids
    return values[values > -math.inf], ids[values > -math.inf]


@given(SCORES, st.integers(1, 40))
def test_largest_is_a_sort_with_ties_by_lowest_index(scores, count):
    finite = [i for i, score in enumerate(scores) if score > -math.inf]
    expected = sorted(finite, key=lambda i: (-scores[i], i))[:count]
    values, ids = selected(largest(torch.tensor([scores]), count))
    assert ids.tolist() == expected
    assert values.tolist() == [scores[i] for i in expected]


@given(SCORES, st.integers(1, 6))
def test_leading_is_everything_above_a_bound_that_enough_entries_reach(scores, count):
    values, ids = selected(leading(torch.tensor([scores]), count))
    assert values.tolist() == [scores[i] for i in ids]
    ids = ids.tolist()
    finite = [i for i, score in enumerate(scores) if score > -math.inf]
    assert ids == sorted(ids)
    assert len(ids) >= min(count, len(finite))
    assert all(scores[i] > scores[j] for i in ids for j in finite if j not in ids)


@pytest.mark.parametrize("columns", [5, 100, 512])
@pytest.mark.parametrize("select", [leading, largest])
def test_rows_together_equal_each_alone_and_shorter_ones_are_filled_up(select, columns):
    rows = torch.randn(6, columns, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    rows[1, 3:] = -math.inf
    rows[4] = -math.inf
    values, ids = select(rows, 8)
    for i in range(6):
        alone, alone_ids = selected(select(rows[i : i + 1], 8))
        assert torch.equal(alone, values[i, : len(alone)])
        assert torch.equal(alone_ids, ids[i, : len(alone)])
        assert (values[i, len(alone) :] == -math.inf).all()


@pytest.mark.parametrize("count", [1, 7, 20, 200])
def test_a_few_of_a_large_vocabulary_are_those_of_a_sort(count):
    row = torch.randn(1, 5001, generator=torch.Generator().manual_seed(0)).round(decimals=2)
    values, ids = largest(row, count)
    expected = row[0].sort(descending=True, stable=True)
    assert torch.equal(values[0], expected.values[:count])
    assert torch.equal(ids[0], expected.indices[:count])
    selected_ids = leading(row, count)[1][0].tolist()
    assert selected_ids == sorted(selected_ids)


def test_leading_leaves_most_of_a_large_vocabulary_out():
    rows = torch.randn(1, 49_152, generator=torch.Generator().manual_seed(0))
    assert 1024 <= len(selected(leading(rows, 1024))[1]) < 1500


@given(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=8), st.floats(0, 1, exclude_max=True))
def test_pick_inverts_the_cumulative_sum_and_never_returns_weight_zero(weights, u):
    if sum(weights) == 0:
        with pytest.raises(ValueError, match="no token is left"):
            pick(torch.tensor(weights), u)
        return
    index = pick(torch.tensor(weights), u)
    assert weights[index] > 0
    assert sum(weights[:index]) <= u * sum(weights) < sum(weights[: index + 1])


def test_pick_survives_a_fraction_that_rounds_to_the_whole():
    assert pick(torch.tensor([0.3, 0.3, 0.0]), 1 - 2**-60) == 1


def test_pick_refuses_weights_that_are_not_numbers():
    with pytest.raises(ValueError, match="not finite"):
        pick(torch.tensor([0.5, math.nan]), 0.1)
