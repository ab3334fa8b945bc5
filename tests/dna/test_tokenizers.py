"""Bases, k-mers and BPE: round trips, spans, the other strand, and specs that are wrong."""

from __future__ import annotations

import json

import numpy as np
import pytest

from modalities.dna import tokenizers as module
from modalities.dna.bases import UNKNOWN, decode, encode, reverse_complement
from modalities.dna.splits import Region
from modalities.dna.tokenizers import load_tokenizer, train_bpe


class FakeGenome:
    def __init__(self, text):
        self.text = text

    def codes(self, name, start=0, stop=None):
        return encode(self.text[start:stop])

    def region(self):
        return [Region("a", 0, len(self.text), "train")]


def sequence(count, seed=0, unknown=0.0):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 4, count).astype(np.uint8)
    codes[rng.random(count) < unknown] = UNKNOWN
    return codes


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("bpe") / "new" / "dna.json"
    text = decode(sequence(30_000, 1)) + "N" * 700 + "ACGACGTTT" * 400
    train_bpe(FakeGenome(text), FakeGenome(text).region(), 128, path)
    return load_tokenizer(str(path))


# ---- bases and k-mers ----


def test_bases_are_their_codes():
    tokenizer = load_tokenizer("bases")
    assert (tokenizer.num_targets, tokenizer.unknown_id, tokenizer.bos_id, tokenizer.pad_id) == (4, 4, 5, 6)
    assert tokenizer.vocab_size == 7 and tokenizer.bases_per_token == 1.0
    found = tokenizer.encode(encode("ACGTNacgtR"))
    assert found.ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4] and found.ids.dtype == np.int64
    assert found.spans.tolist() == [1] * 10 and found.left_over == 0
    assert decode(tokenizer.decode([5, 0, 1, 4, 3, 6])) == "ACNT"
    assert load_tokenizer("bases") is tokenizer
    assert load_tokenizer("kmer:1").fingerprint == tokenizer.fingerprint != load_tokenizer("kmer:2").fingerprint


@pytest.mark.parametrize("k", [1, 3, 8])
def test_kmers_read_in_base_four(k):
    tokenizer = load_tokenizer(f"kmer:{k}")
    codes = sequence(403, k, unknown=0.02)
    found = tokenizer.encode(codes)
    count = 403 // k
    assert len(found.ids) == count and found.spans.tolist() == [k] * count and found.left_over == 403 - count * k
    for n, number in enumerate(found.ids.tolist()):
        piece = codes[n * k : n * k + k]
        expected = 4**k if UNKNOWN in piece else int("".join(map(str, piece)), 4)
        assert number == expected
    back = tokenizer.decode(found.ids).reshape(count, k)
    lost = found.ids == tokenizer.unknown_id
    assert np.array_equal(back[~lost], codes[: count * k].reshape(count, k)[~lost]) and (back[lost] == UNKNOWN).all()
    assert (tokenizer.num_targets, tokenizer.vocab_size, tokenizer.pad_id) == (4**k, 4**k + 3, 4**k + 2)
    assert tokenizer.widths.tolist() == [k] * (4**k + 1) + [0, 0] and tokenizer.bases_per_token == k


@pytest.mark.parametrize("spec", ["bases", "kmer:5"])
def test_the_other_strand_of_tokens_is_the_tokens_of_the_other_strand(spec):
    tokenizer = load_tokenizer(spec)
    codes = sequence(40 * int(tokenizer.bases_per_token), 3, unknown=0.03)
    ids = tokenizer.encode(codes).ids
    turned = tokenizer.complements[ids[::-1]]
    assert np.array_equal(turned, tokenizer.encode(reverse_complement(codes)).ids)
    assert np.array_equal(tokenizer.complements[turned[::-1]], ids)
    specials = [tokenizer.unknown_id, tokenizer.bos_id, tokenizer.pad_id]
    assert tokenizer.complements[specials].tolist() == specials


