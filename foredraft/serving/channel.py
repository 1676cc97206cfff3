"""Channels to the other services."""

import grpc

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
)


def channel(address: str, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> grpc.aio.Channel:
    """A plaintext channel to "host:port" or "unix:/path"; it connects on first use and reconnects by itself."""
    return grpc.aio.insecure_channel(address, [*_OPTIONS, ("grpc.max_receive_message_length", max_message_bytes)])
