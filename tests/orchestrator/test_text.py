"""The text that a client sees is the text that the tokenizer makes of the tokens."""

import asyncio
import time
from functools import cache
from itertools import chain, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from orchestrator.text import Detokenizer, OutputText, StopMatcher, detokenize
from orchestrator.tokenizer import Tokenizer
from tests import tiny

TEXTS = [
    "Hello, world!",
    " leading and trailing spaces  ",
    "naïve café — 東京タワー、ありがとう。 한국어 עברית العربية",
    "👍🏽👩‍👩‍👧‍👦 🇫🇷 ends in emoji 🎉",
    "tabs\tand\nnewlines\r\n\n  indented",
    "combining: é ä, zero\x00byte",
]


@cache
def byte_level() -> tuple[Tokenizer, Backend]:
    backend = tiny.tokenizer().backend_tokenizer
    return build(backend), backend


@cache
def sentencepiece() -> tuple[Tokenizer, Backend]:
    """As Llama 2: spaces are "▁", a leading one is added, and characters without a token become byte tokens."""
    words = ["▁", "▁▁", "a", "b", "e", "l", "o", "▁a", "▁hello", "he", "llo", "wor", "ld", "東", "京", "é", ",", "ab"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    bpe = models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    backend = Backend(bpe)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return build(backend), backend


@cache
def metaspace() -> tuple[Tokenizer, Backend]:
    tokens = ["<unk>", "▁", "▁▁", "a", "b", "▁a", "▁hello", "he", "llo", "東", "😀", "a▁b"]
    backend = Backend(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    return build(backend), backend


@cache
def wordpiece() -> tuple[Tokenizer, Backend]:
    tokens = ["[UNK]", "hello", "##ing", "wor", "##ld", ".", ",", "東", "##京"]
    backend = Backend(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    return build(backend), backend


def build(backend: Backend) -> Tokenizer:
    return Tokenizer({"tokenizer.json": backend.to_str().encode(), "tokenizer_config.json": b"{}"})


def ids(kind) -> st.SearchStrategy[list[int]]:
    # Some ids lie beyond the vocabulary: such ids have no text.
    return st.lists(st.integers(0, kind()[1].get_vocab_size() + 2), max_size=40)


@pytest.mark.parametrize("kind", [byte_level, metaspace, wordpiece])
@settings(max_examples=150, deadline=None)
@given(data=st.data(), keep=st.booleans())
def test_text_of_random_tokens_is_what_the_tokenizer_decodes(kind, data, keep) -> None:
    tokenizer, backend = kind()
    token_ids = data.draw(ids(kind))
    expected = backend.decode(token_ids, skip_special_tokens=not keep)
    assert detokenize(tokenizer, token_ids, keep_special_tokens=keep) == expected


@settings(max_examples=150, deadline=None)
@given(data=st.data(), keep=st.booleans())
def test_text_of_a_sentencepiece_tokenizer_is_what_it_decodes_where_characters_are_whole(data, keep) -> None:
    tokenizer, backend = sentencepiece()
    vocabulary = backend.get_vocab()
    characters = st.text(max_size=3).map(lambda text: [vocabulary[f"<0x{b:02X}>"] for b in text.encode()])
    words = st.integers(259, len(vocabulary)).map(lambda i: [i])
    specials = st.integers(0, 2).map(lambda i: [i])
    token_ids = list(chain(*data.draw(st.lists(st.one_of(characters, words, specials), max_size=20))))
    expected = backend.decode(token_ids, skip_special_tokens=not keep)
    assert detokenize(tokenizer, token_ids, keep_special_tokens=keep) == expected


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_broken_bytes_of_a_sentencepiece_tokenizer_never_take_back_whole_characters(data) -> None:
    tokenizer, backend = sentencepiece()
    raw = data.draw(st.binary(min_size=1, max_size=20))
    token_ids = [backend.token_to_id("ab"), *(backend.token_to_id(f"<0x{byte:02X}>") for byte in raw)]
    assert detokenize(tokenizer, token_ids) == "ab" + raw.decode(errors="replace")


@pytest.mark.parametrize("kind", [byte_level, sentencepiece])
@pytest.mark.parametrize("text", TEXTS)
async def test_real_text_survives_and_every_piece_is_whole_characters(kind, text) -> None:
    tokenizer, _ = kind()
    token_ids = await tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    assert "".join(pieces) == text
    assert "�" not in "".join(pieces)
    assert detokenizer.flush() == ""


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30))
async def test_any_text_survives_a_byte_level_tokenizer(text) -> None:
    tokenizer, _ = byte_level()
    assert detokenize(tokenizer, await tokenizer.encode(text)) == text or "<|" in text


async def test_the_event_loop_goes_on_while_a_long_text_is_encoded() -> None:
    tokenizer, _ = byte_level()
    encoding = asyncio.create_task(tokenizer.encode("Once upon a time there was a model. " * 20_000))
    beats = [time.perf_counter()]
    while not encoding.done():
        await asyncio.sleep(0)
        beats.append(time.perf_counter())
    longest = max(after - before for before, after in pairwise(beats))
    assert longest < 0.7 * (beats[-1] - beats[0])


def test_a_character_comes_with_the_token_that_completes_it() -> None:
    tokenizer, backend = byte_level()
    token_ids = backend.encode("🎉").ids
    assert len(token_ids) == 4
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(token_id) for token_id in token_ids] == ["", "", "", "🎉"]


