"""Which draft tokens stand, and which token follows them, so that the text is distributed as the target's own.

The arithmetic (acceptance probabilities, distribution of the next token) is apart from the draws, so that tests can
enumerate every outcome. Rows are indexed from 0: p[i] is the target's distribution after i draft tokens, q[i] the
distribution that draft token i was drawn from.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.sampling.coupled import draw
from foredraft.sampling.noise import Purpose, uniform
from foredraft.sampling.params import Method, SamplingParams
from foredraft.sampling.proposal import SparseQ, one_hot
from foredraft.sampling.selection import pick


@dataclass(frozen=True, slots=True)
class Verification:
    """The outcome of a round: `accepted` draft tokens stand, and `next_token` follows them."""

    accepted: int
    next_token: int


def verify(
    warped: Tensor, draft: Sequence[int], q: SparseQ | None, params: SamplingParams, *, sample_index: int, base: int
) -> Verification:
    """Verifies a round by `params.method`; an empty draft is a plain decode step.

    Args:
        warped: [k + 1, V] from `foredraft.sampling.warpers.warp`, row i following `draft[:i]`.
        draft: k draft tokens.
        q: what they were drawn from. Not used by Method.COUPLED nor at temperature 0; None: they were not drawn.
        base: absolute position of draft[0].

    Raises:
        ValueError: shapes, ids or probabilities that do not fit, or a row that leaves no token to draw.
    """
    if len(warped) != len(draft) + 1:
        raise ValueError(f"{len(draft)} draft tokens need {len(draft) + 1} rows of scores, not {len(warped)}")
    if params.method is Method.COUPLED or params.temperature == 0:
        draws = draw(warped, params, sample_index=sample_index, positions=range(base, base + len(warped)))
        return coupled_verification(draws, draft)
    p = warped.double().softmax(-1)
    if not bool(p.sum().isfinite()):
        raise ValueError("no token is left to draw: all of a row are masked, or the logits are not numbers")
    dense = dense_q(q or one_hot(draft), draft, p)
    rule = rejection_rule if params.method is Method.REJECTION else block_rule
    coins = [uniform(params.seed, sample_index, base + i, Purpose.ACCEPT, base) for i in range(len(draft))]
    accepted, weights = rule(p, dense, draft, coins)
    u = uniform(params.seed, sample_index, base + accepted, Purpose.NEXT, base)
    return Verification(accepted, pick(weights, u))


def coupled_verification(draws: Sequence[int], draft: Sequence[int]) -> Verification:
    """What stands, and what follows: the target's own draw at the first position where that is not the draft's."""
    accepted = coupled_rule(draws, draft)
    return Verification(accepted, draws[accepted])


def coupled_rule(draws: Sequence[int], draft: Sequence[int]) -> int:
    """How many draft tokens stand: those up to the first that is not what the target draws (arXiv 2408.07978)."""
    return next((i for i, token in enumerate(draft) if token != draws[i]), len(draft))


def rejection_rule(p: Tensor, q: Tensor, draft: Sequence[int], coins: Sequence[float]) -> tuple[int, Tensor]:
    """Token by token, accepted with probability min(1, p/q) (Leviathan et al., arXiv 2211.17192).

    Args:
        p: [k + 1, V] float64 distributions of the target.
        q: [k, V] float64 distributions the draft tokens were drawn from.
        coins: k independent uniform numbers.

    Returns:
        How many tokens are accepted, and the weights [V], not normalised, that the next token is drawn with.
    """
    accept = rejection_acceptance(p, q, draft)
    accepted = next((i for i, coin in enumerate(coins) if coin >= accept[i]), len(draft))
    return accepted, residual(p[accepted], q[accepted]) if accepted < len(draft) else p[accepted]


def block_rule(p: Tensor, q: Tensor, draft: Sequence[int], coins: Sequence[float]) -> tuple[int, Tensor]:
    """The longest prefix that passes, even if a shorter one does not (Sun et al., arXiv 2403.10444).

    Arguments and result as those of `rejection_rule`.
    """
    accept, kept = block_acceptance(p, q, draft)
    accepted = max((i + 1 for i, coin in enumerate(coins) if coin < accept[i]), default=0)
    return accepted, residual(p[accepted], q[accepted], kept[accepted]) if accepted < len(draft) else p[accepted]


def rejection_acceptance(p: Tensor, q: Tensor, draft: Sequence[int]) -> list[float]:
    """min(1, p/q) at each draft token: the probability to accept it once those before it are."""
    return [min(1.0, ratio) for ratio in _ratios(p, q, draft)]


def block_acceptance(p: Tensor, q: Tensor, draft: Sequence[int]) -> tuple[list[float], list[float]]:
    """Block verification, algorithm 2 of Sun et al. (arXiv 2403.10444).

    Returns:
        h: k probabilities; h[i] is that of the prefix of i + 1 tokens to pass, independently of the others.
        w: k + 1 weights of the prefixes of 0..k tokens: w[0] = 1, w[i + 1] = min(1, w[i] p[i] / q[i]). The token after
        i < k accepted ones comes from `residual(p[i], q[i], w[i])`.
    """
    w = [1.0]
    for ratio in _ratios(p, q, draft):
        w.append(min(1.0, w[-1] * ratio))
    h = []
    for i in range(1, len(draft)):
        excess = float((w[i] * p[i] - q[i]).clamp_(min=0).sum())
        missing = excess + 1 - w[i]
        # 0 / 0 means p = q here: then p, the fallback of an empty residual, is right.
        h.append(excess / missing if missing > 0 else 1.0)
    return h + w[len(h) + 1 :], w


def residual(p: Tensor, q: Tensor, weight: float = 1.0) -> Tensor:
    """max(0, weight * p - q) [V], not normalised; p itself where that leaves nothing."""
    excess = (weight * p - q).clamp_(min=0)
    return excess if float(excess.sum()) > 0 else p


def dense_q(q: SparseQ, draft: Sequence[int], like: Tensor) -> Tensor:
    """[k, V] float64 distributions of k draft tokens, on the device of `like` [k + 1, V].

    Weights of repeated ids add up and rows are normalised. A row that gives its draft token no chance cannot be what
    it was drawn from; it is replaced by certainty of that token, which is exact however the token came about.

    Raises:
        ValueError: another number of rows than draft tokens, ids outside the vocabulary, or weights that are negative
            or not finite.
    """
    rows, columns = len(draft), like.shape[-1]
    if q.token_ids.shape != q.probabilities.shape or len(q.token_ids) != rows:
        shapes = f"{list(q.token_ids.shape)} ids and {list(q.probabilities.shape)} probabilities"
        raise ValueError(f"q must have one row per draft token ({rows}), as many ids as probabilities; it has {shapes}")
    if not rows:
        return torch.zeros(0, columns, dtype=torch.float64, device=like.device)
    ids, weights = q.token_ids, q.probabilities.double()
    if not bool((weights.isfinite() & (weights >= 0)).all()):
        raise ValueError("the probabilities of q must be finite and not negative")
    if min(draft) < 0 or max(draft) >= columns or bool(((ids < 0) | (ids >= columns)).any()):
        raise ValueError(f"token ids of the draft and of q must lie in [0, {columns})")
    drafted = torch.tensor(draft, dtype=torch.int64, device=ids.device).unsqueeze(-1)
    impossible = (weights * (ids == drafted)).sum(-1, keepdim=True) == 0
    ids = torch.cat((ids, drafted), 1)
    weights = torch.cat((weights.masked_fill(impossible, 0), impossible.double()), 1)
    weights = weights / weights.sum(-1, keepdim=True)
    dense = torch.zeros(rows, columns, dtype=torch.float64, device=like.device)
    return dense.scatter_add_(1, ids.to(like.device), weights.to(like.device))


def _ratios(p: Tensor, q: Tensor, draft: Sequence[int]) -> list[float]:
    at = torch.tensor(draft, dtype=torch.int64, device=p.device).unsqueeze(-1)
    k = len(draft)
    ratios: list[float] = (p[:k].gather(1, at) / q.gather(1, at)).squeeze(-1).tolist()
    return ratios
