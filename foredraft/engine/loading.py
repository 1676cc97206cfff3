"""Loading a causal language model and its tokenizer from a Transformers directory, a hub id or a GGUF file."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging as transformers_logging

from foredraft.engine.compatibility import check_config, check_model, check_parallel, embedding_rows
from foredraft.engine.errors import ModelError
from foredraft.engine.head import restrict
from foredraft.engine.identity import vocabulary_hash, weight_files, weights_hash

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
HUB_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"]
TOKENIZER_FILES = ["tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt"]


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to compute, and what identifies it.

    `weights_hash` covers configuration and weights, `vocabulary_hash` the `vocabulary`: token strings in order of id,
    "" where there is none. Token ids lie below `vocabulary_size`; the embedding may have more rows. `dtype` and
    `device` are named as in the protos. `context_length` is in tokens. A model may come without a `tokenizer`.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    weights_hash: str
    dtype: str
    device: str
    eos_token_ids: tuple[int, ...]
    vocabulary: tuple[str, ...]
    vocabulary_hash: str
    parameter_count: int
    context_length: int

    @property
    def vocabulary_size(self) -> int:
        """One more than the greatest token id."""
        return len(self.vocabulary)

    def tokenizer_files(self) -> dict[str, bytes]:
        """The tokenizer's files by name, chat template included, as Transformers saves them; maybe none."""
        if self.tokenizer is None:
            return {}
        with tempfile.TemporaryDirectory() as directory:
            self.tokenizer.save_pretrained(directory)
            return {path.name: path.read_bytes() for path in sorted(Path(directory).iterdir())}


def load(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    layers: int | None = None,
    progress: bool = False,
    tensor_parallel_size: int = 1,
) -> LoadedModel:
    """Loads the model called `name`: a directory, a hub id or a .gguf file, which is dequantised.

    `dtype` "auto" is bfloat16 on processors that compute it natively, else float32; on CUDA the checkpoint's own.
    `layers` keeps only the first layers, which makes a cheap draft. `progress` shows progress bars. With a
    `tensor_parallel_size` above 1 this rank gets its part; all that have joined must call. Code that comes with a model
    never runs, and of weight files only safetensors and GGUF are read. Raises ModelError.
    """
    place = _device(device)
    path, source = _resolve(name, progress)
    with _quiet(progress):
        config = _load_config(name, source)
        _keep_layers(config, layers)
        check_config(config)
        weights = _load_weights(
            name, source, config, _dtype(dtype, place, config, path), tensor_parallel_size=tensor_parallel_size
        )
        tokenizer = _load_tokenizer(name, path, source)
    check_model(weights)
    text_config = config.get_text_config(decoder=True)
    vocabulary = _vocabulary(tokenizer, embedding_rows(weights))
    restrict(weights, path, vocabulary_hash(vocabulary))
    torch.nn.Module.to(weights, place)
    return LoadedModel(
        model=weights,
        tokenizer=tokenizer,
        name=name,
        weights_hash=weights_hash(path, text_config.num_hidden_layers if layers else None),
        dtype=str(weights.dtype).removeprefix("torch."),
        device=place.type,
        eos_token_ids=_eos_token_ids(weights),
        vocabulary=vocabulary,
        vocabulary_hash=vocabulary_hash(vocabulary),
        parameter_count=sum(parameter.numel() for parameter in weights.parameters()),
        context_length=text_config.max_position_embeddings,
    )


def load_part(name: str, *, dtype: str, device: str, tensor_parallel_size: int) -> PreTrainedModel:
    """This rank's part of a model whose leader calls `load`, and nothing else. Raises ModelError."""
    path, source = _resolve(name, progress=False)
    with _quiet(progress=False):
        config = _load_config(name, source)
        chosen = _dtype(dtype, _device(device), config, path)
        return _load_weights(name, source, config, chosen, tensor_parallel_size=tensor_parallel_size)


def parallel_device(name: str, *, device: str, tensor_parallel_size: int) -> str:
    """Where the parts of a model will lie, "cpu" or "cuda"; raises ModelError, before anything is loaded."""
    kind = _device(device).type
    if kind == "cpu" and torch.cuda.is_available():
        raise ModelError(
            "Transformers splits models over the GPUs it sees; to use the CPU hide them: CUDA_VISIBLE_DEVICES="
        )
    if kind == "cuda" and torch.cuda.device_count() < tensor_parallel_size:
        raise ModelError(
            f"tensor_parallel_size is {tensor_parallel_size}; {torch.cuda.device_count()} CUDA devices are visible"
        )
    path, source = _resolve(name, progress=False)
    if path.is_file():
        raise ModelError(f"{name} is a GGUF file, which cannot be split over devices; give a Transformers directory")
    check_parallel(_load_config(name, source), tensor_parallel_size)
    return kind


