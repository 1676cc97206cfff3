"""One causal language model behind slots of KV cache and a ragged batched forward."""

from foredraft.engine.batch import Node, Row, Slot
from foredraft.engine.engine import Engine
from foredraft.engine.errors import ModelError, NoFreeSlot
from foredraft.engine.loading import LoadedModel, load

__all__ = ["Engine", "LoadedModel", "ModelError", "NoFreeSlot", "Node", "Row", "Slot", "load"]
