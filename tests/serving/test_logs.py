"""What the servers write to standard error."""

import json
import subprocess
import sys

PROGRAM = """
import logging
from foredraft.serving.logs import configure_logging, request_id
configure_logging("info", {log_format!r})
logger = logging.getLogger("some.module")
logger.info("before any request")
request_id.set("mine")
logger.info("says %r", 'two\\nlines and a "quote"')
try:
    1 / 0
except ZeroDivisionError:
    logger.exception("failed")
"""


def written(log_format: str) -> str:
    program = PROGRAM.format(log_format=log_format)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stderr


def test_every_json_record_is_an_object_on_a_line_with_the_requests_id() -> None:
    first, second, third = map(json.loads, written("json").splitlines())
    assert {name: first[name] for name in ("level", "logger", "message")} == {
        "level": "INFO",
        "logger": "some.module",
        "message": "before any request",
    }
    assert "request_id" not in first
    assert first["time"] <= second["time"]
    assert second["message"] == "says 'two\\nlines and a \"quote\"'"
    assert (second["request_id"], third["request_id"]) == ("mine", "mine")
    assert (third["level"], "ZeroDivisionError" in third["exc_info"]) == ("ERROR", True)


def test_a_line_of_text_ends_with_the_requests_id() -> None:
    lines = written("text").splitlines()
    assert lines[0].endswith("INFO some.module: before any request")
    assert lines[1].endswith("[mine]")
