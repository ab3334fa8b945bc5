"""Text as the rest of the project knows it: building a model, its loss, data and evaluators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from torch import nn

from modalities.contract import Evaluators, Modality, Outside
from modalities.decoder.model import (
    batch_weight,
    causal_lm_loss,
    check_tokenizer,
    decoder_cost,
)
from modalities.loading import first_heldout
from modalities.text import HEADLINE, RECIPES_MODULE
from modalities.text.config import TextDataConfig
from modalities.text.data import build_loader
from modalities.text.model import CausalLM
from modalities.text.tokenizers import load_tokenizer
from modalities.tokenizers.outside import open_tokenizer, spells
from zoo.catalog import create_model, model_entry
from zoo.model import ZooModel


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
    # Imported so that the Auto classes know our format.
    import modalities.text.hf  # noqa: F401
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
    weight=batch_weight,
    cost=decoder_cost,
    evaluators=Evaluators("modalities.text.evaluators"),
    outside={"hf": Outside(_open_outside, _claim_outside)},
    headline=HEADLINE,
    recipes=RECIPES_MODULE,
    task="text-generation",
)
