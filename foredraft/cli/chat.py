"""`foredraft chat`: a conversation on the terminal."""

import signal
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from foredraft.cli.requests import Address, explain, plain_errors, with_credentials, with_sampling

DRAFTED = "green"
HELP = "Tokens in green were drafted. /reset starts over, /quit or Ctrl-D ends, Ctrl-C stops an answer."


@with_credentials
@with_sampling
def chat(
    options: dict[str, Any],
    credentials: dict[str, Any],
    address: Address = "127.0.0.1:50051",
    system: Annotated[str | None, typer.Option("--system", help="The system message.")] = None,
) -> None:
    """Talk to the model. Also works in a pipe: every line is a message. Exit code 1 if the last one failed."""
    from orchestrator.client import Client, GenerationError

    console = Console(highlight=False, soft_wrap=True)
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    with plain_errors(address):
        connection = Client(address, **credentials)
    with connection as client:
        with plain_errors(address):
            models = client.get_model(timeout=10)
        drafting = (
            models.degraded_reason or f"drafted by {models.draft.name if models.draft else 'n-grams of the text'}"
        )
        Console(stderr=True, highlight=False).print(f"{models.target.name}, {drafting}. {HELP}", style="dim")
        # Around them all, since flags may hold what no request can.
        with plain_errors(address):
            failed = False
            while (line := read_line()) not in (None, "/quit"):
                if line == "/reset":
                    messages, failed = list(start), False
                elif line:
                    messages.append({"role": "user", "content": line})
                    try:
                        messages.append({"role": "assistant", "content": answer(client, console, messages, options)})
                        failed = False
                    except GenerationError as error:
                        messages.pop()
                        failed = True
                        print(f"error: {explain(error, address)}", file=sys.stderr)
    if failed:
        raise typer.Exit(1)


def read_line() -> str | None:
    """The next message without blanks around it, None at the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        print()
        return ""


def answer(client: Any, console: Console, messages: list[dict[str, str]], options: dict[str, Any]) -> str:
    """Print an answer as it comes, then its statistics; returns its text, which Ctrl-C cuts off."""
    from orchestrator.client import GenerationError

    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True
        stream.close()

    with client.stream(messages=messages, **options) as stream:
        before = signal.signal(signal.SIGINT, stop)
        try:
            for chunk in stream:
                for text, drafted in pieces(client, chunk):
                    console.print(Text(text, DRAFTED if drafted else ""), end="")
        except GenerationError:
            if not stopped:
                raise
        finally:
            signal.signal(signal.SIGINT, before)
    console.print()
    completion = next(iter(stream.result.completions), None)
    if completion is None:
        return ""
    if completion.statistics is not None:
        Console(stderr=True, highlight=False).print(summary(completion), style="dim")
    return str(completion.text)


def pieces(client: Any, chunk: Any) -> list[tuple[str, bool]]:
    """The text of a chunk, divided into what was drafted and the target's own token after it."""
    accepted = sum(chunk.drafted)
    if 0 < accepted < len(chunk.token_ids):
        begin = client.detokenize(chunk.token_ids[:accepted])
        # Text may have been held back, by an unfinished character or stop string; then tokens and text do not match.
        if chunk.text.startswith(begin):
            return [(begin, True), (chunk.text[len(begin) :], False)]
    return [(chunk.text, 2 * accepted > len(chunk.token_ids))]


def summary(completion: Any) -> str:
    """A line about how fast an answer came and how speculation went."""
    statistics, count = completion.statistics, completion.completion_token_count
    decoding = statistics.total_time - statistics.time_to_first_token
    speed = f"{(count - 1) / decoding:.1f} tokens/s" if count > 1 and decoding > 0 else "one token"
    parts = [f"{count} tokens", speed, f"first after {statistics.time_to_first_token:.2f} s"]
    if statistics.drafted:
        parts.append(f"{statistics.accepted} of {statistics.drafted} drafted accepted")
        parts.append(f"{statistics.mean_accepted_length:.2f} tokens/round")
    if statistics.hits + statistics.misses:
        parts.append(f"{statistics.hits} of {statistics.hits + statistics.misses} verdicts foreseen")
    if statistics.degraded_reason:
        parts.append(statistics.degraded_reason)
    return ", ".join(parts)
