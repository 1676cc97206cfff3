"""Transformers' own assisted generation on the same two models."""

import time
from collections.abc import Sequence

import torch
from transformers import GenerationConfig

from foredraft.backends import Result
from foredraft.engine.loading import LoadedModel
from foredraft.sampling.params import SamplingParams


def generate(target: LoadedModel, draft: LoadedModel, prompt: Sequence[int], params: SamplingParams, k: int) -> Result:
    """Generate with `target.generate(assistant_model=draft)`, `k` draft tokens per round; k = 0 is plain decoding.

    Random numbers are Transformers' own, so the output equals the services' only at temperature 0. Raises ValueError
    for parameters that Transformers does not have or applies in another way.
    """
    _check(params)
    ids = torch.tensor([list(prompt)], device=target.model.device)
    sampled = params.temperature > 0
    eos = [] if params.ignore_eos else list(target.eos_token_ids)
    # What is None would come from the model's own defaults.
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=sampled,
        temperature=params.temperature if sampled else 1.0,
        top_k=params.top_k if sampled else 0,
        top_p=params.top_p if sampled else 1.0,
        min_p=params.min_p if sampled else 0.0,
        repetition_penalty=params.repetition_penalty,
        max_new_tokens=params.max_new_tokens,
        min_new_tokens=params.min_new_tokens,
        eos_token_id=[*eos, *params.stop_token_ids] or None,
        pad_token_id=0,
    )
    if k > 0:
        assistant = draft.model.generation_config
        assistant.num_assistant_tokens, assistant.num_assistant_tokens_schedule = k, "constant"
        assistant.assistant_confidence_threshold = 0.0
    torch.manual_seed(params.seed % 2**63)
    started = time.perf_counter()
    output = target.model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=config,
        assistant_model=draft.model if k > 0 else None,
    )
    return Result(output[0, len(prompt) :].tolist(), time.perf_counter() - started)


def _check(params: SamplingParams) -> None:
    refused = {
        "presence_penalty": params.presence_penalty != 0,
        "frequency_penalty": params.frequency_penalty != 0,
        "logit_bias": bool(params.logit_bias),
    }
    for name, given in refused.items():
        if given:
            raise ValueError(f"the hf backend has no {name}; leave it out or use the service backend")
