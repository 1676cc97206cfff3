"""Bearer tokens. A server has only their hashes, in a file that may be replaced at any time."""

import hashlib
import hmac
import logging
import os
import re
import secrets
from pathlib import Path
from typing import Any

import grpc

from foredraft.errors import RequestError

logger = logging.getLogger(__name__)

LINE = re.compile(r"([0-9a-fA-F]{64})(\s.*)?")


class TokensError(Exception):
    """The file cannot be used; the message says where and why, and holds nothing of it."""


def new_token() -> str:
    """A random token of 256 bits, with a beginning by which it is known where it should not be."""
    return "foredraft_" + secrets.token_urlsafe(32)


def token_hash(token: str) -> bytes:
    """What the file has of a token, in hex: its SHA-256. Tokens are random, so there is nothing to stretch or salt."""
    return hashlib.sha256(token.encode()).digest()


class Tokens:
    """The tokens that a file lets in: one SHA-256 in hex a line, and after blanks a comment; also lines with #.

    It is read again when it has changed, which every call looks for. A file that cannot be used then is logged, and the
    last good one stays in force. Raises TokensError if it cannot be used at first.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # The file is looked at first: a change while it is read leads to another reading.
        self._stamp = self._look()
        self._hashes = self._read()
        if not self._hashes:
            logger.warning("there is no token in %s: every call will be refused", path)

    def refusal(self, details: grpc.HandlerCallDetails) -> RequestError | None:
        """UNAUTHENTICATED unless the metadata has "authorization: Bearer TOKEN" with a token that is let in."""
        metadata: Any = details.invocation_metadata or ()
        given = [value for key, value in metadata if key == "authorization"]
        scheme, _, token = str(given[0]).partition(" ") if len(given) == 1 else ("", "", "")
        if scheme.lower() != "bearer" or not token.strip():
            return _unauthenticated('this server needs a token: send the metadata "authorization: Bearer TOKEN"')
        if not self._knows(token.strip()):
            return _unauthenticated("the token is not one of those that this server lets in")
        return None

    def _knows(self, token: str) -> bool:
        self._refresh()
        digest = token_hash(token)
        # All are compared, so that the time tells nothing.
        return sum(hmac.compare_digest(digest, known) for known in self._hashes) > 0

    def _refresh(self) -> None:
        stamp = self._look()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._hashes = self._read()
            logger.info("read the changed tokens in %s: %d", self._path, len(self._hashes))
        except TokensError as error:
            logger.error("the tokens known so far stay: %s", error)

    def _look(self) -> tuple[int, ...] | None:
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _read(self) -> tuple[bytes, ...]:
        try:
            lines = self._path.read_text().splitlines()
        except OSError as error:
            raise TokensError(f"auth_tokens: cannot read {self._path}: {error.strerror}") from error
        except UnicodeDecodeError:
            raise TokensError(f"auth_tokens: {self._path} is no text") from None
        hashes = []
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            match = LINE.fullmatch(line.strip())
            if match is None:
                raise TokensError(
                    f"auth_tokens: line {number} of {self._path} must begin with the SHA-256 of a token in 64 hex "
                    "digits; `foredraft token` makes one"
                )
            hashes.append(bytes.fromhex(match[1]))
        return tuple(hashes)


def _unauthenticated(message: str) -> RequestError:
    return RequestError(grpc.StatusCode.UNAUTHENTICATED, message)
