"""The settings of the three services: their options, what values they take and which go together.

A field whose option has another name than the attribute has that as its alias; the target's `listen`, for example, is
`target_listen`.
`foredraft.config` says where values come from.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from foredraft import emulation


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
