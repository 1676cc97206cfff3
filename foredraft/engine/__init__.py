"""One causal language model behind slots of KV cache and a ragged batched forward."""

from foredraft.engine.engine import Engine, Node, Row, Slot
from foredraft.engine.errors import ModelError, NoFreeSlot
from foredraft.engine.loading import LoadedModel, load

__all__ = ["Engine", "LoadedModel", "ModelError", "NoFreeSlot", "Node", "Row", "Slot", "load"]
