"""Scores of windows against logits worked out by hand, both strands, and baselines that are exact."""

import numpy as np
import pytest
import torch

from modalities.dna.scoring import score_windows
from modalities.dna.tokenizers import load_tokenizer, reverse_complement
from tests.dna.models import bpe_tokenizer, tiny


def windows(count, length, unknown=0.1, seed=0):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 4, (count, length)).astype(np.uint8)
    codes[rng.random(codes.shape) < unknown] = 4
    return codes


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    return bpe_tokenizer(tmp_path_factory.mktemp("bpe"))


def expected(model, window):
    """(nll, bases, correct) of the counted tokens of one window, from one pass over all of it."""
    tokenizer = load_tokenizer(model.config.tokenizer)
    ids, spans = tokenizer.encode(window).ids, tokenizer.encode(window).spans
    with torch.inference_mode():
        logits = model(torch.tensor([[tokenizer.bos_id, *ids[:-1]]]))[0].double()
    found = []
    for row, token, span in zip(logits, ids, spans, strict=True):
        counts = token < tokenizer.num_targets
        row = row[: tokenizer.num_targets]
        nll = float(-torch.log_softmax(row, -1)[token]) if counts else 0.0
        found.append((nll, int(span) if counts else 0, float(counts and row.argmax() == token)))
    return np.array(found)


@pytest.mark.parametrize("tokenizer", ["bases", "kmer:3", "bpe"])
def test_scores_are_those_of_the_logits(tokenizer, bpe):
    model, codes = tiny(bpe if tokenizer == "bpe" else tokenizer), windows(5, 50)
    scores = score_windows(model, codes)
    left = 0
    for row, window in enumerate(codes):
        truth = expected(model, window)
        count = len(truth)
        np.testing.assert_allclose(scores.nll[row, :count], truth[:, 0], atol=2e-5)
        assert scores.bases[row, :count].tolist() == truth[:, 1].tolist()
        assert scores.correct[row, :count].tolist() == truth[:, 2].tolist()
        assert not scores.bases[row, count:].any() and not scores.nll[row, count:].any()
        left += load_tokenizer(model.config.tokenizer).encode(window).left_over
    assert scores.left_over == left == (10 if tokenizer == "kmer:3" else 0)
    assert scores.nll.dtype == torch.float64


@pytest.mark.parametrize("tokenizer", ["bases", "kmer:2", "bpe"])
def test_both_strands_are_the_mean_and_exactly_equivariant(tokenizer, bpe):
    model, codes = tiny(bpe if tokenizer == "bpe" else tokenizer), windows(6, 50)
    turned = np.stack([reverse_complement(window) for window in codes])
    scores, mirror = (score_windows(model, w, strands="both") for w in (codes, turned))
    for name in ("nll", "bases", "correct"):
        assert getattr(scores, name).flip(1).equal(getattr(mirror, name)), name
    assert scores.bases.shape[1] == (25 if tokenizer == "kmer:2" else 50)
    forth, back = score_windows(model, codes), score_windows(model, turned)
    if tokenizer in ("bases", "kmer:2"):
        torch.testing.assert_close(scores.nll, (forth.nll + back.nll.flip(1)) / 2)
