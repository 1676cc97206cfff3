"""Logging of the servers: one entry a line, to standard error, with the id of the request that it is about."""

import logging
import sys
from contextvars import ContextVar
from typing import Literal, TypeAlias

from pythonjsonlogger.json import JsonFormatter
from rich.console import Console
from rich.logging import RichHandler

from foredraft.serving import tracing

LogFormat: TypeAlias = Literal["text", "json"]

# Set while a call is handled; tasks started meanwhile inherit it, the model thread has none.
request_id: ContextVar[str] = ContextVar("request_id", default="")


def configure_logging(level: str = "info", log_format: LogFormat = "text") -> None:
    """Log at `level` ("debug", "info", "warning", "error" or "critical") and above.

    "text" is for people, in colour on a terminal. "json" is an object a line: time, level, logger, message, and where
    there are any request_id, trace_id and exc_info.
    """
    handler: logging.Handler = logging.StreamHandler()
    if log_format == "json":
        names = {"levelname": "level", "name": "logger"}
        handler.setFormatter(JsonFormatter("%(levelname)s %(name)s %(message)s", rename_fields=names, timestamp="time"))
    elif sys.stderr.isatty():
        handler = RichHandler(console=Console(stderr=True), show_path=False)
        handler.setFormatter(_WithRequest("%(name)s: %(message)s"))
    else:
        handler.setFormatter(_WithRequest("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.addFilter(add_ids)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class _WithRequest(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        identity = getattr(record, "request_id", "")
        return super().formatMessage(record) + (f" [{identity}]" if identity else "")


def add_ids(record: logging.LogRecord) -> bool:
    """A filter that lets everything pass, with `request_id` and `trace_id` if there are any."""
    for name, identity in (("request_id", request_id.get()), ("trace_id", tracing.trace_id())):
        if identity:
            setattr(record, name, identity)
    return True
