"""A head for frequent tokens only (FR-Spec, Zhao et al. 2025, arXiv 2502.14856): cheaper drafts, never other results.

A draft's directory states `restricted_head_size` in its config.json and holds the token ids in a file of its own.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from foredraft.engine.errors import ModelError

SIZE = "restricted_head_size"
FILE = "head_token_ids.json"


class RestrictedHead(nn.Module):
    """Computes the logits of `token_ids` [N] alone; `weight` [N, H] are their rows of a head that has `rows`."""

    def __init__(self, weight: Tensor, token_ids: Tensor, rows: int) -> None:
        super().__init__()
        self.listed = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.listed.weight = nn.Parameter(weight, requires_grad=False)
        self.token_ids: Tensor
        self.register_buffer("token_ids", token_ids, persistent=False)
        self.rows = rows

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits [..., rows] of `hidden` [..., H]; -inf for all other tokens."""
        logits = hidden.new_full((*hidden.shape[:-1], self.rows), -torch.inf)
        return logits.index_copy_(-1, self.token_ids, self.listed(hidden))


def write_token_ids(directory: Path, token_ids: Sequence[int], vocabulary_hash: str) -> None:
    """Write the file that `restrict` reads."""
    content = {"vocabulary_hash": vocabulary_hash, "token_ids": list(token_ids)}
    (directory / FILE).write_text(json.dumps(content) + "\n", encoding="utf-8")


def restrict(model: PreTrainedModel, directory: Path, vocabulary_hash: str) -> None:
    """Give the model the head that its directory asks for, if any. Raises ModelError if that cannot be done."""
    size = getattr(model.config, SIZE, None)
    if size is None:
        return
    try:
        content = json.loads((directory / FILE).read_text(encoding="utf-8"))
        token_ids, expected = [int(token) for token in content["token_ids"]], str(content["vocabulary_hash"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{directory} has a head for {size} tokens only, but {FILE}, which lists them, cannot be read: {error!r}; "
            "assemble the draft again"
        ) from error
    if expected != vocabulary_hash:
        raise ModelError(
            f"{FILE} in {directory} belongs to another vocabulary; assemble the draft again for its target"
        )
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ModelError(f"{type(model).__name__} has no plain linear head, so it cannot be restricted to some tokens")
    rows = head.out_features
    if len(token_ids) != size or len(set(token_ids)) != size or not 0 <= min(token_ids) <= max(token_ids) < rows:
        raise ModelError(f"{FILE} in {directory} must list {size} different ids below {rows}; assemble the draft again")
    ids = torch.tensor(token_ids, device=head.weight.device)
    model.set_output_embeddings(RestrictedHead(head.weight.detach()[ids], ids, rows))
