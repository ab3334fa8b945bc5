"""The first five minutes: train a tiny model whose position is a sum of priors, then measure it beyond its training length.

    python tools/demo.py

One DeepSpeed launch trains ggd_goat (GGD + spectral + key bias) on State of the Union speeches, for a tenth of its recipe's
steps, on the CPU where there is no GPU. Its bits per byte against length are then drawn beside those of shipped models, and
how often these find a key in a text again, which takes the whole recipe to learn. An interrupted demo continues where it
stopped; `rm -r runs/demo` starts a new one.
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
from modalities.text.evaluators.perplexity import Perplexity
from recipes.commands import call
from recipes.report import load_results

RECIPE = "text.ggd_goat_tiny"
SHIPPED = ("text_ggd_goat_ssmax_tiny.facts", "text_rope_ssmax_tiny.facts", "text_alibi_tiny.facts")
ROOT = Path(__file__).resolve().parent.parent

console = Console(highlight=False)


def main(
    run: Annotated[Path, typer.Option(help="run folder of the model that is trained")] = Path("runs/demo"),
    out: Annotated[Path, typer.Option(help="folder for tables and plots")] = Path("results/demo"),
    steps: Annotated[int, typer.Option(help="training steps")] = 900,
    samples: Annotated[int, typer.Option(help="passkeys at each of 20 depths, and stretches of text")] = 2,
    lengths: Annotated[str, typer.Option(help="what to evaluate at")] = "256,512,1024,2048,4096,8192",
) -> None:
    """Train, evaluate, draw."""
    started = time.perf_counter()
    console.rule(f"1 of 2 — training {RECIPE} with DeepSpeed")
    launcher = Path(sys.executable).parent / "deepspeed"
    # A GPU trains alone; on the CPU two ranks of one thread are faster than one rank of two.
    ranks = 1 if torch.cuda.is_available() else min(2, os.cpu_count() or 1)
    command = [str(launcher), "--log_level", "error", "--num_gpus", str(ranks), str(ROOT / "recipes/train.py"), RECIPE]
    execute([*command, "--run-dir", str(run), "--resume", "auto", "--set", f"train.steps={steps}"])

    console.rule("2 of 2 — measuring it beside shipped models, up to 32 times the training length")
    command = [sys.executable, str(ROOT / "recipes/evaluate.py"), str(run), *SHIPPED, "passkey,perplexity"]
    execute([*command, "--lengths", lengths, "--samples", str(samples), "--out", str(out)])

    minutes = (time.perf_counter() - started) / 60
    console.rule(f"done in {minutes:.1f} minutes")
    console.print(summary(load_results(Perplexity, out), load_results(Passkey, out)), soft_wrap=True)
    console.print(f"The picture: {out / 'overview.png'}", soft_wrap=True)


def execute(command: list[str]) -> None:
    """Run one of the project's commands as a user would; exits with its status."""
    shown = " ".join(os.path.relpath(part) if part.startswith(str(ROOT)) else part for part in command)
    console.print(f"$ {shown}", style="dim", soft_wrap=True)
    status = subprocess.run(command).returncode
    if status:
        raise typer.Exit(status)


def summary(perplexity: list[ModelResult], passkey: list[ModelResult]) -> str:
    """What was shown, from the measured rows, and what to run next."""
    trained = next(result for result in perplexity if result.label.startswith(RECIPE))
    first, last = trained.rows[0], trained.rows[-1]
    shares = {result.method: result.rows[-1]["free_generation"] for result in passkey if result.label in SHIPPED}
    answered = ", ".join(f"{method} {share:.0%}" for method, share in shares.items())
    return (
        f"Trained on {trained.trained_at} tokens for a few minutes, {trained.method} reads held-out speeches at "
        f"{first['bits_per_byte']:.2f} bits per byte in windows of {first['length']:,} tokens and at "
        f"{last['bits_per_byte']:.2f} in windows of {last['length']:,}.\n"
        f"The shipped models, trained longer, find a key in {passkey[0].rows[-1]['length']:,} tokens again in this share of "
        f"trials: {answered}.\n"
        f"Next: python -m zoo list --pretrained · python -m zoo plot-prior {SHIPPED[0]} · "
        f"python recipes/evaluate.py {SHIPPED[0]} passkey --distractors 0,1,4"
    )


if __name__ == "__main__":
    sys.exit(call(main, None, prog="tools/demo.py"))
