"""The first minutes: train the recommended method and RoPE by one recipe, and read beyond the training length.

    python tools/demo.py

GGD with SSMax and RoPE learn speeches side by side, 256 tokens at a time, and then read held-out ones in windows of up to
8,192 tokens. An interrupted demo continues where it stopped; `rm -r runs/demo` starts a new one.
"""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a plain `python tools/…` finds the project

from modalities.text.evaluators.perplexity import Perplexity
from recipes import train_seeds
from recipes.commands import Console, call
from recipes.report import load_results

METHODS = ("ggd_ssmax", "rope")
# Speeches alone: both methods learn these in the time. Facts to be found again take the whole recipe.
SETTINGS = ["data.facts_fraction=0", "data.copies_fraction=0", "optim.warmup=40", "evaluate.every=100"]
MEASURED = "perplexity --lengths 256,512,1024,2048,4096,8192 --samples 1"


def main(
    out: Annotated[Path, typer.Option(help="folder of the runs, tables and plots")] = Path("runs/demo"),
    steps: Annotated[int, typer.Option(help="training steps of each")] = 500,
) -> int | None:
    """Train, evaluate, and say in three sentences what was measured and what to type next."""
    started, console = time.perf_counter(), Console()
    words = [f"text.{method}_tiny" for method in METHODS] + ["--seeds", "0", "--jobs", "2", "--out", str(out)]
    for setting in (*SETTINGS, f"train.steps={steps}"):
        words += ["--set", setting]
    words += ["--evaluate", MEASURED]
    console.print(f"$ priorzoo train-seeds {shlex.join(words)}", style="dim", soft_wrap=True)
    if code := train_seeds.main(words):
        return code
    rows = {result.method: result.rows for result in load_results(Perplexity, out / "results")}
    (ggd, *_, ggd_far), (rope, *_, rope_far) = (rows[method] for method in METHODS)
    console.rule(f"done in {(time.perf_counter() - started) / 60:.1f} minutes")
    return console.print(
        f"Inside the training length of {ggd['length']} tokens, GGD with SSMax reads at {ggd['bits_per_byte']:.2f} bits "
        f"per byte and RoPE at {rope['bits_per_byte']:.2f}.\n"
        f"In windows of {ggd_far['length']:,} tokens, which neither has seen, it is {ggd_far['bits_per_byte']:.2f} and "
        f"{rope_far['bits_per_byte']:.2f}.\n"
        "Next: `priorzoo evaluate text_ggd_ssmax_tiny.facts passkey` finds a key in 16 times the training length.\n"
        f"The picture: {out / 'results' / 'perplexity.png'}",
        soft_wrap=True,
    )


if __name__ == "__main__":
    sys.exit(call(main, None, prog="tools/demo.py"))
