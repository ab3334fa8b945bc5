"""Logits, losses and scores equal the recorded ones; processors round differently, hence a tolerance."""

import json
from pathlib import Path

import pytest

from tests.golden.golden import golden

RECORDED = json.loads(Path(__file__).with_name("numbers.json").read_text())


@pytest.mark.slow
def test_golden_numbers() -> None:
    entries = golden()
    assert {kind: set(group) for kind, group in entries.items()} == {k: set(group) for k, group in RECORDED.items()}
    for kind, group in entries.items():
        for name, entry in group.items():
            assert entry["values"] == pytest.approx(RECORDED[kind][name], rel=1e-4, abs=1e-5), f"{kind} {name}"
