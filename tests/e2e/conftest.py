"""Three real servers as processes: one tiny float64 target, and drafts of four qualities with an orchestrator each."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests import tiny
from tests.e2e import processes
from tests.e2e.processes import Server

# Weight noise of the drafts, relative to the weights: they draw the target's token in .95, .7, .3 and .03 of cases.
DRAFTS = {"good": 0.02, "fair": 0.1, "poor": 0.3, "useless": 5.0}
CONTEXT = 256


@dataclass
class Tiny:
    """Model directories and running servers; orchestrators by the quality of their draft."""

    directory: Path
    target_model: Path
    draft_models: dict[str, Path]
    target: Server
    orchestrators: dict[str, Server] = field(default_factory=dict)
    drafts: dict[str, Server] = field(default_factory=dict)

    def log(self, name: str) -> Path:
        """Where a further server of this name may log."""
        return self.directory / f"{name}.log"


@pytest.fixture(scope="session")
def stacks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    """The target with all orchestrators and drafts, ready."""
    directory = tmp_path_factory.mktemp("e2e")
    shape = {"dtype": "float64", "max_length": CONTEXT, "layers": 2}
    # A target as fast as its draft would never leave it the time to prepare for a verdict.
    target_model = tiny.save_model(directory / "target", idle_layers=12, **shape)
    draft_models = {name: tiny.save_model(directory / name, noise=noise, **shape) for name, noise in DRAFTS.items()}
    target = processes.target(directory / "target.log", model=target_model, dtype="float64", max_sessions=32)
    result = Tiny(directory, target_model, draft_models, target)
    for name, model in draft_models.items():
        draft = processes.draft(
            directory / f"draft-{name}.log", draft_model=model, draft_dtype="float64", draft_max_sessions=32
        )
        result.drafts[name] = draft
        # A loaded machine must not turn the rounds of these tests into plain ones.
        result.orchestrators[name] = processes.orchestrator(
            result.log(f"orchestrator-{name}"), target, draft, max_draft_tokens=8, draft_timeout_s=20
        )
    servers = [target, *result.drafts.values(), *result.orchestrators.values()]
    try:
        for server in servers:
            server.wait_ready()
        yield result
        codes = [server.stop() for server in reversed(servers)]
        assert codes == [0] * len(servers), "a server did not stop cleanly on SIGTERM"
    finally:
        for server in servers:
            server.process.kill()
