"""Channels to the other services."""

import grpc

from foredraft.serving.retry import RETRY
from foredraft.serving.tls import ClientTls
from foredraft.serving.tracing import propagating

MAX_MESSAGE_BYTES = 16 * 2**20

_OPTIONS = (
    # A long prefill sends no data: pings tell a busy server from a dead one.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # gRPC's own maximum of two minutes would keep a restarted server waiting.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    RETRY,
)


def channel(
    address: str,
    tls: ClientTls | None = None,
    *,
    authority: str | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> grpc.aio.Channel:
    """A channel to "host:port" or "unix:/path"; it connects on first use and reconnects by itself.

    With `tls` it is encrypted, except through a Unix socket, and keeps what the files hold now: when
    `tls.fingerprint()` has changed, make another one. The server's certificate must be for the host of `address`, or
    for `authority`, which the server is told in its place. Raises TlsError for files that cannot be used.
    """
    options: list[tuple[str, str | int]] = [*_OPTIONS, ("grpc.max_receive_message_length", max_message_bytes)]
    if authority is not None:
        options.append(("grpc.default_authority", authority))
    if tls is None or address.startswith("unix:"):
        return propagating(grpc.aio.insecure_channel(address, options))
    return propagating(grpc.aio.secure_channel(address, tls.credentials(), options))
