"""Measure vision transformers of every position method on the CPU against the one without positions.

    python tools/bench_vision.py                        # ViT-S/16 at 384 px, a few minutes on two idle cores
    python tools/bench_vision.py --model tiny --size 96 --seconds 0.5

Each ratio is the median over paired passes of whole models, without positions and then with, alternated, so that other work
on the machine falls on both; `nope` against another `nope` shows what is noise. Memory is what one attention call on a large
image, its prior made anew, adds to the process at its peak, the output included.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a plain `python tools/…` finds the project

from modalities.cost import Meter
from modalities.vision import VisionTransformer
from tools.bench_attention import no_grad, paired, write_record
from zoo import create_model, list_models, prior_attention
from zoo.methods import list_grid_positions
from zoo.naming import did_you_mean

PLAIN = "nope"
MEMORY_SIZE = 1024


@dataclass(frozen=True)
class Result:
    """One ratio: a pass over `batch` images of `tokens` tokens."""

    model: str
    method: str
    what: str
    batch: int
    tokens: int
    plain_ms: float
    ms: float
    ratio: float
    pairs: int


def names_of(model: str) -> dict[str, str]:
    """The model of each position method, for a size such as "small".

    Raises:
        ValueError: for a size that there is none of.
    """
    prefix = f"vision_{PLAIN}_"
    sizes = {name.removeprefix(prefix).partition("_")[0]: name for name in list_models(f"{prefix}*_patch*")}
    sizes = {size: name for size, name in sizes.items() if size != "ssmax"}
    if model not in sizes:
        raise ValueError(f"no vision models of size {model!r}; {did_you_mean(model, sizes)}known: {', '.join(sizes)}")
    size = sizes[model].removeprefix(prefix)
    return {method: f"vision_{method}_{size}" for method in list_grid_positions()}


class Problem:
    """One model and its images; a step is the forward pass and all gradients, without an optimiser."""

    def __init__(self, name: str, images: torch.Tensor) -> None:
        torch.manual_seed(0)
        model = create_model(name)
        assert isinstance(model, VisionTransformer)
        self.model, self.images = model.to(images.dtype), images
        self.leaves = [p for p in model.parameters() if p.requires_grad]

    def forward(self) -> torch.Tensor:
        return self.model(self.images)

    def step(self) -> None:
        torch.autograd.grad(self.forward().square().mean(), self.leaves, allow_unused=True)


def measure(name: str, method: str, plain: Problem, seconds: float, clock: Callable[[], float]) -> list[Result]:
    """Both passes of one model beside the plain one, which is kept."""
    ours = Problem(name, plain.images)
    tokens = plain.model.positions(*plain.images.shape[2:]).length
    results = []
    for what, runs in (
        ("forward", (no_grad(plain.forward), no_grad(ours.forward))),
        ("fwd+bwd", (plain.step, ours.step)),
    ):
        numbers = paired(*runs, seconds, clock)
        results.append(Result(name, method, what, len(plain.images), tokens, *numbers))
    return results


@torch.no_grad()
def extra_memory(names: dict[str, str], size: int, dtype: torch.dtype) -> dict[str, float]:
    """MiB of attention over one image of `size` pixels, for plain attention and for every method whose prior is a table."""
    found = {}
    for method, name in names.items():
        model = Problem(name, torch.zeros(1, 3, size, size, dtype=dtype)).model
        prior, config = model.layers[0].attention.prior, model.config
        grid = model.positions(size, size)
        if method != PLAIN and prior(grid, grid, causal=False).table is None:
            continue
        shape = (1, grid.length, config.num_heads, config.dim // config.num_heads)
        q, k, v = (torch.randn(shape, dtype=dtype).transpose(1, 2) for _ in range(3))
        with Meter("cpu") as meter:
            prior_attention(q, k, v, prior(grid, grid, causal=False), causal=False)
        if meter.peak_bytes is not None:
            found[method] = meter.peak_bytes / 2**20
    return found


def show(results: list[Result], memories: dict[str, float], size: int, memory_size: int, console: Console) -> None:
    first = results[0]
    table = Table(
        title=f"{first.batch} × {size} px, {first.tokens} tokens, on {torch.get_num_threads()} CPU threads; "
        f"ratios to {PLAIN}; attention's extra memory at {memory_size} px",
        box=SIMPLE_HEAD,
        padding=0,
    )
    table.add_column("method", no_wrap=True)
    for column in ("forward ms", "ratio", "fwd+bwd ms", "ratio", "MiB"):
        table.add_column(column, no_wrap=True, justify="right")
    for forward, step in zip(results[::2], results[1::2], strict=True):
        memory = f"{memories[forward.method]:.0f}" if forward.method in memories else ""
        cells = (f"{forward.ms:.1f}", f"{forward.ratio:.2f}", f"{step.ms:.1f}", f"{step.ratio:.2f}", memory)
        table.add_row(forward.method, *cells)
    console.print(table)


def main(
    size: int = typer.Option(384, help="Side of the images in pixels."),
    model: str = typer.Option("small", help="Size of the models: tiny, small or base."),
    batch: int = typer.Option(1, help="Images a pass."),
    methods: str = typer.Option("", help="Comma-separated position methods; all of them by default."),
    seconds: float = typer.Option(6.0, help="Seconds of paired passes for each ratio."),
    memory_size: int = typer.Option(MEMORY_SIZE, help="Side of the image whose attention's memory is measured."),
    dtype: str = typer.Option("float32", help="float32, bfloat16 or float64."),
    threads: int = typer.Option(0, help="CPU threads; 0 leaves torch's own number."),
    clock: str = typer.Option("wall", help="wall, or cpu: processor time of this process."),
    out: Path | None = typer.Option(None, help="Write the results as JSON here."),
) -> None:
    """Print the table of ratios and, with --out, save it."""
    clocks = {"wall": time.perf_counter, "cpu": time.process_time}
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
    for option, value, known in (("clock", clock, clocks), ("dtype", dtype, kinds)):
        if value not in known:
            raise typer.BadParameter(f"--{option} must be one of {', '.join(known)}, got {value!r}")
    try:
        names = names_of(model)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    wanted = (
        [method.strip() for method in methods.split(",")] if methods else [PLAIN, *(m for m in names if m != PLAIN)]
    )
    for method in wanted:
        if method not in names:
            raise typer.BadParameter(
                f"unknown method {method!r}; {did_you_mean(method, names)}known: {', '.join(names)}"
            )
    if threads:
        torch.set_num_threads(threads)
    console = Console()
    torch.manual_seed(0)
    plain = Problem(names[PLAIN], torch.randn(batch, 3, size, size, dtype=kinds[dtype]))
    results: list[Result] = []
    for method in track(wanted, description="measuring", console=console):
        results += measure(names[method], method, plain, seconds, clocks[clock])
    memories = extra_memory({m: names[m] for m in dict.fromkeys([PLAIN, *wanted])}, memory_size, kinds[dtype])
    show(results, memories, size, memory_size, console)
    if out is not None:
        record: dict[str, Any] = {
            "image_size": size, "batch": batch, "dtype": dtype, "clock": clock, "plain": PLAIN,
            "results": [asdict(r) for r in results],
            "memory_image_size": memory_size, "attention_extra_memory_mib": memories,
        }  # fmt: skip
        write_record(out, record, console)


if __name__ == "__main__":
    typer.run(main)
