"""DNA models in `transformers`: the same logits and bases, labels that cannot be predicted, tokenizers, a saved folder."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from modalities.dna.bases import decode, encode
from modalities.dna.model import DnaDecoder
from modalities.dna.tokenizers import load_tokenizer
from zoo import create_model

transformers = pytest.importorskip("transformers")
from modalities.dna import hf  # noqa: E402


def small(tokenizer: str = "bases", **options) -> DnaDecoder:
    torch.manual_seed(0)
    known = load_tokenizer(tokenizer)
    vocabulary = dict(vocab_size=known.vocab_size, num_targets=known.num_targets, tokenizer=tokenizer)
    sizes = dict(num_layers=2, dim=64, num_heads=2, hidden_dim=64)
    return create_model("dna_goat_ssmax_tiny", **sizes, **vocabulary, **options).eval()


@pytest.fixture(scope="module")
def bpe(tmp_path_factory) -> str:
    """A file of BPE over random bases."""
    library = pytest.importorskip("tokenizers")
    draw = random.Random(1)
    backend = library.Tokenizer(library.models.BPE())
    words = ["".join(draw.choices("ACGT", k=300)) for _ in range(30)]
    backend.train_from_iterator(
        words, library.trainers.BpeTrainer(vocab_size=60, initial_alphabet=list("ACGT"), show_progress=False)
    )
    path = tmp_path_factory.mktemp("bpe") / "dna.json"
    backend.save(str(path))
    return str(path)


@pytest.mark.parametrize("spec", ["bases", "kmer:3", "kmer:6", "bpe"])
def test_tokenizers_give_our_ids(spec, bpe) -> None:
    """Random bases in both cases, RNA, unknown and ambiguous ones, rests of k-mers, more bases than BPE merges at once."""
    spec = bpe if spec == "bpe" else spec
    ours, theirs, draw = load_tokenizer(spec), hf.fast_tokenizer(spec), random.Random(0)
    for n in [*range(60), 9001]:
        text = "".join(draw.choices("ACGTacgtuUNnRY" if n % 2 else "ACGT", k=n))
        ids = ours.encode(encode(text)).ids.tolist()
        assert theirs(text, add_special_tokens=False).input_ids == ids
        assert theirs(text).input_ids == [ours.bos_id, *ids]
        assert theirs.decode(theirs(text).input_ids, skip_special_tokens=True) == decode(ours.decode(ids))
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (ours.bos_id, None, ours.pad_id)


@pytest.mark.parametrize("spec", ["bases", "kmer:3"])
@torch.no_grad()
def test_a_folder_writes_the_bases_that_our_model_writes(spec, tmp_path) -> None:
    model = small(spec)
    hf.wrap(model).save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(again, hf.PriorzooDnaForCausalLM)
    ids = torch.randint(0, model.config.num_targets, (2, 9))
    assert torch.equal(again(ids).logits, model(ids))
    write = transformers.pipeline("text-generation", str(tmp_path), device="cpu")
    [written] = write("ACGTACGTA", max_new_tokens=6, do_sample=False, return_full_text=False)
    assert written["generated_text"] == "".join(model.stream_text("ACGTACGTA", max_new_tokens=6))


def test_what_cannot_be_predicted_is_ignored_as_a_label() -> None:
    wrapped = hf.wrap(small())
    tokens = torch.tensor([[5, 0, 1, 4, 2, 3, 6]])
    out = wrapped(tokens, labels=tokens)
    targets = torch.tensor([0, 1, -100, 2, 3, -100])
    torch.testing.assert_close(out.loss, F.cross_entropy(out.logits[0, :-1], targets))
    out.loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in wrapped.parameters())
    with pytest.raises(ValueError, match="strands='one'"):
        hf.wrap(small(strands="both"))(tokens, labels=tokens)
