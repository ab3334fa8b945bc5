"""Benchmarks: ratios to the fastest thing that a user would call instead, all measured in turns in
one process.

    python tools/bench.py attention --lengths 2048,16384
        compared with torch, flash-attn and FlexAttention
    python tools/bench.py training --models text_rope_tiny,text_ggd_ssmax_tiny
        compared with a transformers Llama
    python tools/bench.py decoding --lengths 4096,65536
        a token after many, compared with a transformers Llama
    python tools/bench.py attention --device cuda --out benchmarks/gpu/attention.json

--out is written after each shape, so that a run cut short keeps its rows. Needs torch, numpy and
safetensors; what is not installed is left out, and the record says so.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

# So that a plain `python tools/…` finds the project.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

COMMANDS = ("attention", "training", "decoding")


def main(argv: list[str] | None = None) -> int:
    """Run a benchmark by its name; returns the exit status."""
    if argv is None:
        argv = sys.argv[1:]
    command = argv[0] if argv else ""
    if command not in COMMANDS:
        print(__doc__, f"expected one of {', '.join(COMMANDS)}", sep="\n", file=sys.stderr)
        return 0 if command in ("--help", "-h") else 2
    import torch

    # As recipes/train.py and evaluate.py do.
    torch.set_flush_denormal(True)
    return importlib.import_module(f"tools.benches.{command}").main(argv[1:])


if __name__ == "__main__":
    sys.exit(main())
