"""Letters and codes; bases, k-mers and BPE: round trips, spans, the other strand, and specs that are wrong."""

from __future__ import annotations

import numpy as np
import pytest

from modalities.dna.bases import BASES, UNKNOWN, decode, encode, reverse_complement
from modalities.dna.splits import Region
from modalities.dna.tokenizers import load_tokenizer, train_bpe
from tests.dna.test_windows import genome_of


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
    train_bpe(genome_of(a=text), [Region("a", 0, len(text), "train")], 128, path)
    return load_tokenizer(str(path))


def test_letters():
    assert encode("ACGTacgtUu").tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 3, 3]
    assert set(encode("NXRYSWKMBDHVnxryswkmbdhv").tolist()) == {UNKNOWN} and encode("").shape == (0,)
    codes = sequence(1000, unknown=0.1)
    assert np.array_equal(encode(decode(codes).encode()), codes) and decode(np.arange(5)) == BASES + "N"
    assert decode(reverse_complement(encode("AACGTN"))) == "NACGTT"
    with pytest.raises(ValueError, match=r"codes 0\.\.7 are outside 0\.\.4"):
        decode(np.array([0, 7]))
    for text, message in (
        ("ACGTMKVLT", r"letter 7 of the sequence: 'L' is not a nucleotide code \(protein"),
        ("AC-GT", r"letter 2 of the sequence: '-' .* gap or stop"),
        ("ACé1", r"letter 2 of the sequence: 'é' \(0xe9\) .*binary"),
        (b"A\x00", r"letter 1 .* \(0x00\)"),
        ("ACGT1", r"letter 4 of the sequence: '1' .*IUPAC"),
    ):
        with pytest.raises(ValueError, match=message):
            encode(text)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_kmers_read_in_base_four(k):
    tokenizer = load_tokenizer(f"kmer:{k}")
    codes, count = sequence(403, k, unknown=0.02), 403 // k
    encoded = tokenizer.encode(codes)
    assert encoded.spans.tolist() == [k] * count and encoded.left_over == 403 - count * k
    pieces = codes[: count * k].reshape(count, k)
    expected = [4**k if UNKNOWN in piece else int("".join(map(str, piece)), 4) for piece in pieces]
    assert encoded.ids.tolist() == expected and encoded.ids.dtype == np.int64
    back = tokenizer.decode(encoded.ids).reshape(count, k)
    lost = encoded.ids == tokenizer.unknown_id
    assert np.array_equal(back[~lost], pieces[~lost]) and (back[lost] == UNKNOWN).all()
    assert (tokenizer.num_targets, tokenizer.vocab_size, tokenizer.pad_id) == (4**k, 4**k + 3, 4**k + 2)
    assert tokenizer.widths.tolist() == [k] * (4**k + 1) + [0, 0] and tokenizer.bases_per_token == k
    bases = load_tokenizer("bases")
    assert bases is load_tokenizer("bases") and (bases.fingerprint == tokenizer.fingerprint) == (k == 1)


@pytest.mark.parametrize("spec", ["bases", "kmer:5"])
def test_complements(spec):
    tokenizer = load_tokenizer(spec)
    codes = sequence(40 * int(tokenizer.bases_per_token), 3, unknown=0.03)
    turned = tokenizer.complements[tokenizer.encode(codes).ids[::-1]]
    assert np.array_equal(turned, tokenizer.encode(reverse_complement(codes)).ids)
    specials = [tokenizer.unknown_id, tokenizer.bos_id, tokenizer.pad_id]
    assert tokenizer.complements[specials].tolist() == specials


def test_bpe_round_trip(bpe):
    codes = encode("NN" + decode(sequence(20_000, 7, unknown=0.01)) + "N" * 40 + "ACG")
    encoded = bpe.encode(codes)
    assert np.array_equal(bpe.decode(encoded.ids), codes)
    assert encoded.spans.sum() == len(codes) and encoded.left_over == 0 and len(encoded.ids) < 0.6 * len(codes)
    assert np.array_equal(encoded.ids == bpe.unknown_id, codes[np.cumsum(encoded.spans) - 1] == UNKNOWN)
    assert np.array_equal(bpe.widths[encoded.ids], encoded.spans)
    assert bpe.encode(encode("")).ids.tolist() == [] and len(bpe.decode([bpe.bos_id, bpe.pad_id])) == 0


def test_bpe_of_another_maker(tmp_path):
    """Special tokens come first in many vocabularies: targets still come first here."""
    library = pytest.importorskip("tokenizers")
    names = ["[UNK]", "[CLS]", "A", "C", "[MASK]", "G", "T", "AC", "ACG"]
    model = library.models.BPE({n: i for i, n in enumerate(names)}, [("A", "C"), ("AC", "G")], unk_token="[UNK]")
    library.Tokenizer(model).save(str(tmp_path / "other.json"))
    tokenizer = load_tokenizer(str(tmp_path / "other.json"))
    assert tokenizer.num_targets == 6 and tokenizer.encode(encode("ACGTNAC")).ids.tolist() == [5, 3, 6, 4]
    assert tokenizer.widths.tolist() == [1, 1, 1, 1, 2, 3, 1, 0, 0]


def test_errors(tmp_path):
    library = pytest.importorskip("tokenizers")
    library.Tokenizer(library.models.BPE({c: i for i, c in enumerate("acgt")}, [])).save(str(tmp_path / "lower.json"))
    changed = library.Tokenizer(library.models.BPE({c: i for i, c in enumerate("ACGT")}, []))
    changed.normalizer = library.normalizers.Replace("A", "")
    changed.save(str(tmp_path / "drops.json"))
    (tmp_path / "no.json").write_text('{"a": 1}')
    for spec, error, message in (
        (str(tmp_path / "lower.json"), ValueError, "no token 'A'"),
        (str(tmp_path / "drops.json"), ValueError, "does not keep every base as it is"),
        (str(tmp_path / "no.json"), ValueError, "is not a `tokenizers` JSON file"),
        ("base", ValueError, "did you mean 'bases'"),
        ("kmer", ValueError, "K must be a whole number from 1 to 8"),
        ("kmer:9", ValueError, "from 1 to 8"),
        ("", ValueError, "non-empty string such as 'bases'"),
        ("nowhere/bpe.json", FileNotFoundError, "no such file"),
    ):
        with pytest.raises(error, match=message):
            load_tokenizer(spec)
