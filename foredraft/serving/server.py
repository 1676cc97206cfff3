"""A gRPC server's life: bind, start, serve, drain, stop."""

import asyncio
import errno
import logging
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Self, TypeAlias

import grpc
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from prometheus_client import CollectorRegistry

from foredraft.errors import unavailable
from foredraft.serving.address import is_loopback
from foredraft.serving.auth import Tokens
from foredraft.serving.channel import MAX_MESSAGE_BYTES
from foredraft.serving.health import HealthServicer
from foredraft.serving.metrics import MetricsServer
from foredraft.serving.rpc import RETRY_AFTER_S, Services
from foredraft.serving.tls import ServerTls, TlsError
from foredraft.serving.tracing import Tracing, TracingError, connect
from foredraft.settings import DraftSettings, OrchestratorSettings, TargetSettings

logger = logging.getLogger(__name__)

# With the interpreter's 5 ms, a model thread in pure Python holds up every message that long.
SWITCH_INTERVAL_S = 0.0005

# A question for health is a service's name.
MAX_HEALTH_MESSAGE_BYTES = 4096

_OPTIONS = (
    # Two servers on one port would share its calls at random.
    ("grpc.so_reuseport", 0),
    # Pings find clients that vanished without a word, and clients may ping as often as our channels do.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
)


AnySettings: TypeAlias = TargetSettings | DraftSettings | OrchestratorSettings


class StartError(Exception):
    """The server cannot start; the message says why and what to do."""


