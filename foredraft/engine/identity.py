"""Hashes that tell whether two servers run the same model and speak the same vocabulary."""

import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from foredraft.engine.errors import ModelError

CONFIG_FILES = ("config.json", "generation_config.json", "head_token_ids.json")
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"


def weight_files(directory: Path) -> list[Path]:
    """The weight files of a Transformers directory, in order of name. Raises ModelError if there are none."""
    if (directory / WEIGHTS).exists():
        return [directory / WEIGHTS]
    if not (directory / WEIGHTS_INDEX).exists():
        raise ModelError(f"{directory} has neither {WEIGHTS} nor {WEIGHTS_INDEX}; convert the weights to safetensors")
    shards: dict[str, str] = json.loads((directory / WEIGHTS_INDEX).read_text())["weight_map"]
    return [directory / shard for shard in sorted(set(shards.values()))]


def weights_hash(path: Path, layers: int | None) -> str:
    """SHA-256, in hexadecimal, over configuration and weights of a directory or GGUF file, wherever it lies.

    `layers` is the number kept if not all are: a model cut short is another model.
    """
    if path.is_file():
        named = [("", path)]
    else:
        configs = [path / name for name in CONFIG_FILES if (path / name).exists()]
        named = [(file.name, file) for file in (*configs, *weight_files(path))]
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(_file_hash, (file for _, file in named)))
    whole = hashlib.sha256()
    for (name, _), digest in zip(named, digests, strict=True):
        whole.update(f"{name} {digest}\n".encode())
    if layers is not None:
        whole.update(f"layers {layers}\n".encode())
    return whole.hexdigest()


def vocabulary_hash(vocabulary: Iterable[str]) -> str:
    """SHA-256, in hexadecimal, over the token strings in order of id."""
    return hashlib.sha256(json.dumps(list(vocabulary)).encode()).hexdigest()


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
