"""Which drafter fits which text: n-grams, a model, or n-grams where they have a match and else the model.

Replays what the target itself writes on chat, summarising and code-editing prompts, by coupled sampling, and counts the
tokens of a round. Usage: python bench/drafters.py --target DIR --draft DIR [--temperature 0] [--k 4]
(`--draft` is the `draft` directory of `foredraft distill`, or one in drafts/).
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from draft_service.ngram import NgramIndex
from foredraft.distill import report
from foredraft.distill.generate import Text, Writer
from foredraft.distill.prompts import HELD_OUT, Conversation
from foredraft.distill.prune import head_weight
from foredraft.distill.stored import Stored
from foredraft.engine.loading import LoadedModel, load

PASSAGES = (
    "The ferry to the island runs twice a day in winter and every hour in summer. Tickets cost four euros, "
    "bicycles go free. In strong wind the ferry stays in the harbour, and passengers are told by a flag on the "
    "mast.",
    "Honey does not spoil because it holds very little water and is slightly acid. Bees fan the nectar with their "
    "wings until most of the water is gone, and then close the cell with wax. Jars found in old tombs could still "
    "be eaten.",
    "The town voted on Tuesday to turn the old mill into a library. The work will cost two million dollars and "
    "take three years. Some neighbours fear the traffic, but the mayor promised a new bus line and forty parking "
    "places.",
    "Maria planted forty tomato seeds in March. Ten never came up, and snails ate eight more. In August she had "
    "so many tomatoes from the other plants that she gave them to her neighbours, who made soup and sauce of "
    "them.",
    "Trains lean into curves so that passengers feel less force from the side. Sensors measure the curve, and "
    "pistons under the car body tilt it by up to eight degrees. The train can then drive through old curves at a "
    "higher speed.",
)
SUMMARISE = (
    "Summarize this text: {}",
    "Rewrite this text in the past tense: {}",
    "Repeat the text, then name its topic: {}",
)
SNIPPETS = (
    "def mean(xs):\n    total = 0\n    for x in xs:\n        total += x\n    return total / len(xs)",
    "def find(items, wanted):\n    for i, item in enumerate(items):\n        if item == wanted:\n            return i",
    "class Stack:\n    def __init__(self):\n        self.xs = []\n\n    def push(self, x):\n        self.xs += [x]",
    "function greet(name) {\n  if (name === '') {\n    return 'Hello!';\n  }\n  return 'Hello, ' + name + '!';\n}",
    "with open('data.txt') as f:\n    for line in f.readlines():\n        print(line.strip().upper())",
)
EDITS = (
    "Add comments to this code:\n{}",
    "Rename the first function or class to run:\n{}",
    "Repeat this code with types:\n{}",
)


def chats(templates: Sequence[str], texts: Sequence[str]) -> list[Conversation]:
    """A conversation for every template and text."""
    return [[{"role": "user", "content": template.format(text)}] for text in texts for template in templates]


KINDS = {"chat": HELD_OUT[:20], "summarise": chats(SUMMARISE, PASSAGES), "edit code": chats(EDITS, SNIPPETS)}
# How many tokens of a draft of `k` are accepted at `base` of a reply; None if the drafter has nothing to say there.
Run = Callable[[int, int], int | None]


def tokens_per_round(length: int, run: Run, k: int) -> tuple[int, int]:
    """Tokens and rounds of decoding a reply of `length` tokens after the first one."""
    base, count = 1, 0
    while base < length:
        base += (run(base, min(k, length - base - 1)) or 0) + 1
        count += 1
    return length - 1, count


def ngram_run(text: Text, reply: int, shortest: int) -> Run:
    """What n-grams draft in a reply."""
    start, end = int(text.prompt_lengths[reply]), int(text.lengths[reply])
    tokens = text.tokens[reply, :end].tolist()
    index, drafts = NgramIndex(shortest, 3), []
    index.extend(tokens[:start])
    for token in tokens[start:]:
        drafts.append(index.continuation(8))
        index.extend([token])

    def run(base: int, k: int) -> int | None:
        draft, truth = drafts[base][:k], tokens[start + base :]
        accepted = next((i for i, (a, b) in enumerate(zip(draft, truth, strict=False)) if a != b), len(draft))
        return accepted if draft else None

    return run


def model_run(matched: Sequence[bool]) -> Run:
    """What the model drafts in a reply."""
    return lambda base, k: next((i for i in range(k) if not matched[base + i]), k)


def first(run: Run, otherwise: Run) -> Run:
    """`run` where it drafts at all."""

    def combined(base: int, k: int) -> int | None:
        found = run(base, k)
        return otherwise(base, k) if found is None else found

    return combined


def compare(target: LoadedModel, stored: Stored, directory: Path, temperature: float, k: int) -> Table:
    """Tokens per round by kind of prompt and drafter."""
    table = Table("", "n-gram", "model", "n-gram of 1-3, else model", "of 2-3", "of 3", title=f"T={temperature}, k={k}")
    writer = Writer(target, directory, rows=64, max_new_tokens=128)
    texts = {kind: writer.held_out(prompts, temperature, kind.replace(" ", "-")) for kind, prompts in KINDS.items()}
    draft, ids = stored.apply(target), stored.head_ids.long()
    head = head_weight(draft).detach()[ids]
    for kind, text in texts.items():
        matched = report.matches(draft, head, ids, text, target.vocabulary_size)
        sums = torch.zeros(5, 2)
        for i, row in enumerate(matched):
            model = model_run(row)
            combined = [first(ngram_run(text, i, shortest), model) for shortest in (1, 2, 3)]
            runs = [ngram_run(text, i, 1), model, *combined]
            sums += torch.tensor([tokens_per_round(len(row), run, k) for run in runs])
        table.add_row(kind, *(f"{tokens / rounds:.2f}" for tokens, rounds in sums.tolist()))
    return table


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--k", type=int, default=4)
    arguments = parser.parse_args()
    target, stored = load(arguments.target, dtype="float32"), Stored.read(arguments.draft)
    with tempfile.TemporaryDirectory() as directory:
        Console().print(compare(target, stored, Path(directory), arguments.temperature, arguments.k))


if __name__ == "__main__":
    main()
