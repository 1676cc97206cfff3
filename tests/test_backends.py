"""The other two ways to speculate: what they share with the services, and what they refuse."""

from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare

from foredraft.backends import hf, manual
from foredraft.engine.loading import LoadedModel, load
from foredraft.sampling.params import Method, SamplingParams
from tests import tiny


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, LoadedModel]:
    """A tiny target whose own defaults ask for top-k, and a draft."""
    directory: Path = tmp_path_factory.mktemp("backends")
    paths = [tiny.save_model(directory / str(noise), dtype="float64", noise=noise) for noise in (0.0, 0.1)]
    (paths[0] / "generation_config.json").write_text('{"eos_token_id": 2, "do_sample": true, "top_k": 1, "top_p": 0.5}')
    target, draft = (load(str(path), dtype="float64", device="cpu") for path in paths)
    return target, draft


PROMPT = tiny.tokenizer()("Once upon a time")["input_ids"]


@pytest.mark.parametrize("k", [0, 3])
def test_greedy_is_the_same_in_both(models: tuple[LoadedModel, LoadedModel], k: int) -> None:
    params = SamplingParams(temperature=0, max_new_tokens=24, repetition_penalty=1.2)
    expected = hf.generate(*models, PROMPT, params, 0).token_ids
    assert hf.generate(*models, PROMPT, params, k).token_ids == expected
    result = manual.generate(*models, PROMPT, params, k)
    assert result.token_ids == expected
    assert (result.accepted or 0) <= (result.drafted or 0)


@pytest.mark.parametrize("method", Method)
def test_manual_output_ends_by_the_rules(models: tuple[LoadedModel, LoadedModel], method: Method) -> None:
    params = SamplingParams(seed=3, max_new_tokens=12, method=method, ignore_eos=True)
    assert len(manual.generate(*models, PROMPT, params, 4).token_ids) == 12
    full = manual.generate(*models, PROMPT, params, 4).token_ids
    stopped = SamplingParams(seed=3, max_new_tokens=12, method=method, ignore_eos=True, stop_token_ids=(full[5],))
    assert manual.generate(*models, PROMPT, stopped, 4).token_ids == full[: full.index(full[5]) + 1]


def test_hf_samples_the_requests_distribution_and_not_the_models_defaults(
    models: tuple[LoadedModel, LoadedModel],
) -> None:
    target, _ = models
    with torch.inference_mode():
        p = target.model(torch.tensor([PROMPT])).logits[0, -1, :320].softmax(0)
    top = p.topk(4).indices.tolist()
    draws = [
        hf.generate(*models, PROMPT, SamplingParams(seed=seed, max_new_tokens=1, top_k=4), 0).token_ids[0]
        for seed in range(400)
    ]
    expected = (p[top] / p[top].sum() * len(draws)).tolist()
    assert chisquare([draws.count(token) for token in top], expected).pvalue > 1e-4


def test_hf_refuses_what_it_does_not_have(models: tuple[LoadedModel, LoadedModel]) -> None:
    with pytest.raises(ValueError, match="presence_penalty"):
        hf.generate(*models, PROMPT, SamplingParams(presence_penalty=1), 0)
