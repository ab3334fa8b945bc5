"""The causal language model and its sizes. Importing it registers the models with the zoo."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from modalities.decoder.model import Decoder, DecoderConfig, register_decoders
from modalities.text.tokenizers import load_tokenizer


@dataclass(frozen=True)
class TextConfig(DecoderConfig):
    """`DecoderConfig` of text; `tokenizer` is a spec of `modalities.text.tokenizers`."""


class CausalLM(Decoder):
    """A decoder-only language model."""

    config_class = TextConfig
    modality = "text"

    def stream_text(
        self, prompt: str = "", *, max_new_tokens: int = 200, **sampling: float | None
    ) -> Iterator[str]:
        """What follows the prompt, yielded as it is written; `sampling` as in
        `modalities.decoder.generation.stream`."""
        from modalities.decoder.generation import stream_text

        tokenizer = load_tokenizer(self.config.tokenizer)
        ids = self.read(prompt)[0].tolist()
        ends = {"max_new_tokens": max_new_tokens, "eos_id": tokenizer.eos_id}
        return stream_text(self, ids, tokenizer.decode, **ends | sampling)  # type: ignore[arg-type]

    def read(self, text: str) -> Tensor:
        """(1, T) ids: BOS and the tokens of a text."""
        tokenizer = load_tokenizer(self.config.tokenizer)
        ids = [tokenizer.bos_id, *tokenizer.encode(text).tolist()]
        return torch.tensor([ids], device=self.device)


Fields = dict[str, object]

# What sizes share. The models that ship: columns of a prior are added to those of the heads, so
# that all methods have equal room for content.
TINY: Fields = dict(
    vocab_size=1024,
    tokenizer="bpe-1k",
    lanes="beside",
    train_context=256,
)
WORDS: Fields = dict(
    vocab_size=4096,
    tokenizer="bpe-4k",
    lanes="beside",
    train_context=512,
)
# They read bytes.
SMALL: Fields = dict(
    train_context=512,
)
# GOAT, C4: "a pre-norm GPT".
GOAT: Fields = dict(
    style="gpt2",
    vocab_size=50257,
    tokenizer="gpt2",
    train_context=2048,
)
# CABLE's tiny, small and medium, which it calls 44M, 124M and 334M. Its released code pads GPT-2's
# vocabulary.
CABLE: Fields = dict(
    style="gpt2",
    vocab_size=50304,
    tokenizer="gpt2",
    train_context=1024,
)
# BAM, FineWeb, the Mistral v0.3 vocabulary.
BAM: Fields = dict(
    vocab_size=32768,
    tokenizer="data/mistral-v0.3/tokenizer.json",
    tied=False,
    train_context=512,
)

# The sizes of the papers keep their names.
SIZES: dict[str, Fields] = {
    "tiny": TINY | dict(dim=128, num_layers=4, num_heads=4, hidden_dim=344),
    "small": SMALL | dict(dim=384, num_layers=6, num_heads=6, hidden_dim=1024),
    "lm": WORDS | dict(dim=192, num_layers=6, num_heads=6, hidden_dim=512),
    "125m": GOAT | dict(dim=768, num_layers=12, num_heads=12, hidden_dim=3072),
    "44m": CABLE | dict(dim=512, num_layers=6, num_heads=8, hidden_dim=2048),
    "124m": CABLE | dict(dim=768, num_layers=12, num_heads=12, hidden_dim=3072),
    "354m": CABLE | dict(dim=1024, num_layers=24, num_heads=16, hidden_dim=4096),
    "120m": BAM | dict(dim=768, num_layers=12, num_heads=16, hidden_dim=1536),
    "432m": BAM | dict(dim=1536, num_layers=14, num_heads=24, hidden_dim=3072),
    "1100m": BAM | dict(dim=2048, num_layers=15, num_heads=32, hidden_dim=8192),
}


def build_model(**config: object) -> CausalLM:
    """A decoder from the entries of a `TextConfig`."""
    return CausalLM(TextConfig(**config))  # type: ignore[arg-type]


# Every position method × SSMax on and off × size.
register_decoders("text", SIZES, TextConfig, build_model)
