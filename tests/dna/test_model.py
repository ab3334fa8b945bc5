"""The DNA decoder: logits of targets alone, and configurations that cannot be."""

from __future__ import annotations

import pytest
import torch

from modalities.dna.data import DnaDataConfig
from modalities.dna.model import DnaConfig, DnaDecoder, build_model
from modalities.dna.tokenizers import encode, load_tokenizer
from zoo import create_model


def small(name: str = "dna_goat_tiny", **overrides) -> DnaDecoder:
    torch.manual_seed(0)
    return create_model(name, **(dict(num_layers=2, dim=64, num_heads=2, hidden_dim=64, train_context=40) | overrides))


@pytest.mark.parametrize("spec", ["bases", "kmer:3"])
@torch.no_grad()
def test_only_targets_can_be_predicted(spec: str) -> None:
    tokenizer = load_tokenizer(spec)
    model = small(tokenizer=spec, vocab_size=tokenizer.vocab_size, num_targets=tokenizer.num_targets)
    logits = model(torch.tensor([[tokenizer.bos_id, 0, 1]]))
    assert logits[..., : tokenizer.num_targets].isfinite().all()
    assert (logits[..., tokenizer.num_targets :] == -torch.inf).all()
    assert model.read("ACGTAC")[0].tolist() == [tokenizer.bos_id, *tokenizer.encode(encode("ACGTAC")).ids]
    written = model.generate([[tokenizer.bos_id]], max_new_tokens=40, temperature=5.0, seed=0)[0]
    assert len(written) == 40 and max(written) < tokenizer.num_targets


def test_configurations_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="'one' or 'both'"):
        DnaConfig(strands="two")
    with pytest.raises(ValueError, match="num_targets 9"):
        DnaConfig(num_targets=9)
    with pytest.raises(ValueError, match="evaluate with --strands both"):
        build_model("dna_goat_tiny", {"strands": "both"}, DnaDataConfig())


def test_a_tokenizer_that_the_vocabulary_does_not_fit_is_refused():
    with pytest.raises(
        ValueError, match=r"tokenizer 'kmer:6' has 4096 targets in \d+ ids; the model has num_targets 4, "
    ):
        DnaConfig(tokenizer="kmer:6")
    kmers = load_tokenizer("kmer:2")
    fitting = {"tokenizer": "kmer:2", "vocab_size": kmers.vocab_size, "num_targets": kmers.num_targets}
    assert DnaConfig(**fitting).tokenizer == "kmer:2"
    with pytest.raises(ValueError, match="weights are of one tokenizer"):
        DnaConfig(**fitting | {"tokenizer": "bases"})
