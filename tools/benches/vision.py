"""Whole vision transformers of every position method beside the one without positions, on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

from modalities.cost import Meter
from modalities.vision import VisionTransformer
from tools.benches import harness
from tools.benches.harness import PASSES, Cell, Column, Row, Settings, option
from zoo import create_model, list_models, prior_attention
from zoo.methods import list_grid_positions

PLAIN = "nope"
SECONDS = 6.0


@dataclass(frozen=True)
class VisionSettings(Settings):
    size: Annotated[int, option("side of the images in pixels")] = 384
    model: Annotated[str, option("tiny, small or base")] = "small"
    batch: Annotated[int, option("images a pass")] = 1
    methods: Annotated[str, option("comma-separated position methods; default all")] = ""
    memory_size: Annotated[int, option("side of the image whose attention's memory is measured")] = 1024
    dtype: Annotated[str, option(", ".join(harness.DTYPES))] = "float32"
    clock: Annotated[str, option("wall, or cpu for processor time of this process")] = "wall"


def names_of(model: str) -> dict[str, str]:
    """The model of each position method, for a size such as "small". typer.BadParameter for an unknown size."""
    prefix = f"vision_{PLAIN}_"
    sizes = {name.removeprefix(prefix).partition("_")[0]: name for name in list_models(f"{prefix}*_patch*")}
    sizes.pop("ssmax", None)
    size = sizes[harness.one_of("model", model, sizes)].removeprefix(prefix)
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


@torch.no_grad()
def attention_mib(name: str, size: int, dtype: torch.dtype) -> float | None:
    """MiB that one attention call adds, for an image of `size` pixels and a fresh prior; None for a prior without table."""
    model = Problem(name, torch.zeros(1, 3, size, size, dtype=dtype)).model
    prior, config = model.layers[0].attention.prior, model.config
    grid = model.positions(size, size)
    if f"_{PLAIN}_" not in name and prior(grid, grid, causal=False).table is None:
        return None
    shape = (1, grid.length, config.num_heads, config.dim // config.num_heads)
    q, k, v = (torch.randn(shape, dtype=dtype).transpose(1, 2) for _ in range(3))
    with Meter("cpu") as meter:
        prior_attention(q, k, v, prior(grid, grid, causal=False), causal=False)
    return None if meter.peak_bytes is None else meter.peak_bytes / 2**20


class Vision(harness.Benchmark):
    """Vision transformers of every position method on the CPU, as ratios to the one without positions.

    Each ratio is over passes of whole models, without positions and then with, in turns; `nope` against another `nope` shows
    what is noise. Memory is what one attention call on a large image, its prior computed anew, adds to the process at its
    peak, the output included.
    """

    Settings = VisionSettings
    chooses = ("methods",)

    def __init__(self, settings: VisionSettings) -> None:
        super().__init__(settings)
        self.dtype = harness.DTYPES[harness.one_of("dtype", settings.dtype, harness.DTYPES)]
        self.stopwatch = harness.by_clock(settings.clock)
        self.names = names_of(settings.model)
        wanted = harness.words(settings.methods) or [PLAIN, *(m for m in self.names if m != PLAIN)]
        self.methods = [harness.one_of("methods", method, self.names) for method in wanted]

    def about(self) -> Row:
        s = self.settings
        torch.manual_seed(0)
        self.plain = Problem(self.names[PLAIN], torch.randn(s.batch, 3, s.size, s.size, dtype=self.dtype))
        return {
            "image_size": s.size, "batch": s.batch, "dtype": s.dtype, "clock": s.clock, "plain": PLAIN,
            "memory_image_size": s.memory_size,
        }  # fmt: skip

    def cells(self) -> list[Cell]:
        return [Cell(method, "methods", method) for method in self.methods]

    def measure(self, cell: Cell) -> list[Row]:
        name, plain, s = self.names[cell.value], self.plain, self.settings
        ours, extra = Problem(name, plain.images), attention_mib(name, s.memory_size, self.dtype)
        rows = []
        for what in PASSES:
            runs = {
                kind: problem.step if what == "fwd+bwd" else harness.no_grad(problem.forward)
                for kind, problem in (("plain", plain), ("ours", ours))
            }
            rounds = harness.in_turns(runs, s.seconds or SECONDS, self.stopwatch)
            rows.append({
                "model": name, "method": cell.value, "what": what, "batch": len(plain.images),
                "tokens": plain.model.positions(*plain.images.shape[2:]).length, "plain_ms": rounds.ms("plain"),
                "ms": rounds.ms("ours"), "ratio": rounds.ratio("ours", "plain"), "pairs": len(rounds),
                "attention_extra_mib": extra,
            })  # fmt: skip
        return rows

    def title(self, record: Row) -> str:
        return (
            f"{record['batch']} × {record['image_size']} px on {record['threads']} CPU threads; ratios to {PLAIN}; "
            f"attention's extra memory at {record['memory_image_size']} px"
        )

    def columns(self) -> list[Column]:
        return [
            Column("method", lambda row: row["method"]),
            Column("pass", lambda row: row["what"]),
            Column("ms", harness.text_of("ms", ".1f")),
            Column("ratio", harness.text_of("ratio", ".2f")),
            Column("MiB", harness.text_of("attention_extra_mib", ".0f")),
        ]
