"""What the engine says when it cannot serve a model or a session."""


class ModelError(ValueError):
    """A model cannot be loaded or served. The message says what is wrong and what would be right."""


class NoFreeSlot(RuntimeError):  # noqa: N818
    """All sessions that fit are open."""
