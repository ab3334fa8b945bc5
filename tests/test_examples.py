"""The programs in examples/ run, a few steps each."""

from __future__ import annotations

import sys

import pytest

from tests.launching import ROOT, command

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example) -> None:
    out = command([sys.executable, str(example), "--steps", "2"], folder=ROOT)
    assert len(out.splitlines()) >= 4


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short(example) -> None:
    """40 to 80 lines of code and text, so that it is read before it is run."""
    assert 40 <= len(example.read_text().splitlines()) <= 100
