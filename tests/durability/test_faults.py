"""Runs that break at a file operation, or whose files are damaged, end as unbroken ones.

PRIORZOO_FAULTS=1 breaks every operation by every kind, half an hour; by default every 45th by one
kind.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import ROOT, command

HERE = Path(__file__).parent
COMPILER = shutil.which("cc") or shutil.which("gcc")


@pytest.mark.slow
@pytest.mark.skipif(
    COMPILER is None or sys.platform != "linux", reason="needs Linux and a C compiler"
)
def test_broken_run_continues(tmp_path: Path) -> None:
    """A broken run continues as if nothing had happened."""
    library = tmp_path / "inject.so"
    subprocess.run(
        [COMPILER, "-shared", "-fPIC", "-O1", "-o", library, HERE / "inject.c", "-ldl"], check=True
    )
    stride = "1" if os.environ.get("PRIORZOO_FAULTS") else "45"
    words = [sys.executable, str(HERE / "trials.py"), str(tmp_path), stride]
    printed = command(
        words, timeout=7200, folder=ROOT, LD_PRELOAD=str(library), PYTHONPATH=str(ROOT)
    )
    outcome = json.loads(printed.splitlines()[-1])
    assert outcome["operations"] > 100
    assert outcome["trials"] >= 3
    assert outcome["differences_seen"]
    assert outcome["wrong"] == {}
