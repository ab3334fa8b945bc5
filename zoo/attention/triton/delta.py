"""δ = rowsum(dO ∘ O): what the softmax takes from every gradient of a row's logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.attention.triton import common
from zoo.attention.triton.common import Geometry, last_axis_contiguous, on_device, padded_width
from zoo.attention.triton.tiles import tile_at

__all__ = ["row_delta"]


@triton.jit(do_not_specialize=["heads", "queries"])
def _delta(
    grad_out, out, delta, gob, goh, got, ob, oh, ot, heads, queries, WIDTH: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """One block of rows of one head of δ = rowsum(dO ∘ O)."""
    blocks = tl.cdiv(queries, BM)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    start = tl.program_id(0) % blocks * BM
    b, h = row // heads, row % heads
    do = tile_at(grad_out + b * gob + h * goh, start, got, queries, WIDTH, DV, BM, True)
    o = tile_at(out + b * ob + h * oh, start, ot, queries, WIDTH, DV, BM, True)
    rows = start + tl.arange(0, BM)
    tl.store(delta + row * queries + rows, tl.sum(do.to(tl.float32) * o.to(tl.float32), 1), mask=rows < queries)


def row_delta(grad_out: Tensor, out: Tensor, geometry: Geometry) -> Tensor:
    """(B, H, T) float32 δ = Σ_d dO·O, what the softmax takes from every ds of a row; both arguments (B, H, T, Dv)."""
    g = geometry
    grad_out, out = last_axis_contiguous(grad_out), last_axis_contiguous(out)
    delta = torch.empty(g.batch, g.heads, g.queries, dtype=torch.float32, device=out.device)
    block = common.TILE
    with on_device(out):
        _delta[(triton.cdiv(g.queries, block) * g.batch * g.heads,)](
            grad_out, out, delta, *grad_out.stride()[:3], *out.stride()[:3], g.heads, g.queries,
            WIDTH=g.width_v, DV=padded_width(g.width_v), BM=block, num_warps=4,
        )  # fmt: skip
    return delta
