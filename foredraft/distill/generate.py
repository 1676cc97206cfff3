"""The target writes the training text, and what it thought of every token is kept.

A shard is one batch of conversations answered side by side: its file is written in one go, and a resumed run makes the
shards that are missing. Every shard follows from (seed, shard number) and from the shards before it.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel, PreTrainedTokenizerBase

from foredraft.distill.files import write_whole
from foredraft.distill.prompts import Conversation, follow_up
from foredraft.distill.prune import head_weight
from foredraft.engine.loading import LoadedModel
from foredraft.sampling.coupled import draw
from foredraft.sampling.params import SamplingParams
from foredraft.sampling.warpers import warp

ATTENTION = "foredraft_distill"
# Of five shards four answer fresh prompts and one follows up on their replies.
POOL = 4
TEMPERATURES = (0.0, 0.7, 1.0)
# Training text is drawn among so many tokens: a full row of noise costs more, and hardly ever draws another one.
LIKELIEST = 64
HELD_OUT_TOKENS = 128
# Draws from logits [B, V], given which replies the rows are and the positions of the tokens drawn: int64 [B].
Pick = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Text:
    """Some of the target's replies, and what it thought of every token.

    `tokens` int32 [S, L] are prompts and replies, padded on the right with zeros; reply i is
    `tokens[i, prompt_lengths[i] : lengths[i]]`, drawn at `temperatures[i]`. `hidden` float16 [R, H] has a row for every
    token of all replies, one reply after the other: the target's last hidden state before that token. Its product with
    the head gives the logits of all tokens, and is smaller than the logits of many.
    """

    tokens: Tensor
    prompt_lengths: Tensor
    lengths: Tensor
    temperatures: Tensor
    hidden: Tensor

    def save(self, path: Path) -> None:
        """Write the file in one go: it is there completely or not at all."""
        write_whole(path, save({name: getattr(self, name) for name in self.__slots__}))

    def replies(self) -> list[Tensor]:
        """The tokens of every reply."""
        ends = zip(self.prompt_lengths.tolist(), self.lengths.tolist(), strict=True)
        return [self.tokens[i, start:end] for i, (start, end) in enumerate(ends)]

    @classmethod
    def load(cls, path: Path) -> "Text":
        """Read a shard."""
        tensors = load_file(path)
        return cls(**{name: tensors[name] for name in cls.__slots__})


class BatchCache:
    """Keys and values of a batch whose rows grow in step; `mask` [B, 1, 1, L] hides a row's padding."""

    def __init__(self, model: PreTrainedModel, rows: int, length: int) -> None:
        config = model.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, rows, heads, length, size)
        self.keys = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.values = torch.zeros_like(self.keys)
        self.mask = torch.zeros(rows, 1, 1, length, dtype=model.dtype, device=model.device)
        self.length = 0

    def keep(self, rows: Tensor) -> Tensor:
        """Drop all but `rows`, rising; returns them in the order they now have: the last ones fill the gaps."""
        count = len(rows)
        order = torch.arange(count, device=rows.device)
        gaps = order[~torch.isin(order, rows)]
        order[gaps] = movers = rows[rows >= count]
        for held in (self.keys, self.values):
            for layer in held:
                layer[gaps, :, : self.length] = layer[movers, :, : self.length]
        self.keys, self.values, self.mask = self.keys[:, :count], self.values[:, :count], self.mask[order]
        return order


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    batch_cache: BatchCache,
    scaling: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Write `key` and `value` [B, Hk, T, D] behind what the cache holds, and let `query` [B, H, T, D] attend to it all.

    The query heads of one key head are packed into the query axis: stock attention would copy the keys for each.
    """
    rows, heads, new, size = query.shape
    key_heads, start = key.shape[1], batch_cache.length
    end, layer = start + new, cast(int, module.layer_idx)
    keys, values = batch_cache.keys[layer, :, :, :end], batch_cache.values[layer, :, :, :end]
    keys[:, :, start:], values[:, :, start:] = key, value
    mask = batch_cache.mask[..., :end]
    if new > 1:
        mask = mask + torch.full((new, end), -torch.inf, dtype=mask.dtype, device=mask.device).triu(start + 1)
        mask = mask.repeat(1, 1, heads // key_heads, 1)
    packed = query.reshape(rows, key_heads, -1, size)
    output = functional.scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=scaling)
    return output.reshape(rows, heads, new, size).transpose(1, 2), None


AttentionInterface.register(ATTENTION, attend)


def render(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> list[int]:
    """The token ids of a conversation, up to where the reply begins."""
    if tokenizer.chat_template is None:
        return list(tokenizer(conversation[-1]["content"] + "\n")["input_ids"])
    encoded: Any = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])


class Writer:
    """Writes shards `shard-00000.safetensors`, ... into a directory; the target must have a tokenizer."""

    def __init__(
        self,
        target: LoadedModel,
        directory: Path,
        *,
        rows: int,
        max_new_tokens: int,
        max_prompt_tokens: int = 224,
        seed: int = 0,
    ) -> None:
        self._target = target
        self._model = target.model
        self._tokenizer = cast(PreTrainedTokenizerBase, target.tokenizer)
        self._directory = directory
        self._rows = rows
        self._max_new_tokens = max_new_tokens
        self._max_prompt_tokens = max_prompt_tokens
        self._seed = seed
        directory.mkdir(parents=True, exist_ok=True)

    def write(self, prompts: Iterator[Conversation]) -> Iterator[Path]:
        """Yields the path of every shard, in order, until the prompts run out; shards that exist are not made again."""
        pool: list[list[Conversation]] = []
        for number in itertools.count():
            if number % (POOL + 1) == 0:
                pool = self._next_pool(prompts)
                if not pool:
                    return
            path = self._directory / f"shard-{number:05}.safetensors"
            if not path.exists():
                fresh = number % (POOL + 1)
                batch = pool[fresh % len(pool)] if fresh < POOL else self._follow_ups(number, pool)
                self._reply(batch, seed=self._seed * 1_000_003 + number).save(path)
            yield path

    def held_out(self, conversations: Sequence[Conversation], temperature: float, name: str) -> Text:
        """Replies for measuring, kept as file `name`: drawn by coupled sampling with seed 0, reply i as sample i."""
        path = self._directory / f"{name}.safetensors"
        if not path.exists():
            params, limit = SamplingParams(temperature=temperature), min(HELD_OUT_TOKENS, self._max_new_tokens)
            prompts = [render(self._tokenizer, conversation) for conversation in conversations]
            prompts = [prompt for prompt in prompts if len(prompt) <= self._max_prompt_tokens]

            def pick(logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
                return coupled_draws(logits, params, rows, positions, self._target.vocabulary_size)

            self._decode(prompts, torch.full((len(prompts),), temperature), pick, limit, fewest=0).save(path)
        return Text.load(path)

    def _reply(self, conversations: Sequence[Conversation], seed: int) -> Text:
        prompts = [render(self._tokenizer, conversation) for conversation in conversations]
        prompts = [prompt for prompt in prompts if len(prompt) <= self._max_prompt_tokens]
        chosen = random.Random(seed).choices(TEMPERATURES, (0.35, 0.4, 0.25), k=len(prompts))
        temperatures, generator = torch.tensor(chosen), torch.Generator().manual_seed(seed)

        def pick(logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
            values, ids = logits.topk(min(LIKELIEST, logits.shape[-1]))
            noise = -torch.empty(values.shape).exponential_(generator=generator).log()
            scores = values.cpu() + temperatures[rows, None] * noise
            return ids.cpu().gather(1, scores.argmax(-1, keepdim=True))[:, 0]

        # The last few rows would make small, slow batches: their replies end there.
        return self._decode(prompts, temperatures, pick, self._max_new_tokens, fewest=len(prompts) // 6)

    def _next_pool(self, prompts: Iterator[Conversation]) -> list[list[Conversation]]:
        # Batches of prompts of like length, in shuffled order: less padding.
        fresh = sorted(itertools.islice(prompts, POOL * self._rows), key=lambda c: len(render(self._tokenizer, c)))
        batches = [fresh[i : i + self._rows] for i in range(0, len(fresh), self._rows)]
        random.Random(self._seed).shuffle(batches)
        return batches

    def _follow_ups(self, number: int, pool: list[list[Conversation]]) -> list[Conversation]:
        rng = random.Random(self._seed + number)
        found = []
        for step, batch in enumerate(pool):
            text = Text.load(self._directory / f"shard-{number - POOL + step:05}.safetensors")
            ends = zip(text.tokens.tolist(), text.prompt_lengths.tolist(), text.lengths.tolist(), strict=True)
            by_prompt = {tuple(render(self._tokenizer, conversation)): conversation for conversation in batch}
            for tokens, start, end in ends:
                conversation = by_prompt.get(tuple(tokens[:start]))
                if conversation is not None and tokens[end - 1] in self._target.eos_token_ids and 8 < end - start < 120:
                    reply = str(self._tokenizer.decode(tokens[start : end - 1]))
                    found.append(follow_up(conversation, reply, rng))
        rng.shuffle(found)
        found = [c for c in found if len(render(self._tokenizer, c)) <= self._max_prompt_tokens]
        return found[: self._rows] or pool[0]

    @torch.inference_mode()
    def _decode(self, prompts: list[list[int]], temperatures: Tensor, pick: Pick, limit: int, fewest: int) -> Text:
        """Replies until they end or are `limit` tokens long, or only `fewest` have not ended."""
        model, count = self._model, len(prompts)
        head = head_weight(model)
        model.set_attn_implementation(ATTENTION)
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        width = int(lengths.max())
        cache = BatchCache(model, count, width + limit)
        hidden = self._read(prompts, cache)
        tokens = torch.zeros(count, width + limit, dtype=torch.int32)
        for i, prompt in enumerate(prompts):
            tokens[i, : len(prompt)] = torch.tensor(prompt)
        rows, ends = torch.arange(count), lengths.clone()
        steps: list[tuple[Tensor, Tensor]] = []
        eos = torch.tensor(self._target.eos_token_ids)
        for _ in range(limit):
            logits = functional.linear(hidden, head).float()
            drawn = pick(logits, rows, ends[rows])
            steps.append((rows, hidden.half().cpu()))
            tokens[rows, ends[rows]] = drawn.int()
            ends[rows] += 1
            alive = (~torch.isin(drawn, eos)).nonzero()[:, 0]
            if len(alive) <= fewest:
                break
            if len(alive) < len(rows):
                alive = cache.keep(alive.to(model.device)).cpu()
                rows, drawn = rows[alive], drawn[alive]
            hidden = self._forward(drawn[:, None], (ends[rows] - 1)[:, None], cache)
        owners, states = (torch.cat(parts) for parts in zip(*steps, strict=True))
        tokens = tokens[:, : int(ends.max())].clone()
        return Text(tokens, lengths, ends, temperatures, states[owners.argsort(stable=True)])

    def _read(self, prompts: list[list[int]], cache: BatchCache) -> Tensor:
        """Fills the cache with the prompts, their common beginning once; returns the last hidden states [B, H]."""
        shared = min(_common_prefix(prompts), min(len(prompt) for prompt in prompts) - 1)
        if shared > 0:
            one = BatchCache(self._model, 1, shared)
            self._forward(torch.tensor([prompts[0][:shared]]), torch.arange(shared)[None], one)
            cache.keys[..., :shared, :] = one.keys
            cache.values[..., :shared, :] = one.values
            cache.length = shared
        width = max(len(prompt) for prompt in prompts)
        padding = [width - len(prompt) for prompt in prompts]
        for i, size in enumerate(padding):
            # Not -inf: padding that sees nothing but padding would be not a number, and that spreads.
            cache.mask[i, ..., shared : shared + size] = torch.finfo(cache.mask.dtype).min / 2
        ids = torch.tensor([[0] * p + prompt[shared:] for p, prompt in zip(padding, prompts, strict=True)])
        positions = (torch.arange(shared, width) - torch.tensor(padding)[:, None]).clamp(min=0)
        return self._forward(ids, positions, cache)

    def _forward(self, ids: Tensor, positions: Tensor, cache: BatchCache) -> Tensor:
        device = self._model.device
        output = self._model.base_model(
            input_ids=ids.to(device),
            position_ids=positions.to(device),
            attention_mask=None,
            use_cache=False,
            batch_cache=cache,
        )
        cache.length += ids.shape[1]
        hidden: Tensor = output.last_hidden_state[:, -1]
        return hidden


@torch.inference_mode()
def token_counts(texts: Iterable[Text], head: Tensor, stride: int = 8) -> Tensor:
    """How often every token occurs in the replies, or may: float64 [V].

    Little text says little about rare tokens, so what the target might have written instead counts as well: its
    distributions at every `stride`-th place are added, `stride`-fold. `head` is [V, H].
    """
    counts = torch.zeros(len(head), dtype=torch.float64)
    for text in texts:
        counts += torch.bincount(torch.cat(text.replies()).long(), minlength=len(head))
        for hidden in torch.split(text.hidden[::stride], 512):
            counts += stride * (hidden.to(head) @ head.T).softmax(-1).sum(0).double().cpu()
    return counts


def coupled_draws(
    logits: Tensor, params: SamplingParams, rows: Tensor, positions: Tensor, vocabulary_size: int
) -> Tensor:
    """Draws a token from each row of `logits` [B, V] as the services do, row i as sample `rows[i]`: int64 [B]."""
    draws = []
    for row, sample, position in zip(logits, rows.tolist(), positions.tolist(), strict=True):
        warped = warp(row[None], params, text=(), prompt_length=0, vocabulary_size=vocabulary_size)
        draws += draw(warped, params, sample_index=sample, positions=[position])
    return torch.tensor(draws)


def _common_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens all begin with."""
    different = (i for i, tokens in enumerate(zip(*prompts, strict=False)) if len(set(tokens)) > 1)
    return next(different, min(map(len, prompts)))
