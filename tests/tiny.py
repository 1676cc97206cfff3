"""Tiny random models with a real tokenizer, saved as Transformers directories, for tests of every part.

The tokenizer is a byte-level BPE, so any text survives encoding and decoding; it has a ChatML template and "<|im_end|>"
as end-of-sequence token. Weights follow from (seed, parameter name): a model with fewer `layers` is the bottom of the
one with more, and one with `noise` is a perturbed copy of the one without, so that both make believable drafts.
Idle layers change nothing but the time a forward takes.
"""

import zlib
from functools import cache
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCABULARY_SIZE = 320
EOS = "<|im_end|>"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "Once upon a time there was a small model that proposed tokens, and a large model that verified them.",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    "To be, or not to be, that is the question: whether it is nobler in the mind to suffer.",
]


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with `VOCABULARY_SIZE` tokens: specials, 256 bytes and a few merges."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    specials = [AddedToken(token, special=True) for token in ("<|endoftext|>", "<|im_start|>", EOS)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TEXT, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=EOS, clean_up_tokenization_spaces=False)
    fast.chat_template = CHATML
    return fast


def model(
    kind: str = "llama",
    dtype: torch.dtype | str = torch.float32,
    seed: int = 0,
    noise: float = 0.0,
    layers: int = 2,
    hidden: int = 64,
    padding_rows: int = 0,
    max_length: int = 512,
    idle_layers: int = 0,
) -> PreTrainedModel:
    """A random model. `kind`: llama, llama-tied, qwen2, gpt2 or mistral (sliding window of 24 tokens).

    `noise` is relative to each parameter's own standard deviation; 0.05 to 0.1 makes a useful draft. `padding_rows` are
    rows of the embedding beyond what the tokenizer knows. `idle_layers` (of Llama shapes) follow the `layers` and add
    nothing to the residual stream.
    """
    vocabulary_rows = VOCABULARY_SIZE + padding_rows
    eos = tokenizer().eos_token_id
    common = {"vocab_size": vocabulary_rows, "bos_token_id": None, "eos_token_id": eos}
    shape = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers + idle_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": max_length,
    }
    result: PreTrainedModel
    if kind in ("llama", "llama-tied"):
        result = LlamaForCausalLM(LlamaConfig(**common, **shape, tie_word_embeddings=kind == "llama-tied"))
    elif kind == "qwen2":
        result = Qwen2ForCausalLM(Qwen2Config(**common, **shape, tie_word_embeddings=False))
    elif kind == "mistral":
        result = MistralForCausalLM(MistralConfig(**common, **shape, sliding_window=24, tie_word_embeddings=False))
    elif kind == "gpt2":
        result = GPT2LMHeadModel(GPT2Config(**common, n_embd=hidden, n_layer=layers, n_head=4, n_positions=max_length))
    else:
        raise ValueError(f"unknown kind {kind!r}")
    _randomise(result, seed, noise)
    with torch.no_grad():
        for layer in result.base_model.layers[layers:] if idle_layers else ():
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return result.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype).eval()


def save_model(
    path: Path | str,
    kind: str = "llama",
    dtype: torch.dtype | str = torch.float32,
    seed: int = 0,
    noise: float = 0.0,
    layers: int = 2,
    hidden: int = 64,
    padding_rows: int = 0,
    max_length: int = 512,
    idle_layers: int = 0,
) -> Path:
    """Saves such a model and the tokenizer in the directory `path`, and returns it."""
    path = Path(path)
    model(kind, dtype, seed, noise, layers, hidden, padding_rows, max_length, idle_layers).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


@torch.no_grad()
def _randomise(result: PreTrainedModel, seed: int, noise: float) -> None:
    # Scaled so that attention and logits are far from uniform: a wrong mask or position then shows.
    for name, parameter in result.named_parameters():
        is_embedding = "wte" in name or "embed" in name or "wpe" in name
        if parameter.ndim < 2:
            scale = 0.1 if name.endswith("bias") else 0.0
        elif is_embedding:
            scale = 0.3 if result.config.tie_word_embeddings else 1.0
        else:
            scale = (3.0 if "lm_head" in name else 0.8) / result.config.hidden_size**0.5
        if scale == 0.0:
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode(), seed))
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        values += noise * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.copy_(values.mul_(scale))
