"""A draft as it is stored: only what its target does not hold, and what is needed to make a model of both again."""

import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.distill.files import write_whole
from foredraft.distill.prune import prune
from foredraft.engine.errors import ModelError
from foredraft.engine.head import SIZE, write_token_ids
from foredraft.engine.loading import LoadedModel, load

WEIGHTS = "draft.safetensors"
DESCRIPTION = "draft.json"
HEAD_IDS = "head_token_ids"


@dataclass(frozen=True)
class Stored:
    """A draft's `weights` by name, its `head_ids` int32 [N] and which `layers` of the target it began as."""

    weights: Mapping[str, Tensor]
    head_ids: Tensor
    layers: tuple[int, ...]
    vocabulary_hash: str
    embeddings_hash: str

    def save(self, directory: Path) -> None:
        """Write the two files; weights as bfloat16."""
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in self.weights.items()}
        write_whole(directory / WEIGHTS, save({**tensors, HEAD_IDS: self.head_ids.int()}))
        description = {
            "layers": list(self.layers),
            "head_size": len(self.head_ids),
            "target": {"vocabulary_sha256": self.vocabulary_hash, "embeddings_sha256": self.embeddings_hash},
        }
        (directory / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> "Stored":
        """Read a stored draft. Raises ModelError if files are missing or damaged."""
        try:
            description: dict[str, Any] = json.loads((directory / DESCRIPTION).read_text(encoding="utf-8"))
            weights = load_file(directory / WEIGHTS)
            head_ids = weights.pop(HEAD_IDS)
            target = description["target"]
            layers = tuple(int(layer) for layer in description["layers"])
            return cls(weights, head_ids, layers, target["vocabulary_sha256"], target["embeddings_sha256"])
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise ModelError(
                f"{directory} holds no stored draft ({error!r}); it should have {DESCRIPTION} and {WEIGHTS} with "
                f"{HEAD_IDS}"
            ) from error

    def apply(self, target: LoadedModel) -> PreTrainedModel:
        """A model with the target's embeddings and these weights. Raises ModelError if they do not belong together."""
        if self.vocabulary_hash != target.vocabulary_hash:
            raise ModelError(f"the draft was made for another vocabulary than that of {target.name}")
        if self.embeddings_hash != embeddings_hash(target.model):
            raise ModelError(f"the draft was made for a target with other embeddings than {target.name}")
        draft = prune(target.model, self.layers)
        own = {name: value for name, value in draft.named_parameters() if value.requires_grad}
        if {name: value.shape for name, value in own.items()} != {n: v.shape for n, v in self.weights.items()}:
            raise ModelError(f"the draft's weights do not have the shapes that layers of {target.name} have")
        with torch.no_grad():
            for name, value in self.weights.items():
                own[name].copy_(value)
        draft.train(False)
        return draft


def stored(draft: PreTrainedModel, head_ids: Tensor, layers: tuple[int, ...], target: LoadedModel) -> Stored:
    """What is to be stored of a draft of this target."""
    weights = {name: value for name, value in draft.named_parameters() if value.requires_grad}
    return Stored(weights, head_ids, layers, target.vocabulary_hash, embeddings_hash(target.model))


def embeddings_hash(model: PreTrainedModel) -> str:
    """SHA-256, in hexadecimal, over the values of the input embeddings as float32."""
    embedding: Any = model.get_input_embeddings()
    values = embedding.weight.detach().float().cpu().contiguous()
    return hashlib.sha256(values.numpy().data).hexdigest()


def assemble(target: str | Path, draft: Path, output: Path) -> Path:
    """Make a Transformers directory of a target and a stored draft for it, and return it.

    The directory appears complete or not at all. `foredraft.engine.loading.load` gives the model its restricted head;
    Transformers alone gives it the target's whole head. Raises ModelError; FileExistsError if there is one already.
    """
    read = Stored.read(draft)
    loaded = load(str(target), dtype="float32", device="cpu")
    return write_model(read, loaded, output)


def write_model(read: Stored, target: LoadedModel, output: Path) -> Path:
    """`assemble` for a target that is loaded already."""
    if output.exists():
        raise FileExistsError(f"{output} exists already; remove it to assemble the draft again")
    model = read.apply(target)
    setattr(model.config, SIZE, len(read.head_ids))
    output.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        model.save_pretrained(work)
        for name, content in target.tokenizer_files().items():
            (work / name).write_bytes(content)
        write_token_ids(work, read.head_ids.tolist(), target.vocabulary_hash)
        # A temporary directory and safetensors' files are for their owner alone; a server may run as somebody else.
        for file in work.iterdir():
            file.chmod(0o644)
        work.chmod(0o755)
        work.rename(output)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return output


def assembled(target: Path, draft: Path, cache: Path) -> Path:
    """The directory below `cache` where `assemble` has put, or now puts, these two; another draft gets another one."""
    whole = hashlib.sha256(str(target.resolve()).encode())
    for name in (WEIGHTS, DESCRIPTION):
        with contextlib.suppress(OSError):  # What is missing is reported by assemble.
            whole.update((draft / name).read_bytes())
    output = cache / f"{draft.name}-draft-{whole.hexdigest()[:12]}"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(output.with_suffix(".lock")):
        return output if output.exists() else assemble(str(target), draft, output)
