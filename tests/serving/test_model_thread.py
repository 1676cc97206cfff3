"""The model thread: it works while there is work, sleeps, wakes, stops, and reports its failure."""

import queue
import threading
from collections.abc import Callable

import pytest

from foredraft.serving import model_thread
from foredraft.serving.model_thread import ModelThread

WAIT_S = 20


def fail(error: Exception) -> None:
    raise AssertionError("no failure was expected") from error


def thread(step: Callable[[], bool], **options: Callable[..., None]) -> ModelThread:
    return ModelThread(step, name="model", on_failure=options.pop("on_failure", fail), **options)


def test_it_steps_until_there_is_nothing_to_do_and_again_when_woken() -> None:
    work = queue.SimpleQueue[int]()
    done = queue.SimpleQueue[int | None]()

    def step() -> bool:
        item = None if work.empty() else work.get()
        done.put(item)
        return item is not None

    for item in (1, 2):
        work.put(item)
    model = thread(step)
    model.start()
    assert [done.get(timeout=WAIT_S) for _ in range(3)] == [1, 2, None]
    work.put(3)
    model.wake()
    assert [done.get(timeout=WAIT_S) for _ in range(2)] == [3, None]
    model.stop()
    assert done.empty()


def test_a_wake_during_a_step_leads_to_another_step() -> None:
    started, proceed = threading.Semaphore(0), threading.Semaphore(0)

    def step() -> bool:
        started.release()
        proceed.acquire()
        return False

    model = thread(step)
    model.start()
    assert started.acquire(timeout=WAIT_S)
    model.wake()
    proceed.release()
    assert started.acquire(timeout=WAIT_S)
    proceed.release()
    model.stop()


def test_stop_lets_the_step_in_progress_end() -> None:
    started, proceed, ended = threading.Event(), threading.Event(), threading.Event()

    def step() -> bool:
        started.set()
        proceed.wait()
        ended.set()
        return True

    model = thread(step)
    model.start()
    assert started.wait(WAIT_S)
    threading.Timer(0.05, proceed.set).start()
    assert model.stop()
    assert ended.is_set()


def test_a_step_that_hangs_is_seen_and_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_thread, "STOP_TIMEOUT_S", 0.05)
    hangs, proceed = threading.Event(), threading.Event()

    def step() -> bool:
        hangs.set()
        proceed.wait()
        return True

    model = thread(step)
    assert model.step_s == 0
    model.start()
    assert hangs.wait(WAIT_S)
    assert not model.stop()
    assert model.step_s > 0
    proceed.set()
    assert model.stop()
    assert model.step_s == 0


def test_a_thread_that_was_never_started_can_be_stopped() -> None:
    assert thread(lambda: False).stop()


@pytest.mark.parametrize("where", ["step", "prepare"])
def test_a_failure_ends_the_thread_and_is_reported_once(where: str) -> None:
    failures = queue.SimpleQueue[Exception]()
    error = RuntimeError("the device is gone")
    calls = []

    def broken() -> bool:
        calls.append(threading.current_thread().name)
        raise error

    if where == "step":
        model = thread(broken, on_failure=failures.put)
    else:
        model = thread(lambda: False, on_failure=failures.put, prepare=broken)
    model.start()
    assert failures.get(timeout=WAIT_S) is error
    assert model.failure is error
    model.wake()
    model.stop()
    assert calls == ["model"]
    assert failures.empty()


def test_prepare_runs_in_the_thread_before_the_first_step() -> None:
    order = queue.SimpleQueue[tuple[str, str]]()

    def step() -> bool:
        order.put(("step", threading.current_thread().name))
        return False

    model = thread(step, prepare=lambda: order.put(("prepare", threading.current_thread().name)))
    model.start()
    assert [order.get(timeout=WAIT_S) for _ in range(2)] == [("prepare", "model"), ("step", "model")]
    model.stop()
