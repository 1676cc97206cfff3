"""How near decoding comes to the limit that memory bandwidth sets: the engine alone, with random weights.

    python -m bench.gpu [--json OUT]     # a GPU with 24 GB or more; under six minutes, nothing is downloaded
    python -m bench.gpu --tiny           # the same on tiny shapes, on any machine, to see that it runs

A target shaped like Qwen2.5-7B and a draft shaped like Qwen2.5-0.5B are made on the device. A decode step has to read
all weights once and the keys and values of its sessions; how long that takes at the speed of a copy is the limit.
"""

import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from foredraft.engine import Engine, Node, Row, Slot
from foredraft.sampling.params import SamplingParams
from foredraft.sampling.verification import verify
from foredraft.sampling.warpers import warp

VERIFIED = 5
"""Tokens of a verification: the last final one and four draft tokens."""
BRANCHES = 6
"""Tree nodes of a pass in which the draft prepares answers."""
BUDGET_S = 300.0
"""After so long nothing more is begun."""


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    target: Qwen2Config
    draft: Qwen2Config
    batches: Sequence[int]
    prompt: int
    steps: int
    copied_bytes: int


def qwen2(hidden: int, inner: int, layers: int, heads: int, key_heads: int, vocabulary: int, tied: bool) -> Qwen2Config:
    """The shape of a Qwen2 model."""
    return Qwen2Config(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=32768,
    )


FULL = Plan(
    target=qwen2(3584, 18944, 28, 28, 4, 152064, tied=False),
    draft=qwen2(896, 4864, 24, 14, 2, 151936, tied=True),
    batches=(1, 8, 32),
    prompt=512,
    steps=60,
    copied_bytes=2**31,
)
TINY = Plan(
    target=qwen2(64, 128, 2, 4, 2, 320, tied=False),
    draft=qwen2(32, 64, 2, 4, 2, 320, tied=True),
    batches=(1, 2),
    prompt=40,
    steps=5,
    copied_bytes=2**24,
)


def random_model(config: Qwen2Config, device: torch.device) -> PreTrainedModel:
    """A model with random weights, made on the device."""
    torch.manual_seed(0)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32
        )
    return model.requires_grad_(False)


def median_seconds(step: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Median time of `step`, after it has run a few times."""
    for _ in range(3):
        step()
    times = []
    for _ in range(repeats):
        wait(device)
        started = time.perf_counter()
        step()
        wait(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_bandwidth(size: int, device: torch.device) -> float:
    """Bytes read and written per second in a large copy."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / median_seconds(lambda: target.copy_(source), 10, device)


def weight_bytes(model: PreTrainedModel) -> int:
    """What a step reads of the weights: all, but of an embedding that is not the head, too, only a few rows."""
    total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    embedding = model.get_input_embeddings().weight
    tied = model.config.tie_word_embeddings
    return total if tied else total - embedding.numel() * embedding.element_size()


def key_value_bytes(model: PreTrainedModel) -> int:
    """What a step reads for each token of text that it sees."""
    config = model.config
    size = config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * size * model.dtype.itemsize)


class Decoding:
    """`batch` sessions of one engine with texts of about `plan.prompt` tokens."""

    def __init__(self, model: PreTrainedModel, plan: Plan, batch: int) -> None:
        self.device, self.plan = model.device, plan
        self.engine = Engine(model, max_model_len=2 * plan.prompt, max_sessions=batch, tree_size=BRANCHES)
        self.slots: list[Slot] = []
        for index in range(batch):
            text = [(7919 * i + 31 * index) % self.engine.vocabulary_rows for i in range(plan.prompt)]
            slot = self.engine.open(text)
            self.engine.forward([Row(slot, text[len(slot.tokens) :])])
            self.slots.append(slot)

    def step(self, tokens: int) -> list[Tensor]:
        """A pass over `tokens` new tokens of every session, whose greedy draws are read; the text stays as it was."""
        rows = [Row(slot, range(tokens), range(tokens)) for slot in self.slots]
        logits = self.engine.forward(rows)
        torch.cat(logits).argmax(-1).tolist()
        for slot in self.slots:
            self.engine.rollback(slot, self.plan.prompt)
        return logits

    def prepare(self) -> None:
        """A pass over a tree of the first session, as the draft makes them."""
        slot = self.slots[0]
        nodes = [Node(self.plan.prompt) for _ in range(BRANCHES)]
        (logits,) = self.engine.forward([Row(slot, range(BRANCHES), range(BRANCHES), nodes)])
        logits.argmax(-1).tolist()
        self.engine.drop_tree(slot)

    def seconds(self, step: Callable[[], object]) -> float:
        """Median time of a step."""
        return median_seconds(step, self.plan.steps, self.device)


