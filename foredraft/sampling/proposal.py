"""The draft's side of rejection sampling and block verification: what to propose, and from which distribution."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.sampling.noise import Purpose, uniform
from foredraft.sampling.params import SamplingParams
from foredraft.sampling.selection import largest, pick


@dataclass(frozen=True, slots=True)
class SparseQ:
    """The distributions that k draft tokens were drawn from, over S tokens each.

    The weights are the truth: a token was drawn with probability weight / sum of its row. Entries of 0 fill up rows.
    """

    token_ids: Tensor
    """[k, S] int64"""
    probabilities: Tensor
    """[k, S] float32"""

    @classmethod
    def stack(cls, rows: Sequence[tuple[Tensor, Tensor]]) -> "SparseQ":
        """From one (token_ids [S_i], probabilities [S_i]) per draft token, as `propose` returns them."""
        ids, probabilities = zip(*rows, strict=True)
        pad = torch.nn.utils.rnn.pad_sequence
        return cls(pad(list(ids), batch_first=True), pad(list(probabilities), batch_first=True))


def propose(
    warped_row: Tensor, params: SamplingParams, *, sample_index: int, base: int, position: int
) -> tuple[int, Tensor, Tensor]:
    """Draws one draft token from the `params.q_support` most probable tokens of `warped_row` [V].

    Args:
        base: absolute position of the first draft token of the round.
        position: absolute position of this token.

    Returns:
        The token, and the distribution it was drawn from: ids [S] int64 and probabilities [S] float32, in falling
        order. S is at most `q_support`, and 1 at temperature 0.

    Raises:
        ValueError: the row leaves no token to draw.
    """
    values, columns = largest(warped_row.unsqueeze(0), params.q_support if params.temperature > 0 else 1)
    scores, ids = values[values > -torch.inf], columns[values > -torch.inf]
    # Drawn from the rounded numbers that are sent, not from what they were rounded from.
    probabilities = scores.double().softmax(-1).float()
    index = pick(probabilities, uniform(params.seed, sample_index, position, Purpose.PROPOSE, base))
    return int(ids[index]), ids, probabilities


def one_hot(tokens: Sequence[int]) -> SparseQ:
    """The q of draft tokens that were not drawn at random, such as those of an n-gram drafter."""
    token_ids = torch.tensor(tokens, dtype=torch.int64).view(-1, 1)
    return SparseQ(token_ids, torch.ones(len(tokens), 1))
