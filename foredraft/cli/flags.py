"""Command-line flags made from the settings, so that flag, environment variable and YAML key cannot differ."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from foredraft.config import OPTIONS, default_text, options, sections, value_kind
from foredraft.settings import Settings

Config = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="YAML file with options; else FOREDRAFT_CONFIG.")
]


def with_settings(*services: type[Settings], without: tuple[str, ...] = ()) -> Callable[..., Callable[..., None]]:
    """Decorate a command that takes `flags` (option name -> value, None if not given): it gets a flag for every option.

    All values stay text here: the settings convert and check them, whichever way they came.
    """
    names = [name for name in options(*services) if name not in without]
    panels = {name: title for title, members in sections() for name in members} if len(services) > 1 else {}
    made = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=flag(name, panels.get(name)))
        for name in names
    ]
    block = typer.Option(
        "--speculative-config", metavar="JSON", help="vLLM's or TensorRT-LLM's speculative_config, translated."
    )
    made.append(
        inspect.Parameter(
            "speculative_config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, block]
        )
    )

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**arguments: Any) -> None:
            flags = {parameter.name: arguments.pop(parameter.name) for parameter in made}
            command(flags=flags, **arguments)

        own = [p for p in inspect.signature(command).parameters.values() if p.name != "flags"]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature([*own, *made])  # type: ignore[attr-defined]
        return run

    return decorate


def flag(name: str, panel: str | None) -> Any:
    """The typer annotation of one option."""
    field = OPTIONS[name]
    spelled = "--" + name.replace("_", "-")
    kind = value_kind(name)
    if kind == "true | false":
        spelled += f"/--no-{spelled.removeprefix('--')}"
    spellings = [spelled]
    # The full name of a server's address only tells it from the others' where they meet.
    short = name.removeprefix("target_").removeprefix("draft_")
    if panel is None and name.endswith("_listen") and short != name:
        spellings.append("--" + short.replace("_", "-"))
    option = typer.Option(
        *spellings,
        metavar=kind,
        help=f"{field.description} (default: {default_text(name)})",
        rich_help_panel=panel,
        show_default=False,
    )
    value: Any = bool if kind == "true | false" else str
    return Annotated[value | None, option]
