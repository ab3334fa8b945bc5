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
        return torch.tensor(
            [[tokenizer.bos_id, *tokenizer.encode(text).tolist()]], device=self.device
        )


GPT2: dict[str, object] = dict(style="gpt2", vocab_size=50257, tokenizer="gpt2")
# Of the models that ship. Columns of a prior are added to those of the heads, so that all methods
# have equal room for content.
WORDS: dict[str, object] = dict(vocab_size=1024, tokenizer="bpe-1k", lanes="beside")

# The sizes of the papers keep their names; small reads bytes.
SIZES: dict[str, dict[str, object]] = {
    "tiny": WORDS | dict(dim=128, num_layers=4, num_heads=4, hidden_dim=344, train_context=256),
    "small": dict(dim=384, num_layers=6, num_heads=6, hidden_dim=1024, train_context=512),
    "lm": WORDS
    | dict(
        dim=192,
        num_layers=6,
        num_heads=6,
        hidden_dim=512,
        train_context=512,
        vocab_size=4096,
        tokenizer="bpe-4k",
    ),
    # GOAT, C4: "a pre-norm GPT"
    "125m": GPT2 | dict(dim=768, num_layers=12, num_heads=12, hidden_dim=3072, train_context=2048),
    # CABLE's tiny, small and medium, whose released code pads GPT-2's vocabulary; it calls them
    # 44M, 124M and 334M
    "44m": GPT2
    | dict(
        dim=512, num_layers=6, num_heads=8, hidden_dim=2048, train_context=1024, vocab_size=50304
    ),
    "124m": GPT2
    | dict(
        dim=768, num_layers=12, num_heads=12, hidden_dim=3072, train_context=1024, vocab_size=50304
    ),
    "354m": GPT2
    | dict(
        dim=1024, num_layers=24, num_heads=16, hidden_dim=4096, train_context=1024, vocab_size=50304
    ),
    # BAM, FineWeb, the Mistral v0.3 vocabulary
    "120m": dict(dim=768, num_layers=12, num_heads=16, hidden_dim=1536, train_context=512),
    "432m": dict(dim=1536, num_layers=14, num_heads=24, hidden_dim=3072, train_context=512),
    "1100m": dict(dim=2048, num_layers=15, num_heads=32, hidden_dim=8192, train_context=512),
}
for _name in ("120m", "432m", "1100m"):
    SIZES[_name] |= dict(vocab_size=32768, tokenizer="data/mistral-v0.3/tokenizer.json", tied=False)


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
    if (
        "vocab_size" not in options
        and spec.partition("?")[0] != entry["tokenizer"].partition("?")[0]
    ):
        fields["vocab_size"] = load_tokenizer(spec).vocab_size
    return create_model(name, **fields | dict(options))


def _open_outside(name: str) -> tuple[nn.Module, bool]:
    """A causal LM of transformers; a folder of our own format is the zoo's model again, behind the
    folder's tokenizer."""
    import modalities.text.hf  # noqa: F401  the Auto classes know the format then
    from modalities.decoder.outside import OutsideDecoder, open_causal_lm

    model = open_causal_lm(name)
    if isinstance(decoder := getattr(model, "model", None), CausalLM):
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
