"""What sampling costs on one thread, per row of scores, beside a forward pass of a model.

    python bench/noise.py [--model DIRECTORY]

Without a model, the forward pass is a stack of matrix products with as many parameters as a small draft model.
"""

import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from foredraft.sampling.coupled import INDIVIDUAL, draw
from foredraft.sampling.params import Method, SamplingParams
from foredraft.sampling.proposal import SparseQ, propose
from foredraft.sampling.verification import verify
from foredraft.sampling.warpers import warp

VOCABULARIES = (49_152, 151_936)
ROWS = 5
REPEATS = 30


def milliseconds(step: Callable[[int], object]) -> float:
    """Median time of a step, which gets the number of the repeat."""
    step(0)
    times = []
    for repeat in range(REPEATS):
        start = time.perf_counter()
        step(repeat)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1000


def model_forward(path: str) -> tuple[str, Callable[[int], object]]:
    """One token through the model in a Transformers directory."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path)
    token = torch.tensor([[0]])
    return f"one token through {path}", lambda _: model(token, use_cache=False)


def synthetic_forward(vocabulary: int, hidden: int = 576, layers: int = 30) -> tuple[str, Callable[[int], object]]:
    """One token through the matrices of a small model: four of attention, three of a gated MLP, and the head."""
    shapes = [(hidden, hidden)] * 4 + [(hidden, 3 * hidden)] * 2 + [(3 * hidden, hidden)]
    weights = [torch.randn(shape) / shape[0] ** 0.5 for _ in range(layers) for shape in shapes]
    head = torch.randn(hidden, vocabulary)
    x = torch.randn(1, hidden)

    def forward(_: int) -> Tensor:
        y = x
        for q, k, v, o, gate, up, down in zip(*[iter(weights)] * 7, strict=True):
            y = y + (y @ q + y @ k + y @ v) @ o
            y = torch.nn.functional.normalize(y + (y @ gate * (y @ up)) @ down)
        return y @ head

    parameters = sum(w.numel() for w in weights) + head.numel()
    return f"one token through matrices of {parameters / 1e6:.0f} M parameters", forward


def scores(vocabulary: int) -> Tensor:
    """Rows whose r-th most probable token has a probability in proportion to r ** -1.6, in random order."""
    tail = -1.6 * torch.arange(1, vocabulary + 1).float().log()
    return torch.stack([tail[torch.randperm(vocabulary)] for _ in range(ROWS)])


def sampling_steps(vocabulary: int) -> dict[str, Callable[[int], object]]:
    """Each handles ROWS rows, with another seed at each repeat."""
    logits = scores(vocabulary)
    draft = [int(row.argmax()) for row in logits[:-1]]

    def coupled(individual: int) -> Callable[[int], object]:
        return lambda seed: draw(
            logits, SamplingParams(seed=seed), sample_index=0, positions=range(ROWS), individual=individual
        )

    def warped(params: SamplingParams) -> Callable[[int], object]:
        return lambda _: warp(
            logits, params, text=range(1000), prompt_length=500, draft=draft, vocabulary_size=vocabulary
        )

    def verified(method: Method) -> Callable[[int], object]:
        params = SamplingParams(method=method)
        q = SparseQ.stack([propose(row, params, sample_index=0, base=0, position=0)[1:] for row in logits[:-1]])
        return lambda seed: verify(
            logits, draft, q, SamplingParams(method=method, seed=seed), sample_index=0, base=1000
        )

    return {
        "coupled draw, noise for the whole vocabulary": coupled(vocabulary),
        f"coupled draw, noise for the top {INDIVIDUAL} and a pool": coupled(INDIVIDUAL),
        "greedy draw": lambda _: draw(logits, SamplingParams(temperature=0), sample_index=0, positions=range(ROWS)),
        "rejection, k = 4": verified(Method.REJECTION),
        "block verification, k = 4": verified(Method.BLOCK),
        "warp: temperature": warped(SamplingParams(temperature=0.7)),
        "warp: temperature, top-k 50": warped(SamplingParams(temperature=0.7, top_k=50)),
        "warp: temperature, top-p 0.95": warped(SamplingParams(temperature=0.7, top_p=0.95)),
        "warp: temperature, min-p 0.05": warped(SamplingParams(temperature=0.7, min_p=0.05)),
        "warp: temperature, penalties": warped(SamplingParams(temperature=0.7, repetition_penalty=1.1)),
    }


@torch.inference_mode()
def main(model: Annotated[str | None, typer.Option(help="A Transformers directory.")] = None) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for vocabulary in VOCABULARIES:
        name, forward = model_forward(model) if model else synthetic_forward(vocabulary)
        forward_ms = milliseconds(forward)
        table = Table(title=f"Vocabulary of {vocabulary}", title_justify="left")
        table.add_column("Step")
        table.add_column("ms / row", justify="right")
        table.add_column("of a forward pass", justify="right")
        table.add_row(name, f"{forward_ms:.2f}", "100 %")
        for step_name, step in sampling_steps(vocabulary).items():
            row_ms = milliseconds(step) / ROWS
            table.add_row(step_name, f"{row_ms:.2f}", f"{row_ms / forward_ms:.1%}")
        Console().print(table)


if __name__ == "__main__":
    typer.run(main)
