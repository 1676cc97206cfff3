"""The target's tokenizer, built from the files that it streams."""

import asyncio
import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from foredraft.errors import Violation, invalid

# Longer texts are encoded in a thread, so that the event loop goes on.
SHORT_TEXT = 2000

BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


class TokenizerError(ValueError):
    """The files make no tokenizer that can be used here."""


class Tokenizer:
    """Text to tokens, tokens to bytes, and the model's chat template. Safe to use from several threads."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """Build the tokenizer out of files by name; raises TokenizerError if they do not make one."""
        self._transformers = _load(files)
        # Used directly: the wrapper sets truncation on it in every call, which fails when two threads meet.
        self._backend = self._transformers.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        decoder = self._backend.decoder
        types = set(_types(json.loads(decoder.__getstate__()))) if decoder is not None else set()
        self._byte_level = "ByteLevel" in types
        self._byte_fallback = "ByteFallback" in types

    async def encode(self, text: str) -> list[int]:
        """The tokens of a plain text, with those that the model wants around it (such as beginning-of-sequence)."""
        return await self._encode(text, add_special_tokens=True)

    async def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The tokens of a conversation up to where the assistant speaks; each message has `role` and `content`.

        Raises RequestError INVALID_ARGUMENT if the chat template refuses the messages, or if the model has none.
        """
        if self._transformers.chat_template is None:
            raise invalid([Violation("chat", "the model has no chat template; send the prompt as text or token_ids")])

        def render() -> str:
            text: str = self._transformers.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            return text

        try:
            text = await asyncio.to_thread(render)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            reason = f"the model's chat template refuses these messages: {error}"
            raise invalid([Violation("chat.messages", reason)]) from error
        return await self._encode(text, add_special_tokens=False)

    async def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        def encode() -> list[int]:
            # As a batch: for a single text the library keeps the GIL.
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids: list[int] = encoding.ids
            return ids

        return await asyncio.to_thread(encode) if len(text) > SHORT_TEXT else encode()

    def spelling(self, token_id: int) -> str:
        """The token as the tokenizer spells it; an id without a token is an empty string."""
        return self._backend.id_to_token(token_id) or ""

    def piece(self, token_id: int, previous: int | None) -> bytes:
        """The bytes of UTF-8 that a token adds to a text that ends with `previous`, or that it begins a text with."""
        spelling = self.spelling(token_id)
        if self._byte_level:
            try:
                return bytes(map(BYTE_OF_CHARACTER.__getitem__, spelling))
            except KeyError:  # An added token, spelled as it is.
                return spelling.encode()
        if self._byte_fallback and (match := BYTE_TOKEN.fullmatch(spelling)):
            byte = bytes.fromhex(match[1])
            if previous is not None or not byte.isascii():
                return byte
        # Any other kind of decoder: what it makes of a token depends at most on the one before.
        before = [] if previous is None else [previous]
        text: str = self._backend.decode([*before, token_id], skip_special_tokens=False)
        return text.removeprefix(self._backend.decode(before, skip_special_tokens=False)).encode()


def _load(files: Mapping[str, bytes]) -> Any:
    # Not AutoTokenizer, whose import brings torch. Imported here because it takes a second.
    from transformers import PreTrainedTokenizerFast

    if "tokenizer.json" not in files:
        raise TokenizerError(
            f"the target's tokenizer has no tokenizer.json, only {', '.join(sorted(files)) or 'nothing'}"
        )
    with tempfile.TemporaryDirectory(prefix="foredraft-tokenizer-") as directory:
        for name, data in files.items():
            (Path(directory) / Path(name).name).write_bytes(data)
        try:
            return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
        except Exception as error:  # The library raises bare Exceptions for a broken file.
            raise TokenizerError(f"the target's tokenizer cannot be read: {error}") from error


def _types(decoder: Mapping[str, Any]) -> Iterator[str]:
    """The kinds of decoder in a sequence of them."""
    yield decoder["type"]
    for part in decoder.get("decoders", ()):
        yield from _types(part)


def _byte_of_character() -> dict[str, int]:
    """How byte-level BPE spells bytes: printable Latin-1 characters as themselves, the rest from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_of_character()
