"""Markov chains against a plain dictionary of counts, and what they may learn from."""

import math
from collections import Counter
from itertools import product

import numpy as np
import pytest

from modalities.dna import baselines as markov
from modalities.dna.baselines import create_baseline
from modalities.dna.splits import GenomeSplit, Region
from modalities.dna.tokenizers import decode, encode, reverse_complement
from modalities.loading import Heldout
from tests.dna.models import genome_of


def letters(rng, length, unknown=0.02):
    text = "".join(rng.choice(list("ACGT"), length, p=[0.4, 0.3, 0.2, 0.1]))
    return "".join("N" if rng.random() < unknown else letter for letter in text)


@pytest.fixture
def genome():
    rng = np.random.default_rng(0)
    return genome_of(**{name: letters(rng, size) for name, size in (("a", 3000), ("b", 1200), ("c", 400))})


REGIONS = (
    Region("a", 0, 1900, "train"),
    Region("a", 2000, 3000, "heldout"),
    Region("b", 100, 1200, "train"),
    Region("c", 0, 400, "train"),
)


def counted(texts, order):
    """Stretches of order + 1 letters on both strands; N breaks them."""
    found = Counter()
    for text in texts:
        for strand in (text, decode(reverse_complement(encode(text)))):
            for at in range(len(strand) - order):
                word = strand[at : at + order + 1]
                if "N" not in word:
                    found[word] += 1
    return found


def probability(found, order, taus, context, letter):
    """p_k(letter | context), k = len(context), from the recursion as it is written."""
    if context is None:
        return 0.25
    below = probability(found, order, taus, context[1:] if context else None, letter)

    def n(word):
        return sum(found["".join(head) + word] for head in product("ACGT", repeat=order + 1 - len(word)))

    total = sum(n(context + other) for other in "ACGT")
    tau = taus[len(context)]
    return (n(context + letter) + tau * below) / (total + tau)


def test_probabilities_are_those_of_a_dictionary(genome):
    order, taus = 3, (7.0, 1.0, 3.5, 20.0)
    texts = [decode(genome.codes(r.contig, r.start, r.stop)) for r in REGIONS if r.label == "train"]
    found = counted(texts, order)
    chain = markov.Markov(markov.fit(genome, REGIONS, order).tables, taus)
    rng = np.random.default_rng(1)
    windows = np.stack([encode(letters(rng, 40, unknown=0.1)) for _ in range(3)])
    for k in range(order + 1):
        p = chain.probabilities(windows, k)
        for row, window in enumerate(windows):
            text = decode(window)
            for at in range(len(text)):
                context = text[max(0, at - k) : at].rpartition("N")[2]  # from the start of the window, or the last N
                expected = [probability(found, order, taus, context, letter) for letter in "ACGT"]
                np.testing.assert_allclose(p[row, at], expected, rtol=1e-12)
    np.testing.assert_allclose(chain.probabilities(windows, order).sum(-1), 1, rtol=1e-12)


def test_taus_are_the_likeliest_for_what_was_held_back(genome):
    order = 2
    kept, aside = markov._pieces([r for r in REGIONS if r.label == "train"])
    texts, back = ([decode(genome.codes(r.contig, r.start, r.stop)) for r in pieces] for pieces in (kept, aside))
    found, taus = counted(texts, order), []
    for k in range(order + 1):

        def cost(tau, k=k):
            return -sum(
                math.log(probability(found, order, [*taus, tau], text[at - k : at], text[at]))
                for text in back
                for at in range(k, len(text))
                if "N" not in text[at - k : at + 1]
            )

        taus.append(min(markov.TAUS, key=cost))
    assert markov.fit(genome, REGIONS, order).taus == tuple(taus)


def test_a_chain_is_fitted_before_it_scores(genome, monkeypatch):
    monkeypatch.setattr(markov, "ORDER", 3)
    model = create_baseline("markov-2", train_context=64)
    windows = np.stack([encode(letters(np.random.default_rng(2), 50, unknown=0.1))] * 2)
    with pytest.raises(RuntimeError, match="markov-2 is not fitted"):
        model.score(windows)
    model.fit(Heldout("g", "0" * 16, GenomeSplit("g", genome, REGIONS)))
    scores, p = model.score(windows), markov.fit(genome, REGIONS, 3).probabilities(windows, 2)
    known = windows < 4
    for row, at in zip(*np.nonzero(known), strict=True):
        assert scores.nll[row, at].item() == -math.log(p[row, at, windows[row, at]])
        assert scores.correct[row, at].item() == (p[row, at].argmax() == windows[row, at])
    assert scores.bases.tolist() == known.astype(int).tolist()
    assert not scores.nll[~known].any() and not scores.correct[~known].any()
    monkeypatch.setattr(markov, "SCORED", 14)  # columns of a chunk: 7
    assert model.score(windows).nll.equal(scores.nll)
    with pytest.raises(ValueError, match=r"no baseline 'markov-13'; orders go to 3; did you mean 'markov-3'"):
        create_baseline("markov-13")
