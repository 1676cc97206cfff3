"""Log-probabilities that are reported to the user."""

from collections.abc import Sequence

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
    result = []
    for row, token in zip(logits[:, :vocabulary_size].double().log_softmax(-1), chosen, strict=True):
        values, ids = largest(row, top) if top else (row[:0], row[:0])
        result.append((float(row[token]), list(zip(ids.tolist(), values.tolist(), strict=True))))
    return result
