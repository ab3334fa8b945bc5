"""The fused kernel at real tile sizes: near float64 of the same inputs, on memory filled with NaN,
the same bits in each run.

On a GPU the calls of tests/zoo have one tile; 1,031 tokens have whole tiles inside, which take the
paths without a mask. In the interpreter, which runs one program after another, once at 40 tokens in
tiles of 16.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.device import DEVICE, some
from tests.zoo.test_attention import Case, build, evaluate
from zoo import Positions
from zoo.attention import skipping
from zoo.attention.selfcheck import BOUNDS, CANCELLING, relative_error
from zoo.priors.alibi import Alibi
from zoo.priors.ggd import Ggd

pytest.importorskip("triton")
from zoo.attention.triton import TRITON, common, table_grad

pytestmark = pytest.mark.gpu

CUDA = DEVICE.type == "cuda"
LENGTH, GRID, TILE = (1031, (31, 32, 3), 64) if CUDA else (40, (5, 7, 2), 16)
FORMATS = [(16, torch.float32)]
if CUDA:
    FORMATS = [
        (64, torch.bfloat16),
        (128, torch.bfloat16),
        (64, torch.float16),
        (64, torch.float32),
    ]


@dataclass(frozen=True)
class Setup:
    """A call, what is realised of its prior, and what is not a case of the oracle.

    `table`: "decay" or "hidden" (some are −∞) over distances or displacements; `prior`: "ggd", "ggd
    mu" (θμ trained too) or "ramp" (ALiBi's lanes); `skip`: skip tiles of negligible weight;
    `gradients`: else forward alone, by the decoding kernel.
    """

    case: Case
    realised: str = "table"
    lanes: int = 5
    table: str = ""
    prior: str = ""
    skip: bool = False
    gradients: bool = True


def line(queries: int = LENGTH, **options: Any) -> Case:
    return Case(queries, LENGTH, **options)


ON_GRID = dict(
    queries=GRID[0] * GRID[1] + GRID[2], keys=GRID[0] * GRID[1] + GRID[2], causal=False, grid=GRID
)
CUTS = (LENGTH // 5, LENGTH // 2)
EVERYTHING = dict(groups=2, documents=CUTS, window=LENGTH // 3, scale="shared")
CASES = {
    "bare": Setup(line(), "none"),
    "lanes": Setup(line(), "lanes", lanes=16),
    "table": Setup(line()),
    "parametric": Setup(line(), "none", prior="ggd"),
    "parametric-scale-skip": Setup(line(scale="shared"), "none", prior="ggd", skip=True),
    "parametric-mu": Setup(line(), "none", prior="ggd mu"),
    "table-skip": Setup(line(), table="decay", skip=True),
    "scale-bare": Setup(line(scale="batch"), "none"),
    "documents": Setup(line(documents=CUTS)),
    "documents-lanes-skip": Setup(line(documents=CUTS), "lanes", skip=True),
    "window-both-ways": Setup(line(causal=False, window=LENGTH // 6)),
    "grouped": Setup(line(groups=2)),
    "grouped-parametric-scale": Setup(line(groups=1, scale="shared"), "none", prior="ggd"),
    "offset-parametric": Setup(line(LENGTH // 3), "none", prior="ggd"),
    "grid": Setup(Case(**ON_GRID)),
    "grid-scale": Setup(Case(**ON_GRID, scale="shared")),
    "grid-skip": Setup(Case(**ON_GRID), table="decay", skip=True),
    "everything": Setup(line(LENGTH * 2 // 3, **EVERYTHING), "both", skip=True),
    "plus-infinity-hidden": Setup(line(), table="hidden"),
    "ramp": Setup(line(), "none", prior="ramp"),
    "decode": Setup(line(1), gradients=False),
    "decode-ramp": Setup(line(1, groups=2), "none", prior="ramp", gradients=False),
    "decode-everything": Setup(line(7, **EVERYTHING), "both", gradients=False),
}
QUICK = [
    "bare",
    "lanes",
    "table",
    "parametric-scale-skip",
    "documents",
    "grouped",
    "grid",
    "ramp",
    "decode",
]


def tensors_of(
    setup: Setup, width: int, dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Any], Any]:
    """Leaves on the device as a kernel gets them, options, and the prior, if there is one, whose
    parameters are leaves."""
    leaves, options = build(setup.case, setup.realised, width=width, lanes=setup.lanes)
    queries = setup.case.queries
    keys = setup.case.keys
    distance = (torch.arange(queries + keys - 1) - (queries - 1)).float()
    if setup.case.grid:
        y, x = (torch.arange(1 - n, n).float() for n in GRID[:2])
        distance = torch.hypot(y[:, None], x).flatten()
    if setup.table == "decay":
        leaves["table"] = -torch.tensor([2.0, 0.5, 0.1, 0.01])[:, None] * distance.abs()
    if setup.table == "hidden":
        hidden = (distance > min(70, keys // 3)) & (distance % 3 == 0)
        leaves["table"] = leaves["table"].detach().masked_fill(hidden, -math.inf)
    rounded = {
        name: x.detach().to(dtype).to(dtype if name in "qkv" else torch.float32)
        for name, x in leaves.items()
    }
    low = {name: x.to(DEVICE).requires_grad_() for name, x in rounded.items()}
    prior: Any = Alibi(4).to(DEVICE) if setup.prior == "ramp" else None
    if setup.prior.startswith("ggd"):
        prior = Ggd(4, init="alibi", train_mu=setup.prior == "ggd mu").to(DEVICE).float()
        with torch.no_grad():
            prior.theta_beta.add_(0.1 * torch.randn_like(prior.theta_beta))
            prior.theta_alpha.add_(float(setup.skip))
        low |= {
            name: parameter
            for name, parameter in prior.named_parameters()
            if parameter.requires_grad
        }
    options = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in options.items()}
    return low, options, prior


def run(
    setup: Setup, leaves: dict[str, Tensor], options: dict[str, Any], prior: Any, kernel: str
) -> dict[str, Tensor]:
    terms = None
    if prior is not None:
        k_pos = Positions.line(setup.case.keys)
        terms = prior(
            k_pos.tail(setup.case.queries), k_pos, causal=setup.case.causal, x=leaves["q"][:, 0]
        )
    return evaluate(leaves, options, kernel, setup.case.grid, terms)


def worst_tile(value: Tensor, exact: Tensor, tokens: int) -> float:
    """The largest error of so many tokens of a head relative to their norm: the norm of all hides
    one wrong tile of many.

    A norm counts as at least that of the smallest normal numbers of the dtype, below which it has
    no relative precision.
    """
    if not torch.isfinite(value).all():
        return math.inf
    errors, norms = (
        torch.stack([tile.norm(dim=(-2, -1)) for tile in x.double().split(tokens, dim=-2)], -1)
        for x in (value.double() - exact, exact)
    )
    least = torch.finfo(value.dtype).smallest_normal * math.sqrt(
        min(tokens, value.shape[-2]) * value.shape[-1]
    )
    return float((errors / norms.clamp(min=max(least, 1e-30))).max())


@contextmanager
def nan_filled() -> Iterator[None]:
    """torch.empty is filled with NaN and the largest integers, and float32 products are not rounded
    to tf32."""
    matmul: Any = torch.backends.cuda.matmul
    settings = torch.are_deterministic_algorithms_enabled(), matmul.allow_tf32
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        matmul.allow_tf32 = False
        yield
    finally:
        torch.use_deterministic_algorithms(settings[0])
        matmul.allow_tf32 = settings[1]


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dtype"), FORMATS, ids=lambda x: str(x).removeprefix("torch."))
@pytest.mark.parametrize("name", CASES if CUDA else some(QUICK, 3))
def test_case_is_exact(name: str, width: int, dtype: torch.dtype, monkeypatch) -> None:
    """A case is as exact as rounding allows."""
    monkeypatch.setattr(TRITON, "least_keys", 1)
    if not CUDA:
        monkeypatch.setattr(common, "TILE", TILE)
        monkeypatch.setattr(table_grad, "PROGRAMS", 16)  # idle programs cost the interpreter time
    setup = CASES[name]
    with nan_filled(), torch.set_grad_enabled(setup.gradients), skipping(setup.skip):
        leaves, options, prior = tensors_of(setup, width, dtype)
        wide = {key: x.detach().double().requires_grad_() for key, x in leaves.items()}
        wide_prior = None if prior is None else copy.deepcopy(prior).double()
        if wide_prior is not None:
            wide |= {
                key: parameter for key, parameter in wide_prior.named_parameters() if key in wide
            }
        exact = run(setup, wide, options, wide_prior, "reference")
        results, *again = (
            run(setup, leaves, options, prior, "triton") for _ in range(2 if CUDA else 1)
        )
    for key, value in results.items():
        bound = BOUNDS[dtype] * (1.0 if key in ("out", "q", "k", "v") else CANCELLING)
        assert relative_error(value, exact[key]) <= bound, key
        if key in ("out", "q", "k", "v"):  # a tile is not averaged with others
            assert (
                worst_tile(value, exact[key], 1 if key == "out" else TILE)
                <= BOUNDS[dtype] * CANCELLING
            ), key
        assert all(torch.equal(other[key], value) for other in again), key
