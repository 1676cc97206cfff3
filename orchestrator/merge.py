"""Several streams as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """The items of all streams as they come, in order within each stream.

    Holds at most one unread item per stream; then the streams wait. The first error ends all of them and is raised.
    Every stream is closed when the generator ends or is closed.
    """
    arrived: asyncio.Queue[T | Exception | _End] = asyncio.Queue()
    free = asyncio.Semaphore(len(streams))
    tasks = [asyncio.create_task(_forward(stream, arrived, free)) for stream in streams]
    try:
        running = len(streams)
        while running:
            item = await arrived.get()
            if isinstance(item, _End):
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                free.release()
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _End:
    """Comes after the last item of a stream."""


async def _forward(
    stream: AsyncGenerator[T, None], arrived: "asyncio.Queue[T | Exception | _End]", free: asyncio.Semaphore
) -> None:
    try:
        async with aclosing(stream):
            async for item in stream:
                await free.acquire()
                arrived.put_nowait(item)
        arrived.put_nowait(_End())
    except Exception as error:
        arrived.put_nowait(error)
