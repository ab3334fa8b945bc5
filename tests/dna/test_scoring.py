"""Letters, tokens, and the cost of windows against logits worked out by hand and chains against a
dictionary of counts."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch

from modalities.dna import baselines as markov
from modalities.dna.baselines import MarkovChain
from modalities.dna.scoring import score_windows
from modalities.dna.splits import GenomeSplit, Region
from modalities.dna.tokenizers import (
    BASES,
    UNKNOWN,
    decode,
    encode,
    load_tokenizer,
    reverse_complement,
)
from modalities.loading import Heldout
from tests.dna.models import bpe_tokenizer, genome_of, tiny
from tests.refusals import refuses


def sequence(*shape, seed=0, unknown=0.1):
    rng = np.random.default_rng(seed)
    codes = rng.choice(4, shape, p=(0.4, 0.1, 0.2, 0.3)).astype(np.uint8)
    codes[rng.random(shape) < unknown] = UNKNOWN
    return codes


def test_letters():
    assert encode("ACGTacgtUu").tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 3, 3]
    assert set(encode("NXRYSWKMBDHVnxryswkmbdhv").tolist()) == {UNKNOWN}
    assert encode("").shape == (0,)
    codes = sequence(1000)
    assert np.array_equal(encode(decode(codes).encode()), codes)
    assert decode(np.arange(5)) == BASES + "N"
    assert decode(reverse_complement(encode("AACGTN"))) == "NACGTT"
    for text, message in (
        ("ACGTMKVLT", r"letter 7 of the sequence: 'L' is not a nucleotide code \(protein"),
        ("AC-GT", r"letter 2 of the sequence: '-' .* gap or stop"),
        ("ACé1", r"letter 2 of the sequence: 'é' is not"),
        (b"A\x00", r"letter 1 .* '\\x00' is not"),
        ("ACGT1", r"letter 4 of the sequence: '1' .*IUPAC"),
    ):
        refuses(message, encode, text)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_kmers_read_in_base_four(k):
    tokenizer = load_tokenizer(f"kmer:{k}")
    codes = sequence(403, seed=k, unknown=0.02)
    count = 403 // k
    encoded = tokenizer.encode(codes)
    assert encoded.spans.tolist() == [k] * count
    assert encoded.left_over == 403 - count * k
    pieces = codes[: count * k].reshape(count, k)
    expected = [4**k if UNKNOWN in piece else int("".join(map(str, piece)), 4) for piece in pieces]
    assert encoded.ids.tolist() == expected
    assert encoded.ids.dtype == np.int64
    back = tokenizer.decode(encoded.ids).reshape(count, k)
    lost = encoded.ids == tokenizer.unknown_id
    assert np.array_equal(back[~lost], pieces[~lost])
    assert (back[lost] == UNKNOWN).all()
    assert (tokenizer.num_targets, tokenizer.vocab_size, tokenizer.pad_id) == (
        4**k,
        4**k + 3,
        4**k + 2,
    )
    assert tokenizer.widths.tolist() == [k] * (4**k + 1) + [0, 0]
    assert tokenizer.bases_per_token == k
    bases = load_tokenizer("bases")
    assert bases is load_tokenizer("bases")
    assert (bases.fingerprint == tokenizer.fingerprint) == (k == 1)


def test_unknown_specs():
    for spec, message in (
        ("base", "did you mean 'bases'"),
        ("kmer", "K must be a whole number from 1 to 8"),
        ("kmer:9", "from 1 to 8"),
        ("", "non-empty string such as 'bases'"),
        ("bpe.json", "expected 'bases', 'kmer:K' or 'hf:FOLDER'"),
    ):
        refuses(message, load_tokenizer, spec)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    return bpe_tokenizer(tmp_path_factory.mktemp("bpe"))


@pytest.mark.parametrize("tokenizer", ["bases", "kmer:3", "bpe"])
@torch.inference_mode()
def test_scores_equal_logits(tokenizer, bpe):
    """Scores are those of the logits."""
    model = tiny(bpe if tokenizer == "bpe" else tokenizer)
    windows = sequence(5, 50)
    scores = score_windows(model, windows)
    spec = load_tokenizer(model.config.tokenizer)
    left_over = 0
    for row, window in enumerate(windows):
        encoded = spec.encode(window)
        left_over += encoded.left_over
        logits = model(torch.tensor([[spec.bos_id, *encoded.ids[:-1]]]))[
            0, :, : spec.num_targets
        ].double()
        for n, (token, span) in enumerate(zip(encoded.ids, encoded.spans, strict=True)):
            counts = token < spec.num_targets
            nll = -float(logits[n].log_softmax(-1)[token]) if counts else 0.0
            assert scores.nll[row, n].item() == pytest.approx(nll, abs=2e-5)
            assert scores.bases[row, n] == (span if counts else 0)
            assert scores.correct[row, n] == (counts and logits[n].argmax() == token)
        assert not scores.bases[row, n + 1 :].any()
        assert not scores.nll[row, n + 1 :].any()
    assert scores.left_over == left_over == (10 if tokenizer == "kmer:3" else 0)


@pytest.mark.parametrize("strands", ["one", "both"])
def test_cut_windows_same_bases(strands):
    """16 bases at once, 8 apart; the last of 50 begin 16 before the end."""
    model = tiny()
    codes = sequence(5, 50)
    options = {"strands": strands, "by_base": True}
    cut, whole = (score_windows(model, codes, **options, at_once=n) for n in (16, 50))
    assert cut.bases.equal(whole.bases)
    assert cut.nll.shape == whole.nll.shape
    starts = {0: 0, 8: 8, 16: 8, 24: 8, 32: 8, 34: 14}
    parts = [
        score_windows(model, codes[:, n : n + 16], **options).nll[:, k:] for n, k in starts.items()
    ]
    torch.testing.assert_close(cut.nll, torch.cat(parts, 1))


@pytest.mark.parametrize("tokenizer", ["bases", "kmer:2", "bpe"])
def test_strands_are_averaged(tokenizer, bpe):
    """Both strands are the mean and exactly equivariant."""
    model = tiny(bpe if tokenizer == "bpe" else tokenizer)
    codes = sequence(6, 50)
    turned = np.stack([reverse_complement(window) for window in codes])
    scores, mirror = (score_windows(model, w, strands="both") for w in (codes, turned))
    for name in ("nll", "bases", "correct"):
        assert getattr(scores, name).flip(1).equal(getattr(mirror, name)), name
    forth, back = (score_windows(model, w, by_base=True) for w in (codes, turned))
    counted = (forth.bases > 0) & (back.bases.flip(1) > 0)
    torch.testing.assert_close(
        scores.nll, torch.where(counted, (forth.nll + back.nll.flip(1)) / 2, 0.0)
    )


LENGTHS = {"a": 3000, "b": 1200, "c": 400}


@pytest.fixture
def genome():
    return genome_of(
        **{name: decode(sequence(n, seed=n, unknown=0.02)) for name, n in LENGTHS.items()}
    )


REGIONS = (
    Region("a", 0, 1900, "train"),
    Region("a", 2000, 3000, "heldout"),
    Region("b", 100, 1200, "train"),
    Region("c", 0, 400, "train"),
)


def counted(texts, order):
    """Stretches of order + 1 letters on both strands; N breaks them."""
    words = Counter()
    for text in texts:
        for strand in (text, decode(reverse_complement(encode(text)))):
            for at in range(len(strand) - order):
                word = strand[at : at + order + 1]
                if "N" not in word:
                    words[word] += 1
    return words


def probability(words, order, taus, context, letter):
    """p_k(letter | context), k = len(context), from the recursion as it is written."""
    if context is None:
        return 0.25
    below = probability(words, order, taus, context[1:] if context else None, letter)

    def n(word):
        return sum(
            words["".join(head) + word] for head in product("ACGT", repeat=order + 1 - len(word))
        )

    tau = taus[len(context)]
    return (n(context + letter) + tau * below) / (sum(n(context + other) for other in "ACGT") + tau)


def test_probabilities_equal_dictionary_counts(genome):
    """Probabilities are those of a dictionary."""
    order = 3
    taus = (7.0, 1.0, 3.5, 20.0)
    words = counted(
        [decode(genome.codes(r.contig, r.start, r.stop)) for r in REGIONS if r.label == "train"],
        order,
    )
    chain = markov.Markov(markov.fit(genome, REGIONS, order).tables, taus)
    windows = sequence(3, 40, seed=1)
    for k in range(order + 1):
        p = chain.probabilities(windows, k)
        for row, window in enumerate(windows):
            text = decode(window)
            for at in range(len(text)):
                context = text[max(0, at - k) : at].rpartition("N")[
                    2
                ]  # from the start of the window, or the last N
                expected = [probability(words, order, taus, context, letter) for letter in "ACGT"]
                np.testing.assert_allclose(p[row, at], expected, rtol=1e-12)
    np.testing.assert_allclose(chain.probabilities(windows, order).sum(-1), 1, rtol=1e-12)


def test_pseudo_counts_are_likeliest(genome):
    """Pseudo counts are the likeliest for what is set aside."""
    bulk, aside = markov._pieces([r for r in REGIONS if r.label == "train"])
    texts, rest = (
        [decode(genome.codes(r.contig, r.start, r.stop)) for r in pieces]
        for pieces in (bulk, aside)
    )
    words = counted(texts, 1)
    taus = []
    for k in range(2):
        places = [
            (text, at)
            for text in rest
            for at in range(k, len(text))
            if "N" not in text[at - k : at + 1]
        ]

        def likelihood(tau, k=k, places=places):
            return sum(
                math.log(probability(words, 1, [*taus, tau], text[at - k : at], text[at]))
                for text, at in places
            )

        taus.append(max(markov.TAUS, key=likelihood))
    assert markov.fit(genome, REGIONS, 1).taus == tuple(taus)


def test_chain_is_fitted_first(genome, monkeypatch):
    """A chain is fitted before it scores."""
    monkeypatch.setattr(markov, "ORDER", 3)
    model = MarkovChain(2, train_context=64)
    windows = sequence(2, 50, seed=2)
    refuses("markov-2 is not fitted", model.score, windows, error=RuntimeError)
    model.fit(Heldout("g", "0" * 16, GenomeSplit("g", genome, REGIONS)))
    scores = model.score(windows)
    p = markov.fit(genome, REGIONS, 3).probabilities(windows, 2)
    known = windows < 4
    for row, at in zip(*np.nonzero(known), strict=True):
        assert scores.nll[row, at].item() == -math.log(p[row, at, windows[row, at]])
        assert scores.correct[row, at].item() == (p[row, at].argmax() == windows[row, at])
    assert scores.bases.tolist() == known.astype(int).tolist()
    assert not scores.nll[~known].any()
    assert not scores.correct[~known].any()
    monkeypatch.setattr(markov, "SCORED", 14)  # columns of a chunk: 7
    assert model.score(windows).nll.equal(scores.nll)