# ---- BPE ----


def test_bpe_gives_every_base_back(bpe):
    codes = encode("NN" + decode(sequence(3000, 7, unknown=0.01)) + "N" * 40 + "ACG")
    found = bpe.encode(codes)
    assert np.array_equal(bpe.decode(found.ids), codes)
    assert found.spans.sum() == len(codes) and found.left_over == 0 and len(found.ids) < 0.6 * len(codes)
    assert np.array_equal(found.ids == bpe.unknown_id, np.repeat(codes, 1)[np.cumsum(found.spans) - 1] == UNKNOWN)
    assert found.ids.dtype == np.int64 and np.array_equal(bpe.widths[found.ids], found.spans)
    assert bpe.encode(encode("")).ids.tolist() == [] and len(bpe.decode([bpe.bos_id, bpe.pad_id])) == 0


def test_bpe_is_encoded_in_bounded_pieces(bpe, monkeypatch):
    codes = sequence(20_000, 8)
    lengths = []
    backend = bpe.backend

    class Spy:
        def encode(self, text, **options):
            lengths.append(len(text))
            return backend.encode(text, **options)

    monkeypatch.setattr(bpe, "backend", Spy())
    assert np.array_equal(bpe.decode(bpe.encode(codes).ids), codes)
    assert max(lengths) == module.PIECE and sum(lengths) == 20_000


def test_bpe_of_another_maker_is_put_in_order(tmp_path):
    """Special tokens first, as many do: targets still come first here."""
    library = pytest.importorskip("tokenizers")
    names = ["[UNK]", "[CLS]", "A", "C", "[MASK]", "G", "T", "AC", "ACG"]
    model = library.models.BPE({n: i for i, n in enumerate(names)}, [("A", "C"), ("AC", "G")], unk_token="[UNK]")
    library.Tokenizer(model).save(str(tmp_path / "other.json"))
    tokenizer = load_tokenizer(str(tmp_path / "other.json"))
    assert tokenizer.num_targets == 6 and tokenizer.encode(encode("ACGTNAC")).ids.tolist() == [5, 3, 6, 4]
    assert tokenizer.widths.tolist() == [1, 1, 1, 1, 2, 3, 1, 0, 0]


def test_tokenizers_that_are_none_of_dna_are_refused(tmp_path):
    library = pytest.importorskip("tokenizers")
    small = library.Tokenizer(library.models.BPE({c: i for i, c in enumerate("acgt")}, []))
    small.save(str(tmp_path / "lower.json"))
    with pytest.raises(ValueError, match="no token 'A'"):
        load_tokenizer(str(tmp_path / "lower.json"))
    changed = library.Tokenizer(library.models.BPE({c: i for i, c in enumerate("ACGT")}, []))
    changed.normalizer = library.normalizers.Replace("A", "")
    changed.save(str(tmp_path / "drops.json"))
    with pytest.raises(ValueError, match="does not keep every base as it is"):
        load_tokenizer(str(tmp_path / "drops.json"))
    (tmp_path / "no.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(ValueError, match="is not a `tokenizers` JSON file"):
        load_tokenizer(str(tmp_path / "no.json"))


# ---- specs ----


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("base", ValueError, "did you mean 'bases'"),
        ("kmer", ValueError, "K must be a whole number from 1 to 8"),
        ("kmer:9", ValueError, "from 1 to 8"),
        ("kmer:0", ValueError, "from 1 to 8"),
        ("kmer:six", ValueError, "as in 'kmer:6'"),
        ("", ValueError, "non-empty string such as 'bases'"),
        ("bytes", ValueError, "unknown tokenizer 'bytes'"),
        ("nowhere/bpe.json", FileNotFoundError, "no such file"),
    ],
)
def test_unknown_specs_say_what_is_meant(spec, error, message):
    with pytest.raises(error, match=message):
        load_tokenizer(spec)
