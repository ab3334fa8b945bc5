"""Benchmarks: ratios of times measured in turns within one run, peak memory, and the record of both.

    python tools/bench.py attention                     on CUDA 1k to 128k tokens; on the CPU 1k to 16k
    python tools/bench.py attention --quick
    python tools/bench.py attention --minutes 8 --out benchmarks/h200/attention.json
    python tools/bench.py training --methods rope,ggd_ssmax --lengths 2048 --out training.json
    python tools/bench.py vision --model tiny --size 96 --seconds 0.5
    python tools/bench.py dna
    python tools/bench.py dna-data --source human.fa --tokenizers bases,kmer:6
    python tools/bench.py plot benchmarks/cpu/attention.json

--out is written after each cell (a shape, a context, a method); with --resume a run goes on from the cells it holds.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from pathlib import Path

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a plain `python tools/…` finds the project

# Command → module and class. Only the one that runs is imported: text needs no Biopython, attention no DeepSpeed.
BENCHMARKS = {
    "attention": ("attention", "Attention"),
    "training": ("training", "Training"),
    "vision": ("vision", "Vision"),
    "dna": ("dna", "Dna"),
    "dna-data": ("dna_data", "DnaData"),
}


def application(only: str | None = None) -> typer.Typer:
    """The command line, of one benchmark or of all."""
    from tools.benches.harness import command

    text = (__doc__ or "").replace("\n\n    python", "\n\n\b\n    python")  # \b: click keeps the lines
    app = typer.Typer(add_completion=False, no_args_is_help=True, help=text, rich_markup_mode=None)
    app.callback()(lambda: None)  # with one command alone, typer would take its name for an argument
    for name, (module, benchmark) in BENCHMARKS.items():
        if only in (None, name):
            # The list of commands leaves out what needs an extra that is not installed; naming it raises the ImportError.
            with contextlib.suppress(*(() if only else (ImportError,))):
                command(app, name, getattr(importlib.import_module(f"tools.benches.{module}"), benchmark))
    if only in (None, "plot"):
        from tools.benches import plot

        app.command("plot")(plot.main)
    return app


def main() -> int:
    """Run the command line; returns its exit status."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    named = next((word for word in sys.argv[1:] if word in BENCHMARKS), None)
    try:
        application("plot" if named is None and "plot" in sys.argv[1:] else named)()
    except SystemExit as stopped:
        return int(stopped.code or 0)
    return 0


if __name__ == "__main__":
    status = main()
    if "recipes.engine" in sys.modules:  # ends the process group that training started
        from recipes.engine import leave

        leave(status)
    sys.exit(status)
