"""Where settings come from: one flat set of names for flags, environment, YAML file and docs.

An option has one name. `max_draft_tokens` is the flag `--max-draft-tokens`, the variable
`FOREDRAFT_MAX_DRAFT_TOKENS` and the key `max_draft_tokens` of the YAML file; flags win over the environment, which wins
over the file, which wins over the defaults. What target and draft both have begins with `draft_` for the draft.
`python -m foredraft.config` prints the table of options in docs/configuration.md.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

from foredraft.settings import DraftSettings, ModelSettings, OrchestratorSettings, Settings, TargetSettings
from foredraft.speculative_config import BLOCKS, suggest, translate
from foredraft.speculative_config import ConfigError as ConfigError

ENV_PREFIX = "FOREDRAFT_"
# Names in the environment that are no options of a service.
OTHER_VARIABLES = frozenset({"FOREDRAFT_CACHE", "FOREDRAFT_ADDRESS", "FOREDRAFT_TOKEN"})
# Kubernetes describes every Service to every container; one named foredraft-... makes such variables.
KUBERNETES_VARIABLE = re.compile(
    r".*_(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)


SERVICES: tuple[type[Settings], ...] = (TargetSettings, DraftSettings, OrchestratorSettings)
S = TypeVar("S", bound=Settings)


def option_name(attribute: str, field: FieldInfo) -> str:
    """The name of a field for users."""
    return str(field.validation_alias or attribute)


def options(*services: type[Settings]) -> dict[str, FieldInfo]:
    """The options of these services by name."""
    return {option_name(a, field): field for service in services for a, field in service.model_fields.items()}


OPTIONS = options(*SERVICES)
SCHEMAS = [service.model_json_schema() for service in SERVICES]


def checked(layer: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The options of one source, its blocks translated; raises ConfigError for one that is not known."""
    known = [*OPTIONS, *BLOCKS]
    for name in layer:
        if name not in known:
            raise ConfigError(f"{source}: unknown option {name}{suggest(str(name), known)}")
    return translate(layer, source)


class Environment(EnvSettingsSource):
    """The FOREDRAFT_* variables; raises ConfigError for one that is not known, which pydantic-settings ignores."""

    def __call__(self) -> dict[str, Any]:
        names = {v: v.removeprefix(ENV_PREFIX).lower() for v in os.environ if v.startswith(ENV_PREFIX)}
        known = self.settings_cls.model_fields
        for variable, name in names.items():
            if name not in known and variable not in OTHER_VARIABLES and not KUBERNETES_VARIABLE.fullmatch(variable):
                hint = suggest(name, known, spell=lambda near: ENV_PREFIX + near.upper())
                raise ConfigError(f"unknown environment variable {variable}{hint}")
        return translate({n: v for n, v in super().__call__().items() if n in names.values()}, "environment")


class YamlFile(YamlConfigSettingsSource):
    """The file that a flag or variable names; raises ConfigError if it is missing, which pydantic-settings ignores."""

    def __call__(self) -> dict[str, Any]:
        path = self.current_state.get("config")
        try:
            content = self._read_file(Path(path)) if path else {}
        except OSError as error:
            raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not YAML: {error}") from None
        if not isinstance(content, dict):
            raise ConfigError(f"{path} must be a mapping from option names to values, such as `max_draft_tokens: 4`")
        return checked(content, str(path))


class Sources(BaseSettings):
    """What flags, environment and YAML file give, the strongest first; the services check the values."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_ignore_empty=True)

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags over environment over file."""
        return init_settings, Environment(settings_cls), YamlFile(settings_cls)


FIELDS: dict[str, Any] = dict.fromkeys(["config", *OPTIONS, *BLOCKS], (Any, None))
Layers = create_model("Layers", __base__=Sources, **FIELDS)


def collect(flags: Mapping[str, Any], config: Path | None = None) -> dict[str, Any]:
    """All options that were given, by name, the strongest source winning; raises ConfigError.

    `flags` maps option names to values, None for flags that were not given; `config`, else FOREDRAFT_CONFIG, is a YAML
    file. The text "null" is None, as in YAML.
    """
    given = checked({name: value for name, value in flags.items() if value is not None}, "command line")
    layers = Layers(**given, **({"config": config} if config else {}))
    return {n: None if v == "null" else v for n, v in layers.model_dump(exclude_unset=True, exclude={"config"}).items()}


def build(service: type[S], values: Mapping[str, Any]) -> S:
    """The settings of one service out of options that may belong to any; raises ConfigError with every problem."""
    try:
        return service.model_validate(values, extra="ignore", by_alias=True, by_name=False)
    except ValidationError as error:
        raise ConfigError("\n".join(describe(problem) for problem in error.errors())) from None


def describe(problem: Mapping[str, Any]) -> str:
    """One line about one pydantic error."""
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return str(message)
    name = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "missing":
        return f"{name} is required: --{name.replace('_', '-')}, {ENV_PREFIX}{name.upper()} or {name}: in the YAML file"
    return f"{name}: {message[0].lower()}{message[1:]}, not {problem['input']!r}"


def load(service: type[S], flags: Mapping[str, Any], config: Path | None = None) -> S:
    """The settings of one service; see `collect`. Raises ConfigError."""
    return build(service, collect(flags, config))


def value_kind(name: str) -> str:
    """What an option's values are, for users: `integer`, `auto | cpu | cuda`, ..."""
    schema = next(s["properties"][name] for s in SCHEMAS if name in s["properties"])
    schema = schema.get("anyOf", [schema])[0]
    if "enum" in schema:
        return " | ".join(schema["enum"])
    kind = str(schema["type"])
    return {"boolean": "true | false", "string": "text", "array": "addresses"}.get(kind, kind)


def default_text(name: str) -> str:
    """An option's default, for users."""
    field = OPTIONS[name]
    if field.is_required():
        return "required"
    if isinstance(field.default, tuple):
        return ", ".join(field.default)
    return "unset" if field.default is None else json.dumps(field.default).strip('"')


def sections() -> list[tuple[str, list[str]]]:
    """Option names under the heading of the services that have them."""
    shared, models = options(Settings), options(ModelSettings)
    titles = ("Target", "Draft", "Orchestrator")
    groups = [(t, [n for n in options(s) if n not in models]) for t, s in zip(titles, SERVICES, strict=True)]
    return [*groups, ("Target and draft", [n for n in models if n not in shared]), ("All services", list(shared))]


def markdown_table() -> str:
    """The table of all options for docs/configuration.md."""
    lines = ["| Option | Values | Default | Meaning |", "|---|---|---|---|"]
    for title, names in sections():
        lines.append(f"| **{title}** | | | |")
        for name in names:
            kind = value_kind(name).replace("|", "\\|")
            lines.append(f"| `{name}` | {kind} | {default_text(name)} | {OPTIONS[name].description} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown_table())
