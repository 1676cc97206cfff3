"""What the target is asked to make training text: conversations from templates over topics, and a held-out set.

The built-in prompts are drawn at random, but the n-th of a seed is always the same: a resumed run goes on where it was.
Their words are in prompts.yaml. `HELD_OUT` are written by hand, from no template, and are never trained on.
"""

import random
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import yaml

Conversation = list[dict[str, str]]

_DATA = yaml.safe_load((files(__package__) / "prompts.yaml").read_text(encoding="utf-8"))
# In the order in which they are drawn; the second of a kind ends in 2.
_FIELDS = (
    *("topic", "topic2", "item", "thing", "job", "job2", "place", "city", "country", "name", "name2"),
    *("food", "food2", "day", "question", "language", "program"),
)
HELD_OUT: list[Conversation] = [[{"role": "user", "content": text}] for text in _DATA["held_out"]]


def built_in(seed: int) -> Iterator[Conversation]:
    """Single-turn conversations without end, all different."""
    rng = random.Random(seed)
    kinds = list(_DATA["kinds"].values())
    weights = [kind["weight"] for kind in kinds]
    seen = {conversation[-1]["content"] for conversation in HELD_OUT}
    while True:
        text = _fill(rng.choice(rng.choices(kinds, weights)[0]["templates"]), rng)
        if text not in seen:
            seen.add(text)
            yield [{"role": "user", "content": text}]


def from_file(path: Path) -> list[Conversation]:
    """One single-turn conversation per line that is not empty."""
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    return [[{"role": "user", "content": line}] for line in lines if line]


def follow_up(conversation: Conversation, reply: str, rng: random.Random) -> Conversation:
    """What may be asked after a reply: a second turn, or a new conversation about the reply's text."""
    if rng.random() < 0.5:
        answer = {"role": "assistant", "content": reply}
        return [*conversation, answer, {"role": "user", "content": rng.choice(_DATA["follow_ups"])}]
    return [{"role": "user", "content": rng.choice(_DATA["about_reply"]).format(text=reply)}]


def _fill(template: str, rng: random.Random) -> str:
    values = {field: rng.choice(_DATA["words"][field.removesuffix("2")]) for field in _FIELDS}
    c, d = rng.randint(2, 20), rng.randint(2, 12)
    values |= {"a": rng.randint(20, 500), "b": rng.randint(10, 300), "c": c, "d": d, "c2": c + d, "c3": c + 2 * d}
    sentences = {name: rng.choice(_DATA["sentences"]).format(**values) for name in ("sentence", "sentence2")}
    return template.format(**values, **sentences)
