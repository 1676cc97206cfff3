"""Checks proto messages and converts them. Every check raises one INVALID_ARGUMENT that names every bad field.

Pure functions of their arguments, without torch. Descriptions read "is ...; must be ...".
"""

from foredraft.validation.enums import (
    DRAFTER_VALUES,
    DRAFTERS,
    METHOD_VALUES,
    METHODS,
    MODE_VALUES,
    MODES,
)
from foredraft.validation.generation import (
    GenerationLimits,
    check_detokenize,
    check_generate,
    check_prompt_length,
    check_tokenize,
)
from foredraft.validation.pages import vocabulary_page
from foredraft.validation.sampling import sampling_params, sampling_proto
from foredraft.validation.sessions import (
    DecodedQ,
    check_commit,
    check_open_draft,
    check_open_target,
    check_round,
    check_verifying,
)

__all__ = [
    "DRAFTERS",
    "DRAFTER_VALUES",
    "METHODS",
    "METHOD_VALUES",
    "MODES",
    "MODE_VALUES",
    "DecodedQ",
    "GenerationLimits",
    "check_commit",
    "check_detokenize",
    "check_generate",
    "check_open_draft",
    "check_open_target",
    "check_prompt_length",
    "check_round",
    "check_tokenize",
    "check_verifying",
    "sampling_params",
    "sampling_proto",
    "vocabulary_page",
]
