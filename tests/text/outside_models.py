"""Small causal LMs of `transformers`, made on the spot: a Llama of a rope model's weights, GPT-2s,
tokenizers of each kind."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from modalities.decoder.llama import as_llama
from modalities.text.hf import fast_tokenizer
from recipes.targets import find_targets


def load(name):
    """The model behind `hf:NAME`, in float32."""
    return find_targets([f"hf:{name}"], {}, "cpu", "float32")[0].model


def llama_of(model, folder):
    """A folder with the Llama that computes what a rope model of the zoo does, and the zoo's
    tokenizer."""
    as_llama(model).save_pretrained(folder)
    fast_tokenizer(model.config.tokenizer).save_pretrained(folder)
    return str(folder)


def gpt2(folder, tokenizer, *, positions=64, **options):
    """A folder with a small GPT-2 of random weights."""
    torch.manual_seed(0)
    shape = dict(
        n_embd=32, n_layer=2, n_head=2, n_positions=positions, vocab_size=len(tokenizer) + 5
    )
    GPT2LMHeadModel(GPT2Config(**shape | options)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def character_tokenizer(
    letters, specials=(), *, bos=None, eos=None, adds_bos=False, spaces=False, **options
):
    """A token a letter; `adds_bos` puts BOS before a text, `spaces` a space as sentencepiece
    does."""
    vocabulary = {letter: n for n, letter in enumerate(["<unk>", *specials, *letters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")] if spaces else []
    backend.normalizer = normalizers.Sequence(steps)
    backend.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse()] if spaces else [decoders.Fuse()]
    )
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, vocabulary[bos])]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token=bos,
        eos_token=eos,
        clean_up_tokenization_spaces=False,
        **options,
    )


def leaves(value):
    """Keys and values of nested dictionaries and lists, in order."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield key
            yield from leaves(value[key])
    else:
        yield value


def close(mine, theirs):
    """Numbers equal but for rounding in float32, everything else equal."""
    same = [
        pytest.approx(x, rel=2e-4, abs=2e-4, nan_ok=True) if type(x) is float else x
        for x in leaves(theirs)
    ]
    assert list(leaves(mine)) == same
