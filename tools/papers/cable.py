"""CABLE, "Context-aware Biases for Length Extrapolation" (arXiv 2503.08067)."""

from __future__ import annotations

from pathlib import Path

from recipes.text import CABLE_METHODS
from tools.papers import Row, Verdict, at, columns, command, evaluate, item, lengths, needs_gpu, shipped, told

EDU = [f"recipes/train.py text.cable_{method}_124m" for method in CABLE_METHODS]
TINY = ("cable", "alibi", "rope")


def _order(rows: list[Row]) -> Verdict:
    far = max(row["length"] for row in rows)
    cable, alibi, rope = (at(rows, m, "bits_per_byte", length=far) for m in TINY)
    return cable < alibi and cable < rope, f"bits per byte {told(rows, 'bits_per_byte', digits=3)}"


@item(
    "cable.table4",
    "perplexity beyond the training length",
    published="124M, 1,024 → 15,360: CABLE 20.63 → 19.28, ALiBi 20.99 → 22.89, RoPE 20.87 → 958",
    paper=[*EDU, "recipes/evaluate.py runs/… perplexity --lengths 1024,2048,4096,8192,15360"],
    judge=_order,
)
def table4(out: Path) -> list[Row]:
    """The shipped tiny models on held-out speeches."""
    rows = evaluate(out, [shipped(m) for m in TINY], "perplexity", "--lengths", lengths("ggd", 1, 2, 4, 8, 15))
    return columns(rows, "model", "method", "length", "bits_per_byte")


SPEECH = (
    "Fellow citizens of the Senate and House of Representatives: in resuming your consultations for the general good"
)


@item(
    "cable.figure2",
    "CABLE's bias beside ALiBi's, on a text",
    published="ALiBi falls evenly; CABLE's falls at some tokens and not at others",
    paper=[EDU[0], "priorzoo attention RUN,RUN TEXT --parts prior"],
    judge=lambda rows: (None, "see attention.png: CABLE's prior steps at some tokens, ALiBi's is even"),
)
def figure2(out: Path) -> list[Row]:
    """The priors of a head of each of the shipped models over a sentence."""
    models = f"{shipped('cable')},{shipped('alibi')}"
    command("recipes/attention.py", models, SPEECH, "--parts", "prior,weights", "--out", str(out / "attention.png"))
    return [{"figure": "attention.png"}]


needs_gpu(
    "cable.figure_time",
    "training time and memory of CABLE beside others",
    published="negligible overhead over a plain transformer",
    paper=["tools/bench.py training --device cuda --methods rope,cable,alibi,t5 --contexts 1024"],
    why="ratios of the attention alone on a CPU are in benchmarks/cpu/attention.json; the paper's figure is of one GPU",
)
