"""An engine without a model: forward passes are waits, and text and guesses follow from a seeded hash.

All else is the engine's own: slots, prefix reuse, rollback, trees and checks. The text is a chain: which of the
`LETTERS` follows is a hash of its position and the `CONTEXT` tokens before, and the target gives it nearly all
probability. The draft puts that token first with the probability `accept`, else at rank 2, 3, 4, ... with probability
1/2, 1/4, 1/8, ..., by the same hash, and its logits are the logarithms of just these probabilities: at temperature 0,
`accept` of the draft tokens that follow accepted ones are accepted, and what the draft believes of its alternatives is
true (if `accept` is at least 1/3). With a temperature it draws among them, and fewer are accepted. The hash depends on
nothing but the text, so any draft session guesses the same in any round.
"""

import hashlib
import math
import struct
import time
from collections.abc import Sequence

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from foredraft.emulation import Cost
from foredraft.engine.batch import Batch, Row
from foredraft.engine.engine import Engine
from foredraft.engine.errors import ModelError
from foredraft.engine.identity import vocabulary_hash
from foredraft.engine.loading import LoadedModel
from foredraft.engine.slots import SlotCache

# The prompt may be any text: tokens are bytes, in the alphabet of byte-level BPE.
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
LETTERS = [ALPHABET.index(letter) for letter in "abcdefghijklmnopqrstuvwxyz" + "Ġ"]
CONTEXT = 4
CONTEXT_LENGTH = 2**17
IMPOSSIBLE = -100.0
# Sleepers are woken about so much too late.
LATE_S = 0.0002
CHAT = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"


class EmulatedEngine(Engine):
    """See Engine. A pass takes what `cost` says, or as long as the interpreter needs for its logits, if that is more.

    Without `accept` it is the target's, else the draft's.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cost: Cost,
        accept: float | None,
        *,
        max_model_len: int,
        max_sessions: int,
        tree_size: int = 0,
    ) -> None:
        self.model, self.device = model, torch.device("cpu")
        self.max_model_len, self.max_sessions, self.tree_size = max_model_len, max_sessions, tree_size
        self.vocabulary_rows = len(ALPHABET)
        self.batch_invariant = True
        self._cost, self._accept = cost, accept
        self._scores = torch.tensor([0.0] if accept is None else rank_scores(accept))
        self._stride = tree_size + max_model_len
        # Without layers there is nothing to keep or to copy.
        self._cache = SlotCache(0, max_sessions, self._stride)
        self._forget()

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> list[Tensor]:
        """See Engine."""
        started = time.perf_counter()
        if not rows:
            raise ValueError("rows is empty; a forward needs at least one")
        ranked: list[list[int]] = []
        with self._restored_on_error(rows):
            batch = Batch(self.tree_size, self._stride)
            for row in rows:
                self._check_row(row)
                texts, nodes = len(row.slot.tokens), len(row.slot.nodes)
                batch.add(row)
                start = nodes if row.nodes is not None else texts
                ranked += (self._ranked(*self._context(row, start + index)) for index in row.want)
        logits = torch.full((len(ranked), self.vocabulary_rows), IMPOSSIBLE)
        if ranked:
            logits.scatter_(1, torch.tensor(ranked), self._scores.expand(len(ranked), -1))
        self.forwards += 1
        self.computed_tokens += len(batch.token_ids)
        wait_until(started + self._cost.seconds(len(batch.token_ids)))
        return list(logits.split_with_sizes([len(row.want) for row in rows]))

    def _context(self, row: Row, index: int) -> tuple[int, list[int]]:
        """The length of the text up to token or node `index` of the row's slot, and its last tokens."""
        slot = row.slot
        if row.nodes is None:
            return index + 1, slot.tokens[max(0, index + 1 - CONTEXT) : index + 1]
        prefix, path = slot.nodes[index].prefix, slot.paths[index]
        before = slot.tokens[max(0, prefix - CONTEXT) : prefix]
        return prefix + len(path), [*before, *(slot.tree_tokens[node] for node in path)][-CONTEXT:]

    def _ranked(self, length: int, context: Sequence[int]) -> list[int]:
        """The next tokens that are possible, likeliest first."""
        digest = hashlib.blake2b(struct.pack(f"<{1 + len(context)}I", length, *context), digest_size=12).digest()
        choice, guess, miss = struct.unpack("<III", digest)
        letter = choice % len(LETTERS)
        if self._accept is None:
            return [LETTERS[letter]]
        rank = 0 if guess < self._accept * 2**32 else 1 + min(leading_zeros(miss), len(LETTERS) - 2)
        return [LETTERS[(letter - rank + i) % len(LETTERS)] for i in range(len(LETTERS))]


def wait_until(instant: float) -> None:
    """Sleep until an instant of time.perf_counter; awake at the end, since sleepers are woken too late."""
    time.sleep(max(0.0, instant - LATE_S - time.perf_counter()))
    while time.perf_counter() < instant:
        pass


def leading_zeros(word: int) -> int:
    """Of 32 bits: n or more with probability 2^-n."""
    return 32 - word.bit_length()


def rank_scores(accept: float) -> list[float]:
    """The logarithm of the probability that the text goes on with the draft's token of each rank."""
    misses = [(1 - accept) * 0.5**rank for rank in range(1, len(LETTERS))]
    # The first is the draft's choice, however seldom it is right.
    first = max(accept, 1.01 * misses[0])
    return [math.log(p) if p > 0 else IMPOSSIBLE / 2 - rank for rank, p in enumerate([first, *misses])]


def load_emulated(
    cost: Cost, accept: float | None = None, *, max_model_len: int, max_sessions: int, tree_size: int = 0
) -> tuple[LoadedModel, Engine]:
    """An emulated target or, with `accept`, draft, whose name says that it is one. Raises ModelError."""
    if max_model_len > CONTEXT_LENGTH:
        raise ModelError(f"max_model_len is {max_model_len}; emulated models have a context of {CONTEXT_LENGTH}")
    nothing = PreTrainedModel(PreTrainedConfig())
    engine = EmulatedEngine(
        nothing, cost, accept, max_model_len=max_model_len, max_sessions=max_sessions, tree_size=tree_size
    )
    name = f"emulated target ({cost})" if accept is None else f"emulated draft ({cost}, accept {accept:g})"
    model = LoadedModel(
        model=nothing,
        tokenizer=tokenizer(),
        name=name,
        weights_hash=hashlib.sha256(name.encode()).hexdigest(),
        dtype="float32",
        device="cpu",
        eos_token_ids=(),
        vocabulary=tuple(ALPHABET),
        vocabulary_hash=vocabulary_hash(ALPHABET),
        parameter_count=0,
        context_length=CONTEXT_LENGTH,
    )
    return model, engine


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens."""
    backend = Tokenizer(models.BPE({letter: index for index, letter in enumerate(ALPHABET)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, clean_up_tokenization_spaces=False, chat_template=CHAT
    )
