"""Logits, losses and scores equal the recorded ones; processors round differently, hence a tolerance."""

import json
from pathlib import Path

import pytest

from tests.golden.golden import golden

RECORDED = json.loads(Path(__file__).with_name("numbers.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("words", [("text", "perplexity", "passkey"), ("vision", "find"), ("dna", "bits")])
def test_golden_numbers(words: tuple[str, ...]) -> None:
    for kind, group in golden(*words).items():
        recorded = {name: values for name, values in RECORDED[kind].items() if any(word in name for word in words)}
        assert group.keys() == recorded.keys()
        for name, entry in group.items():
            assert entry["values"] == pytest.approx(recorded[name], rel=1e-4, abs=1e-5), f"{kind} {name}"
