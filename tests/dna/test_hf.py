"""Causal LMs of `transformers` under the evaluators of DNA, and DNA models in `transformers`."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    pipeline,
)

from modalities.dna.hf import PriorzooDnaForCausalLM, fast_tokenizer, wrap
from modalities.dna.outside import OutsideDnaDecoder
from modalities.dna.scoring import score_windows
from modalities.dna.tokenizers import decode, encode, load_tokenizer
from recipes.models import find_outside, modality_of
from tests.dna.models import tiny
from tests.text.outside_models import character_tokenizer, load


def kmer_tokenizer(k):
    """Whole k-mers from the left, single bases for what is left over and for what holds an N."""
    words = ["<unk>", "<cls>", "<pad>", *("".join(w) for w in product("ACGT", repeat=k)), *"ACGTN"]
    backend = Tokenizer(
        models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(f"[ACGT]{{{k}}}|."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    special = dict(unk_token="<unk>", cls_token="<cls>", pad_token="<pad>")
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def test_bits_equal_plain_loop(tmp_path):
    """Bits are those of a loop over the whole vocabulary."""
    tokenizer = kmer_tokenizer(3)
    torch.manual_seed(0)
    shape = dict(n_embd=32, n_layer=2, n_head=2, n_positions=128, vocab_size=len(tokenizer) + 3)
    model = GPT2LMHeadModel(GPT2Config(**shape))
    torch.nn.init.normal_(model.transformer.wte.weight, std=0.5)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    outside = load(tmp_path)
    assert isinstance(outside, OutsideDnaDecoder)
    assert outside.config.strands == "one"
    text = "ACGTTGCAACGNTTGACCAGTACGGTAC" + "ACG" * 8
    spec = load_tokenizer(f"hf:{tmp_path}")
    assert (spec.decode(spec.encode(encode(text)).ids) == encode(text)).all()
    assert round(spec.bases_per_token, 2) == 3
    scores = score_windows(outside, encode(text)[None])
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    with torch.inference_mode():
        logits = (
            outside.model(torch.tensor([[tokenizer.cls_token_id, *ids]]))
            .logits[0]
            .double()
            .log_softmax(-1)
        )
    counted = 0.0
    for place, number in enumerate(ids):
        word = tokenizer.convert_ids_to_tokens(number)
        if set(word) <= set("ACGT"):
            assert float(scores.nll[0, place]) == pytest.approx(
                -logits[place, number].item(), rel=1e-5
            )
            assert int(scores.bases[0, place]) == len(word)
            counted += -logits[place, number].item()
        else:
            assert int(scores.bases[0, place]) == 0
    assert float(scores.nll.sum()) == pytest.approx(counted, rel=1e-5)
    assert int(scores.bases.sum()) == len(text) - 1


def test_modality_follows_vocabulary(tmp_path):
    """Modality is that of the vocabulary."""
    character_tokenizer("ACGTN", ["<s>", "<p>"], bos="<s>", pad_token="<p>").save_pretrained(
        tmp_path / "dna"
    )
    character_tokenizer([*map(chr, range(32, 127))], ["<e>"], eos="<e>").save_pretrained(
        tmp_path / "text"
    )
    character_tokenizer("ACDEFGHIKLMNPQRSTVWY", ["<s>"], bos="<s>").save_pretrained(
        tmp_path / "proteins"
    )
    character_tokenizer("acgtn", ["<s>"], bos="<s>").save_pretrained(tmp_path / "lower")
    assert [modality_of(f"hf:{tmp_path}/{name}") for name in ("dna", "text")] == ["dna", "text"]
    assert find_outside(f"hf:dna:{tmp_path}/text")[0] == "dna"
    assert find_outside(f"hf:text:{tmp_path}/dna")[0] == "text"
    for name in ("lower", "proteins"):
        with pytest.raises(
            ValueError, match=r"seems to read none of text, dna; to insist, hf:text:.*, hf:dna:"
        ):
            find_outside(f"hf:{tmp_path}/{name}")
    with pytest.raises(ValueError, match="no token of upper-case A, C, G and T"):
        load_tokenizer(f"hf:{tmp_path}/lower")


# ------------------------------------------------------------------------------------ our models in
# transformers


def test_tokenizers_give_our_ids():
    """Random bases in both cases, RNA, unknown and ambiguous ones, rests of k-mers."""
    ours = load_tokenizer("kmer:3")
    theirs = fast_tokenizer("kmer:3")
    draw = random.Random(0)
    for n in [*range(30), 9001]:
        text = "".join(draw.choices("ACGTacgtuUNnRY" if n % 2 else "ACGT", k=n))
        ids = ours.encode(encode(text)).ids.tolist()
        assert theirs(text, add_special_tokens=False).input_ids == ids
        assert theirs(text).input_ids == [ours.bos_id, *ids]
        assert theirs.decode(theirs(text).input_ids, skip_special_tokens=True) == decode(
            ours.decode(ids)
        )
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (
        ours.bos_id,
        None,
        ours.pad_id,
    )


@torch.no_grad()
def test_folder_equals_our_model(tmp_path):
    """A folder scores and writes bases as our model does."""
    model = tiny("kmer:3", position="goat", ssmax=True, num_layers=2)
    wrap(model).save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(again, PriorzooDnaForCausalLM)
    assert modality_of(f"hf:{tmp_path}") == "dna"
    window = encode("ACGTTGCAACGNTTGACCAGTACGGTAC")[None]
    assert torch.equal(*(score_windows(m, window).nll for m in (load(tmp_path), model)))
    ids = torch.randint(0, model.config.num_targets, (2, 9))
    assert torch.equal(again(ids).logits, model(ids))
    write = pipeline("text-generation", str(tmp_path), device="cpu")
    [written] = write("ACGTACGTA", max_new_tokens=6, do_sample=False, return_full_text=False)
    assert written["generated_text"] == "".join(model.stream_text("ACGTACGTA", max_new_tokens=6))
    model.embedding.weight.zero_()
    assert set(score_windows(model, window).correct.flatten().tolist()) == {
        0.0,
        1 / model.config.num_targets,
    }  # ties


def test_unpredicted_labels_are_ignored():
    """What cannot be predicted is ignored as a label."""
    wrapped = wrap(tiny(position="goat", ssmax=True))
    tokens = torch.tensor([[5, 0, 1, 4, 2, 3, 6]])
    out = wrapped(tokens, labels=tokens)
    torch.testing.assert_close(
        out.loss, F.cross_entropy(out.logits[0, :-1], torch.tensor([0, 1, -100, 2, 3, -100]))
    )
    out.loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in wrapped.parameters())
