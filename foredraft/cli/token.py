"""`foredraft token`: a token for the public API and what its server has to know of it."""

from typing import Annotated

import typer


def token(
    comment: Annotated[str, typer.Argument(help="Whose token it is; the server ignores it.")] = "",
) -> None:
    """Make a token, which a client needs, and the line for the server's file of auth_tokens."""
    from foredraft.serving.auth import new_token, token_hash

    made = new_token()
    print("token, for FOREDRAFT_TOKEN, shown only now:", made, sep="\n")
    print("line for the file of auth_tokens:")
    print(f"{token_hash(made).hex()} {' '.join(comment.split())}".rstrip())
