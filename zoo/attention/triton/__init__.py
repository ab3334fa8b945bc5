"""Fused attention on the GPU: content, lanes and a relative table in one kernel, forward and backward (Triton).

A tile of BM × BN logits needs BM + BN − 1 numbers of a line's table, so the log-prior costs one cached load a logit and
no memory. Gradients are exact and the same in every run: no float is added atomically. The table's gradient walks along
diagonals of tiles, where the same entries of the table are met again and again, so that tiles add up in registers and are
summed along their own diagonals once (`table_grad`); a table with a law (GGD) passes its gradient to the law's numbers
without that. Tiles that cannot matter, because the prior has decayed or the documents differ, are not computed (`plan`).

On the CPU the kernels run only in Triton's interpreter (TRITON_INTERPRET=1), to be tested.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from zoo.attention.base import AttentionCall, cuda_capability, repeat_heads, traced_as_constant

__all__ = ["TritonKernel", "skipped_share", "skipping"]

# Fewer keys than this are not worth the plan, which reads all queries and keys once.
LEAST_KEYS = 1024
DECODE_QUERIES = 8
WIDEST = 256

_skipping = True


@contextmanager
def skipping(enabled: bool) -> Iterator[None]:
    """Whether tiles that provably do not matter are left out, for what runs inside. They are by default."""
    global _skipping
    before, _skipping = _skipping, enabled
    try:
        yield
    finally:
        _skipping = before


class TritonKernel:
    """Serves tables on lines and grids, lanes, documents and windows, in float32, bfloat16 and float16, on CUDA."""

    def refuses(self, call: AttentionCall) -> str | None:
        if not _installed():
            return "the package triton is not installed"
        device = call.q.device.type
        if device != "cuda" and not (device == "cpu" and _interpreted()):
            return f"it runs on CUDA devices, and the queries are on {call.q.device}"
        if device == "cuda" and cuda_capability(str(call.q.device)) < (8, 0):
            return "it needs an NVIDIA GPU of compute capability 8.0 or later"
        if call.terms.bias is not None:
            return "a dense bias is T × S numbers"
        if len({call.q.dtype, call.k.dtype, call.v.dtype}) > 1:
            return f"q, k and v must be of one dtype, got {call.q.dtype}, {call.k.dtype} and {call.v.dtype}"
        if call.q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"it computes in float32, bfloat16 and float16, not in {call.q.dtype}"
        lanes = 0 if call.terms.q_lanes is None else call.terms.q_lanes.shape[-1]
        width = max(call.q.shape[-1] + lanes, call.v.shape[-1])
        if width > WIDEST:
            return f"heads may be up to {WIDEST} wide, lanes included, got {width}"
        if call.table is not None and call.table.origin is None and call.table.shape is None:
            return "its table is neither over a line nor over a grid"
        if call.segments is not None and call.offset < 0:
            return "documents need a key for every query"
        return None

    def run(self, call: AttentionCall) -> Tensor:
        """(B, H, T, D) in q's dtype; logits and sums in float32. Few queries without gradients take the decoding kernel."""
        from zoo.attention.triton.op import decode_op, fused_attention, fused_decode

        q, k, v, row_scale, segments = _operands(call)
        table = call.table
        values = numbers = tangents = None
        if table is not None:
            values = table.table
            if table.law is not None and torch.is_grad_enabled() and values.requires_grad:
                values, numbers, tangents = values.detach(), table.law.numbers.float(), table.tangents().float()
            values = values.float()
        scalars = _scalars(call)
        if (
            call.num_queries <= DECODE_QUERIES
            and not scalars[3]
            and not _needs_grad(q, k, v, values, numbers, row_scale)
        ):
            decode = decode_op if torch.compiler.is_compiling() else fused_decode
            return decode(q, k, v, values, row_scale, segments, *scalars)
        if values is not None and table is not None and table.origin is not None:
            # Without gradients too: what is computed again for a backward pass must be the same bits.
            values, tangents = _centred(values, tangents, table.center if call.causal else 0)
        skip = _skipping and call.num_keys >= LEAST_KEYS and _may_skip(call)
        return fused_attention(q, k, v, values, row_scale, segments, numbers, tangents, *scalars, skip)[0]


def _centred(values: Tensor, tangents: Tensor | None, first: int) -> tuple[Tensor, Tensor | None]:
    """A line's table (H, N) and its tangents (P, H, N), less their entries where the table is largest from column `first`
    on: where a head looks that sees no content.

    A number per head may be taken off, for a row's weights do not change, and neither do sums with its Σ_j dS_ij = 0. In
    bfloat16 that sum is not quite 0, δ being made of the rounded output; what it is multiplied by had better be small.
    """
    first = min(max(first, 0), values.shape[1] - 1)
    column = values.detach()[:, first:].argmax(dim=1, keepdim=True) + first
    shift = values.detach().gather(1, column)
    values = values - shift.where(shift.isfinite(), 0.0)
    if tangents is not None:
        tangents = tangents - tangents.gather(2, column.expand(len(tangents), -1, 1))
    return values, tangents


def skipped_share(call: AttentionCall) -> float:
    """The share of the visible tiles of this call that are not computed. Waits for the device."""
    from zoo.attention.triton import plan
    from zoo.attention.triton.op import geometry_of

    q, k, v, row_scale, segments = _operands(call)
    geometry = geometry_of(q, k, v, *_scalars(call))
    table = None if call.table is None else call.table.table.float()
    return plan.skipped_share(plan.make_plan(q, k, table, row_scale, segments, geometry), geometry)


@traced_as_constant
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@traced_as_constant
def _interpreted() -> bool:
    from zoo.attention.triton.common import INTERPRET

    return INTERPRET.value


def _may_skip(call: AttentionCall) -> bool:
    """Content alone is bounded by nothing that falls with distance."""
    return call.table is not None or call.terms.q_lanes is not None or call.segments is not None


def _needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _operands(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """q, k, v with equal numbers of key heads, the table's row scale, and document ids, as the kernels take them."""
    q, k, v = call.queries, call.keys, call.v
    if k.shape[1] != v.shape[1]:
        groups = max(k.shape[1], v.shape[1])
        groups = groups if groups % min(k.shape[1], v.shape[1]) == 0 else q.shape[1]
        k, v = repeat_heads(k, groups), repeat_heads(v, groups)
    # A column alone may have any stride and be contiguous.
    q, k, v = (x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format) for x in (q, k, v))
    row_scale = None if call.table is None or call.query_scale is None else call.query_scale.float().contiguous()
    segments = None if call.segments is None else call.segments.to(torch.int32).contiguous()
    return q, k, v, row_scale, segments


def _scalars(call: AttentionCall) -> tuple[bool, int, int, list[int], int]:
    """causal, window, origin, grid and lanes, as the operator takes them."""
    origin, grid = 0, []
    if call.table is not None and call.table.shape is not None:
        origin, grid = call.table.center, [*call.table.shape, call.table.num_prefix]
    elif call.table is not None:
        origin = call.table.origin or 0
    lanes = 0 if call.terms.q_lanes is None else call.terms.q_lanes.shape[-1]
    return call.causal, call.window or 0, origin, grid, lanes
