"""What `generate` and `chat` have in common: sampling flags, the way to the server, and errors in plain words."""

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from foredraft.config import ConfigError

Address = Annotated[str, typer.Option("--address", envvar="FOREDRAFT_ADDRESS", help="Where the orchestrator listens.")]

# How to get in there. A token is taken from the environment only: every user of a machine sees the flags of all.
CREDENTIALS: dict[str, tuple[Any, str]] = {
    "tls_ca": (Path, "PEM file of the authorities for the server's certificate; with it, TLS is spoken."),
    "tls_client_cert": (Path, "Certificate chain, PEM, for a server that wants one."),
    "tls_client_key": (Path, "The key of tls-client-cert, PEM."),
    "insecure": (bool, "Send the token in FOREDRAFT_TOKEN without TLS, even to another machine."),
}

# Options of a request: type and meaning. Their ranges are the server's to check.
SAMPLING: dict[str, tuple[Any, str]] = {
    "temperature": (float, "Divides the logits; 0 is greedy decoding."),
    "top_k": (int, "Keep the k most probable tokens; 0 keeps all."),
    "top_p": (float, "Keep the most probable tokens with this total probability."),
    "min_p": (float, "Keep tokens at least this fraction as probable as the most probable one."),
    "repetition_penalty": (float, "Makes tokens of prompt and output less likely; 1 is off."),
    "presence_penalty": (float, "Subtracted from the logit of every token in the output."),
    "frequency_penalty": (float, "Subtracted from a token's logit for each of its occurrences in the output."),
    "logit_bias": (list[str], "ID=BIAS: added to the logit of this token. May be repeated."),
    "seed": (int, "Decides all random draws."),
    "method": (Literal["coupled", "rejection", "block"], "How draft tokens are verified."),
    "q_support": (int, "Tokens that the draft's distribution is cut to, for rejection and block."),
    "max_new_tokens": (int, "The most tokens to generate."),
    "min_new_tokens": (int, "No end before this many tokens."),
    "stop": (list[str], "A text that ends the output. May be repeated."),
    "stop_token_ids": (list[int], "A token that ends the output. May be repeated."),
    "ignore_eos": (bool, "Do not stop at the model's end-of-sequence token."),
    "mode": (Literal["plain", "sequential", "overlapped"], "How draft and target work together."),
    "drafter": (Literal["model", "ngram", "combined"], "What drafts."),
    "draft_tokens": (int, "Draft exactly this many tokens a round."),
    "max_draft_tokens": (int, "Draft at most this many tokens a round."),
}


def with_sampling(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command that takes `options` (only those that were given): it gets a flag for each of SAMPLING."""

    def run(options: dict[str, Any], **arguments: Any) -> None:
        given = {
            name: value for name, value in options.items() if value is not None and value != [] and value is not False
        }
        if "logit_bias" in given:
            given["logit_bias"] = dict(parse_bias(text) for text in given["logit_bias"])
        command(options=given, **arguments)

    return _with_flags(command, run, "options", SAMPLING, "Sampling and speculation")


def with_credentials(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command that takes `credentials`, those of a Client: it gets a flag for each of CREDENTIALS."""

    def run(credentials: dict[str, Any], **arguments: Any) -> None:
        command(credentials={**credentials, "token": os.environ.get("FOREDRAFT_TOKEN")}, **arguments)

    return _with_flags(command, run, "credentials", CREDENTIALS, "TLS")


def _with_flags(
    command: Callable[..., None], run: Callable[..., None], into: str, table: dict[str, tuple[Any, str]], panel: str
) -> Callable[..., None]:
    """`run` with the flags of `command` and of `table`, whose values it gets as the dict `into`, in place of that."""

    def flagged(**arguments: Any) -> None:
        values = {name: arguments.pop(name) for name in table}
        run(**{into: values}, **arguments)

    made = []
    for name, (kind, text) in table.items():
        spelled = "--" + name.replace("_", "-")
        option = typer.Option(spelled, help=text, show_default=False, rich_help_panel=panel)
        annotation = Annotated[bool, option] if kind is bool else Annotated[kind | None, option]
        default = False if kind is bool else None
        made.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation))
    own = [p for p in inspect.signature(command).parameters.values() if p.name != into]
    flagged.__name__, flagged.__doc__ = command.__name__, command.__doc__
    flagged.__signature__ = inspect.Signature([*own, *made])  # type: ignore[attr-defined]
    return flagged


def parse_bias(text: str) -> tuple[int, float]:
    """ "12=-1.5" as (12, -1.5)."""
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise ConfigError(f"logit_bias: must be a token id and a number, such as 12=-1.5, not {text}") from None


@contextmanager
def plain_errors(address: str) -> Iterator[None]:
    """Print what went wrong with a request in a sentence and exit: 2 for a bad request, 1 for anything else."""
    import grpc

    from orchestrator.client import GenerationError, TlsError

    try:
        yield
    except (ValueError, TlsError) as error:
        raise ConfigError(str(error)) from error
    except GenerationError as error:
        print(f"error: {explain(error, address)}", file=sys.stderr)
        raise typer.Exit(2 if error.status is grpc.StatusCode.INVALID_ARGUMENT else 1) from None


def explain(error: Any, address: str) -> str:
    """A GenerationError in words for a terminal."""
    import grpc

    if error.violations:
        return "\n".join(f"{v.field.removeprefix('sampling.')} {v.description}" for v in error.violations)
    # A server that answers and cannot serve says when to try again.
    if error.status is grpc.StatusCode.UNAVAILABLE and error.retry_after is None:
        if "handshake failed" in error.message or "verification check failed" in error.message:
            return f"what answers at {address} and the TLS flags do not fit together: {error.message}"
        if "Socket closed" in error.message:
            return f"what answers at {address} hangs up at once; if it speaks TLS, give --tls-ca"
        return (
            f"nothing answers at {address}; start the services with `foredraft up --model MODEL`, or say where they "
            "are with --address"
        )
    if error.status is grpc.StatusCode.UNAUTHENTICATED:
        return f"{error.message}; foredraft takes it from the environment variable FOREDRAFT_TOKEN"
    if error.status is grpc.StatusCode.UNIMPLEMENTED:
        return f"what answers at {address} is no orchestrator; say with --address where that listens"
    return str(error.message)
