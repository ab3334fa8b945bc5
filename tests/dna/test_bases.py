"""Letters to codes and back, and the other strand."""

from __future__ import annotations

import numpy as np
import pytest

from modalities.dna.bases import BASES, UNKNOWN, decode, encode, reverse_complement


def test_every_letter_of_the_alphabet():
    assert encode("ACGTacgt").tolist() == [0, 1, 2, 3] * 2
    assert encode("Uu").tolist() == [3, 3]
    assert set(encode("NXRYSWKMBDHVnxryswkmbdhv").tolist()) == {UNKNOWN}
    assert encode("").dtype == np.uint8 and encode("").shape == (0,)
    assert encode(b"GATTACA").tolist() == encode("GATTACA").tolist()


def test_decode_is_the_inverse_of_encode():
    codes = np.random.default_rng(0).integers(0, 5, 1000).astype(np.uint8)
    assert np.array_equal(encode(decode(codes)), codes)
    assert decode(np.arange(5)) == BASES + "N"
    with pytest.raises(ValueError, match=r"codes 0\.\.7 are outside 0\.\.4"):
        decode(np.array([0, 7]))


def test_reverse_complement():
    assert decode(reverse_complement(encode("AACGTN"))) == "NACGTT"
    codes = np.random.default_rng(1).integers(0, 5, 999).astype(np.uint8)
    assert np.array_equal(reverse_complement(reverse_complement(codes)), codes)
    assert reverse_complement(codes).dtype == np.uint8 and reverse_complement(codes[:0]).shape == (0,)


@pytest.mark.parametrize(
    "text, message",
    [
        ("ACGTMKVLT", r"letter 7 of the sequence: 'L' is not a nucleotide code \(protein"),
        ("AC-GT", r"letter 2 of the sequence: '-' .* gap or stop"),
        ("ACé1", r"letter 2 of the sequence: 'é' \(0xe9\) .*binary"),
        (b"A\x00", r"letter 1 .* \(0x00\)"),
        ("ACGT1", r"letter 4 of the sequence: '1' .*IUPAC"),
        ("ACG T", r"letter 3 of the sequence: ' '"),
    ],
)
def test_letters_that_are_no_bases(text, message):
    with pytest.raises(ValueError, match=message):
        encode(text)
