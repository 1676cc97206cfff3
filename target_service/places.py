"""Admission: at most as many sessions as the engine has slots, and a bounded queue for the rest."""

import asyncio

from foredraft.errors import exhausted

RETRY_AFTER_S = 1.0
WAITING_PER_PLACE = 4


class Places:
    """Gives out `count` places in order of arrival.

    `WAITING_PER_PLACE` times as many callers may wait for one, each for `timeout_s` seconds.
    """

    def __init__(self, count: int, timeout_s: float) -> None:
        self.count = count
        self.taken = 0
        self.waiting = 0
        self._timeout_s = timeout_s
        self._free = asyncio.Semaphore(count)

    async def acquire(self) -> None:
        """Takes a place; raises RequestError (RESOURCE_EXHAUSTED) if none came free in time or too many wait."""
        if self._free.locked() and self.waiting >= WAITING_PER_PLACE * self.count:
            message = f"all {self.count} sessions are taken and {self.waiting} clients wait for one; try again later"
            raise exhausted(message, RETRY_AFTER_S)
        self.waiting += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._free.acquire()
        except TimeoutError:
            message = f"all {self.count} sessions stayed taken for {self._timeout_s:g} s; try again later"
            raise exhausted(message, RETRY_AFTER_S) from None
        finally:
            self.waiting -= 1
        self.taken += 1

    def release(self) -> None:
        """Gives a place back."""
        self.taken -= 1
        self._free.release()
