"""Whether speculation pays on this machine, for `foredraft up --measure`.

On a CPU the draft takes cores that the target could have, so plain decoding is measured twice: with the target's cores,
and with all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from foredraft.cli.demo import tokens_per_second
from foredraft.cli.up import OnStack, Stack, available_cores
from foredraft.config import build
from foredraft.settings import Mode, OrchestratorSettings

if TYPE_CHECKING:
    from orchestrator.client import AsyncClient

# With more, a draft leaves the target most of them.
FEW_CORES = 4
PROMPTS = (
    "Why do leaves change their color in autumn?",
    "Write a short letter to a neighbor whose dog barks at night.",
    "List five things to check before buying a used bicycle.",
)
TOKENS = 64
# One is open at a time, and another one may be closing.
SESSIONS = 2
# Ends of options about how others reach the services, which nobody does meanwhile.
PUBLIC = ("listen", "auth_tokens", "otlp_endpoint", "max_new_tokens_limit")


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens per second for each prompt; `all_cores` is empty where the target has all `cores` anyway."""

    threads: int
    cores: int
    plain: Sequence[float]
    speculative: Sequence[float]
    all_cores: Sequence[float] = ()


def hint(options: Mapping[str, Any]) -> str | None:
    """What to tell whoever starts services with a draft model on a machine with few cores."""
    cores, settings = len(available_cores()), build(OrchestratorSettings, options)
    if cores > FEW_CORES or not options.get("draft_model") or not settings.speculation_enabled:
        return None
    if "cuda" in (options.get("device"), options.get("draft_device")):
        return None
    return f"whether speculation pays on {cores} CPU cores depends; up --measure measures it first"


async def measure(options: Mapping[str, Any], *, pin: bool, on_stack: OnStack) -> Speeds:
    """Answer some prompts with services of its own that have these options, and again plainly with all cores.

    `on_stack` gets them before they start.

    Raises ChildError and GenerationError, and ConfigError for options that do not fit together.
    """
    kept = {name: value for name, value in options.items() if not name.startswith("tls_") and not name.endswith(PUBLIC)}
    private = {**kept, "listen": "127.0.0.1:0", "max_sessions": SESSIONS, "draft_max_sessions": SESSIONS}
    cores = len(available_cores())
    stack = Stack(private, pin=pin)
    on_stack(stack)
    async with stack:
        plain, speculative = await speeds(stack.address, ("plain", "overlapped"))
    all_cores: Sequence[float] = ()
    if stack.threads < cores:
        whole = Stack({**private, "threads": cores, "speculation_enabled": False})
        on_stack(whole)
        async with whole:
            (all_cores,) = await speeds(whole.address, ("plain",))
    return Speeds(stack.threads, cores, plain, speculative, all_cores)


async def speeds(address: str, modes: Sequence[Mode]) -> list[list[float]]:
    """Tokens per second of each mode for each prompt; the modes take turns, after one text of each to warm up."""
    from orchestrator.client import AsyncClient

    measured: list[list[float]] = [[] for _ in modes]
    async with AsyncClient(address) as client:
        for number, prompt in enumerate((PROMPTS[0], *PROMPTS)):
            tokens = await tokenized(client, prompt)
            for mode, own in zip(modes, measured, strict=True):
                result = await client.generate(
                    tokens, mode=mode, temperature=0.7, seed=number, max_new_tokens=TOKENS, ignore_eos=True
                )
                if number > 0:
                    own.append(tokens_per_second(result.completions[0]))
    return measured


async def tokenized(client: "AsyncClient", prompt: str) -> list[int]:
    """The prompt as a chat model reads it, if it is one."""
    from orchestrator.client import GenerationError

    try:
        return (await client.tokenize(messages=[{"role": "user", "content": prompt}])).token_ids
    except GenerationError:
        return (await client.tokenize(prompt)).token_ids


def advice(measured: Speeds) -> str:
    """What was measured, and what to do about it."""
    same = f"the same {measured.threads} CPU thread{'s' if measured.threads > 1 else ''}"
    text = f"speculation gives {ratio(measured.speculative, measured.plain)} over plain decoding with {same}"
    speculation = mean(measured.speculative, measured.plain)
    whole = mean(measured.all_cores, measured.plain) if measured.all_cores else 0.0
    if measured.all_cores:
        text += f", plain decoding with all {measured.cores} gives {ratio(measured.all_cores, measured.plain)}"
    if whole > max(speculation, 1.0):
        return f"{text}: faster without: --threads {measured.cores} --no-speculation-enabled"
    if speculation < 1:
        return f"{text}: faster without: --no-speculation-enabled"
    return f"{text}: it pays"


def ratio(own: Sequence[float], other: Sequence[float]) -> str:
    """The mean ratio and those of the single prompts, between which it lies."""
    ratios = [a / b for a, b in zip(own, other, strict=True)]
    return f"{mean(own, other):.2f}x ({min(ratios):.2f} to {max(ratios):.2f} over {len(ratios)} texts)"


def mean(own: Sequence[float], other: Sequence[float]) -> float:
    """The geometric mean of the ratios."""
    return float(prod(a / b for a, b in zip(own, other, strict=True)) ** (1 / len(own)))
