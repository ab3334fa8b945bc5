"""The first five minutes: train a tiny GGD-BAM + SSMax model, then measure how far it reads beyond its training length.

    python tools/demo.py

One DeepSpeed launch trains on the State of the Union speeches with passkey documents mixed in (context 128, on the CPU
where there is no GPU). Its passkey and perplexity curves are then drawn beside those of the shipped RoPE and ALiBi models
of the same size, data and budget. An interrupted demo continues where it stopped; `rm -r runs/demo` starts a new one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a plain `python tools/…` finds the project

from modalities.evaluation import ModelResult
from modalities.text.evaluators.passkey import Passkey
from recipes.report import load_results

RECIPE = "text.ggd_ssmax_tiny"
BASELINES = ("text_rope_ssmax_tiny.passkey", "text_alibi_tiny.passkey")
ROOT = Path(__file__).resolve().parent.parent

console = Console(highlight=False)


def main(
    run: Annotated[Path, typer.Option(help="run folder of the model that is trained")] = Path("runs/demo"),
    out: Annotated[Path, typer.Option(help="folder for tables and plots")] = Path("results/demo"),
    steps: Annotated[int, typer.Option(help="training steps")] = 800,
    samples: Annotated[int, typer.Option(help="passkeys at each of 20 depths, and stretches of text")] = 2,
    lengths: Annotated[str, typer.Option(help="what to evaluate at")] = "128,256,512,1024,2048,4096",
) -> None:
    """Train, evaluate, draw."""
    started = time.perf_counter()
    console.rule(f"1 of 2 — training {RECIPE} with DeepSpeed")
    launcher = Path(sys.executable).parent / "deepspeed"
    # A GPU trains alone; on the CPU two ranks of one thread are faster than one rank of two.
    ranks = 1 if torch.cuda.is_available() else min(2, os.cpu_count() or 1)
    command = [str(launcher), "--log_level", "error", "--num_gpus", str(ranks), str(ROOT / "recipes/train.py"), RECIPE]
    call([*command, "--run-dir", str(run), "--resume", "auto", "--set", f"train.steps={steps}"])

    console.rule("2 of 2 — measuring it beside shipped RoPE and ALiBi, up to 32 times the training length")
    command = [sys.executable, str(ROOT / "recipes/evaluate.py"), str(run), *BASELINES, "passkey,perplexity"]
    call([*command, "--lengths", lengths, "--samples", str(samples), "--out", str(out)])

    minutes = (time.perf_counter() - started) / 60
    console.rule(f"done in {minutes:.1f} minutes")
    console.print(summary(load_results(Passkey, out)), soft_wrap=True)
    console.print(f"The picture: {out / 'overview.png'}", soft_wrap=True)


def call(command: list[str]) -> None:
    """Run one of the project's commands as a user would; where it fails, exits with its status."""
    shown = " ".join(os.path.relpath(part) if part.startswith(str(ROOT)) else part for part in command)
    console.print(f"$ {shown}", style="dim", soft_wrap=True)
    status = subprocess.run(command).returncode
    if status:
        raise typer.Exit(status)


def summary(passkey: list[ModelResult]) -> str:
    """What was shown, from the measured rows, and what to run next."""
    mine = next(result for result in passkey if result.label.startswith(RECIPE))
    others = [result for result in passkey if result is not mine]
    longest = mine.rows[-1]
    beside = " and ".join(f"{other.rows[-1]['free_generation']:.2f} for {other.method}" for other in others)
    return (
        f"Trained on {mine.trained_at} tokens, GGD-BAM with SSMax writes the passkey, in the wording of its training, in "
        f"{longest['free_generation']:.0%} of trials at {longest['length']:,} tokens, {longest['length'] // mine.trained_at} "
        f"times that ({beside}).\n"
        "Next: python -m zoo list --pretrained · python -m zoo plot-prior text_ggd_ssmax_tiny.passkey · "
        "python recipes/evaluate.py 'text_*_tiny.*' passkey --lengths 128,1024,8192"
    )


if __name__ == "__main__":
    typer.run(main)