def test_an_unfinished_character_becomes_a_replacement_character_in_the_end() -> None:
    tokenizer, backend = byte_level()
    token_ids = backend.encode("a🎉").ids[:-1]
    assert detokenize(tokenizer, token_ids) == backend.decode(token_ids) == "a�"


STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3)


def cut_by_hand(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The rule in its plainest form: at the first character that completes a stop string, the longest one counts."""
    for end in range(1, len(text) + 1):
        completed = [stop for stop in stops if text[:end].endswith(stop)]
        if completed:
            longest = max(completed, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@settings(max_examples=300, deadline=None)
@given(chunks=st.lists(st.text(alphabet="abc", max_size=5), max_size=8), stops=STOPS, include=st.booleans())
def test_stop_strings_cut_at_the_same_place_however_the_text_is_split(chunks, stops, include) -> None:
    matcher = StopMatcher(stops, include_stop_string=include)
    shown = ""
    for chunk in chunks:
        shown += matcher.push(chunk)
        assert cut_by_hand("".join(chunks), stops, include)[0].startswith(shown)
    shown += matcher.flush()
    assert (shown, matcher.matched) == cut_by_hand("".join(chunks), stops, include)


@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet="abc", max_size=20), stops=STOPS)
def test_text_is_held_back_only_while_it_may_begin_a_stop_string(text, stops) -> None:
    matcher = StopMatcher(stops)
    shown = matcher.push(text)
    if matcher.matched is None:
        held = text.removeprefix(shown)
        may_begin = [n for n in range(len(text) + 1) for stop in stops if n < len(stop) and text.endswith(stop[:n])]
        assert len(held) == max(may_begin)


def test_the_token_that_completes_a_stop_string_is_the_last_one_counted() -> None:
    tokenizer, backend = byte_level()
    token_ids = backend.encode("one, STOP and more").ids
    output = OutputText(tokenizer, stop_strings=["STOP"])
    text, count = output.push(token_ids)
    assert text == "one, "
    assert output.stop_string == "STOP"
    assert "STOP" in backend.decode(token_ids[:count])
    assert "STOP" not in backend.decode(token_ids[: count - 1])


def test_a_stop_string_is_found_across_pushes_and_can_be_included() -> None:
    tokenizer, backend = byte_level()
    output = OutputText(tokenizer, stop_strings=["東京"], include_stop_string=True)
    token_ids = backend.encode("in 東京 today").ids
    shown = ""
    for token_id in token_ids:
        shown += output.push([token_id])[0]
    assert shown + output.finish() == "in 東京"


def test_text_held_back_comes_in_the_end() -> None:
    tokenizer, backend = byte_level()
    output = OutputText(tokenizer, stop_strings=["ready or not"])
    text, _ = output.push(backend.encode("are you ready or").ids)
    assert text == "are you "
    assert output.finish() == "ready or"


def test_special_tokens_have_text_only_if_they_are_kept() -> None:
    tokenizer, backend = byte_level()
    token_ids = [backend.token_to_id("<|im_start|>"), *backend.encode("hi").ids, backend.token_to_id("<|im_end|>")]
    assert detokenize(tokenizer, token_ids) == "hi"
    assert detokenize(tokenizer, token_ids, keep_special_tokens=True) == "<|im_start|>hi<|im_end|>"
