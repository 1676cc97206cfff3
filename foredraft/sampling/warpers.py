"""From raw logits to the distribution that is sampled: penalties, temperature and truncation, in this order:

mask of padded vocabulary rows, logit bias, repetition penalty (prompt and output), presence and frequency penalty
(output only), minimum-length mask, temperature, top-k, top-p, min-p.
"""

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from foredraft.sampling.params import SamplingParams
from foredraft.sampling.selection import largest

_NUCLEUS_GUESS = 1024
"""A nucleus rarely holds more tokens; only when it does is the whole row sorted."""


def warp(
    logits: Tensor,
    params: SamplingParams,
    *,
    text: Sequence[int],
    prompt_length: int,
    draft: Sequence[int] = (),
    eos_token_ids: Collection[int] = (),
    vocabulary_size: int,
) -> Tensor:
    """Log-probabilities, up to a constant per row, of the distribution to sample from.

    Args:
        logits: [R, V] raw logits, row i following `text + draft[:i]`; never changed. R is at most len(draft) + 1.
        text: all tokens so far, of which the first `prompt_length` are the prompt.
        vocabulary_size: columns from here on are padding of the embedding matrix.

    Returns:
        [R, V], float32 (float64 if the logits are); removed tokens are -inf. At temperature 0 the penalised logits,
        neither divided nor truncated. It is `logits` itself if nothing applies.

    Raises:
        ValueError: there are more rows than `draft` explains.
    """
    rows, columns = logits.shape
    if rows > len(draft) + 1:
        raise ValueError(f"{rows} rows of logits, but {len(draft)} draft tokens allow for {len(draft) + 1}")
    scores = logits if logits.dtype == torch.float64 else logits.float()
    if vocabulary_size < columns:
        scores = scores.clone()
        scores[:, vocabulary_size:] = -torch.inf
    if params.logit_bias:
        scores = _bias(scores, params)
    if params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0:
        scores = _penalties(scores, params, text, prompt_length, draft[: rows - 1])
    masked_rows = min(rows, params.min_new_tokens - (len(text) - prompt_length))
    if masked_rows > 0:
        scores = scores.clone()
        scores[:masked_rows, list({*eos_token_ids, *params.stop_token_ids})] = -torch.inf
    if params.temperature == 0:
        return scores
    if params.temperature != 1:
        # Relative to the maximum, so that no temperature can overflow.
        scores = (scores - scores.amax(-1, keepdim=True)) / params.temperature
    if 0 < params.top_k < columns:
        scores = torch.stack([_keep(row, *largest(row, params.top_k)) for row in scores])
    if params.top_p < 1:
        scores = torch.stack([_top_p(row, params.top_p) for row in scores])
    if params.min_p > 0:
        floor = scores.amax(-1, keepdim=True) + math.log(params.min_p)
        scores = scores.masked_fill(scores < floor, -torch.inf)
    return scores


def _bias(scores: Tensor, params: SamplingParams) -> Tensor:
    ids = torch.tensor(list(params.logit_bias.keys()), device=scores.device)
    values = torch.tensor(list(params.logit_bias.values()), dtype=scores.dtype, device=scores.device)
    return scores.index_add(1, ids, values.expand(len(scores), -1))


def _penalties(
    scores: Tensor, params: SamplingParams, text: Sequence[int], prompt_length: int, draft: Sequence[int]
) -> Tensor:
    rows, columns = scores.shape
    tokens = torch.tensor(text, dtype=torch.int64, device=scores.device)
    counts = torch.bincount(tokens[prompt_length:], minlength=columns).repeat(rows, 1)
    for i, token in enumerate(draft):
        counts[i + 1 :, token] += 1
    if params.repetition_penalty != 1:
        seen = counts > 0
        seen[:, tokens[:prompt_length]] = True
        penalised = torch.where(scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty)
        scores = torch.where(seen, penalised, scores)
    occurrences = counts.to(scores.dtype)
    return scores - params.presence_penalty * occurrences.clamp(max=1) - params.frequency_penalty * occurrences


def _top_p(row: Tensor, top_p: float) -> Tensor:
    peak = row.amax()
    bound = top_p * (row - peak).exp().sum(dtype=torch.float64)
    for count in (_NUCLEUS_GUESS, row.numel()):
        values, ids = largest(row, count)
        cumulative = (values - peak).exp().double().cumsum(-1)
        if cumulative[-1] >= bound:
            break
    # A token stays if those before it do not reach the bound yet; the first always stays.
    kept = 1 + int((cumulative[:-1] < bound).sum())
    return _keep(row, values[:kept], ids[:kept])


def _keep(row: Tensor, values: Tensor, ids: Tensor) -> Tensor:
    return torch.full_like(row, -torch.inf).index_copy_(0, ids, values)
