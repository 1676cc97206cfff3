"""Speculative decoding as in the papers, in one function: no cache, no overlap, nothing but the algorithm."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.backends import Result
from foredraft.engine.loading import LoadedModel
from foredraft.sampling.coupled import draw
from foredraft.sampling.params import Method, SamplingParams
from foredraft.sampling.proposal import SparseQ, propose
from foredraft.sampling.verification import verify
from foredraft.sampling.warpers import warp


@torch.inference_mode()
def generate(
    target: LoadedModel,
    draft: LoadedModel,
    prompt: Sequence[int],
    params: SamplingParams,
    k: int,
    *,
    sample_index: int = 0,
) -> Result:
    """Generate with the target, verifying up to `k` draft tokens per round; k = 0 is plain decoding.

    Under coupled sampling the output is what the services generate from the same seed.
    """
    started = time.perf_counter()
    text, drafted, accepted = list(prompt), 0, 0
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(target.eos_token_ids))
    end = min(len(prompt) + params.max_new_tokens, target.context_length)

    def scores(model: LoadedModel, draft_tokens: list[int]) -> Tensor:
        """[len(draft_tokens) + 1, V]: what follows the text and each of the draft tokens."""
        rows = torch.tensor([text + draft_tokens], device=model.model.device)
        logits = model.model(input_ids=rows, use_cache=False).logits[0, len(text) - 1 :]
        eos, size = target.eos_token_ids, target.vocabulary_size
        return warp(
            logits,
            params,
            text=text,
            prompt_length=len(prompt),
            draft=draft_tokens,
            eos_token_ids=eos,
            vocabulary_size=size,
        )

    while True:
        tokens: list[int] = []
        q_rows: list[tuple[Tensor, Tensor]] = []
        for position in range(len(text), min(len(text) + k, end - 1)):
            row = scores(draft, tokens)[-1:]
            if params.method is Method.COUPLED or params.temperature == 0:
                [token] = draw(row, params, sample_index=sample_index, positions=[position])
            else:
                token, ids, probs = propose(
                    row[0], params, sample_index=sample_index, base=len(text), position=position
                )
                q_rows.append((ids, probs))
            tokens.append(token)
        q = SparseQ.stack(q_rows) if q_rows else None
        verdict = verify(scores(target, tokens), tokens, q, params, sample_index=sample_index, base=len(text))
        emitted = [*tokens[: verdict.accepted], verdict.next_token]
        drafted += len(tokens)
        accepted += verdict.accepted
        for token in emitted:
            text.append(token)
            if token in stops or len(text) == end:
                return Result(text[len(prompt) :], time.perf_counter() - started, drafted, accepted)
