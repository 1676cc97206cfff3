"""The settings of the three services: one flat set of names for flags, environment, YAML file and README.

An option has one name. `max_draft_tokens` is the flag `--max-draft-tokens`, the variable
`FOREDRAFT_MAX_DRAFT_TOKENS` and the key `max_draft_tokens` of the YAML file; flags win over the environment, which wins
over the file, which wins over the defaults. What target and draft both have begins with `draft_` for the draft.
`python -m foredraft.config` prints the README's table of options.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

from foredraft import emulation
from foredraft.speculative_config import BLOCKS, suggest, translate
from foredraft.speculative_config import ConfigError as ConfigError

ENV_PREFIX = "FOREDRAFT_"
# Names in the environment that are no options of a service.
OTHER_VARIABLES = frozenset({"FOREDRAFT_CACHE", "FOREDRAFT_ADDRESS", "FOREDRAFT_TOKEN"})
# Kubernetes describes every Service to every container; one named foredraft-... makes such variables.
KUBERNETES_VARIABLE = re.compile(
    r".*_(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)


def check_address(address: str) -> str:
    """Return `address` if gRPC can listen on it or connect to it: "host:port", "[::1]:port" or "unix:path"."""
    if address.startswith("unix:") and len(address) > len("unix:"):
        return address
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError("must be host:port, such as 127.0.0.1:50051, or unix:/path/to/socket")
    return address


def check_metrics_address(address: str) -> str:
    """Return `address` if metrics can be served there: "host:port" or "[::1]:port"."""
    if address.startswith("unix:"):
        raise ValueError("must be host:port, such as 127.0.0.1:9464")
    return check_address(address)


def check_emulation(text: str) -> str:
    """Return `text` if it says how to emulate models."""
    emulation.parse(text)
    return text


def check_service(address: str) -> str:
    """As check_address, and "dns:///host:port": all addresses of that name are replicas."""
    if address.startswith("dns:"):
        name = address.rpartition("/")[2]
        if not address.startswith("dns:///") or name.startswith(":"):
            raise ValueError("must be dns:///host:port, such as dns:///targets.default.svc:50052")
        check_address(name)
        return address
    return check_address(address)


def split(addresses: Any) -> Any:
    """Addresses may come as one text with commas."""
    return [part.strip() for part in addresses.split(",")] if isinstance(addresses, str) else addresses


Address = Annotated[str, AfterValidator(check_address)]
Addresses = Annotated[
    tuple[Annotated[str, AfterValidator(check_service)], ...], BeforeValidator(split), Field(min_length=1)
]
Emulate = Annotated[str, AfterValidator(check_emulation)]
MetricsAddress = Annotated[str, AfterValidator(check_metrics_address)]
Dtype = Literal["auto", "float64", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
Mode = Literal["plain", "sequential", "overlapped"]


def together(name: str, value: object, other: str, other_value: object) -> None:
    """Raises ValueError if only one of two options is set."""
    if (value is None) != (other_value is None):
        missing, given = (name, other) if value is None else (other, name)
        raise ValueError(f"{given} needs {missing}")


class Settings(BaseModel):
    """What every service has. Made directly, it reads no environment: that is what `load` is for."""

    # A field whose option name differs from the attribute (`listen` of the target) has it as its alias.
    model_config = ConfigDict(frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True)

    grace_s: float = Field(30.0, ge=0, le=86400, description="Seconds that running requests get on SIGTERM.")
    max_message_bytes: int = Field(
        16 * 2**20, ge=2**16, le=2**30, description="Largest gRPC message that is accepted, in bytes."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="What is logged.")
    log_format: Literal["text", "json"] = Field("text", description="How: lines for people, or an object a line.")
    otlp_endpoint: str | None = Field(
        None, pattern="^https?://", description="OpenTelemetry collector (OTLP over gRPC) for traces; unset: no traces."
    )
    tls_cert: Path | None = Field(None, description="The server's certificate chain, PEM; read again when it changes.")
    tls_key: Path | None = Field(None, description="The key of tls_cert, PEM.")
    tls_client_ca: Path | None = Field(
        None, description="Authorities, PEM: clients must have a certificate signed by one of them."
    )
    insecure: bool = Field(False, description="Allow to listen without TLS where other machines can connect.")
    reflection: bool = Field(True, description="Whether the server describes its services to clients that ask.")

    @model_validator(mode="after")
    def complete(self) -> Self:
        """Check that what only works together is there together."""
        together("tls_cert", self.tls_cert, "tls_key", self.tls_key)
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key")
        return self


class ModelSettings(Settings):
    """What target and draft have."""

    emulate: Emulate | None = Field(
        None,
        description=f"Waits and a seeded hash instead of models, to measure all else; such as {emulation.EXAMPLE}.",
    )

    @property
    def emulation(self) -> emulation.Emulation:
        """What `emulate` says."""
        return emulation.parse(self.emulate) if self.emulate else emulation.Emulation()


def stand_in(values: Any, side: Literal["target", "draft"], option: str) -> Any:
    """`values` with the option that names the model of `side` set, if that is emulated. Raises ValueError if it was."""
    if not isinstance(values, dict) or not isinstance(values.get("emulate"), str):
        return values
    try:
        emulated = getattr(emulation.parse(values["emulate"]), side) is not None
    except ValueError:  # The field's own check tells.
        return values
    if not emulated:
        return values
    if values.get(option) is not None:
        raise ValueError(f"{option} and emulate with {side}= exclude each other; leave one out")
    return {**values, option: "emulated"}


class TargetSettings(ModelSettings):
    """`foredraft target-server`."""

    model: str = Field(min_length=1, description="Target model: Transformers directory, hub id or .gguf file.")
    listen: Address = Field(
        "127.0.0.1:50052", validation_alias="target_listen", description="Where the target service listens."
    )
    health_listen: Address | None = Field(
        None, validation_alias="target_health_listen", description="Where health is served without TLS, for probes."
    )
    metrics_listen: MetricsAddress | None = Field(
        None,
        validation_alias="target_metrics_listen",
        description="Where Prometheus metrics are served; unset: nowhere.",
    )
    dtype: Dtype = Field("auto", description="Type of the target's weights; auto: bfloat16 where it is fast.")
    device: Device = Field("auto", description="Where the target runs; auto: cuda if there is one.")
    tensor_parallel_size: int = Field(1, ge=1, le=64, description="GPUs that the target is split over.")
    max_model_len: int | None = Field(
        None, ge=2, description="Most tokens of prompt and output; unset: the model's context, at most 4096."
    )
    max_sessions: int = Field(16, ge=1, le=4096, description="Sessions whose keys and values the target keeps.")
    queue_timeout_s: float = Field(
        10.0, ge=0, description="Seconds a session waits for one of max_sessions; then it gets RESOURCE_EXHAUSTED."
    )
    threads: int | None = Field(None, ge=1, le=1024, description="CPU threads of the target; unset: torch decides.")
    prefill_chunk: int = Field(256, ge=1, description="Prompt tokens of a session that one pass of the target reads.")
    batch_invariant: bool = Field(
        False, description="Same bits for a token whatever else is computed with it; a plain step costs more."
    )
    idle_timeout_s: float = Field(
        600.0, gt=0, validation_alias="target_idle_timeout_s", description="Seconds until a silent session is closed."
    )

    @model_validator(mode="before")
    @classmethod
    def emulated(cls, values: Any) -> Any:
        """An emulated target needs no model."""
        return stand_in(values, "target", "model")


class DraftSettings(ModelSettings):
    """`foredraft draft-server`."""

    draft_model: str | None = Field(None, description="Draft model: Transformers directory, hub id or .gguf file.")
    drafter: Literal["model", "ngram", "combined"] | None = Field(
        None,
        description="What drafts if the request does not say; combined: n-grams where the text repeats two tokens, "
        "else the model; unset: combined if there is a draft model, else ngram.",
    )
    draft_layers: int | None = Field(
        None, ge=1, description="Keep only this many first layers of the draft model: a model as its own draft."
    )
    listen: Address = Field(
        "127.0.0.1:50053", validation_alias="draft_listen", description="Where the draft service listens."
    )
    health_listen: Address | None = Field(
        None, validation_alias="draft_health_listen", description="Where health is served without TLS, for probes."
    )
    metrics_listen: MetricsAddress | None = Field(
        None, validation_alias="draft_metrics_listen", description="As target_metrics_listen, for the draft."
    )
    dtype: Dtype = Field("auto", validation_alias="draft_dtype", description="Type of the draft's weights.")
    device: Device = Field("auto", validation_alias="draft_device", description="Where the draft runs.")
    max_model_len: int | None = Field(
        None, ge=2, validation_alias="draft_max_model_len", description="As max_model_len, for the draft."
    )
    max_sessions: int = Field(
        16, ge=1, le=4096, validation_alias="draft_max_sessions", description="As max_sessions, for the draft."
    )
    threads: int | None = Field(
        None, ge=1, le=1024, validation_alias="draft_threads", description="CPU threads of the draft."
    )
    prefill_chunk: int = Field(
        256, ge=1, validation_alias="draft_prefill_chunk", description="As prefill_chunk, for the draft."
    )
    branches: int = Field(6, ge=1, le=64, description="Verdicts of a round for which the draft prepares an answer.")
    ngram_max: int = Field(
        3, ge=1, le=32, description="Longest run of last tokens that is looked up in the text; combined: at least 2."
    )
    ngram_min: int = Field(
        1, ge=1, le=32, description="Shortest run of last tokens that is looked up in the text; combined: at least 2."
    )
    idle_timeout_s: float = Field(
        600.0, gt=0, validation_alias="draft_idle_timeout_s", description="Seconds until a silent session is closed."
    )

    @model_validator(mode="before")
    @classmethod
    def emulated(cls, values: Any) -> Any:
        """An emulated draft needs no model."""
        return stand_in(values, "draft", "draft_model")

    @model_validator(mode="after")
    def resolve(self) -> Self:
        """Check what concerns several fields, and decide the default drafter."""
        if self.drafter is None:
            object.__setattr__(self, "drafter", "ngram" if self.draft_model is None else "combined")
        if self.draft_model is None and self.drafter != "ngram":
            raise ValueError(f"drafter: {self.drafter} needs draft_model")
        if self.draft_model is None and self.draft_layers is not None:
            raise ValueError(
                "draft_layers needs draft_model (give the target's model to draft with its own first layers)"
            )
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"ngram_min must be at most ngram_max, not {self.ngram_min} > {self.ngram_max}")
        return self


class OrchestratorSettings(Settings):
    """`foredraft orchestrator`."""

    listen: Address = Field("127.0.0.1:50051", description="Where the public API listens.")
    metrics_listen: MetricsAddress | None = Field(None, description="As target_metrics_listen, for the orchestrator.")
    health_listen: Address | None = Field(None, description="Where health is served without TLS, for probes.")
    target: Addresses = Field(
        ("127.0.0.1:50052",),
        description="Addresses of target services with the same model; dns:///host:port: all addresses of that name.",
    )
    draft: Addresses | None = Field(
        ("127.0.0.1:50053",), description="Addresses of draft services, as for target; null: none."
    )
    mode: Mode = Field("overlapped", description="How draft and target work together if the request does not say.")
    speculation_enabled: bool = Field(True, description="Whether to speculate at all; false: always plain decoding.")
    max_draft_tokens: int = Field(4, ge=0, le=64, description="Most draft tokens of a round.")
    target_accept_rate: float | None = Field(
        None, ge=0, le=1, description="Draft only as far as the predicted accepted / drafted stays at least this."
    )
    max_new_tokens_limit: int | None = Field(
        None, ge=1, description="Most tokens a request may ask for; unset: what the context holds."
    )
    max_prompt_tokens_limit: int | None = Field(
        None, ge=1, description="Most tokens a prompt may have; unset: what the context holds."
    )
    target_wait_s: float = Field(10.0, ge=0, description="Seconds a request waits for a target that is gone.")
    target_silence_s: float = Field(
        30.0, gt=0, description="Seconds without a sign of life after which a target counts as hung."
    )
    draft_timeout_s: float = Field(1.0, gt=0, description="Seconds a round waits for a proposal, then it goes plain.")
    max_concurrent_requests: int = Field(64, ge=1, description="Requests that are worked on at a time.")
    log_prompts: bool = Field(False, description="Whether prompts and outputs may appear in the logs.")
    trace_rounds: bool = Field(False, description="Whether traces have a span for every round.")
    auth_tokens: Path | None = Field(
        None, description="File of the tokens' hashes that let clients in (`foredraft token`); unset: no token needed."
    )
    tls_ca: Path | None = Field(
        None, description="Authorities, PEM, for the certificates of target and draft; unset: no TLS to them."
    )
    tls_client_cert: Path | None = Field(None, description="Certificate chain, PEM, to show to target and draft.")
    tls_client_key: Path | None = Field(None, description="The key of tls_client_cert, PEM.")

    @model_validator(mode="after")
    def complete_client(self) -> Self:
        """Check that what only works together is there together."""
        together("tls_client_cert", self.tls_client_cert, "tls_client_key", self.tls_client_key)
        if self.tls_client_cert is not None and self.tls_ca is None:
            raise ValueError("tls_client_cert needs tls_ca")
        return self


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
    """The table of all options for the README."""
    lines = ["| Option | Values | Default | Meaning |", "|---|---|---|---|"]
    for title, names in sections():
        lines.append(f"| **{title}** | | | |")
        for name in names:
            kind = value_kind(name).replace("|", "\\|")
            lines.append(f"| `{name}` | {kind} | {default_text(name)} | {OPTIONS[name].description} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown_table())
