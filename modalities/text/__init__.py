"""Text: one causal LM for every position method, its data, its evaluators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from modalities.contract import Evaluators, Modality, Outside
from modalities.decoder.model import (
    Decoder,
    DecoderConfig,
    causal_lm_loss,
    check_tokenizer,
    decoder_cost,
    register_decoders,
    target_weight,
)
from modalities.decoder.tokenizers import open_tokenizer, spells
from modalities.loading import first_heldout
from modalities.text.data import TextDataConfig, build_loader
from modalities.text.tokenizers import load_tokenizer
from zoo.catalog import create_model, model_entry
from zoo.model import ZooModel

__all__ = ["MODALITY", "CausalLM", "TextConfig", "TextDataConfig"]


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


def build(name: str, options: Mapping[str, object], data: TextDataConfig) -> ZooModel:
    """A registered model at the data's context and tokenizer, whose files are read for an unknown
    vocabulary alone."""
    spec = data.tokenizer
    entry = model_entry(name).config
    check_tokenizer(options, spec)
    fields: dict[str, object] = {"train_context": data.context, "tokenizer": spec}
    # Options after "?" name special tokens and do not change the size of the vocabulary.
    same_file = spec.partition("?")[0] == entry["tokenizer"].partition("?")[0]
    if "vocab_size" not in options and not same_file:
        fields["vocab_size"] = load_tokenizer(spec).vocab_size
    return create_model(name, **fields | dict(options))


def _open_outside(name: str) -> tuple[nn.Module, bool]:
    """A causal LM of transformers; a folder of our own format is the zoo's model again, behind the
    folder's tokenizer."""
    import modalities.text.hf  # noqa: F401  the Auto classes know the format then
    from modalities.decoder.outside import OutsideDecoder, open_causal_lm

    model = open_causal_lm(name)
    decoder = getattr(model, "model", None)
    if isinstance(decoder, CausalLM):
        decoder.config = replace(decoder.config, tokenizer=f"hf:{name}")
        return decoder, True
    return OutsideDecoder(model, name), True


def _claim_outside(name: str) -> float:
    """A half where the tokenizer spells a sentence: one whose vocabulary is mostly another
    modality's claims more."""
    return 0.5 if spells(open_tokenizer(name), "The pass key is 48213. Remember it.") else 0.0


MODALITY = Modality(
    name="text",
    unit="tokens",
    model=CausalLM,
    config=TextDataConfig,
    build=build,
    loader=build_loader,
    heldout=partial(first_heldout, build_loader),
    loss=causal_lm_loss,
    weight=target_weight,
    cost=decoder_cost,
    evaluators=Evaluators("modalities.text.evaluators"),
    outside={"hf": Outside(_open_outside, _claim_outside)},
    headline=("free_generation", "bits_per_byte"),
    recipes="recipes.text",
    task="text-generation",
)
