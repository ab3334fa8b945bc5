"""Benchmarks: ratios of times measured in turns within one run, peak memory, and the record of both.

    python tools/bench.py attention                     on CUDA 1k to 128k tokens; on the CPU 1k to 16k
    python tools/bench.py attention --minutes 8 --out benchmarks/h200/attention.json
    python tools/bench.py far                           heads that forget, 4k to 512k tokens
    python tools/bench.py reading                       trained models over texts of 16k and 64k tokens
    python tools/bench.py decoding                      a token after 4k to 512k, beside a transformers Llama
    python tools/bench.py adapting                      a transformers Llama with priors, beside itself without
    torchrun --nproc-per-node 4 tools/bench.py sharing  memory of ranks that share lines of tokens
    python tools/bench.py launches                      kernels that a layer would launch on a GPU, and the host's time
    python tools/bench.py training --methods rope,ggd_ssmax --contexts 2048 --out training.json
    python tools/bench.py loss --tokens 16384 --vocabulary 32768
    python tools/bench.py vision --model tiny --size 96 --seconds 0.5
    python tools/bench.py dna
    python tools/bench.py dna-data --source human.fa --tokenizers bases,kmer:6
    python tools/bench.py plot benchmarks/cpu/attention.json

--out is written after each shape or context, so that a run cut short keeps what it found.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a plain `python tools/…` finds the project

from tools.benches.screen import command_line

# Command → module and function. Only the one that runs is imported: text needs no Biopython, attention no DeepSpeed.
COMMANDS = {
    "attention": ("attention", "main"),
    "far": ("far", "main"),
    "reading": ("reading", "main"),
    "decoding": ("decoding", "main"),
    "adapting": ("adapting", "main"),
    "sharing": ("sharing", "main"),
    "launches": ("launches", "main"),
    "training": ("models", "training"),
    "loss": ("models", "loss"),
    "vision": ("models", "vision"),
    "dna": ("models", "dna"),
    "dna-data": ("dna_data", "main"),
    "plot": ("plot", "main"),
}


def application(name: str) -> Callable[[], object]:
    """The command line of one command; without a known name, one that shows the help."""
    command, text = None, (__doc__ or "").replace("\n\n    python", "\n\n\b\n    python")  # \b: click keeps the lines
    if name in COMMANDS:
        import torch

        torch.set_flush_denormal(True)  # as recipes/train.py and evaluate.py do
        module, function = COMMANDS[name]
        command = getattr(importlib.import_module(f"tools.benches.{module}"), function)
    return command_line(name, command, text)


def main() -> int:
    """Run the command line; returns its exit status."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        application(next(iter(sys.argv[1:]), ""))()
    except SystemExit as stopped:
        return int(stopped.code or 0)
    return 0


if __name__ == "__main__":
    status = main()
    if "recipes.engine" in sys.modules:  # ends the process group that training started
        from recipes.engine import leave

        leave(status)
    sys.exit(status)
