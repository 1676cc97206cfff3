"""Log-probabilities that are reported to the user."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.sampling.selection import largest


def token_logprobs(
    logits: Tensor, chosen: Sequence[int], top: int, vocabulary_size: int
) -> list[tuple[float, list[tuple[int, float]]]]:
    """Log-softmax of raw logits, before any warper, at the chosen and at the most probable tokens.

    Args:
        logits: [R, V]; columns from `vocabulary_size` on are padding and do not count.
        chosen: one token per row.
        top: how many of the most probable tokens to report per row.

    Returns:
        For each row the logprob of its chosen token, and `top` pairs (token id, logprob) in falling order, ties by
        lowest id.

    Raises:
        ValueError: the numbers of rows and of chosen tokens differ.
    """
    if len(logits) != len(chosen):
        raise ValueError(f"{len(logits)} rows of logits for {len(chosen)} chosen tokens")
    scores = logits[:, :vocabulary_size]
    normalisers = scores.double().logsumexp(-1, keepdim=True)
    at = torch.tensor(chosen, dtype=torch.int64, device=logits.device).unsqueeze(-1)
    values, ids = largest(scores, top) if top else (scores[:, :0], at[:, :0])
    own = (scores.gather(1, at).double() - normalisers).squeeze(-1).tolist()
    alternatives = zip(ids.tolist(), (values.double() - normalisers).tolist(), strict=True)
    return [
        (logprob, [(token, value) for token, value in zip(*row, strict=True) if value > -math.inf])
        for logprob, row in zip(own, alternatives, strict=True)
    ]
