"""Logging of the servers: one line an entry, to standard error."""

import logging
import sys

from rich.console import Console
from rich.logging import RichHandler


def configure_logging(level: str = "info") -> None:
    """Log at `level` ("debug", "info", "warning", "error" or "critical") and above; in colour if on a terminal."""
    handler: logging.Handler
    if sys.stderr.isatty():
        handler = RichHandler(console=Console(stderr=True), show_path=False)
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
