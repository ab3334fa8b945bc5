"""The DNA decoder: every position method in it, logits of targets alone, both strands as one likelihood."""

from __future__ import annotations

import pytest
import torch

from modalities.decoder import Decoder, causal_lm_loss
from modalities.dna.model import DnaConfig, DnaDecoder, both_strands, next_token_loss
from modalities.dna.tokenizers import load_tokenizer
from zoo import create_model
from zoo.methods import list_positions

VARIANTS = [f"dna_{name}{('', '_ssmax')[n % 2]}_tiny" for n, name in enumerate(list_positions())]
BOS = load_tokenizer("bases").bos_id


def small(name: str = "dna_goat_tiny", **overrides) -> DnaDecoder:
    torch.manual_seed(0)
    return create_model(name, **(dict(num_layers=2, dim=64, num_heads=2, hidden_dim=64, train_context=40) | overrides))


def window(rows: int = 3, length: int = 24, known: int | None = None) -> dict[str, torch.Tensor]:
    """A batch of random windows, the last of which is padded after `known` bases."""
    tokens = torch.randint(0, 4, (rows, length + 1), generator=torch.Generator().manual_seed(5))
    tokens[:, 0] = BOS
    segments, weights = torch.zeros_like(tokens), torch.ones(tokens.shape)
    if known is not None:
        tokens[-1, known + 1 :], segments[-1, known + 1 :], weights[-1, known + 1 :] = BOS + 1, -1, 0.0
    return {"tokens": tokens, "segments": segments, "weights": weights}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_prefixes_and_cache(name: str) -> None:
    """The decoder is the shared one: a prefix's logits do not see the rest, and decoding with a cache equals prefill."""
    model, tokens = small(name).double().eval(), window()["tokens"]
    assert isinstance(model, Decoder)
    full = model(tokens)
    torch.testing.assert_close(model(tokens[:, :9]), full[:, :9], atol=1e-5, rtol=1e-5)
    cache = model.new_cache()
    cached = torch.cat([model(part, cache=cache) for part in (tokens[:, :11], *tokens[:, 11:].split(1, 1))], dim=1)
    torch.testing.assert_close(cached, full, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("spec", ["bases", "kmer:3"])
@torch.no_grad()
def test_only_targets_can_be_predicted(spec: str) -> None:
    tokenizer = load_tokenizer(spec)
    model = small(tokenizer=spec, vocab_size=tokenizer.vocab_size, num_targets=tokenizer.num_targets)
    logits = model(torch.tensor([[tokenizer.bos_id, 0, 1]]))
    assert logits[..., : tokenizer.num_targets].isfinite().all()
    assert (logits[..., tokenizer.num_targets :] == -torch.inf).all()
    written = model.generate([[tokenizer.bos_id]], max_new_tokens=40, temperature=5.0, seed=0)[0]
    assert len(written) == 40 and max(written) < tokenizer.num_targets


@pytest.mark.parametrize("spec", ["bases", "kmer:2"])
def test_the_other_strand_is_turned_and_complemented(spec: str) -> None:
    tokenizer = load_tokenizer(spec)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, tokenizer.num_targets, (2, 7), generator=generator)
    tokens[:, 0], tokens[0, 3] = tokenizer.bos_id, tokenizer.unknown_id
    segments, weights = torch.zeros_like(tokens), torch.rand(2, 7, generator=generator)
    tokens[1, 5:], segments[1, 5:] = tokenizer.pad_id, -1
    batch = {"tokens": tokens, "segments": segments, "weights": weights}
    both = both_strands(batch, spec)
    for row, last in ((0, 7), (1, 5)):
        turned = tokenizer.complements[tokens[row, 1:last].numpy()[::-1]]
        assert both["tokens"][2 + row, 1:last].tolist() == turned.tolist()
        assert both["tokens"][2 + row, last:].tolist() == tokens[row, last:].tolist()
        assert both["weights"][2 + row, 1:last].tolist() == weights[row, 1:last].flip(0).tolist()
    assert (both["tokens"][:, 0] == tokenizer.bos_id).all() and torch.equal(both["segments"][2:], segments)
    again = both_strands({name: rows[2:] for name, rows in both.items()}, spec)
    assert all(torch.equal(again[name][2:], batch[name]) for name in batch)


@pytest.mark.slow
def test_equivariance_of_a_model_of_both_strands() -> None:
    """Its loss, and every gradient, are those of the reverse complement; a model of one strand tells the two apart."""
    batch = window(known=9)
    other = {name: rows[3:] for name, rows in both_strands(batch, "bases").items()}
    found = {}
    for strands in ("one", "both"):
        model = small(strands=strands).double()
        for name, rows in (("written", batch), ("turned", other)):
            model.zero_grad()
            loss, _ = next_token_loss(model, rows)
            loss.backward()
            found[strands, name] = loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])
    for written, turned in zip(found["both", "written"], found["both", "turned"], strict=True):
        torch.testing.assert_close(written, turned, atol=1e-12, rtol=1e-10)
    assert abs(found["one", "written"][0] - found["one", "turned"][0]) > 1e-4
    means = (found["one", "written"][0] + found["one", "turned"][0]) / 2
    torch.testing.assert_close(found["both", "written"][0], means)
    torch.testing.assert_close(found["one", "written"][0], causal_lm_loss(small().double(), batch)[0])


def test_configurations_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="'one' or 'both'"):
        DnaConfig(strands="two")
    with pytest.raises(ValueError, match="num_targets 9"):
        DnaConfig(num_targets=9)


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