def measure_decoding(decoding: Decoding, bandwidth: float) -> dict[str, Any]:
    """Plain steps and verifications of one batch against the limit."""
    model, batch = decoding.engine.model, len(decoding.slots)
    plain, verified = (decoding.seconds(lambda n=n: decoding.step(n)) for n in (1, VERIFIED))
    needed = weight_bytes(model) + batch * decoding.plan.prompt * key_value_bytes(model)
    passes = decoding.engine.runner.static_passes
    return {
        "batch": batch,
        "plain_ms": plain * 1e3,
        "verify_ms": verified * 1e3,
        "verify_to_plain": verified / plain,
        "tokens_per_s": batch / plain,
        "limit_ms": needed / bandwidth * 1e3,
        "fraction_of_limit": needed / bandwidth / plain,
        "cuda_graphs": passes is not None,
    }


def measure_sampling(logits: Tensor, plan: Plan, device: torch.device) -> dict[str, float]:
    """Milliseconds to verify a round of one session, [VERIFIED, V] raw logits, as the target service does."""
    draft = logits[:-1].argmax(-1).tolist()
    text = range(plan.prompt)

    def sample(temperature: float) -> None:
        params = SamplingParams(temperature=temperature)
        warped = warp(logits, params, text=text, prompt_length=8, draft=draft, vocabulary_size=logits.shape[1])
        verify(warped, draft, None, params, sample_index=0, base=plan.prompt)

    return {
        f"temperature {temperature:g}": median_seconds(lambda t=temperature: sample(t), plan.steps, device) * 1e3
        for temperature in (0.0, 0.7)
    }


@torch.inference_mode()
def measure(plan: Plan, device: torch.device, say: Callable[[str], None]) -> dict[str, Any]:
    """Everything, as it goes into the JSON."""
    started = time.perf_counter()
    bandwidth = copy_bandwidth(plan.copied_bytes, device)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "copy_gb_per_s": bandwidth / 1e9,
        "prompt_tokens": plan.prompt,
        "verified_tokens": VERIFIED,
        "skipped": [],
    }
    for name, config in (("target", plan.target), ("draft", plan.draft)):
        model = random_model(config, device)
        result[name] = {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "weight_bytes": weight_bytes(model),
            "decoding": [],
        }
        for batch in plan.batches:
            if time.perf_counter() - started > BUDGET_S:
                result["skipped"].append(f"{name}, batch {batch}")
                continue
            say(f"{name}, batch {batch}")
            decoding = Decoding(model, plan, batch)
            result[name]["decoding"].append(measure_decoding(decoding, bandwidth))
            if batch == plan.batches[0]:
                result[name]["tree_ms"] = decoding.seconds(decoding.prepare) * 1e3
                result[name]["sampling_ms"] = measure_sampling(decoding.step(VERIFIED)[0].clone(), plan, device)
                decoding.engine.runner.static_passes = None
                result[name]["plain_ms_without_graphs"] = decoding.seconds(lambda d=decoding: d.step(1)) * 1e3
            del decoding
            gc.collect()
        del model
        gc.collect()
    result["seconds"] = time.perf_counter() - started
    return result


def tables(result: dict[str, Any]) -> list[Table]:
    """What is printed."""
    found = []
    for name in ("target", "draft"):
        part = result[name]
        title = f"{name}, {part['parameters'] / 1e9:.2f} B parameters, {result['prompt_tokens']} tokens of text"
        table = Table("batch", title=title, title_justify="left")
        for column in ("tokens/s", "plain ms", "limit ms", "of the limit", f"verify({VERIFIED}) ms", "verify/plain"):
            table.add_column(column, justify="right")
        for one in part["decoding"]:
            table.add_row(
                str(one["batch"]),
                f"{one['tokens_per_s']:.0f}",
                f"{one['plain_ms']:.2f}",
                f"{one['limit_ms']:.2f}",
                f"{one['fraction_of_limit']:.0%}",
                f"{one['verify_ms']:.2f}",
                f"{one['verify_to_plain']:.2f}",
            )
        sampling = ", ".join(f"{ms:.2f} ms at {at}" for at, ms in part["sampling_ms"].items())
        table.caption = (
            f"batch 1: without CUDA graphs {part['plain_ms_without_graphs']:.2f} ms; a tree of {BRANCHES} nodes "
            f"{part['tree_ms']:.2f} ms; sampling a round of {VERIFIED} {sampling}"
        )
        found.append(table)
    return found


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Where to write all figures.")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Tiny shapes on the CPU.")] = False,
) -> None:
    """Measure decoding against the memory-bandwidth limit."""
    console = Console()
    if not tiny and not torch.cuda.is_available():
        console.print("error: no CUDA device is visible; --tiny runs the same on the CPU")
        raise typer.Exit(1)
    device = torch.device("cpu" if tiny else "cuda")
    result = measure(TINY if tiny else FULL, device, lambda what: console.print(f"[dim]{what}"))
    console.print(f"{result['device']}: copies {result['copy_gb_per_s']:.0f} GB/s; took {result['seconds']:.0f} s")
    for table in tables(result):
        console.print(table)
    if result["skipped"]:
        console.print(f"left out for lack of time: {'; '.join(result['skipped'])}")
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
