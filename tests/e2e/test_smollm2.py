"""The same promise with a real model in float32, where passes of different shapes differ in their last bits."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from foredraft.default_model import DefaultModelError, ensure
from foredraft.sampling.noise import gumbel
from foredraft.sampling.params import SamplingParams
from foredraft.sampling.warpers import warp
from orchestrator.client import Client
from tests.e2e import processes
from tests.e2e.processes import Server

PROMPTS = ["The capital of France is", "def is_prime(n):", "Once upon a time, in a small village,"]
# Two tokens whose scores differ by less than this may change places.
TIE = 1e-4
NOISE = 0.03
DRAFTS = ("itself", "noisy")


@pytest.fixture(scope="module")
def model() -> Path:
    """The default target, fetched on first use."""
    try:
        return ensure()
    except DefaultModelError as error:
        pytest.skip(f"the default model cannot be had: {error}")


@pytest.fixture(scope="module")
def orchestrators(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """The model as target, and as drafts itself and a copy with noise on its weights."""
    directory = tmp_path_factory.mktemp("smollm2")
    noisy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in noisy.parameters():
            parameter += NOISE * parameter.std() * torch.randn(parameter.shape, generator=generator)
    noisy.save_pretrained(directory / "noisy")
    for file in model.glob("token*"):
        (directory / "noisy" / file.name).write_bytes(file.read_bytes())
    small = {"max_model_len": 256, "max_sessions": 2}
    target = processes.target(directory / "target.log", model=model, dtype="float32", **small)
    servers, result = [target], {}
    for name, path in zip(DRAFTS, (model, directory / "noisy"), strict=True):
        options = {"draft_model": path, "draft_dtype": "float32", "branches": 2, "draft_max_sessions": 2}
        draft = processes.draft(directory / f"draft-{name}.log", draft_max_model_len=256, **options)
        result[name] = processes.orchestrator(
            directory / f"orchestrator-{name}.log", target, draft, max_draft_tokens=3, draft_timeout_s=60
        )
        servers += [draft, result[name]]
    try:
        for server in servers:
            server.wait_ready()
        yield result
    finally:
        for server in servers:
            server.process.kill()
            server.process.wait(10)


def gap(model: Path, prompt: list[int], output: list[int], request: dict[str, Any]) -> float:
    """By how much the best score of the token after prompt and output exceeds the second best."""
    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    params = SamplingParams(temperature=request["temperature"], seed=request["seed"], max_new_tokens=100)
    text = [*prompt, *output]
    with torch.inference_mode():
        logits = target(torch.tensor([text])).logits[0, -1:]
    size = logits.shape[1]
    scores = warp(logits, params, text=text, prompt_length=len(prompt), vocabulary_size=size)[0].double().log_softmax(0)
    if params.temperature > 0:
        scores = scores + gumbel(params.seed, 0, len(text), torch.arange(size))
    best, second = scores.topk(2).values.tolist()
    return best - second


@pytest.mark.parametrize("draft", DRAFTS)
def test_modes_agree_but_for_ties_of_rounding(model: Path, orchestrators: dict[str, Server], draft: str) -> None:
    rng = random.Random(draft)
    accepted = drafted = 0
    with Client(orchestrators[draft].address) as client:
        for number in range(6):
            prompt = client.tokenize(PROMPTS[number % len(PROMPTS)]).token_ids
            request = {"temperature": [0, 0.7, 1.0][number // 2], "seed": rng.getrandbits(64), "max_new_tokens": 12}
            plain = client.generate(prompt, mode="plain", **request).completions[0].token_ids
            for mode in ("sequential", "overlapped"):
                completion = client.generate(prompt, mode=mode, draft_tokens=3, **request).completions[0]
                assert not completion.statistics.degraded_reason
                accepted += completion.statistics.accepted
                drafted += completion.statistics.drafted
                if completion.token_ids != plain:
                    pairs = zip(plain, completion.token_ids, strict=False)
                    first = next(i for i, (a, b) in enumerate(pairs) if a != b)
                    assert gap(model, prompt, plain[:first], request) < TIE, (mode, request)
    assert accepted / drafted > {"itself": 0.9, "noisy": 0.1}[draft]
