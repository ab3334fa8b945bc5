"""Kernels are compiled for a GPU that is not there: no spilled registers, and a table costs no shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tools.gpu.hazard import hazards

ROOT = Path(__file__).resolve().parents[2]


def compile_kernels(*options: str) -> subprocess.CompletedProcess[str]:
    """The tool in a process of its own: tests interpret kernels, and that is settled when triton is imported."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "tools/compile_kernels.py", *options],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_the_forward_kernel_fits_and_loads_its_table_as_it_should(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    only = ("--modules", "forward", "--widths", "64", "--dtypes", "bfloat16", "--variants", "bare,table")
    done = compile_kernels(*only, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    bare, table = json.loads(out.read_text())["rows"]
    assert [bare["variant"], table["variant"]] == ["bare", "table"]
    for row in (bare, table):
        assert row["spill"] == 0 and row["unit"] == "HGMMA" and row["blocks"] >= 2
        assert row["serialised"] is False and row["hazards"] == 0
    # The table goes past shared memory, and a thread's 64 elements of a tile take 34 loads where nothing is masked.
    assert bare["table_loads"] == 0 and 64 < table["table_loads"] <= 64 + 36
    assert table["shared"] == bare["shared"]


@pytest.mark.slow
def test_a_bias_in_half_precision_compiles() -> None:
    only = ("--modules", "forward", "--widths", "64", "--dtypes", "bfloat16", "--variants", "bias")
    done = compile_kernels(*only)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_an_unknown_capability_is_named() -> None:
    done = compile_kernels("--capability", "7.0")
    assert done.returncode == 2 and "--capability '7.0'" in done.stderr


@pytest.mark.parametrize(
    ("between", "after", "found"),
    [
        ("MOV R5, R9", "EXIT", ["writes A operand in flight"]),
        ("FADD R24, R24, R9", "EXIT", ["reads accumulator in flight", "writes accumulator in flight"]),
        ("MOV R9, R5", "EXIT", []),
        ("WARPGROUP.DEPBAR.LE gsb0, 0x0", "MOV R5, R9", []),
    ],
)
def test_a_register_of_a_product_in_flight_is_not_touched(between: str, after: str, found: list[str]) -> None:
    product = "HGMMA.64x8x16.F32.BF16 R24, R4, gdesc[UR4], R24, gsb0"
    code = [product, between, after, "EXIT"]
    listing = "\n".join(f"/*{16 * n:04x}*/ {instruction} ;" for n, instruction in enumerate(code))
    products, in_registers, touched = hazards(listing)
    assert (products, in_registers) == (1, 1) and sorted(what for _, what, *_ in touched) == found


EVERY_LENGTH = """
import sys
import torch
from tools.compile_kernels import VARIANTS, compile_only, launches
found = compile_only("9.0")
for module in ("forward", "plan", "decode"):
    kernels = {}
    for length, step in ((1024, 1), (1025, 2), (1000, 1), (300000, 8), (17, 8)):
        launches(16, torch.bfloat16, VARIANTS["all"], length, step)[module]()
        for name, kernel in found:
            kernels.setdefault(name, set()).add(kernel.hash)
        found.clear()
    print(module, *(f"{name}:{len(hashes)}" for name, hashes in kernels.items()))
"""


@pytest.mark.slow
def test_a_new_length_compiles_nothing_new() -> None:
    """Neither in training nor token by token."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", EVERY_LENGTH], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    counts = dict(word.split(":") for word in done.stdout.split() if ":" in word)
    assert len(counts) >= 6 and set(counts.values()) == {"1"}, done.stdout
