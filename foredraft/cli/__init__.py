"""The `foredraft` command. Commands import what they need when they run: `foredraft --help` loads no torch."""

import errno
import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from foredraft.cli import chat, demo, distill, generate, servers, token, top, up
from foredraft.config import ConfigError

# A full disk or quota, a file beyond the limit, a broken device, a closed pipe.
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)


class Commands(TyperGroup):
    """Reports what the user can mend as one sentence instead of a traceback."""

    def invoke(self, ctx: Any) -> object:
        """Run the command; exit code 2 for settings that cannot be used."""
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Speculative decoding for large language models as gRPC services.",
)
app.command("up")(up.up)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("demo")(demo.demo)
app.command("distill")(distill.distill)
app.command("assemble")(distill.assemble)
app.command("token")(token.token)
app.command("top")(top.top)
app.command("target-server")(servers.target_server)
app.command("draft-server")(servers.draft_server)
app.command("orchestrator")(servers.orchestrator)


def main() -> None:
    """Entry point of the `foredraft` script; exit code 1 if the output cannot be written."""
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        # Who has closed a pipe does not want to know.
        if error.errno != errno.EPIPE:
            print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
        # Python writes what is left once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)
