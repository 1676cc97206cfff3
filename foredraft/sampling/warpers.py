"""From raw logits to the distribution that is sampled: penalties, temperature and truncation, in this order:

mask of padded vocabulary rows, logit bias, repetition penalty (prompt and output), presence and frequency penalty
(output only), minimum-length mask, temperature, top-k, top-p, min-p.
"""

import math
from collections.abc import Collection, Sequence

import numpy as np
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
    """As `warp_branches`, for rows that follow one another: row i follows `text + draft[:i]`.

    Raises:
        ValueError: there are more rows than `draft` explains.
    """
    rows = len(logits)
    if rows > len(draft) + 1:
        raise ValueError(f"{rows} rows of logits, but {len(draft)} draft tokens allow for {len(draft) + 1}")
    return warp_branches(
        logits,
        params,
        text=text,
        prompt_length=prompt_length,
        branches=[draft[:i] for i in range(rows)],
        eos_token_ids=eos_token_ids,
        vocabulary_size=vocabulary_size,
    )


def warp_branches(
    logits: Tensor,
    params: SamplingParams,
    *,
    text: Sequence[int],
    prompt_length: int,
    branches: Sequence[Sequence[int]],
    eos_token_ids: Collection[int] = (),
    vocabulary_size: int,
) -> Tensor:
    """Log-probabilities, up to a constant per row, of the distribution to sample from.

    Args:
        logits: [R, V] raw logits, row i following `text + branches[i]`; never changed.
        text: what all rows follow; its first `prompt_length` tokens are the prompt.
        vocabulary_size: columns from here on are padding of the embedding matrix.

    Returns:
        [R, V], float32 (float64 if the logits are); removed tokens are -inf. At temperature 0 the penalised logits,
        neither divided nor truncated. It is `logits` itself if nothing applies.
    """
    columns = logits.shape[1]
    scores = logits if logits.dtype == torch.float64 else logits.float()
    if vocabulary_size < columns:
        scores = scores.clone()
        scores[:, vocabulary_size:] = -torch.inf
    if params.logit_bias:
        scores = _bias(scores, params)
    if params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0:
        scores = _penalties(scores, params, text, prompt_length, branches)
    needed = params.min_new_tokens - (len(text) - prompt_length)
    too_short = [i for i, branch in enumerate(branches) if len(branch) < needed]
    if too_short:
        rows = torch.tensor(too_short, device=scores.device).unsqueeze(-1)
        ends = torch.tensor([*eos_token_ids, *params.stop_token_ids], dtype=torch.int64, device=scores.device)
        scores = scores.index_put((rows, ends), scores.new_tensor(-torch.inf))
    if params.temperature == 0:
        return scores
    if params.temperature != 1:
        # Relative to the maximum, so that no temperature can overflow.
        scores = (scores - scores.amax(-1, keepdim=True)).div_(params.temperature)
    if 0 < params.top_k < columns:
        values, ids = largest(scores, params.top_k)
        if params.top_p < 1:
            values, _ = _nucleus(values, _mass(values, params.top_p))
        scores = _only(scores, values, ids)
    elif params.top_p < 1:
        scores = _top_p(scores, _mass(scores, params.top_p), _NUCLEUS_GUESS)
    if params.min_p > 0:
        floor = scores.amax(-1, keepdim=True) + math.log(params.min_p)
        scores = scores.masked_fill(scores < floor, -torch.inf)
    return scores


def _bias(scores: Tensor, params: SamplingParams) -> Tensor:
    ids = torch.tensor(list(params.logit_bias.keys()), device=scores.device)
    values = torch.tensor(list(params.logit_bias.values()), dtype=scores.dtype, device=scores.device)
    return scores.index_add(1, ids, values.expand(len(scores), -1))


def _penalties(
    scores: Tensor, params: SamplingParams, text: Sequence[int], prompt_length: int, branches: Sequence[Sequence[int]]
) -> Tensor:
    """Only the columns of tokens that occur are touched: U of them."""
    V = scores.shape[1]
    tokens = _ids(text).to(scores.device)
    added = _ids([token for branch in branches for token in branch]).to(scores.device)
    rows = _ids([i for i, branch in enumerate(branches) for _ in branch]).to(scores.device)
    columns = torch.cat((tokens, added)).bincount(minlength=V).nonzero().squeeze(-1)
    counts = tokens[prompt_length:].bincount(minlength=V)[columns].repeat(len(scores), 1)
    counts.index_put_((rows, torch.searchsorted(columns, added)), counts.new_tensor(1), accumulate=True)
    penalised = scores[:, columns]
    if params.repetition_penalty != 1:
        seen = (counts > 0) | (tokens[:prompt_length].bincount(minlength=V)[columns] > 0)
        r = params.repetition_penalty
        penalised = torch.where(seen, torch.where(penalised > 0, penalised / r, penalised * r), penalised)
    occurrences = counts.to(scores.dtype)
    penalised = penalised - params.presence_penalty * occurrences.clamp(max=1) - params.frequency_penalty * occurrences
    return scores.index_copy(1, columns, penalised)


def _ids(tokens: Sequence[int]) -> Tensor:
    # NumPy reads long lists several times faster than PyTorch.
    return torch.from_numpy(np.array(tokens, dtype=np.int64))


def _mass(scores: Tensor, top_p: float) -> Tensor:
    """[R, 1]: the sum that a nucleus must reach, relative to the probability of the row's first choice."""
    return top_p * (scores - scores.amax(-1, keepdim=True)).exp_().sum(-1, keepdim=True, dtype=torch.float64)


def _nucleus(values: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """Falling `values` [R, N] without those after the nucleus, and which rows reach their `mass` [R, 1] at all [R]."""
    cumulative = (values - values[:, :1]).exp().double().cumsum(-1)
    # A token stays if those before it do not reach the mass yet; the first always stays.
    values = values.clone()
    values[:, 1:].masked_fill_(~(cumulative[:, :-1] < mass), -torch.inf)
    return values, ~(cumulative[:, -1] < mass[:, 0])


def _top_p(scores: Tensor, mass: Tensor, count: int) -> Tensor:
    """The nucleus of each row, looked for among its `count` largest first."""
    values, ids = largest(scores, count)
    values, complete = _nucleus(values, mass)
    result = _only(scores, values, ids)
    if count < scores.shape[1] and not bool(complete.all()):
        result[~complete] = _top_p(scores[~complete], mass[~complete], scores.shape[1])
    return result


def _only(scores: Tensor, values: Tensor, ids: Tensor) -> Tensor:
    """[R, V]: `values` [R, N] at `ids`, else -inf; -inf among the values has no effect."""
    return torch.full_like(scores, -torch.inf).scatter_reduce_(1, ids, values, "amax")
