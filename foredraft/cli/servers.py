"""`foredraft target-server`, `draft-server` and `orchestrator`: one service in the foreground."""

import importlib
import os
import signal
import threading
from typing import Annotated, Any

import typer

from foredraft.cli.flags import Config, with_settings
from foredraft.config import load
from foredraft.settings import DraftSettings, OrchestratorSettings, Settings, TargetSettings

StopWithParent = Annotated[bool, typer.Option("--stop-with-parent", hidden=True)]


@with_settings(TargetSettings)
def target_server(flags: dict[str, Any], config: Config = None, stop_with_parent: StopWithParent = False) -> None:
    """Serve the target model: it verifies draft tokens and decides the text."""
    serve("target_service.server", load(TargetSettings, flags, config), stop_with_parent)


@with_settings(DraftSettings)
def draft_server(flags: dict[str, Any], config: Config = None, stop_with_parent: StopWithParent = False) -> None:
    """Serve the drafter: a small model and n-grams of the text, or these alone if no draft model is given."""
    serve("draft_service.server", load(DraftSettings, flags, config), stop_with_parent)


@with_settings(OrchestratorSettings)
def orchestrator(flags: dict[str, Any], config: Config = None, stop_with_parent: StopWithParent = False) -> None:
    """Serve the public API on a target service and, if there is one, a draft service."""
    serve("orchestrator.server", load(OrchestratorSettings, flags, config), stop_with_parent)


def serve(module: str, settings: Settings, stop_with_parent: bool) -> None:
    """Run `main(settings)` of a service's module and exit with its code."""
    if stop_with_parent:
        threading.Thread(target=terminate_at_end_of_input, daemon=True).start()
    # The imports take seconds, and a process 1 ignores signals that it has no handler for.
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    from foredraft.serving.logs import configure_logging
    from foredraft.serving.server import run

    configure_logging(settings.log_level, settings.log_format)
    raise typer.Exit(run(importlib.import_module(module).main(settings)))


def terminate_at_end_of_input() -> None:
    """Send SIGTERM to this process when standard input ends: it does when the parent that holds it is gone."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
