"""Letters and codes; bases and k-mers: round trips, spans, the other strand, and specs that are wrong."""

from __future__ import annotations

import numpy as np
import pytest

from modalities.dna.tokenizers import BASES, UNKNOWN, decode, encode, load_tokenizer, reverse_complement


def sequence(count, seed=0, unknown=0.0):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 4, count).astype(np.uint8)
    codes[rng.random(count) < unknown] = UNKNOWN
    return codes


def test_letters():
    assert encode("ACGTacgtUu").tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 3, 3]
    assert set(encode("NXRYSWKMBDHVnxryswkmbdhv").tolist()) == {UNKNOWN} and encode("").shape == (0,)
    codes = sequence(1000, unknown=0.1)
    assert np.array_equal(encode(decode(codes).encode()), codes) and decode(np.arange(5)) == BASES + "N"
    assert decode(reverse_complement(encode("AACGTN"))) == "NACGTT"
    for text, message in (
        ("ACGTMKVLT", r"letter 7 of the sequence: 'L' is not a nucleotide code \(protein"),
        ("AC-GT", r"letter 2 of the sequence: '-' .* gap or stop"),
        ("ACé1", r"letter 2 of the sequence: 'é' is not"),
        (b"A\x00", r"letter 1 .* '\\x00' is not"),
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


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("base", "did you mean 'bases'"),
        ("kmer", "K must be a whole number from 1 to 8"),
        ("kmer:9", "from 1 to 8"),
        ("", "non-empty string such as 'bases'"),
        ("bpe.json", "expected 'bases', 'kmer:K' or 'hf:FOLDER'"),
    ],
)
def test_unknown_specs(spec, message):
    with pytest.raises(ValueError, match=message):
        load_tokenizer(spec)
