"""The option `emulate`."""

import pytest

from foredraft.config import ConfigError, build
from foredraft.emulation import EXAMPLE, Cost, Emulation, parse
from foredraft.settings import DraftSettings, TargetSettings


def test_costs_are_milliseconds_and_the_example_is_right() -> None:
    assert parse(EXAMPLE) == Emulation(Cost(0.02, 0.0002), Cost(0.002, 0.0), 0.8)
    assert parse("draft=1.5ms+0.25ms/token") == Emulation(None, Cost(0.0015, 0.00025), 0.8)
    assert parse("accept=0.25,target=3ms").accept == 0.25
    assert str(Cost(0.02, 0.0002)) == "20ms+0.2ms/token"
    assert str(Cost(0.002, 0)) == "2ms"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "'' is not one"),
        ("accept=0.5", "what a pass of target or draft takes"),
        ("target=20", "which '20' is not"),
        ("target=3600001ms", "at most 3600000 ms, an hour, which '3600001ms' exceeds"),
        ("draft=2ms+" + "9" * 400 + "ms/token", "at most 3600000 ms, an hour"),
        ("target=20ms+2ms", "which '20ms+2ms' is not"),
        ("target=-1ms", "which '-1ms' is not"),
        ("target=1ms,target=2ms", "target only once"),
        ("target=1ms, draft=2ms", "' draft=2ms' is not one"),
        ("target=1ms,speed=2", "'speed=2' is not one"),
        ("target=1ms,accept=1.5", "from 0 to 1, which '1.5' is not"),
        ("target=1ms,accept=nan", "which 'nan' is not"),
    ],
)
def test_what_is_not_understood_is_told(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match="emulate: ") as caught:
        build(TargetSettings, {"emulate": text})
    assert says in str(caught.value)


def test_emulated_models_need_no_model_and_admit_none() -> None:
    options = {"emulate": EXAMPLE}
    assert build(TargetSettings, options).emulation.target == Cost(0.02, 0.0002)
    draft = build(DraftSettings, options)
    assert draft.draft_model == "emulated"
    assert draft.emulation.draft == Cost(0.002, 0)
    for service, option in ((TargetSettings, "model"), (DraftSettings, "draft_model")):
        with pytest.raises(ConfigError, match=f"{option} and emulate .* exclude each other"):
            build(service, {**options, option: "some/model"})


def test_only_one_model_may_be_emulated() -> None:
    assert build(DraftSettings, {"emulate": "target=20ms"}).drafter == "ngram"
    assert build(TargetSettings, {"emulate": "draft=2ms", "model": "some/model"}).emulation.target is None
    with pytest.raises(ConfigError, match="model is required"):
        build(TargetSettings, {"emulate": "draft=2ms"})
