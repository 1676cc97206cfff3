"""The speculation blocks of vLLM's and TensorRT-LLM's configuration, translated into foredraft's options."""

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any


class ConfigError(ValueError):
    """A setting that cannot be used; the message is for the user, one line per problem."""


# Keys of each block and our names for them. vLLM and TensorRT-LLM both call theirs speculative_config.
BLOCKS = {
    "speculative_config": {
        "model": "draft_model",
        "num_speculative_tokens": "max_draft_tokens",
        "method": "drafter",
        "prompt_lookup_max": "ngram_max",
        "prompt_lookup_min": "ngram_min",
        "max_model_len": "draft_max_model_len",
        "decoding_type": "drafter",
        "speculative_model": "draft_model",
        "speculative_model_dir": "draft_model",
        "max_draft_len": "max_draft_tokens",
        "max_matching_ngram_size": "ngram_max",
    },
    "speculative_decoding": {
        "enabled": "speculation_enabled",
        "draft_model": "draft_model",
        "max_draft_tokens": "max_draft_tokens",
        "target_accept_rate": "target_accept_rate",
    },
}
# Their names of methods (vLLM's method, TensorRT-LLM's decoding_type) in lower case, and our drafters.
DRAFTERS = {"draft_model": "model", "draft_target": "model", "drafttarget": "model", "ngram": "ngram"}


def suggest(name: str, known: Iterable[str], spell: Callable[[str], str] = str) -> str:
    """`; did you mean ...?` with the nearest known name, spelled by `spell`; empty if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {spell(near[0])}?" if near else ""


def translate(layer: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The options of one source with its blocks replaced by our options.

    Raises ConfigError for a key or method that has no counterpart, and for an option given twice with different values.
    """
    options = {name: value for name, value in layer.items() if name not in BLOCKS}
    for block, names in BLOCKS.items():
        for key, value in parse(layer.get(block), f"{source}: {block}").items():
            if key not in names:
                raise ConfigError(f"{source}: {block}.{key} has no counterpart in foredraft{suggest(key, names)}")
            option = names[key]
            ours = drafter(value, f"{source}: {block}.{key}") if option == "drafter" else value
            if option in options and str(options[option]) != str(ours):
                raise ConfigError(
                    f"{source}: {block}.{key} is {ours}, but {option}, which means the same, is {options[option]}; "
                    "give one of them"
                )
            options[option] = ours
    return options


def parse(block: Any, where: str) -> dict[str, Any]:
    """A block as a mapping: it may be JSON text, as on vLLM's command line, or missing."""
    if isinstance(block, str):
        try:
            block = json.loads(block)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{where} is not JSON: {error}") from None
    if block is None:
        return {}
    if not isinstance(block, dict):
        raise ConfigError(f'{where} must be a mapping, such as {{"model": "...", "num_speculative_tokens": 4}}')
    return block


def drafter(method: Any, where: str) -> str:
    """Our drafter for another server's speculation method."""
    ours = DRAFTERS.get(str(method).lower())
    if ours is None:
        raise ConfigError(
            f"{where} is {method}, which foredraft does not have: it drafts with a separate small model (draft_model) "
            "or by looking up n-grams in the text (ngram)"
        )
    return ours
