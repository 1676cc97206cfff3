"""The sampling parameters of one request, resolved: no field is left to a default of somebody else's."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class Method(enum.Enum):
    """How draft tokens are verified; see the proto's Method."""

    COUPLED = "coupled"
    REJECTION = "rejection"
    BLOCK = "block"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What decides which tokens come out. Ranges are checked by `foredraft.validation`, not here.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off; `seed` is an unsigned 64-bit integer;
    `max_new_tokens` counts output tokens; `min_new_tokens` masks end-of-sequence and stop tokens until then.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    method: Method = Method.COUPLED
    q_support: int = 64
    max_new_tokens: int = 1
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
