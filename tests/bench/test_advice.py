"""What `foredraft up` says about speculation on a machine with few cores; shares the services of the measurements."""

from pathlib import Path

import pytest

from foredraft.cli.advice import PROMPTS, Speeds, advice, hint, measure
from foredraft.cli.up import Stack

GAIN = "speculation gives 1.50x (1.50 to 1.50 over 2 texts) over plain decoding with the same 1 CPU thread"


@pytest.mark.parametrize(
    ("speculative", "all_cores", "expected"),
    [
        ([15, 30], (), f"{GAIN}: it pays"),
        ([15, 30], (12, 24), f"{GAIN}, plain decoding with all 2 gives 1.20x (1.20 to 1.20 over 2 texts): it pays"),
        (
            [15, 30],
            (18, 32),
            f"{GAIN}, plain decoding with all 2 gives 1.70x (1.60 to 1.80 over 2 texts): faster without: "
            "--threads 2 --no-speculation-enabled",
        ),
        (
            [8, 20],
            (),
            "speculation gives 0.89x (0.80 to 1.00 over 2 texts) over plain decoding with the same 1 CPU thread: "
            "faster without: --no-speculation-enabled",
        ),
    ],
)
def test_advice_names_the_fastest_way(speculative: list[float], all_cores: tuple[float, ...], expected: str) -> None:
    assert advice(Speeds(1, 2, [10, 20], speculative, all_cores)) == expected


async def test_speeds_are_measured_with_and_without_speculation_and_with_all_cores(
    models: tuple[Path, Path], reused: type[Stack], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foredraft.cli.advice.Stack", reused)
    monkeypatch.setattr("foredraft.cli.advice.available_cores", lambda: [0, 1])
    # Without the files of these options, services that others could reach would not start.
    public = {"tls_cert": "/nonexistent", "tls_key": "/nonexistent", "auth_tokens": "/nonexistent"}
    options = {"model": str(models[0]), "draft_model": str(models[1]), "threads": 1, "draft_threads": 1}
    started: list[Stack] = []
    measured = await measure({**options, **public, "listen": "unix:/nonexistent"}, pin=False, on_stack=started.append)
    assert len(started) == 2
    assert (measured.threads, measured.cores) == (1, 2)
    for speeds in (measured.plain, measured.speculative, measured.all_cores):
        assert len(speeds) == len(PROMPTS)
        assert all(speed > 0 for speed in speeds)


def test_a_hint_is_given_where_a_draft_model_takes_a_core_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.cli.advice.available_cores", lambda: [0, 1])
    assert "on 2 CPU cores" in (hint({"draft_model": "d"}) or "")
    assert hint({}) is None
    assert hint({"draft_model": "d", "speculation_enabled": False}) is None
    assert hint({"draft_model": "d", "device": "cuda"}) is None
    monkeypatch.setattr("foredraft.cli.advice.available_cores", lambda: list(range(8)))
    assert hint({"draft_model": "d"}) is None
