"""The forward pass: one program per block of queries, online softmax over key blocks (FlashAttention, arXiv:2205.14135)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from zoo.attention.triton import common
from zoo.attention.triton.common import (
    INTERPRET,
    Mask,
    Operands,
    TableIndex,
    bias_of,
    cdiv,
    key_range,
    lanes_apart,
    mm,
    narrow,
    on_device,
    padded_width,
    scale_stride,
    shared_limit,
    strided,
    visible_of,
)

if TYPE_CHECKING:
    from zoo.attention.triton.plan import Plan

# (queries, keys, warps, stages) of a block by padded width, for two-byte dtypes and for float32, which is multiplied on CUDA
# cores. None spills registers on compute capability 9.0 (tools/compile_kernels.py).
BLOCKS_16 = {16: (128, 64, 4, 3), 32: (128, 64, 4, 3), 64: (128, 64, 4, 3), 128: (128, 128, 8, 2), 256: (128, 64, 8, 2)}
CROWDED_16 = {**dict.fromkeys((16, 32, 64, 128), (128, 64, 8, 3)), 256: (128, 32, 8, 3)}
UNEVEN_BLOCKS_16 = {**dict.fromkeys((16, 32, 64), (128, 64, 8, 3)), 128: (128, 32, 8, 2), 256: (64, 16, 8, 2)}
BLOCKS_32 = {16: (32, 32, 4, 2), 32: (32, 16, 8, 2), 64: (32, 32, 8, 2), 128: (32, 16, 8, 2), 256: (32, 16, 8, 2)}
CROWDED_32 = {**BLOCKS_32, 64: (32, 16, 8, 2)}
# Blocks where `runs_ahead` holds. Calls with a plan, or a row scale at 128 columns, need registers and take the second.
AHEAD = ((128, 128, 8, 2), (128, 64, 8, 3))
GRID_64 = (128, 128, 8, 2)  # on a grid without other lanes, documents or windows, up to 64 even columns of two bytes


def runs_ahead(k: Tensor, v: Tensor) -> bool:
    """Whether the products of one block are issued before the exponentials of the last, and keys and values are read by tensor
    descriptors, whose addresses and strides are multiples of 16 bytes. The interpreter does so for any number of columns."""
    strides = [x.element_size() * stride for x in (k, v) for stride in x.stride()[:3]]
    if not k.numel() or 0 in strides or any(at % 16 for at in (k.data_ptr(), v.data_ptr(), *strides)):
        return False
    fits = k.shape[-1] == v.shape[-1] in (64, 128) and k.element_size() == 2
    return INTERPRET.value or (fits and driver.active.get_current_target().arch == 90)


def block_sizes(
    dk: int, dv: int, lanes: int, size: int, crowded: bool, even: bool, limit: int
) -> tuple[int, int, int, int]:
    """(queries, keys, warps, stages) for padded widths of `size`-byte elements, within `limit` bytes of shared memory.

    `crowded`: on a grid, with a window, or documents beside 256 columns; `even`: widths before padding are multiples
    of 16.
    """
    if size == 4:
        blocks = CROWDED_32 if crowded else BLOCKS_32
    else:
        blocks = UNEVEN_BLOCKS_16 if not even else CROWDED_16 if crowded else BLOCKS_16
    bm, bn, warps, stages = blocks[max(dk, dv)]
    spare = limit - 1024  # for document ids and reductions
    while bn > 16 and (bm * (dk + lanes) + stages * bn * (dk + lanes + dv)) * size > spare:
        if stages > 2:
            stages -= 1
        elif bn > 32 or bm <= 64:
            bn //= 2
        else:
            bm //= 2
    return bm, bn, warps, stages


class Block(NamedTuple):
    """In a kernel: what the loops over the keys of one block of queries share; None: the call has none."""

    rows: tl.tensor
    row_ids: tl.tensor | None
    q: tl.tensor
    q_lanes: tl.tensor
    k: tl.tuple
    v: tl.tuple
    table: tl.tensor | None
    segments: tl.tensor | None
    factor: tl.tensor
    scale: tl.tensor | None
    lanes: tl.tensor
    width_k: tl.tensor
    width_v: tl.tensor
    mask: Mask
    table_index: TableIndex


@triton.jit
def load_rows(
    side, n, first, width, count, D: tl.constexpr, BN: tl.constexpr, CHECKED: tl.constexpr, AHEAD: tl.constexpr
):  # fmt: skip
    """(BN, D) block n of a head's keys or values, columns from `first` on; CHECKED: zeros beyond the last row and column."""
    tensor, b, g = side
    if AHEAD:
        block = tensor.load([b.to(tl.int32), g.to(tl.int32), n * BN, 0]).reshape(BN, D)
    else:
        pointer, stride_b, stride_g, stride = tensor
        pointer += b * stride_b + g * stride_g
        rows, columns = n * BN + tl.arange(0, BN), first + tl.arange(0, D)
        # Offsets exceed 2^31. A 32 × 32 → 64 bit product is one instruction and takes fewer registers than offsets inside the
        # block, which the compiler would keep across blocks.
        at = (pointer + columns[None, :]) + rows.to(tl.int64)[:, None] * stride
        there = (rows[:, None] < count) & (columns[None, :] < width)
        block = tl.load(at, mask=there, other=0.0) if CHECKED else tl.load(at)
    return block


