"""Kernels are compiled for a GPU that is not there: they spill nothing, and a new length compiles nothing new."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.launching import ROOT

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


def python(*words: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: tests interpret kernels, and that is settled when triton is imported."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_kernels_compile_spill_nothing_and_a_new_length_compiles_nothing_new() -> None:
    """Neither in training nor token by token."""
    only = "--modules forward --widths 64 --dtypes bfloat16 --variants table lanes"
    done = python("tools/compile_kernels.py", *only.split())
    assert done.returncode == 0 and "2 kernels, 0 amiss" in done.stdout, done.stdout + done.stderr
    done = python("-c", EVERY_LENGTH)
    assert done.returncode == 0, done.stderr
    counts = dict(word.split(":") for word in done.stdout.split() if ":" in word)
    assert len(counts) >= 6 and set(counts.values()) == {"1"}, done.stdout
