"""`foredraft generate`: one completion on the terminal."""

import json
import sys
from dataclasses import asdict
from typing import Annotated, Any, Literal

import typer

from foredraft.cli.requests import Address, plain_errors, with_credentials, with_sampling
from foredraft.config import ConfigError

# What only the services can do.
SERVICE_ONLY = ("stop", "mode", "drafter", "max_draft_tokens")
DEFAULT_DRAFT_TOKENS = 4
DEFAULT_MAX_NEW_TOKENS = 256


@with_credentials
@with_sampling
def generate(
    options: dict[str, Any],
    credentials: dict[str, Any],
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - or nothing reads standard input.")] = None,
    address: Address = "127.0.0.1:50051",
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a user's message to a chat model.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything about the output as JSON.")] = False,
    sample_count: Annotated[int, typer.Option("--sample-count", help="How many samples to draw.")] = 1,
    logprobs: Annotated[int | None, typer.Option("--logprobs", help="With --json: so many logprobs a token.")] = None,
    backend: Annotated[
        Literal["service", "hf", "manual"],
        typer.Option("--backend", help="The services, or in this process: Transformers, or the plain algorithm."),
    ] = "service",
    model: Annotated[str | None, typer.Option("--model", help="For hf and manual: the target model.")] = None,
    draft_model: Annotated[str | None, typer.Option("--draft-model", help="For hf and manual: the draft.")] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="For hf and manual: the type of the weights.")] = "auto",
) -> None:
    """Generate text from PROMPT: at most 256 tokens, unless --max-new-tokens says otherwise."""
    if prompt in (None, "-"):
        if sys.stdin.isatty():
            raise ConfigError(
                'there is no prompt: give one, as in foredraft generate "Once upon a time", or pipe it in'
            )
        prompt = sys.stdin.read()
    if backend == "service":
        if model or draft_model:
            raise ConfigError("the services have their models already; leave --model and --draft-model out")
        request = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        from_service(address, credentials, {**request, **options}, sample_count, logprobs, as_json)
    else:
        if model is None:
            raise ConfigError(f"--backend {backend} needs --model, and --draft-model to speculate")
        refused = [name for name in SERVICE_ONLY if name in options]
        if refused or sample_count != 1 or logprobs is not None:
            raise ConfigError(f"--backend {backend} has no {', '.join(refused) or 'sample-count and logprobs'}")
        options.setdefault("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
        in_process(backend, str(prompt), chat, options, model, draft_model, dtype, as_json)


def from_service(
    address: str,
    credentials: dict[str, Any],
    options: dict[str, Any],
    sample_count: int,
    logprobs: int | None,
    as_json: bool,
) -> None:
    """Print what the services generate, as it comes if it is one text."""
    from orchestrator.client import Client

    with plain_errors(address), Client(address, **credentials) as client:
        if "max_new_tokens" not in options:
            limit = client.get_model().max_new_tokens_limit
            options["max_new_tokens"] = min(DEFAULT_MAX_NEW_TOKENS, limit or DEFAULT_MAX_NEW_TOKENS)
        if as_json or sample_count > 1:
            if logprobs is not None:
                options["logprobs"] = logprobs
            result = client.generate(**options, sample_count=sample_count)
            texts = [completion.text for completion in result.completions]
            print(json.dumps(asdict(result), ensure_ascii=False) if as_json else "\n---\n".join(texts))
            return
        with client.stream(**options) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
        print()


def in_process(
    backend: Literal["hf", "manual"],
    prompt: str,
    chat: bool,
    options: dict[str, Any],
    model: str,
    draft_model: str | None,
    dtype: str,
    as_json: bool,
) -> None:
    """Print what another backend generates in this process."""
    import random

    from foredraft.backends import hf, manual
    from foredraft.engine.errors import ModelError
    from foredraft.engine.loading import load
    from foredraft.errors import RequestError
    from foredraft.v1 import common_pb2
    from foredraft.validation import sampling_params

    k = options.pop("draft_tokens", DEFAULT_DRAFT_TOKENS) if draft_model else 0
    options["method"] = f"METHOD_{options.get('method', 'coupled').upper()}"
    sampling = {"seed": random.getrandbits(64), **options}
    try:
        target = load(model, dtype=dtype)
        draft = load(draft_model, dtype=dtype) if draft_model else target
        if target.tokenizer is None:
            raise ConfigError(f"{model} has no tokenizer")
        params = sampling_params(
            common_pb2.Sampling(**sampling), vocabulary_size=target.vocabulary_size, field_prefix=""
        )
        text = prompt
        if chat:
            messages = [{"role": "user", "content": prompt}]
            text = str(target.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        token_ids = target.tokenizer(text, add_special_tokens=not chat)["input_ids"]
        run = hf.generate if backend == "hf" else manual.generate
        result = run(target, draft, token_ids, params, k)
    except (ModelError, RequestError, ValueError) as error:
        raise ConfigError(str(error).removeprefix(".")) from error
    output = target.tokenizer.decode(result.token_ids, skip_special_tokens=True)
    print(
        json.dumps({"text": output, "seed": params.seed, **asdict(result)}, ensure_ascii=False) if as_json else output
    )
