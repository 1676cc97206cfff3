"""The replicas of one service: found by address or DNS, watched for health, picked for each session."""

# The stubs' asyncio classes exist for type checkers only.
from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from foredraft.serving.channel import channel
from foredraft.serving.tls import ClientTls, TlsError

logger = logging.getLogger(__name__)

# Seconds between attempts to reach a replica that is away.
RETRY_INTERVAL = 0.5
# The same for one that does not fit: somebody has to restart it with another model first.
UNFIT_INTERVAL = 10.0
# Seconds between looks at the addresses of a DNS name.
RESOLVE_INTERVAL = 5.0
# Seconds after which a channel that is not used any more is closed whatever still runs there.
LONGEST_SESSION_S = 3600.0
# The owner of addresses that were given as such.
FIXED = ""
# Texts are recognised by their beginnings of whole blocks of so many tokens; so many beginnings are remembered.
BLOCK, REMEMBERED = 32, 16_384

Health: TypeAlias = "grpc.aio.UnaryStreamCall[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]"
Stub = TypeVar("Stub")
Admitted = TypeVar("Admitted")


class UnfitError(ValueError):
    """A replica answers, but must not be used; the message says why."""


@dataclass(eq=False)
class Replica(Generic[Stub, Admitted]):
    """One server. `admitted` is what it was found to be, None while it must get no sessions, and `reason` says why.

    `sessions` are those of this process. `tried`: it was asked at least once; `unfit`: it answers, but must not be
    used; `draining`: it has announced its end, so that running sessions had better move.
    """

    address: str
    authority: str | None
    stub: Stub
    channel: grpc.aio.Channel
    admitted: Admitted | None = None
    reason: str = "was not reached yet"
    sessions: int = 0
    tried: bool = False
    unfit: bool = False
    draining: bool = False
    suspect: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def usable(self) -> bool:
        """Whether new sessions may go there."""
        return self.admitted is not None

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Stub]:
        """The stub, counted as one session of it."""
        self.sessions += 1
        try:
            yield self.stub
        finally:
            self.sessions -= 1