def _device(device: str) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ModelError(f'there is no device "{device}"; use "auto", "cpu" or "cuda"') from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f'device "{device}" was asked for but no CUDA device is visible; use "auto" or "cpu"')
    return place


def _dtype(dtype: str, device: torch.device, config: PreTrainedConfig, path: Path) -> torch.dtype:
    if dtype != "auto":
        if dtype not in DTYPES:
            raise ModelError(f'there is no dtype "{dtype}"; use "auto", {", ".join(DTYPES)}')
        return DTYPES[dtype]
    if device.type == "cpu":
        return torch.bfloat16 if _computes_bfloat16() else torch.float32
    # Quantised files have no dtype of their own.
    return config.dtype if path.is_dir() and isinstance(config.dtype, torch.dtype) else torch.bfloat16


def _computes_bfloat16() -> bool:
    capabilities: Mapping[str, Any] = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "arm_bf16"))


def _resolve(name: str, progress: bool) -> tuple[Path, dict[str, Any]]:
    """The directory or GGUF file that `name` means, and how to call it in Transformers' from_pretrained."""
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{name} is a file but no .gguf; give the directory that holds config.json")
        return path, {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    if not path.is_dir():
        try:
            with _quiet(progress):
                path = Path(snapshot_download(name, allow_patterns=HUB_FILES))
        except (HFValidationError, OSError) as error:
            raise ModelError(
                f"{name} is no directory, no .gguf file and no hub model that can be reached: {error}"
            ) from error
    weight_files(path)
    return path, {"pretrained_model_name_or_path": str(path)}


def _load_config(name: str, source: dict[str, Any]) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(**source, trust_remote_code=False)
    except (ValueError, OSError, KeyError, ImportError) as error:
        raise ModelError(f"the configuration of {name} cannot be read: {error}") from error
    return config


def _keep_layers(config: PreTrainedConfig, layers: int | None) -> None:
    if layers is None:
        return
    text_config = config.get_text_config(decoder=True)
    total = text_config.num_hidden_layers
    if not 1 <= layers <= total:
        raise ModelError(f"layers is {layers}; the model has {total}, so it must lie in 1..{total}")
    text_config.num_hidden_layers = layers
    if getattr(text_config, "layer_types", None) is not None:
        text_config.layer_types = text_config.layer_types[:layers]


def _load_weights(
    name: str,
    source: dict[str, Any],
    config: PreTrainedConfig,
    dtype: torch.dtype,
    *,
    tensor_parallel_size: int,
) -> PreTrainedModel:
    parts: dict[str, Any] = {}
    if tensor_parallel_size > 1:
        parts["distributed_config"] = DistributedConfig(tp_plan="auto", tp_size=tensor_parallel_size)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            **source,
            **parts,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (ValueError, OSError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"the weights of {name} cannot be loaded: {error}") from error
    model: PreTrainedModel = loaded[0]
    missing: list[str] = sorted(loaded[1]["missing_keys"])
    if missing:
        raise ModelError(f"the weights of {name} lack {len(missing)} tensors, for example {missing[0]}")
    return model


def _load_tokenizer(name: str, path: Path, source: dict[str, Any]) -> PreTrainedTokenizerBase | None:
    if path.is_dir() and not any((path / file).exists() for file in TOKENIZER_FILES):
        return None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(**source, trust_remote_code=False)
    except (ValueError, OSError, KeyError, ImportError) as error:
        raise ModelError(f"the tokenizer of {name} cannot be loaded: {error}") from error
    return tokenizer


def _vocabulary(tokenizer: PreTrainedTokenizerBase | None, rows: int) -> tuple[str, ...]:
    if tokenizer is None:
        return ("",) * rows
    by_id = {index: token for token, index in tokenizer.get_vocab().items()}
    # A tokenizer may know tokens that the model has no embedding for; the model cannot read them.
    return tuple(by_id.get(index, "") for index in range(min(max(by_id) + 1, rows)))


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    found: set[int] = set()
    for config in (model.generation_config, model.config, model.config.get_text_config(decoder=True)):
        ids = getattr(config, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    return tuple(sorted(found))


@contextmanager
def _quiet(progress: bool) -> Iterator[None]:
    """Silences Transformers' loading report, and its progress bars unless asked for."""
    logging: Any = transformers_logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not progress:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
