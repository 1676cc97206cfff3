"""From tokens to text that may be shown: whole characters only, and nothing that a stop string may still take back."""

import codecs
from collections.abc import Sequence

from orchestrator.tokenizer import Tokenizer


class Detokenizer:
    """Turns tokens into text one by one: whole characters as soon as they are complete, at a constant cost a token.

    All text together is what the tokenizer makes of all tokens at once. One exception: where a sentencepiece-like
    tokenizer finds a broken character in a run of byte tokens, it gives up the whole run; here only that character
    becomes U+FFFD, since the ones before it have been shown.
    """

    def __init__(self, tokenizer: Tokenizer, *, keep_special_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._keep_special_tokens = keep_special_tokens
        self._previous: int | None = None
        # Holds back the bytes of an incomplete character.
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The characters that this token completes."""
        skipped = token_id in self._tokenizer.special_ids and not self._keep_special_tokens
        if skipped or not self._tokenizer.spelling(token_id):
            return ""
        piece = self._tokenizer.piece(token_id, self._previous)
        self._previous = token_id
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """U+FFFD for the bytes of a character that will not be completed."""
        return self._utf8.decode(b"", final=True)


def detokenize(tokenizer: Tokenizer, token_ids: Sequence[int], *, keep_special_tokens: bool = False) -> str:
    """The text of these tokens."""
    detokenizer = Detokenizer(tokenizer, keep_special_tokens=keep_special_tokens)
    return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()


class StopMatcher:
    """Cuts a text at the first character that completes a stop string.

    If it completes several, the longest of them counts. How the text is split into pushes makes no difference.
    """

    def __init__(self, stop_strings: Sequence[str], *, include_stop_string: bool = False) -> None:
        self.matched: str | None = None
        self._stops = [_Prefix(stop) for stop in stop_strings]
        self._include = include_stop_string
        self._held = ""

    def push(self, text: str) -> str:
        """The text now known to come before any stop string; at a match, all that is left to show, then nothing."""
        if self.matched is not None or not self._stops:
            return "" if self._stops else text
        self._held += text
        for end in range(len(self._held) - len(text), len(self._held)):
            completed = [stop.text for stop in self._stops if stop.advance(self._held[end])]
            if completed:
                return self._cut(end + 1, max(completed, key=len))
        return self._release(len(self._held) - max(stop.length for stop in self._stops))

    def flush(self) -> str:
        """The text that was held back, when no more will come."""
        return self._release(len(self._held))

    def _cut(self, end: int, matched: str) -> str:
        self.matched = matched
        text = self._held[: end if self._include else end - len(matched)]
        self._held = ""
        return text

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text


class _Prefix:
    """How much of a stop string the text so far ends with (Knuth, Morris and Pratt 1977)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.length = 0
        # fallback[n]: the longest proper prefix of text that text[:n] ends with.
        self._fallback = [0, 0]
        length = 0
        for character in text[1:]:
            length = self._next(length, character)
            self._fallback.append(length)

    def advance(self, character: str) -> bool:
        """Append one character; whether it completes the stop string."""
        self.length = self._next(self.length, character)
        return self.length == len(self.text)

    def _next(self, length: int, character: str) -> int:
        while length and self.text[length] != character:
            length = self._fallback[length]
        return length + (self.text[length] == character)


class OutputText:
    """The text of one sample, as it may be shown."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop_strings: Sequence[str] = (),
        include_stop_string: bool = False,
        keep_special_tokens: bool = False,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, keep_special_tokens=keep_special_tokens)
        self._stops = StopMatcher(stop_strings, include_stop_string=include_stop_string)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.matched

    def push(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """New text, and how many of the tokens are output: all, or up to the one that completes a stop string."""
        text = ""
        for count, token_id in enumerate(token_ids, start=1):
            text += self._stops.push(self._detokenizer.push(token_id))
            if self.stop_string is not None:
                return text, count
        return text, len(token_ids)

    def finish(self) -> str:
        """What was held back, when no more tokens will come."""
        text = self._stops.push(self._detokenizer.flush())
        return text + self._stops.flush()
