"""The first minutes: train the recommended method and RoPE by one recipe, and read beyond the
training length.

    python tools/demo.py

GGD with SSMax and RoPE learn speeches side by side, 256 tokens at a time, and then read held-out
ones in windows of up to 8,192 tokens. An interrupted demo continues where it stopped;
`rm -r runs/demo` starts a new one.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

# So that a plain `python tools/…` finds the project.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from modalities.results import ModelResult
from modalities.text.evaluators.perplexity import Perplexity
from recipes import train_seeds
from recipes.commands import call
from zoo.console import Console
from zoo.pretrained import manifest

METHODS = ("ggd_ssmax", "rope")
SHIPPED = ("text_ggd_ssmax_tiny.facts", "text_rope_tiny.facts", "text_alibi_tiny.facts")
# Speeches alone: both methods learn these in the time. Facts to be found again take the whole
# recipe.
SETTINGS = [
    "data.facts_fraction=0",
    "data.copies_fraction=0",
    "optim.warmup=40",
    "evaluate.every=100",
]
MEASURED = "perplexity --lengths 256,512,1024,2048,4096,8192 --samples 1"


def main(
    out: Annotated[Path, typer.Option(help="folder of the runs, tables and plots")] = Path(
        "runs/demo"
    ),
    steps: Annotated[int, typer.Option(help="training steps of each")] = 500,
) -> int:
    """Train, evaluate, draw."""
    started = time.perf_counter()
    console = Console()
    words = [f"text.{method}_tiny" for method in METHODS]
    words += ["--seeds", "0"]
    words += ["--jobs", "2"]
    words += ["--out", str(out)]
    for setting in (*SETTINGS, f"train.steps={steps}"):
        words += ["--set", setting]
    words += ["--evaluate", MEASURED]
    console.print(f"$ priorzoo train-seeds {shlex.join(words)}", style="dim", soft_wrap=True)
    code = train_seeds.main(words)
    if code:
        return code
    results = []
    for path in sorted((out / "results" / "perplexity").glob("*.json")):
        stored = json.loads(path.read_text())
        results.append(
            ModelResult(
                stored["label"],
                stored["train_context"],
                stored["rows"],
                method=stored["method"],
            )
        )
    draw(results, out / "demo.png")
    console.rule(f"done in {(time.perf_counter() - started) / 60:.1f} minutes")
    console.print(f"{summary(results)}\nThe picture: {out / 'demo.png'}", soft_wrap=True)
    return 0


def draw(results: list[ModelResult], path: Path) -> None:
    """Bits per byte over the length of the window: the two models as thick lines, shipped ones as
    thin lines behind them."""
    from modalities.figures import curves, panels, save_figure

    shipped = []
    for name in SHIPPED:
        card = manifest()[name]
        rows = [row for row in card["measured"] if "bits_per_byte" in row]
        method = name.removeprefix("text_").partition("_tiny")[0]
        shipped.append(ModelResult(f"{name} (shipped)", card["train_context"], rows, method=method))
    figure, (axis,) = panels(1, 1, width=8.0, height=4.8)
    curves(axis, [*shipped, *results], Perplexity.overview)
    names = {result.label: f"{result.method}, trained just now" for result in results}
    for line in axis.lines:
        name = str(line.get_label())
        if name in names:
            line.set(linewidth=3.2, markersize=7, zorder=4, linestyle="-", label=names[name])
        elif name.endswith("(shipped)"):
            line.set(linewidth=1.0, markersize=3.5, alpha=0.6)
    axis.legend(frameon=False, fontsize=9)
    save_figure(figure, path)


def summary(results: list[ModelResult]) -> str:
    """Three sentences: what is seen, from the measured rows, and what to type next."""
    rows = {result.method: result.rows for result in results}
    ggd = [row["bits_per_byte"] for row in rows["ggd_ssmax"]]
    rope = [row["bits_per_byte"] for row in rows["rope"]]
    lengths = [row["length"] for row in rows["rope"]]
    return (
        f"Inside the training length of {lengths[0]} tokens, GGD with SSMax reads at "
        f"{ggd[0]:.2f} bits per byte and RoPE at {rope[0]:.2f}.\n"
        f"In windows of {lengths[-1]:,} tokens, which neither has seen, it is {ggd[-1]:.2f} and "
        f"{rope[-1]:.2f}.\n"
        "Next: `priorzoo evaluate text_ggd_ssmax_tiny.facts passkey` finds a key in 16 times the "
        "training length."
    )


if __name__ == "__main__":
    sys.exit(call(main, None, prog="tools/demo.py"))
