"""Kernels are compiled for a GPU that is not there: they spill nothing, and a new length compiles
nothing new."""

from __future__ import annotations

import sys

import pytest

from tests.launching import ROOT, command

pytest.importorskip("triton")

EVERY_LENGTH = """
import torch
from tools.compile_kernels import VARIANTS, compile_only, launches
compiled = compile_only()
for module in ("forward", "plan", "decode"):
    kernels = {}
    for length, step in ((1024, 1), (1025, 2), (1000, 1), (300000, 8), (17, 8)):
        launches(16, torch.bfloat16, VARIANTS["all"], length, step)[module]()
        for name, kernel in compiled:
            kernels.setdefault(name, set()).add(kernel.hash)
        compiled.clear()
    print(module, *(f"{name}:{len(hashes)}" for name, hashes in kernels.items()))
"""


def python(*words: str) -> str:
    """A process of its own: tests interpret kernels, and that is settled when triton is
    imported."""
    words = ("env", "--unset=TRITON_INTERPRET", sys.executable, *words)
    return command([*words], timeout=300, folder=ROOT, PYTHONPATH=str(ROOT))


@pytest.mark.slow
def test_kernels_compile_once() -> None:
    """Neither in training nor token by token."""
    only = "--modules forward --widths 64 --dtypes bfloat16 --variants table lanes"
    assert "2 kernels, 0 amiss" in python("tools/compile_kernels.py", *only.split())
    counts = dict(word.split(":") for word in python("-c", EVERY_LENGTH).split() if ":" in word)
    assert len(counts) >= 6, counts
    assert set(counts.values()) == {"1"}, counts
