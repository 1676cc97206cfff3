"""One thread for one model, so that forwards never block the event loop."""

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

# A step that takes longer than this, after all sessions have ended, is not waited for.
STOP_TIMEOUT_S = 10.0


class ModelThread:
    """Calls `step` again and again in one dedicated thread while it returns True, then waits for `wake`.

    `step` hands results to the event loop with `loop.call_soon_threadsafe`. If it raises, the thread ends, `failure` is
    set and `on_failure` is called in the thread with the exception. `prepare` is called once in the thread before the
    first step, for settings that belong to a thread, and counts as a step when it raises.
    """

    def __init__(
        self,
        step: Callable[[], bool],
        *,
        name: str,
        on_failure: Callable[[Exception], None],
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self.failure: Exception | None = None
        self._step = step
        self._on_failure = on_failure
        self._prepare = prepare
        self._awake = threading.Event()
        self._stopping = False
        self._step_since: float | None = None
        # Seconds waited, and since when it waits; one tuple, so that other threads never see half of a change.
        self._waited: tuple[float, float | None] = (0.0, None)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread; it begins with a step."""
        self._thread.start()

    def wake(self) -> None:
        """Have `step` called again; from any thread, cheap. What was written before this call is seen by that step."""
        self._awake.set()

    def stop(self) -> bool:
        """Let the step in progress end, then end the thread. Blocks meanwhile: call it with `asyncio.to_thread`.

        Returns whether the thread has ended: a step may hang, and is then left behind after `STOP_TIMEOUT_S`.
        """
        self._stopping = True
        self._awake.set()
        if self._thread.is_alive():
            self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("the thread %r is left behind in a step of %.0f s so far", self._thread.name, self.step_s)
        return not self._thread.is_alive()

    @property
    def step_s(self) -> float:
        """Seconds that the step in progress has taken so far, 0 without one; from any thread."""
        since = self._step_since
        return 0.0 if since is None else time.perf_counter() - since

    @property
    def idle_s(self) -> float:
        """Seconds that it has waited for work so far; from any thread, never less than before."""
        now = time.perf_counter()
        waited, since = self._waited
        return waited if since is None else waited + max(0.0, now - since)

    def _run(self) -> None:
        try:
            if self._prepare is not None:
                self._prepare()
            while not self._stopping:
                # Cleared before the step: a wake during the step leads to another one.
                self._awake.clear()
                if not self._stopping and not self._timed_step():
                    self._wait()
        except Exception as error:
            logger.exception("the thread %r ended by an error", self._thread.name)
            self.failure = error
            self._on_failure(error)

    def _timed_step(self) -> bool:
        self._step_since = time.perf_counter()
        try:
            return self._step()
        finally:
            self._step_since = None

    def _wait(self) -> None:
        waited, since = self._waited[0], time.perf_counter()
        self._waited = (waited, since)
        self._awake.wait()
        self._waited = (waited + time.perf_counter() - since, None)