class Replicas(Generic[Stub, Admitted]):
    """All replicas of a service. `admit` asks a stub what it is; it raises UnfitError for one that must not be used.
    `capacity` is for how many sessions such a one has room, 0 if that is unknown.

    `addresses` are "host:port", "unix:path" or "dns:///host:port"; the last stands for all addresses of that name,
    which are looked up again and again. `service` is the full name whose health is watched. `failovers` counts sessions
    lost.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        service: str,
        make_stub: Callable[[grpc.aio.Channel], Stub],
        admit: Callable[[Stub], Awaitable[Admitted]],
        capacity: Callable[[Admitted], int],
        tls: ClientTls | None = None,
    ) -> None:
        self.all: dict[str, Replica[Stub, Admitted]] = {}
        self.failovers = 0
        self._names = [address for address in addresses if address.startswith("dns:")]
        self._fixed = [address for address in addresses if address not in self._names]
        self._service = service
        self._make_stub = make_stub
        self._admit = admit
        self._capacity = capacity
        self._tls = tls
        self._fingerprint = tls.fingerprint() if tls is not None else b""
        self._served: OrderedDict[int, str] = OrderedDict()
        # Which of the names, or the fixed addresses, an address comes from: it goes when the last of them lets go.
        self._owners: dict[str, set[str]] = {}
        self._changed = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Begin to look for replicas."""
        for address in self._fixed:
            self._own(address, FIXED)
        for name in self._names:
            self._tasks[name] = asyncio.create_task(self._resolve(name))

    async def close(self) -> None:
        """Stop watching and close the channels."""
        tasks = [*self._tasks.values(), *self._closing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(replica.channel.close() for replica in self.all.values()))

    @property
    def usable(self) -> list[Replica[Stub, Admitted]]:
        """Those that may get sessions."""
        return [replica for replica in self.all.values() if replica.usable]

    @property
    def room(self) -> float:
        """How many more sessions they could take at once, as far as those of this process tell."""
        return sum(self._room(replica) for replica in self.usable)

    @property
    def reason(self) -> str:
        """Why none is usable, by address."""
        reasons = [f"{replica.address} {replica.reason}" for replica in self.all.values()]
        return "; ".join(reasons) or f"{', '.join(self._names)} has no addresses"

    async def wait(self) -> None:
        """Return when any replica has become usable or has ceased to be."""
        await self._changed.wait()

    def pick(
        self, text: Sequence[int], *, without: Sequence[Replica[Stub, Admitted]] = ()
    ) -> Replica[Stub, Admitted] | None:
        """The replica for a session on this text: the one that served its longest beginning, else the least busy.

        A replica that holds the beginning is passed over if it is far busier than another, or full: waiting there costs
        more than reading the text again.
        """
        usable = [replica for replica in self.usable if replica not in without]
        usable = [replica for replica in usable if self._room(replica)] or usable
        if not usable:
            return None
        idlest = min(usable, key=lambda replica: replica.sessions)
        for key in reversed(_beginnings(text)):
            known = self.all.get(self._served.get(key, ""))
            if known in usable and known is not None:
                return known if known.sessions <= 2 * idlest.sessions + 1 else idlest
        return idlest

    def remember(self, text: Sequence[int], replica: Replica[Stub, Admitted]) -> None:
        """This replica has the keys and values of the text now."""
        for key in _beginnings(text):
            self._served[key] = replica.address
            self._served.move_to_end(key)
        while len(self._served) > REMEMBERED:
            self._served.popitem(last=False)

    def failed(self, replica: Replica[Stub, Admitted], reason: str) -> None:
        """Report that a session was lost: no new ones until the replica has answered again."""
        self.failovers += 1
        self._exclude(replica, reason)
        replica.suspect.set()

    def _room(self, replica: Replica[Stub, Admitted]) -> float:
        capacity = self._capacity(replica.admitted) if replica.admitted is not None else 0
        return max(0, (capacity or math.inf) - replica.sessions)

    def _own(self, address: str, owner: str, authority: str | None = None) -> None:
        if address not in self.all:
            self._add(address, authority)
        self._owners.setdefault(address, set()).add(owner)

    def _disown(self, address: str, owner: str) -> None:
        owners = self._owners[address]
        owners.discard(owner)
        if not owners:
            removal = asyncio.create_task(self._remove(self.all.pop(address)))
            self._closing.add(removal)
            removal.add_done_callback(self._closing.discard)

    def _add(self, address: str, authority: str | None = None) -> None:
        made = channel(address, self._tls, authority=authority)
        replica = self.all[address] = Replica[Stub, Admitted](address, authority, self._make_stub(made), made)
        self._tasks[address] = asyncio.create_task(self._watch(replica))

    async def _remove(self, replica: Replica[Stub, Admitted]) -> None:
        """Running sessions go on: only the watch ends, and the channel closes when they have ended."""
        self._exclude(replica, "is no address of the service any more")
        task = self._tasks.pop(replica.address)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await replica.channel.close(LONGEST_SESSION_S)

    async def _resolve(self, name: str) -> None:
        """Keep the replicas those that the name stands for."""
        host, _, port = name.rpartition("/")[2].rpartition(":")
        mine: set[str] = set()
        loop = asyncio.get_running_loop()
        while True:
            try:
                found = await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
            except OSError as error:  # Those that are known may still be there.
                logger.warning("cannot look up %s: %s", host, error)
            else:
                hosts = {str(end[0]) for *_, end in found}
                addresses = {f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}" for ip in hosts}
                for address in addresses - mine:
                    try:
                        self._own(address, name, authority=host)
                    except TlsError as error:  # Half renewed: they will fit together at the next look.
                        logger.warning("cannot connect to %s yet: %s", address, error)
                addresses &= self.all.keys()
                for address in mine - addresses:
                    self._disown(address, name)
                mine = addresses
            await asyncio.sleep(RESOLVE_INTERVAL)

    async def _watch(self, replica: Replica[Stub, Admitted]) -> None:
        """Admit the replica whenever it is healthy, for ever."""
        while True:
            pause = RETRY_INTERVAL
            try:
                await self._follow(replica)
            except grpc.aio.AioRpcError as error:
                self._exclude(replica, f"cannot be reached: {error.details()}")
            except UnfitError as error:
                pause, replica.unfit = UNFIT_INTERVAL, True
                self._exclude(replica, str(error))
            await asyncio.sleep(pause)
            try:
                await self._renew()
            except TlsError as error:
                self._exclude(replica, str(error))

    async def _renew(self) -> None:
        """New channels if the files for TLS were renewed; running sessions end on the old ones."""
        if self._tls is None or (fingerprint := self._tls.fingerprint()) == self._fingerprint:
            return
        self._fingerprint = fingerprint
        old = [replica.channel for replica in self.all.values()]
        for replica in self.all.values():
            replica.channel = channel(replica.address, self._tls, authority=replica.authority)
            replica.stub = self._make_stub(replica.channel)
            replica.suspect.set()
        for each in old:
            closing = asyncio.create_task(each.close(LONGEST_SESSION_S))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _follow(self, replica: Replica[Stub, Admitted]) -> None:
        """Follow the replica's own word on its health, until its stream ends or a session there is lost."""
        replica.suspect.clear()
        request = health_pb2.HealthCheckRequest(service=self._service)
        watch = health_pb2_grpc.HealthStub(replica.channel).Watch(request)
        suspect = asyncio.create_task(replica.suspect.wait())
        following = asyncio.create_task(self._obey(replica, watch))
        try:
            await asyncio.wait([following, suspect], return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
            # A server without health service: whether it answers is all there is to know.
            await self._try(replica)
            await suspect
        finally:
            suspect.cancel()
            following.cancel()
            watch.cancel()

    async def _obey(self, replica: Replica[Stub, Admitted], watch: Health) -> None:
        async for response in watch:
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                await self._try(replica)
            else:
                replica.draining = True
                self._exclude(replica, "is not serving: it starts or drains")
        raise _ended()

    async def _try(self, replica: Replica[Stub, Admitted]) -> None:
        replica.admitted = await self._admit(replica.stub)
        replica.reason, replica.tried, replica.unfit, replica.draining = "", True, False, False
        self._tell()

    def _exclude(self, replica: Replica[Stub, Admitted], reason: str) -> None:
        if replica.reason != reason:
            logger.warning("%s at %s %s", self._service, replica.address, reason)
        replica.admitted, replica.reason, replica.tried = None, reason, True
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _beginnings(text: Sequence[int]) -> list[int]:
    """A hash of every beginning of whole blocks, shortest first."""
    keys, key = [], 0
    for end in range(BLOCK, len(text) + 1, BLOCK):
        key = hash((key, *text[end - BLOCK : end]))
        keys.append(key)
    return keys


def _ended() -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "the stream of its health ended")
