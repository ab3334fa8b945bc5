"""Causal LMs of `transformers` as models of text: `hf:NAME`, a folder or a name of the hub."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from modalities.contract import Outside
from modalities.decoder.outside import OutsideDecoder, open_causal_lm
from modalities.decoder.tokenizers import open_tokenizer, spells
from modalities.text.model import CausalLM

__all__ = ["OUTSIDE"]

SENTENCE = "The pass key is 48213. Remember it."


def _claim(name: str) -> float:
    """A half where the tokenizer spells a sentence: one whose vocabulary is mostly another modality's claims more."""
    return 0.5 if spells(open_tokenizer(name), SENTENCE) else 0.0


def _load(name: str) -> tuple[nn.Module, bool]:
    """A folder of our own format is the zoo's model again, behind the folder's tokenizer."""
    import modalities.text.hf  # noqa: F401  the Auto classes know the format then

    model = open_causal_lm(name)
    if isinstance(decoder := model.base_model, CausalLM):
        decoder.config = replace(decoder.config, tokenizer=f"hf:{name}")
        return decoder, True
    return OutsideDecoder(model, name), True


OUTSIDE = Outside(_load, _claim)
