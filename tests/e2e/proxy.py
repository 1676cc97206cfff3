"""A TCP proxy between two servers, whose connections a test can cut."""

import asyncio
import contextlib
from typing import Self


class Proxy:
    """Forwards what comes to `address` to `upstream`, "host:port" both, until it is left. `cut` counts connections."""

    def __init__(self, upstream: str) -> None:
        self.cut = 0
        self._host, _, port = upstream.rpartition(":")
        self._port = int(port)
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def address(self) -> str:
        """Where it listens."""
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    def drop(self) -> None:
        """Cut all connections, as a network that fails does; new ones are welcome."""
        self.cut += len(self._open) // 2
        for writer in self._open:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with contextlib.suppress(OSError):
                await self._forward(reader, writer)
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Both ways, until either side ends."""
        from_server, to_server = await asyncio.open_connection(self._host, self._port)
        pair = {writer, to_server}
        self._open |= pair
        ways = [asyncio.create_task(_copy(reader, to_server)), asyncio.create_task(_copy(from_server, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._open -= pair
            to_server.transport.abort()
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(2**16):
        writer.write(data)
        await writer.drain()