class Server:
    """A gRPC server with health and reflection.

        server = Server(address, [SERVICE_NAME])
        await server.start()                    # bound; calls get UNAVAILABLE, health NOT_SERVING
        server.add(target_pb2_grpc.add_TargetServiceServicer_to_server, servicer)
        await server.set_serving()
        exit_code = await server.wait()         # until SIGTERM, SIGINT or shut_down; running calls get grace_s seconds

    Create it inside the event loop. `address` is "host:port" (port 0: any free one) or "unix:/path". Through a Unix
    socket there is no TLS: the permissions of its directory guard it. An address that other machines can reach needs
    `tls`, or `insecure`. With `tokens`, all but health needs one of them. `health_address` serves health alone, without
    TLS, for probes. `metrics_address`, "host:port", serves what is in `metrics`. `tracing` makes spans of calls and is
    stopped with the server.
    """

    def __init__(
        self,
        address: str,
        service_names: Sequence[str],
        *,
        grace_s: float = 30.0,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        tls: ServerTls | None = None,
        insecure: bool = False,
        tokens: Tokens | None = None,
        reflection: bool = True,
        health_address: str | None = None,
        metrics_address: str | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.address = address
        self.health_address = health_address
        self.metrics_address = metrics_address
        self.metrics = CollectorRegistry()
        self.tracing = tracing
        self.grace_s = grace_s
        self._service_names = tuple(service_names)
        self._tls = tls
        self._insecure = insecure
        self._asks_who = tokens is not None or (tls is not None and tls.client_ca is not None)
        self._reflection = reflection
        self._services = Services(tokens, tracing.interceptor if tracing is not None else None)
        self._grpc = grpc.aio.server(
            handlers=[self._services], options=[*_OPTIONS, ("grpc.max_receive_message_length", max_message_bytes)]
        )
        self._health = HealthServicer(self._service_names)
        self._health_grpc: grpc.aio.Server | None = None
        self._metrics_server: MetricsServer | None = None
        self._exit_code = 0
        self._shut_down = asyncio.Event()
        self._at_once = asyncio.Event()

    @classmethod
    def configured(cls, settings: AnySettings, service_names: Sequence[str], tokens: Tokens | None = None) -> Self:
        """The server that the options of a service describe. Raises StartError if traces cannot be sent."""
        try:
            name = type(settings).__name__.removesuffix("Settings").lower()
            tracing = connect(settings.otlp_endpoint, name) if settings.otlp_endpoint is not None else None
        except TracingError as error:
            raise StartError(str(error)) from error
        tls = None
        if settings.tls_cert is not None and settings.tls_key is not None:
            tls = ServerTls(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
        return cls(
            settings.listen,
            service_names,
            grace_s=settings.grace_s,
            max_message_bytes=settings.max_message_bytes,
            tls=tls,
            insecure=settings.insecure,
            tokens=tokens,
            reflection=settings.reflection,
            health_address=settings.health_listen,
            metrics_address=settings.metrics_listen,
            tracing=tracing,
        )

    async def start(self) -> None:
        """Bind and start. Afterwards `address`, `health_address` and `metrics_address` have the real ports.

        Raises StartError if an address cannot be had or would let others in unprotected, or TLS's files cannot be used.
        """
        self.address = self._bind(self._grpc, self.address, self._credentials())
        if not self._asks_who and not is_loopback(self.address):
            logger.warning("whoever can reach %s may use it: no client certificate or token is needed", self.address)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        if self._reflection:
            names = (*self._service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection_pb2_grpc.add_ServerReflectionServicer_to_server(
                reflection.aio.ReflectionServicer(names), self._services
            )
        if self.health_address is not None:
            self._health_grpc = grpc.aio.server(
                options=[*_OPTIONS, ("grpc.max_receive_message_length", MAX_HEALTH_MESSAGE_BYTES)]
            )
            self.health_address = self._bind(self._health_grpc, self.health_address, None)
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._health_grpc)
        if self.metrics_address is not None:
            try:
                self._metrics_server = MetricsServer(self.metrics_address, self.metrics)
            except OSError as error:
                raise StartError(f"cannot serve metrics on {self.metrics_address}: {error}") from error
            self.metrics_address = self._metrics_server.address
            logger.info("metrics on http://%s/metrics", self.metrics_address)
        for server in filter(None, (self._grpc, self._health_grpc)):
            await server.start()
        logger.info("listening on %s", self.address)

    def _credentials(self) -> grpc.ServerCredentials | None:
        """What the address is protected with, None for nothing. Raises StartError if that is too little."""
        _probe(self.address)
        if self.address.startswith("unix:"):
            return None
        if self._tls is not None:
            try:
                return self._tls.credentials()
            except TlsError as error:
                raise StartError(str(error)) from error
        if not self._insecure and not is_loopback(self.address):
            raise StartError(
                f"{self.address} can be reached from other machines, and there is no TLS: give tls_cert and tls_key, "
                "listen on 127.0.0.1, or allow it with --insecure"
            )
        return None

    def _bind(self, server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> str:
        """Bind and return the address with its real port."""
        _probe(address)
        try:
            if credentials is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise StartError(f"cannot listen on {address}: {error}") from error
        return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"

    def add(self, add_to_server: Callable[[Any, Any], None], servicer: object) -> None:
        """Add a service with the function generated for it. What its handlers may be: see `rpc.Services`."""
        add_to_server(servicer, self._services)

    async def set_serving(self) -> None:
        """Accept calls and report SERVING."""
        self._services.refusal = None
        self._health.set(health_pb2.HealthCheckResponse.SERVING)
        logger.info("serving on %s", self.address)

    def shut_down(self, exit_code: int = 0) -> None:
        """Have `wait` drain and return `exit_code`; a second call ends running calls at once. In the loop's thread."""
        self._exit_code = self._exit_code or exit_code
        if self._shut_down.is_set():
            self._at_once.set()
        self._shut_down.set()

    async def wait(self) -> int:
        """Serve until SIGTERM, SIGINT or `shut_down`, then `stop`. Returns the process's exit code."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, self.shut_down)
        try:
            await self._shut_down.wait()
            await self.stop(self.grace_s)
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
        return self._exit_code

    async def stop(self, grace_s: float = 0.0) -> None:
        """Report NOT_SERVING, refuse new calls, and stop once the running ones have ended, at most `grace_s` later."""
        self._services.refusal = unavailable("the server is shutting down; try another one or later", RETRY_AFTER_S)
        self._health.set(health_pb2.HealthCheckResponse.NOT_SERVING)
        if self._services.running:
            logger.info("draining: %d running calls have up to %g s", self._services.running, grace_s)
            ended = [asyncio.ensure_future(event.wait()) for event in (self._services.idle, self._at_once)]
            await asyncio.wait(ended, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
            for future in ended:
                future.cancel()
        if self._services.running:
            logger.warning("cutting off %d running calls", self._services.running)
        # Without running calls, the last statuses get time to leave; watchers of health never end by themselves.
        grace = None if self._services.running else 0.2
        await asyncio.gather(*(server.stop(grace) for server in (self._grpc, self._health_grpc) if server is not None))
        if self._metrics_server is not None:
            await asyncio.to_thread(self._metrics_server.stop)
        if self.tracing is not None:
            await self.tracing.stop()
        logger.info("stopped")


def run(main: Coroutine[Any, Any, int]) -> int:
    """Run a server's main coroutine on uvloop; returns its exit code, or 1 with a sentence on standard error.

    Until `Server.wait`, SIGTERM and SIGINT end the process at once: nothing runs yet, and loading cannot be stopped.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os._exit(128 + number))
    try:
        return uvloop.run(main)
    except StartError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _probe(address: str) -> None:
    """Raises StartError with the operating system's reason, which gRPC does not tell."""
    try:
        if address.startswith("unix:"):
            _probe_unix(address.removeprefix("unix:").removeprefix("//"))
        else:
            _probe_tcp(address)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise StartError(f"cannot listen on {address}: {reason}; free it or choose another address") from error


def _probe_unix(path: str) -> None:
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise FileNotFoundError(errno.ENOENT, "no such directory")
    if os.path.exists(path) and not stat.S_ISSOCK(os.stat(path).st_mode):
        raise FileExistsError(errno.EEXIST, "there is a file, and it is no socket")
    with socket.socket(socket.AF_UNIX) as client:
        # gRPC replaces the socket of a running server without a word.
        if client.connect_ex(path) == 0:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _probe_tcp(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError('the address must be "host:port" or "unix:/path"')
    resolved = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    errors = []
    for family, kind, protocol, _, endpoint in resolved:
        try:
            with socket.socket(family, kind, protocol) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(endpoint)
        except OSError as error:
            errors.append(error)
    # A host without IPv6 may well resolve "localhost" to an IPv6 address too.
    for failure in errors:
        if failure.errno == errno.EADDRINUSE or len(errors) == len(resolved):
            raise failure
