"""What drafts should be, token by token: plain Transformers forwards over the whole text, and sampling on top."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from draft_service.drafter import Opening
from foredraft.sampling.coupled import draw
from foredraft.sampling.params import Method, SamplingParams
from foredraft.sampling.proposal import SparseQ, one_hot, propose
from foredraft.sampling.warpers import warp
from tests.tiny import VOCABULARY_SIZE, model, tokenizer

EOS = int(tokenizer().eos_token_id)
PROMPT = tokenizer().encode("The quick brown fox jumps over the lazy dog, and the lazy dog")
MAX_MODEL_LEN = 256
# A draft and what it is a perturbed copy of.
DRAFT: dict[str, Any] = {"dtype": torch.float64, "seed": 1, "noise": 0.1, "layers": 2, "hidden": 32}
TARGET: dict[str, Any] = {**DRAFT, "noise": 0.0}

WARPED = SamplingParams(
    temperature=0.9,
    top_k=60,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    logit_bias={40: 2.0, EOS: 3.0},
    seed=11,
    max_new_tokens=100,
    min_new_tokens=7,
    stop_token_ids=(50,),
)
PARAMETERS = {
    "coupled": SamplingParams(temperature=0.8, seed=7, max_new_tokens=100),
    "greedy": SamplingParams(temperature=0.0, max_new_tokens=100),
    "warped": WARPED,
    "greedy warped": replace(WARPED, temperature=0.0),
    "minimum length": SamplingParams(seed=7, max_new_tokens=100, min_new_tokens=6, logit_bias={EOS: 9.0}),
    "rejection": SamplingParams(temperature=0.8, seed=7, max_new_tokens=100, method=Method.REJECTION, q_support=16),
    "block warped": replace(WARPED, method=Method.BLOCK, q_support=8),
    "greedy rejection": SamplingParams(temperature=0.0, max_new_tokens=100, method=Method.REJECTION),
}

# Without an end of text, drafts have the length that is asked for.
COUPLED = replace(PARAMETERS["coupled"], ignore_eos=True)


def opening(params: SamplingParams, text: Sequence[int] = PROMPT, prompt_length: int | None = None) -> Opening:
    """A session on `text`."""
    return Opening(
        text=list(text),
        prompt_length=prompt_length or len(text),
        sample_index=3,
        params=params,
        eos_token_ids=frozenset({EOS}),
    )


class Reference:
    """A model without a cache."""

    def __init__(self, **options: Any) -> None:
        self.model: PreTrainedModel = model(**options)

    @torch.inference_mode()
    def draft(
        self, opened: Opening, text: Sequence[int], count: int, max_model_len: int = MAX_MODEL_LEN
    ) -> tuple[list[int], SparseQ | None]:
        """A fresh proposal of at most `count` tokens after `text`."""
        base = len(text)
        count = min(count, opened.room(base), max_model_len - base)
        tokens: list[int] = []
        rows = []
        # Draws for rejection and block verification go on beyond an end: see ModelSession.is_done.
        while len(tokens) < count and (opened.needs_q or not (tokens and opened.ends(tokens[-1]))):
            row = self._warped(opened, [*text, *tokens])
            position = base + len(tokens)
            if opened.needs_q:
                token, ids, probabilities = propose(
                    row[0], opened.params, sample_index=opened.sample_index, base=base, position=position
                )
                rows.append((ids, probabilities))
            else:
                (token,) = draw(row, opened.params, sample_index=opened.sample_index, positions=[position])
            tokens.append(token)
        return tokens, SparseQ.stack(rows) if rows else None

    @torch.inference_mode()
    def draw(self, opened: Opening, text: Sequence[int]) -> int:
        """The token after `text`, drawn with the noise of coupled sampling."""
        row = self._warped(opened, text)
        params = replace(opened.params, method=Method.COUPLED)
        return draw(row, params, sample_index=opened.sample_index, positions=[len(text)])[0]

    def _warped(self, opened: Opening, text: Sequence[int]) -> torch.Tensor:
        logits = self.model(input_ids=torch.tensor([text])).logits[0, -1:]
        return warp(
            logits,
            opened.params,
            text=text,
            prompt_length=opened.prompt_length,
            eos_token_ids=opened.eos_token_ids,
            vocabulary_size=VOCABULARY_SIZE,
        )


class CombinedReference(Reference):
    """Drafts what came after the latest earlier occurrence of the last 3 or 2 tokens, else as the model does."""

    def draft(
        self, opened: Opening, text: Sequence[int], count: int, max_model_len: int = MAX_MODEL_LEN
    ) -> tuple[list[int], SparseQ | None]:
        tokens = look_up(text, min(count, opened.room(len(text)), max_model_len - len(text)))
        if not tokens:
            return super().draft(opened, text, count, max_model_len)
        ends = [i for i, token in enumerate(tokens, start=1) if opened.ends(token)]
        tokens = tokens[: ends[0]] if ends else tokens
        return tokens, one_hot(tokens) if opened.needs_q else None


def look_up(text: Sequence[int], count: int) -> list[int]:
    """The next `count` tokens of a text that repeats itself; none if its last 2 tokens are new."""
    for length in (3, 2):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[len(text) - length :]:
                followed = text[end:]
                return [followed[i % len(followed)] for i in range(count)]
    return []
