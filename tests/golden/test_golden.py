"""Logits, losses and scores equal the recorded ones; processors round differently, hence a
tolerance."""

import json
from pathlib import Path

import pytest

from tests.golden.golden import golden

RECORDED = json.loads(Path(__file__).with_name("numbers.json").read_text())


# Three of six models with a copy expert: each sorts its memory, that of the largest for most of a
# minute. golden.py has all.
DNA = ("dna.", "tiny.genomes", "ggd_goat_copy_tiny", "bits")


@pytest.mark.slow
@pytest.mark.parametrize("words", [("text", "perplexity", "passkey"), ("vision", "find"), DNA])
def test_golden_numbers(words: tuple[str, ...]) -> None:
    for kind, group in golden(*words).items():
        recorded = {
            name: values
            for name, values in RECORDED[kind].items()
            if any(word in name for word in words)
        }
        assert group.keys() == recorded.keys()
        for name, entry in group.items():
            assert entry["values"] == pytest.approx(recorded[name], rel=1e-4, abs=1e-5), (
                f"{kind} {name}"
            )
