"""What the tests of validation share."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from foredraft.errors import RequestError
from foredraft.v1 import common_pb2

V = 100
CONTEXT = 8


def violations(check: Callable[..., object], *arguments: Any, **options: Any) -> list[str]:
    """What `check` complains about, as "field: description"."""
    with pytest.raises(RequestError) as raised:
        check(*arguments, **options)
    assert raised.value.status is grpc.StatusCode.INVALID_ARGUMENT
    (detail,) = raised.value.details
    assert isinstance(detail, error_details_pb2.BadRequest)
    return [f"{violation.field}: {violation.description}" for violation in detail.field_violations]


def succeeds(check: Callable[..., object], *arguments: Any, **options: Any) -> bool:
    """Whether `check` passes; if not, it must name fields."""
    try:
        check(*arguments, **options)
    except RequestError:
        assert violations(check, *arguments, **options)
        return False
    return True


def resolved(**fields: Any) -> common_pb2.Sampling:
    """A message that a session accepts, but for `fields`."""
    return common_pb2.Sampling(**{"seed": 1, "max_new_tokens": 10, **fields})
