"""Errors that a client sees: a gRPC status, one sentence, and details as `google.rpc` messages."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

# Details travel in the trailers, for which gRPC grants 8 KiB.
MAX_VIOLATIONS = 16
MAX_DESCRIPTION = 200


@dataclass(frozen=True, slots=True)
class Violation:
    """What is wrong with one field: its path, such as "sampling.top_p", and what was wrong and what would be right."""

    field: str
    description: str


class RequestError(Exception):
    """Ends the call with this status; raise it anywhere below a handler."""

    def __init__(self, status: grpc.StatusCode, message: str, details: Sequence[Message] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.details = tuple(details)


def invalid(violations: Iterable[Violation]) -> RequestError:
    """INVALID_ARGUMENT with google.rpc.BadRequest; the first 16 violations are told, and how many more there are."""
    violations = list(violations)
    told = [Violation(v.field, _shortened(v.description)) for v in violations[:MAX_VIOLATIONS]]
    message = f"{told[0].field}: {told[0].description}"
    if len(violations) > 1:
        message += f" (and {len(violations) - 1} more)"
    bad_request = error_details_pb2.BadRequest(
        field_violations=[
            error_details_pb2.BadRequest.FieldViolation(field=v.field, description=v.description) for v in told
        ]
    )
    return RequestError(grpc.StatusCode.INVALID_ARGUMENT, message, [bad_request])


def exhausted(message: str, retry_after_s: float) -> RequestError:
    """RESOURCE_EXHAUSTED with google.rpc.RetryInfo: load that will pass."""
    return RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, message, [_retry_info(retry_after_s)])


def unavailable(message: str, retry_after_s: float) -> RequestError:
    """UNAVAILABLE with google.rpc.RetryInfo: starting, draining or cut off."""
    return RequestError(grpc.StatusCode.UNAVAILABLE, message, [_retry_info(retry_after_s)])


def failed_precondition(message: str) -> RequestError:
    """FAILED_PRECONDITION: a well-formed request that does not fit the state of things."""
    return RequestError(grpc.StatusCode.FAILED_PRECONDITION, message)


async def abort(context: "grpc.aio.ServicerContext[Any, Any]", error: RequestError) -> NoReturn:
    """End the call with the error's status and details; raises grpc.aio.AbortError, which must reach gRPC."""
    status = status_pb2.Status(code=error.status.value[0], message=error.message)
    # For instrumentation, which does not know of statuses with details.
    context.set_code(error.status)
    context.set_details(error.message)
    for detail in error.details:
        status.details.add().Pack(detail)
    try:
        await context.abort_with_status(rpc_status.to_status(status))
    except grpc.aio.AbortError as aborted:
        # Traces keep exceptions with those that they come from, and these may quote a prompt.
        raise aborted from None


@dataclass(frozen=True, slots=True)
class ErrorDetails:
    """What a server told beside status and message."""

    violations: tuple[Violation, ...] = ()
    retry_after_s: float | None = None


def error_details(error: grpc.aio.AioRpcError) -> ErrorDetails:
    """The details of an error that a call raised; empty if there are none or they cannot be read."""
    try:
        status = rpc_status.from_call(error)
    except (ValueError, DecodeError):
        status = None
    violations: list[Violation] = []
    retry_after_s = None
    for detail in status.details if status is not None else ():
        bad_request, retry_info = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(bad_request):
            violations += [Violation(v.field, v.description) for v in bad_request.field_violations]
        elif detail.Unpack(retry_info):
            retry_after_s = retry_info.retry_delay.ToTimedelta().total_seconds()
    return ErrorDetails(tuple(violations), retry_after_s)


def _retry_info(seconds: float) -> Any:
    info: Any = error_details_pb2.RetryInfo()
    info.retry_delay.FromMilliseconds(round(seconds * 1000))
    return info


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_DESCRIPTION else text[: MAX_DESCRIPTION - 3] + "..."
