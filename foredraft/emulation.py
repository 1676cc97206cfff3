"""What `emulate` says: how long forward passes take that are waits, and how often the draft guesses right.

`target=20ms+0.2ms/token,draft=2ms,accept=0.8`: a pass of the target takes 20 ms and 0.2 ms for each of its tokens, one
of the draft 2 ms, and 8 of 10 draft tokens are the target's. See `foredraft.engine.emulated` for the model behind it.
"""

import re
from dataclasses import dataclass

ACCEPT = 0.8
MAX_MS = 3_600_000
COST = re.compile(r"(?P<base>\d+(\.\d+)?)ms(\+(?P<per_token>\d+(\.\d+)?)ms/token)?")
EXAMPLE = "target=20ms+0.2ms/token,draft=2ms,accept=0.8"


@dataclass(frozen=True, slots=True)
class Cost:
    """What a forward pass takes, in seconds."""

    base_s: float
    per_token_s: float

    def seconds(self, tokens: int) -> float:
        """The time of a pass over this many tokens."""
        return self.base_s + self.per_token_s * tokens

    def __str__(self) -> str:
        per_token = f"+{1e3 * self.per_token_s:g}ms/token" if self.per_token_s else ""
        return f"{1e3 * self.base_s:g}ms{per_token}"


@dataclass(frozen=True, slots=True)
class Emulation:
    """The costs of both models, None for one that is not emulated, and the acceptance rate."""

    target: Cost | None = None
    draft: Cost | None = None
    accept: float = ACCEPT


def parse(text: str) -> Emulation:
    """What `text` says. Raises ValueError, with what would be right."""
    values: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals or name not in ("target", "draft", "accept"):
            raise ValueError(f"must be a list of target=, draft= and accept=, such as {EXAMPLE}; {part!r} is not one")
        if name in values:
            raise ValueError(f"must say {name} only once")
        values[name] = value
    if not values.keys() & {"target", "draft"}:
        raise ValueError(f"must say what a pass of target or draft takes, such as {EXAMPLE}")
    costs = {name: parse_cost(name, values[name]) for name in ("target", "draft") if name in values}
    return Emulation(**costs, accept=parse_rate(values.get("accept", str(ACCEPT))))


def parse_cost(name: str, text: str) -> Cost:
    """Milliseconds of a pass and, if it is given, of each token. Raises ValueError."""
    match = COST.fullmatch(text)
    if match is None:
        raise ValueError(f"{name} must be a time such as 2ms or 20ms+0.2ms/token, which {text!r} is not")
    base, per_token = float(match["base"]), float(match["per_token"] or 0)
    if max(base, per_token) > MAX_MS:
        raise ValueError(f"{name} must take at most {MAX_MS} ms, an hour, which {text!r} exceeds")
    return Cost(1e-3 * base, 1e-3 * per_token)


def parse_rate(text: str) -> float:
    """A number from 0 to 1. Raises ValueError."""
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not 0 <= rate <= 1:
        raise ValueError(f"accept must be a number from 0 to 1, which {text!r} is not")
    return rate