@triton.jit
def multiply_keys(
    block, n, LANES: tl.constexpr, DK: tl.constexpr, BN: tl.constexpr, CHECKED: tl.constexpr, AHEAD: tl.constexpr
):  # fmt: skip
    """(BM, BN) products of the queries with key block n."""
    keys, count = block.k, block.mask.keys
    z = mm(block.q, tl.trans(load_rows(keys, n, block.lanes, block.width_k, count, DK, BN, CHECKED, AHEAD)))
    if LANES:
        z = mm(block.q_lanes, tl.trans(load_rows(keys, n, 0, block.lanes, count, LANES, BN, CHECKED, AHEAD)), z)
    return z


@triton.jit
def _attend(
    sums, block, lo, hi, LANES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr,
    EVEN: tl.constexpr, AHEAD: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """`sums` over key blocks [lo, hi) too: the weighted values (BM, DV), the weights (BM,), both relative to exp2 of the
    largest logits so far (BM,). AHEAD: the products of the next block run during the exponentials of this one."""
    acc, total, top = sums
    rows, keys = block.rows, block.mask.keys
    CHECKED: tl.constexpr = MASKED or not EVEN
    if AHEAD:
        next_z = multiply_keys(block, lo, LANES, DK, BN, True, AHEAD)
    for n in range(lo, hi):
        cols = n * BN + tl.arange(0, BN)
        v = load_rows(block.v, n, 0, block.width_v, keys, DV, BN, CHECKED, AHEAD)
        if AHEAD:
            z = next_z
            next_z = multiply_keys(block, n + 1, LANES, DK, BN, True, AHEAD)
        else:
            z = multiply_keys(block, n, LANES, DK, BN, CHECKED, AHEAD)
        seen = rows[:, None] >= 0
        if MASKED:
            col_ids = None
            if block.segments is not None:
                col_ids = tl.load(block.segments + cols, mask=cols < keys, other=-1)
            seen = visible_of(rows, cols, block.row_ids, col_ids, block.mask, CAUSAL)
        if block.table is not None:
            z *= block.factor
            z += bias_of(block.table, rows, cols, seen, block.table_index, MASKED)
        if block.scale is not None:
            z *= block.scale[:, None]
        if MASKED:
            z = tl.where(seen, z, float("-inf"))
        # Content alone is not scaled until the exponent, where the factor is free.
        unit = 1.0 if block.table is not None or block.scale is not None else block.factor
        new_top = tl.maximum(top, tl.max(z, 1) * unit)
        # Keep the pivot finite for rows without a visible key so far: −∞ − (−∞) = NaN.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(z * unit - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(p, 1)
        acc = acc * fade[:, None] + mm(narrow(p, v.dtype), v)
        top = new_top
    return acc, total, top


# Sizes change from call to call and must not trigger recompilation.
LENGTHS = ["ssb", "sth", "heads", "group", "tiles", "queries", "keys", "offset", "window", "origin", "prefix"]


@triton.jit(do_not_specialize=LENGTHS, do_not_specialize_on_alignment=["table", "row_scale", "segments"])
def _forward(
    q, k, v, table, row_scale, segments, plan, codes, out, lse, ssb, sth,
    heads, group, tiles, queries, keys, offset, window, origin, prefix, factor, lanes, width_k, width_v,
    LANES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TILE: tl.constexpr,
    CAUSAL: tl.constexpr, EVEN: tl.constexpr, AHEAD: tl.constexpr
):  # fmt: skip
    """One block of queries of one head. What a call does not have is None. AHEAD: k and v are tensor descriptors."""
    q_ptr, sqb, sqh, sqt = q
    out_ptr, sob, soh, sot = out
    mask, index = Mask(queries, keys, offset, window), TableIndex(origin, codes, prefix)
    # One grid axis, since the others are limited to 65535. The last queries of a causal call have the most keys and start
    # first, so that no long program runs last.
    blocks = tl.cdiv(queries, BM)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    first = (blocks - 1 - tl.program_id(0) % blocks) * BM
    b, h = row // heads, row % heads
    q_ptr += b * sqb + h * sqh + first * tl.cast(sqt, tl.int64)
    out_ptr += b * sob + h * soh + first * tl.cast(sot, tl.int64)
    if table is not None:
        table += h * sth
    rows = first + tl.arange(0, BM)
    dk, dv, r = lanes + tl.arange(0, DK), tl.arange(0, DV), tl.arange(0, BM)[:, None]
    valid = rows[:, None] < queries
    q = tl.load(q_ptr + (r * sqt + dk[None, :]), mask=valid & (dk[None, :] < width_k), other=0.0)
    q_lanes = q
    if LANES:
        dl = tl.arange(0, LANES)
        q_lanes = tl.load(q_ptr + (r * sqt + dl[None, :]), mask=valid & (dl[None, :] < lanes), other=0.0)
    row_ids, scale = None, None
    if segments is not None:
        segments += b * keys
        row_ids = tl.load(segments + offset + rows, mask=rows < queries, other=-2)
    if row_scale is not None:
        scale = tl.load(row_scale + b * ssb + h * queries + rows, mask=rows < queries, other=0.0)
        if table is None:
            scale *= factor
    plan_step = (tl.num_programs(0) // blocks).to(tl.int64) * tiles
    if plan is not None:
        plan += row * tiles
    lo, full_lo, full_hi, hi = key_range(
        first, plan, plan_step, segments, row_ids, mask, index, BM, BN, TILE, CAUSAL, DK + DV <= 256
    )  # fmt: skip
    block = Block(
        rows, row_ids, q, q_lanes, (k, b, h // group), (v, b, h // group), table, segments, factor, scale, lanes,
        width_k, width_v, mask, index,
    )  # fmt: skip
    sums = tl.zeros([BM, DV], tl.float32), tl.zeros([BM], tl.float32), tl.full([BM], float("-inf"), tl.float32)
    sums = _attend(sums, block, lo, full_lo, LANES, DK, DV, BN, CAUSAL, EVEN, AHEAD, True)
    sums = _attend(sums, block, full_lo, full_hi, LANES, DK, DV, BN, CAUSAL, EVEN, AHEAD, False)
    acc, total, top = _attend(sums, block, full_hi, hi, LANES, DK, DV, BN, CAUSAL, EVEN, AHEAD, True)
    # A row that sees nothing, or −∞ alone, is 0, and so are its weights exp2(z2 − lse2) in the backward pass.
    lse2 = tl.where(total == 0.0, float("inf"), top + tl.log2(total))
    result = narrow(acc / tl.where(total == 0.0, 1.0, total)[:, None], out_ptr.dtype.element_ty)
    tl.store(out_ptr + (r * sot + dv[None, :]), result, mask=valid & (dv[None, :] < width_v))
    tl.store(lse + row * queries + rows, lse2, mask=rows < queries)


def attention_forward(call: Operands, plan: Plan | None = None) -> tuple[Tensor, Tensor]:
    """out (B,H,T,Dv) in q's dtype, in memory (B,T,H,Dv); lse2 (B,H,T) float32, log2 Σ_j exp z[i,j], +∞ of an empty row.

    plan: tiles to compute; None for every visible one.
    """
    q, k, v, row_scale, segments, g = call.q, call.k, call.v, call.row_scale, call.segments, call.geometry
    table2 = call.table2
    out = q.new_empty(g.batch, g.queries, g.heads, g.width_v).transpose(1, 2)
    lse2 = torch.empty(g.batch, g.heads, g.queries, dtype=torch.float32, device=q.device)
    lanes = lanes_apart(g)
    dk, dv = padded_width(g.width_k - lanes), padded_width(g.width_v)
    padded_lanes = padded_width(lanes) if lanes else 0
    with on_device(q):
        limit = shared_limit(q.device.index or 0)
        even = g.width_k % 16 == g.width_v % 16 == lanes % 16 == 0
        crowded = g.grid_width > 0 or g.window > 0 or (segments is not None and dk + dv > 256)
        on_grid_alone = g.grid_width and not (padded_lanes or g.window or segments is not None)
        full = dk + padded_lanes == g.width_k and dv == g.width_v
        ahead = full and not (crowded or padded_lanes) and segments is None and runs_ahead(k, v)
        if ahead:
            bm, bn, warps, stages = AHEAD[plan is not None or (dk > 64 and row_scale is not None)]
        elif on_grid_alone and even and q.element_size() == 2 and max(dk, dv) <= 64:
            bm, bn, warps, stages = GRID_64
        else:
            bm, bn, warps, stages = block_sizes(dk, dv, padded_lanes, q.element_size(), crowded, even, limit)
        bm, bn = (max(16, size * common.TILE // 64) for size in (bm, bn))
        k_side, v_side = (
            TensorDescriptor.from_tensor(x, [1, 1, bn, x.shape[-1]]) if ahead else strided(x) for x in (k, v)
        )
        _forward[(cdiv(g.queries, bm) * g.batch * g.heads,)](
            strided(q), k_side, v_side, table2, row_scale, segments, None if plan is None else plan.rows,
            call.codes, strided(out), lse2, scale_stride(row_scale), 0 if table2 is None else table2.stride(0),
            g.heads, g.heads // g.groups, -(-g.queries // common.TILE), g.queries, g.keys, g.offset, g.window or None, g.origin,
            g.prefix or None, g.factor, lanes, g.width_k, g.width_v,
            LANES=padded_lanes, DK=dk, DV=dv, BM=bm, BN=bn, TILE=common.TILE, CAUSAL=g.causal,
            EVEN=full, AHEAD=ahead,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out, lse2
