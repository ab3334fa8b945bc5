"""The forward pass: one program per block of queries, online softmax over key blocks
(FlashAttention, arXiv:2205.14135)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.attention.triton import common
from zoo.attention.triton.common import (
    Mask,
    Operands,
    TableIndex,
    cdiv,
    describable,
    descriptor,
    entries,
    key_range,
    mm,
    narrow,
    on_device,
    place_of,
    rows_of,
    scale_stride,
    seen_of,
    shape_options,
    shared_limit,
    store_tile,
    strided,
)

if TYPE_CHECKING:
    from zoo.attention.triton.plan import Plan

# (queries, keys, warps, stages) of a block by padded width, for two-byte dtypes and for float32,
# which is multiplied on CUDA cores. docs/KERNELS.md says which spill registers on compute
# capability 9.0 (tools/compile_kernels.py).
BLOCKS_16 = {
    16: (128, 64, 4, 3),
    32: (128, 64, 4, 3),
    64: (128, 64, 4, 3),
    128: (128, 128, 8, 2),
    256: (128, 64, 8, 2),
}
CROWDED_16 = {**dict.fromkeys((16, 32, 64, 128), (128, 64, 8, 3)), 256: (128, 32, 8, 3)}
UNEVEN_BLOCKS_16 = {
    **dict.fromkeys((16, 32, 64), (128, 64, 8, 3)),
    128: (128, 32, 8, 2),
    256: (64, 16, 8, 2),
}
BLOCKS_32 = {
    16: (32, 32, 4, 2),
    32: (32, 16, 8, 2),
    64: (32, 32, 8, 2),
    128: (32, 16, 8, 2),
    256: (32, 16, 8, 2),
}
CROWDED_32 = {**BLOCKS_32, 64: (32, 16, 8, 2)}
# Where the products with the next keys are issued before the exponentials of these. The second is
# for windows up to 64 columns, and at 128 for documents, or row scales without a plan.
AHEAD = ((128, 128, 8, 2), (128, 64, 8, 3))
# On a grid without other lanes, documents or windows, up to 64 even columns of two bytes.
GRID_64 = (128, 128, 8, 2)


def block_sizes(
    dk: int, dv: int, lanes: int, size: int, crowded: bool, even: bool, limit: int
) -> tuple[int, int, int, int]:
    """(queries, keys, warps, stages) for padded widths of `size`-byte elements, within `limit`
    bytes of shared memory.

    `crowded`: on a grid, with a window, or documents beside 256 columns; `even`: widths before
    padding are multiples of 16.
    """
    if size == 4:
        blocks = CROWDED_32 if crowded else BLOCKS_32
    elif not even:
        blocks = UNEVEN_BLOCKS_16
    else:
        blocks = CROWDED_16 if crowded else BLOCKS_16
    bm, bn, warps, stages = blocks[max(dk, dv)]
    # Document ids and reductions take the rest.
    available = limit - 1024
    # Queries are held once, keys and values once a stage. The cheapest step down comes first.
    while bn > 16 and (bm * (dk + lanes) + stages * bn * (dk + lanes + dv)) * size > available:
        if stages > 2:
            stages -= 1
        elif bn > 32 or bm <= 64:
            bn //= 2
        else:
            bm //= 2
    return bm, bn, warps, stages


class Block(NamedTuple):
    """In a kernel: what the loops over the keys of one block of queries share; None: the call has
    none."""

    first: tl.tensor
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
    mask: Mask
    table_index: TableIndex


@triton.jit
def multiply_keys(
    block,
    start,
    WIDTH_K: tl.constexpr,
    DK: tl.constexpr,
    LANES: tl.constexpr,
    DL: tl.constexpr,
    BN: tl.constexpr,
    MASKED: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """(BM, BN) products of the queries with the keys from `start` on."""
    tensor, b, g = block.k
    count = block.mask.keys
    z = mm(
        block.q,
        tl.trans(rows_of(tensor, b, g, LANES, start, count, WIDTH_K, DK, BN, MASKED, AHEAD)),
    )
    if LANES > 0:
        z = mm(
            block.q_lanes,
            tl.trans(rows_of(tensor, b, g, 0, start, count, LANES, DL, BN, MASKED, AHEAD)),
            z,
        )
    return z


@triton.jit
def _attend(
    sums,
    block,
    lo,
    hi,
    WIDTH_K: tl.constexpr,
    WIDTH_V: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    LANES: tl.constexpr,
    DL: tl.constexpr,
    BN: tl.constexpr,
    CAUSAL: tl.constexpr,
    AHEAD: tl.constexpr,
    MASKED: tl.constexpr,
):
    """`sums` over key blocks [lo, hi) too: weighted values (BM, DV), weights (BM,), both relative
    to exp2 of the largest logits so far (BM,); with AHEAD also the products of the next block,
    which run during the exponentials of this one."""
    acc, total, top, next_z = sums
    rows = block.rows
    keys = block.mask.keys
    values, b, g = block.v
    for n in range(lo, hi):
        cols = n * BN + tl.arange(0, BN)
        v = rows_of(values, b, g, 0, n * BN, keys, WIDTH_V, DV, BN, MASKED, AHEAD)
        if AHEAD:
            z = next_z
            next_z = multiply_keys(block, n * BN + BN, WIDTH_K, DK, LANES, DL, BN, True, AHEAD)
        else:
            z = multiply_keys(block, n * BN, WIDTH_K, DK, LANES, DL, BN, MASKED, AHEAD)
        seen = rows[:, None] >= 0
        if MASKED:
            col_ids = None
            if block.segments is not None:
                col_ids = tl.load(block.segments + cols, mask=cols < keys, other=-1)[None, :]
            seen = seen_of(rows[:, None], cols[None, :], block.row_ids, col_ids, block.mask, CAUSAL)
        if block.table is not None:
            z *= block.factor
            q_rows = rows[:, None]
            k_cols = cols[None, :]
            index = block.table_index
            q_place = place_of(q_rows, index)
            k_place = place_of(k_cols, index)
            z += entries(
                block.table,
                block.first,
                n * BN,
                q_rows,
                k_cols,
                q_place,
                k_place,
                seen,
                index,
                MASKED,
            )
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
    return acc, total, top, next_z


# Sizes change from call to call and must not trigger recompilation.
LENGTHS = [
    "ssb",
    "sth",
    "heads",
    "group",
    "tiles",
    "queries",
    "keys",
    "offset",
    "window",
    "origin",
    "prefix",
]


@triton.jit(
    do_not_specialize=LENGTHS, do_not_specialize_on_alignment=["table", "row_scale", "segments"]
)
def _forward(
    q,
    k,
    v,
    table,
    row_scale,
    segments,
    plan,
    codes,
    out,
    lse,
    # Strides and sizes, as LENGTHS says.
    ssb,
    sth,
    heads,
    group,
    tiles,
    queries,
    keys,
    offset,
    window,
    origin,
    prefix,
    factor,
    WIDTH_K: tl.constexpr,
    WIDTH_V: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    LANES: tl.constexpr,
    DL: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    TILE: tl.constexpr,
    CAUSAL: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """One block of queries of one head. What a call does not have is None. AHEAD: k and v are
    tensor descriptors."""
    # A tensor comes with its strides as one tuple (`strided`): the name is the pointer from here.
    out, sob, soh, sot = out
    mask = Mask(queries, keys, offset, window)
    index = TableIndex(origin, codes, prefix)
    # One grid axis, since the others are limited to 65535. The last queries of a causal call have
    # the most keys and start first, so that no long program runs last.
    blocks = tl.cdiv(queries, BM)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    first = (blocks - 1 - tl.program_id(0) % blocks) * BM
    b = row // heads
    h = row % heads
    if table is not None:
        table += h * sth
    rows = first + tl.arange(0, BM)
    q_lanes = rows_of(q, b, h, 0, first, queries, LANES, DL, BM, True, False) if LANES else None
    q = rows_of(q, b, h, LANES, first, queries, WIDTH_K, DK, BM, True, False)
    row_ids = None
    scale = None
    if segments is not None:
        segments += b * keys
        row_ids = tl.load(segments + offset + rows, mask=rows < queries, other=-2)[:, None]
    if row_scale is not None:
        scale = tl.load(row_scale + b * ssb + h * queries + rows, mask=rows < queries, other=0.0)
        if table is None:
            scale *= factor
    plan_step = (tl.num_programs(0) // blocks).to(tl.int64) * tiles
    if plan is not None:
        plan += row * tiles
    lo, full_lo, full_hi, hi = key_range(
        first, plan, plan_step, segments, row_ids, mask, index, BM, BN, TILE, CAUSAL, DK + DV <= 256
    )
    k_side = (k, b, h // group)
    v_side = (v, b, h // group)
    block = Block(
        first,
        rows,
        row_ids,
        q,
        q_lanes,
        k_side,
        v_side,
        table,
        segments,
        factor,
        scale,
        mask,
        index,
    )
    top = tl.full([BM], float("-inf"), tl.float32)
    next_z = top
    if AHEAD:
        next_z = multiply_keys(block, lo * BN, WIDTH_K, DK, LANES, DL, BN, True, AHEAD)
    sums = tl.zeros([BM, DV], tl.float32), tl.zeros([BM], tl.float32), top, next_z
    sums = _attend(
        sums, block, lo, full_lo, WIDTH_K, WIDTH_V, DK, DV, LANES, DL, BN, CAUSAL, AHEAD, True
    )
    sums = _attend(
        sums, block, full_lo, full_hi, WIDTH_K, WIDTH_V, DK, DV, LANES, DL, BN, CAUSAL, AHEAD, False
    )
    acc, total, top, _ = _attend(
        sums, block, full_hi, hi, WIDTH_K, WIDTH_V, DK, DV, LANES, DL, BN, CAUSAL, AHEAD, True
    )
    # A row that sees nothing, or −∞ alone, is 0, and so are its weights exp2(z2 − lse2) in the
    # backward pass.
    lse2 = tl.where(total == 0.0, float("inf"), top + tl.log2(total))
    acc /= tl.where(total == 0.0, 1.0, total)[:, None]
    store_tile(out + b * sob + h * soh, acc, first, sot, queries, WIDTH_V, DV, BM)
    tl.store(lse + row * queries + rows, lse2, mask=rows < queries)


def attention_forward(call: Operands, plan: Plan | None = None) -> tuple[Tensor, Tensor]:
    """out (B,H,T,Dv) in q's dtype, in memory (B,T,H,Dv); lse2 (B,H,T) float32, log2 Σ_j exp z[i,j],
    +∞ of an empty row.

    plan: tiles to compute; None for every visible one.
    """
    q = call.q
    k = call.k
    v = call.v
    row_scale = call.row_scale
    segments = call.segments
    g = call.geometry
    table2 = call.table2
    out = q.new_empty(g.batch, g.queries, g.heads, g.width_v).transpose(1, 2)
    lse2 = torch.empty(g.batch, g.heads, g.queries, dtype=torch.float32, device=q.device)
    options = shape_options(g)
    lanes = options["LANES"]
    dk = options["DK"]
    dv = options["DV"]
    padded_lanes = options["DL"] if lanes else 0
    with on_device(q):
        limit = shared_limit(q.device.index or 0)
        even = g.width_k % 16 == g.width_v % 16 == lanes % 16 == 0
        crowded = g.grid_width > 0 or g.window > 0 or (segments is not None and dk + dv > 256)
        on_grid_alone = g.grid_width and not (padded_lanes or g.window or segments is not None)
        ahead = not (g.grid_width or padded_lanes or (crowded and dk > 64)) and describable(k, v)
        if ahead:
            wide = dk > 64 and (segments is not None or (row_scale is not None and plan is None))
            block = AHEAD[1] if wide or g.window > 0 else AHEAD[0]
            bm, bn, warps, stages = block
        elif on_grid_alone and even and q.element_size() == 2 and max(dk, dv) <= 64:
            bm, bn, warps, stages = GRID_64
        else:
            bm, bn, warps, stages = block_sizes(
                dk, dv, padded_lanes, q.element_size(), crowded, even, limit
            )
        # Blocks shrink with the tile that tests lower.
        bm = max(16, bm * common.TILE // 64)
        bn = max(16, bn * common.TILE // 64)
        k_side = descriptor(k, bn) if ahead else strided(k)
        v_side = descriptor(v, bn) if ahead else strided(v)
        _forward[(cdiv(g.queries, bm) * g.batch * g.heads,)](
            q=strided(q),
            k=k_side,
            v=v_side,
            table=table2,
            row_scale=row_scale,
            segments=segments,
            plan=None if plan is None else plan.rows,
            codes=call.codes,
            out=strided(out),
            lse=lse2,
            ssb=scale_stride(row_scale),
            sth=0 if table2 is None else table2.stride(0),
            heads=g.heads,
            group=g.heads // g.groups,
            tiles=cdiv(g.queries, common.TILE),
            queries=g.queries,
            keys=g.keys,
            offset=g.offset,
            window=g.window or None,
            origin=g.origin,
            prefix=g.prefix or None,
            factor=g.factor,
            BM=bm,
            BN=bn,
            TILE=common.TILE,
            AHEAD=ahead,
            num_warps=warps,
            num_stages=stages,
            **options,
        )
    return out, lse2
