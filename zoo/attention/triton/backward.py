"""Gradients of q, k, v, the row scale and a parametric table's params; that of the table itself is
in table_grad.py.

With weights p = exp2(z2 − lse2), δ = rowsum(dO ∘ O) and ds = p ∘ (dO·vᵀ − δ), the gradient of the
natural-log logits row_scale[i]·(c·q·k + table[index]), c the softmax scale:

    dq = c·row_scale ∘ (ds·k)      dk = c·(row_scale ∘ ds)ᵀ·q      dv = pᵀ·dO
    d row_scale[i] = Σ_j ds·(c·q·k + table[index])
    d params[p] = Σ_ij ds·row_scale[i]·∂table/∂params_p[index]

(FlashAttention, arXiv:2205.14135, algorithm 4, as two kernels; README.md here.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.attention.triton import common
from zoo.attention.triton.common import (
    INTERPRET,
    LOG2E,
    STEEP,
    Geometry,
    Mask,
    Operands,
    TableIndex,
    cdiv,
    entries,
    key_range,
    last_axis_contiguous,
    mm,
    narrow,
    on_device,
    padded_width,
    place_of,
    planned,
    row_values,
    same_document,
    scale_stride,
    seen_of,
    shape_options,
    shared_limit,
    split,
    store_tile,
    strided,
    tile_at,
)

if TYPE_CHECKING:
    from zoo.attention.triton.plan import Plan

# As in forward.py. Masked tiles are pipelined too: loads staged through registers cost more
# registers.
DKDV_16 = {
    **dict.fromkeys((16, 32, 64), (64, 128, 8, 2)),
    128: (32, 128, 8, 2),
    256: (16, 64, 8, 2),
}
# On a line without lanes, documents, a window or row scales; up to 64 columns with a table.
DKDV_PLAIN_16 = {
    **dict.fromkeys((16, 32, 64), (128, 128, 8, 2)),
    128: (64, 128, 8, 2),
    256: (16, 64, 8, 2),
}
DKDV_WINDOW_16 = {
    **dict.fromkeys((16, 32, 64), (64, 64, 8, 2)),
    128: (32, 64, 8, 2),
    256: (16, 64, 8, 2),
}
DKDV_32 = {
    16: (32, 64, 8, 2),
    32: (32, 64, 8, 2),
    64: (32, 32, 8, 1),
    128: (32, 32, 8, 1),
    256: (16, 16, 8, 1),
}
# On grids too.
DKDV_WINDOW_32 = {
    **DKDV_32,
    16: (32, 32, 8, 2),
    32: (32, 32, 8, 2),
    128: (16, 32, 8, 1),
}
DQ_16 = {**dict.fromkeys((16, 32, 64, 128), (128, 64, 8, 2)), 256: (64, 32, 8, 2)}
# With gradients of params, whose sums and gathers take registers; up to 64 columns on a line.
DQ_PARAMS_16 = {
    **dict.fromkeys((16, 32, 64), (64, 64, 4, 2)),
    128: (128, 32, 8, 2),
    256: (64, 16, 8, 2),
}
DQ_32 = {
    16: (32, 32, 8, 2),
    32: (32, 32, 8, 2),
    64: (64, 32, 8, 2),
    128: (32, 16, 8, 1),
    256: (32, 16, 8, 1),
}


@triton.jit(do_not_specialize=["heads", "queries"])
def _delta(
    grad_out,
    out,
    delta,
    gob,
    goh,
    got,
    ob,
    oh,
    ot,
    heads,
    queries,
    WIDTH: tl.constexpr,
    DV: tl.constexpr,
    BM: tl.constexpr,
):
    """One block of rows of one head of δ = rowsum(dO ∘ O)."""
    blocks = tl.cdiv(queries, BM)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    start = tl.program_id(0) % blocks * BM
    b = row // heads
    h = row % heads
    do = tile_at(grad_out + b * gob + h * goh, start, got, queries, WIDTH, DV, BM, True)
    o = tile_at(out + b * ob + h * oh, start, ot, queries, WIDTH, DV, BM, True)
    rows = start + tl.arange(0, BM)
    tl.store(
        delta + row * queries + rows,
        tl.sum(do.to(tl.float32) * o.to(tl.float32), 1),
        mask=rows < queries,
    )


class OutputGradient(NamedTuple):
    """What gives ds of a call: dO (B,H,T,Dv), its last axis contiguous; lse2 and δ (B,H,T) float32;
    the gradient of the log-sum-exp, which δ is less, or None."""

    grad_out: Tensor
    lse2: Tensor
    delta: Tensor
    grad_lse: Tensor | None = None


def output_gradient(
    grad_out: Tensor, out: Tensor, lse2: Tensor, geometry: Geometry, grad_lse2: Tensor | None = None
) -> OutputGradient:
    """dO with δ = Σ_d dO·O, the softmax term of every ds of a row; `out` (B,H,T,Dv) and lse2 are of
    the forward pass."""
    g = geometry
    grad_out = last_axis_contiguous(grad_out)
    out = last_axis_contiguous(out)
    delta = torch.empty(g.batch, g.heads, g.queries, dtype=torch.float32, device=out.device)
    block = common.TILE
    gob, goh, got = grad_out.stride()[:3]
    ob, oh, ot = out.stride()[:3]
    with on_device(out):
        _delta[(cdiv(g.queries, block) * g.batch * g.heads,)](
            grad_out=grad_out,
            out=out,
            delta=delta,
            gob=gob,
            goh=goh,
            got=got,
            ob=ob,
            oh=oh,
            ot=ot,
            heads=g.heads,
            queries=g.queries,
            WIDTH=g.width_v,
            DV=padded_width(g.width_v),
            BM=block,
            num_warps=4,
        )
    if grad_lse2 is None:
        return OutputGradient(grad_out, lse2, delta)
    grad_lse = (grad_lse2 * LOG2E.value).contiguous()
    return OutputGradient(grad_out, lse2, delta - grad_lse, grad_lse)


# Sizes change from call to call and must not trigger recompilation. Inside a tuple Triton would
# specialise them: a tensor comes with its strides in a tuple, sizes come one by one. The order of
# arguments decides a few registers.
LENGTHS = [
    "scale_b",
    "table_h",
    "heads",
    "share",
    "queries",
    "keys",
    "offset",
    "window",
    "prefix",
    "origin",
    "q_tiles",
    "k_tiles",
    "jacobian_p",
]


@triton.jit(do_not_specialize=LENGTHS[:-1])
def _dkdv(
    grad_out,
    q,
    k,
    v,
    table,
    row_scale,
    segments,
    lse,
    delta,
    plan,
    codes,
    # Strides and sizes, as LENGTHS says.
    scale_b,
    table_h,
    heads,
    share,
    queries,
    keys,
    offset,
    window,
    prefix,
    origin,
    q_tiles,
    k_tiles,
    factor,
    dk,
    dv,
    WIDTH_K: tl.constexpr,
    WIDTH_V: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    LANES: tl.constexpr,
    DL: tl.constexpr,
    TILE: tl.constexpr,
    CAUSAL: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One block of keys of one key head. Tiles are keys × queries, so that p and ds enter their
    products from registers."""
    # A tensor comes with its strides as one tuple (`strided`): the name is the pointer from here.
    grad_out, gob, goh, got = grad_out
    q, qb, qh, qt = q
    k, kb, kg, ks = k
    v, vb, vg, vs = v
    dk, dkb, dkg, dks = dk
    dv, dvb, dvg, dvs = dv
    mask = Mask(queries, keys, offset, window)
    index = TableIndex(origin, codes, prefix)
    blocks = tl.cdiv(keys, BN)
    groups = heads // share
    row = (tl.program_id(0) // blocks).to(tl.int64)
    start = tl.program_id(0) % blocks * BN
    b = row // groups
    g = row % groups
    batch_rows = tl.num_programs(0) // blocks * share
    cols = (start + tl.arange(0, BN))[:, None]
    k_place = place_of(cols, index)
    k_tile = tile_at(k + b * kb + g * kg + LANES, start, ks, keys, WIDTH_K, DK, BN, True)
    k_lanes = k_tile
    if LANES > 0:
        k_lanes = tile_at(k + b * kb + g * kg, start, ks, keys, LANES, DL, BN, True)
    v_tile = tile_at(v + b * vb + g * vg, start, vs, keys, WIDTH_V, DV, BN, True)
    col_ids = None
    if segments is not None:
        col_ids = row_values(segments + b * keys, cols, keys, 0, True)
    # Queries that see some key of this block, and those that see all of it. `0 * start` makes
    # each a tensor and not a constant, as the branches that follow assign tensors to it.
    first = 0 * start
    last = 0 * start + queries
    full_first = 0 * start
    full_last = 0 * start + queries
    if CAUSAL:
        first = tl.maximum(first, start - offset)
        full_first = start + BN - 1 - offset
    if window is not None:
        # Both are bounded by the number of queries, which `last` is until here.
        all_queries = last
        last = tl.minimum(all_queries, start + BN - 1 + window - offset)
        full_last = tl.minimum(all_queries, start + window - offset)
        if not CAUSAL:
            first = tl.maximum(first, start - window + 1 - offset)
            full_first = start + BN - window - offset
    if prefix is not None:
        full_first = tl.maximum(full_first, prefix)
        full_last = tl.where(start < prefix, 0, full_last)
    full_last = tl.where(start + BN > keys, 0, full_last)
    if PARTS == 1:
        full_last = 0 * start
    elif segments is not None:
        _, near, far, _ = split(first, last, full_first, full_last, BM)
        near, far = same_document(
            segments + b * keys + offset, col_ids, start - offset, near, far, BM
        )
        full_first = near * BM
        full_last = far * BM
    dk_sum = tl.zeros([BN, DK], tl.float32)
    dv_sum = tl.zeros([BN, DV], tl.float32)
    lanes_sum = tl.zeros([BN, DL], tl.float32)
    for member in range(0, share):
        h = g * share + member
        head_row = b * heads + h
        q_head = q + b * qb + h * qh
        do_head = grad_out + b * gob + h * goh
        lo_token = first
        hi_token = last
        if plan is not None:
            lo_plan, hi_plan = planned(
                plan + head_row * k_tiles,
                batch_rows.to(tl.int64) * k_tiles,
                k_tiles,
                start,
                queries,
                BN,
                TILE,
            )
            lo_token = tl.maximum(first, lo_plan)
            hi_token = tl.minimum(last, hi_plan)
        lo, full_lo, full_hi, hi = split(lo_token, hi_token, full_first, full_last, BM)
        # 0: masked tiles, 1: tiles wholly inside the mask.
        for part in tl.static_range(PARTS):
            count = full_hi - full_lo if part == 1 else hi - lo - (full_hi - full_lo)
            # Always 0, which the compiler does not know; see tile_at.
            opaque_zero = member // share
            for t in tl.range(0, count):
                m = full_lo + t
                if part == 0:
                    # Masked tiles lie on both sides of the others, which are jumped over.
                    m = lo + t + tl.where(t >= full_lo - lo, full_hi - full_lo, 0)
                at = m * BM
                rows = (at + tl.arange(0, BM))[None, :]
                q_tile = tile_at(
                    q_head + LANES, at, qt, queries, WIDTH_K, DK, BM, part == 0, opaque_zero
                )
                q_lanes = q_tile
                if LANES > 0:
                    q_lanes = tile_at(
                        q_head, at, qt, queries, LANES, DL, BM, part == 0, opaque_zero
                    )
                do_tile = tile_at(
                    do_head, at, got, queries, WIDTH_V, DV, BM, part == 0, opaque_zero
                )
                z = mm(k_tile, tl.trans(q_tile))
                if LANES > 0:
                    z = mm(k_lanes, tl.trans(q_lanes), z)
                z *= factor
                seen = rows < queries
                if part == 0:
                    row_ids = None
                    if segments is not None:
                        row_ids = row_values(segments + b * keys + offset, rows, queries, 0, True)
                    seen = seen_of(rows, cols, row_ids, col_ids, mask, CAUSAL)
                if table is not None:
                    q_place = place_of(rows, index)
                    z += entries(
                        table + h * table_h,
                        at,
                        start,
                        rows,
                        cols,
                        q_place,
                        k_place,
                        seen,
                        index,
                        part == 0,
                    )
                scale = 1.0
                if row_scale is not None:
                    scale = row_values(
                        row_scale + b * scale_b + h * queries, rows, queries, 0.0, part == 0
                    )
                    z *= scale
                p = tl.exp2(
                    z - row_values(lse + head_row * queries, rows, queries, float("inf"), part == 0)
                )
                if part == 0:
                    p = tl.where(seen, p, 0.0)
                dv_sum += mm(narrow(p, do_tile.dtype), do_tile)
                dp = mm(v_tile, tl.trans(do_tile))
                ds = p * (
                    dp - row_values(delta + head_row * queries, rows, queries, 0.0, part == 0)
                )
                if row_scale is not None:
                    ds *= scale
                dk_sum += mm(narrow(ds, q_tile.dtype), q_tile)
                if LANES > 0:
                    lanes_sum += mm(narrow(ds, q_tile.dtype), q_lanes)
    opaque_zero = start // (start + keys)
    softmax_scale = factor / LOG2E
    dk_sum *= softmax_scale
    if LANES > 0:
        lanes_sum *= softmax_scale
        store_tile(dk + b * dkb + g * dkg, lanes_sum, start, dks, keys, LANES, DL, BN, opaque_zero)
    store_tile(
        dk + b * dkb + g * dkg + LANES, dk_sum, start, dks, keys, WIDTH_K, DK, BN, opaque_zero
    )
    store_tile(dv + b * dvb + g * dvg, dv_sum, start, dvs, keys, WIDTH_V, DV, BN, opaque_zero)


@triton.jit
def quarter_sums(x):
    """(R, 4) sums of columns 8·n + 2·i and 8·n + 2·i + 1 of x (R, C), which one thread holds of a
    product: no shuffles."""
    groups = x.reshape(x.shape[0], x.shape[1] // 8, 4, 2).permute(0, 2, 1, 3)
    return tl.sum(groups.reshape(x.shape[0], 4, x.shape[1] // 4), 2)


@triton.jit(do_not_specialize=LENGTHS)
def _dq(
    grad_out,
    q,
    k,
    v,
    table,
    row_scale,
    segments,
    lse,
    delta,
    d_lse,
    plan,
    codes,
    jacobian,
    dq,
    d_scale,
    d_params,
    jacobian_p,
    # Strides and sizes, as LENGTHS says.
    scale_b,
    table_h,
    heads,
    share,
    queries,
    keys,
    offset,
    window,
    prefix,
    origin,
    q_tiles,
    k_tiles,
    factor,
    WIDTH_K: tl.constexpr,
    WIDTH_V: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    LANES: tl.constexpr,
    DL: tl.constexpr,
    TILE: tl.constexpr,
    CAUSAL: tl.constexpr,
    PARTS: tl.constexpr,
    PARAMS: tl.constexpr,
    LOG_FACTOR: tl.constexpr,
):
    """One block of queries of one head: dq, the row scale's gradient, and this block's part of the
    params' gradients. With LOG_FACTOR the derivative by the first param is the table itself."""
    # A tensor comes with its strides as one tuple (`strided`): the name is the pointer from here.
    grad_out, gob, goh, got = grad_out
    q, qb, qh, qt = q
    k, kb, kg, ks = k
    v, vb, vg, vs = v
    dq, dqb, dqh, dqt = dq
    mask = Mask(queries, keys, offset, window)
    index = TableIndex(origin, codes, prefix)
    blocks = tl.cdiv(queries, BM)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    # Last blocks first: causal, they have the most keys.
    block = blocks - 1 - tl.program_id(0) % blocks
    start = block * BM
    batch_rows = tl.num_programs(0) // blocks
    b = row // heads
    h = row % heads
    rows = (start + tl.arange(0, BM))[:, None]
    q_place = place_of(rows, index)
    q_tile = tile_at(q + b * qb + h * qh + LANES, start, qt, queries, WIDTH_K, DK, BM, True)
    q_lanes = q_tile
    if LANES > 0:
        q_lanes = tile_at(q + b * qb + h * qh, start, qt, queries, LANES, DL, BM, True)
    do_tile = tile_at(grad_out + b * gob + h * goh, start, got, queries, WIDTH_V, DV, BM, True)
    lse_rows = row_values(lse + row * queries, rows, queries, float("inf"), True)
    delta_rows = row_values(delta + row * queries, rows, queries, 0.0, True)
    k_head = k + b * kb + h // share * kg
    v_head = v + b * vb + h // share * vg
    row_ids = None
    if segments is not None:
        segments += b * keys
        row_ids = row_values(segments + offset, rows, queries, 0, True)
    scale = tl.full([BM, 1], 1.0, tl.float32)
    if row_scale is not None:
        scale = row_values(row_scale + b * scale_b + h * queries, rows, queries, 0.0, True)
    if plan is not None:
        plan += row * q_tiles
    lo, full_lo, full_hi, hi = key_range(
        start,
        plan,
        batch_rows.to(tl.int64) * q_tiles,
        segments,
        row_ids,
        mask,
        index,
        BM,
        BN,
        TILE,
        CAUSAL,
        PARTS > 1,
    )
    dq_sum = tl.zeros([BM, DK], tl.float32)
    lanes_sum = tl.zeros([BM, DL], tl.float32)
    # Of the row scale's gradient, in `quarter_sums`: Σ_j ds·z, Σ_j ds, Σ_j p·z.
    scale_sum = tl.zeros([BM, 4], tl.float32)
    residue = scale_sum
    mean = scale_sum
    # A tuple with the sums of each param: Triton has no list of tensors.
    param_sums = (tl.zeros([BM, 4], tl.float32),) * PARAMS
    # 0: masked tiles, 1: tiles wholly inside the mask.
    for part in tl.static_range(PARTS):
        count = full_hi - full_lo if part == 1 else hi - lo - (full_hi - full_lo)
        for t in tl.range(0, count):
            n = full_lo + t
            if part == 0:
                n = lo + t + tl.where(t >= full_lo - lo, full_hi - full_lo, 0)
            at = n * BN
            cols = (at + tl.arange(0, BN))[None, :]
            k_tile = tile_at(k_head + LANES, at, ks, keys, WIDTH_K, DK, BN, part == 0)
            k_lanes = k_tile
            if LANES > 0:
                k_lanes = tile_at(k_head, at, ks, keys, LANES, DL, BN, part == 0)
            v_tile = tile_at(v_head, at, vs, keys, WIDTH_V, DV, BN, part == 0)
            z = mm(q_tile, tl.trans(k_tile))
            if LANES > 0:
                z = mm(q_lanes, tl.trans(k_lanes), z)
            z *= factor
            seen = rows < queries
            if part == 0:
                col_ids = None
                if segments is not None:
                    col_ids = row_values(segments, cols, keys, 0, True)
                seen = seen_of(rows, cols, row_ids, col_ids, mask, CAUSAL)
            k_place = place_of(cols, index)
            entry = z
            if table is not None:
                entry = entries(
                    table + h * table_h,
                    start,
                    at,
                    rows,
                    cols,
                    q_place,
                    k_place,
                    seen,
                    index,
                    part == 0,
                )
                z += entry
            p = tl.exp2(z * scale - lse_rows)
            if part == 0:
                p = tl.where(seen, p, 0.0)
            ds = p * (mm(do_tile, tl.trans(v_tile)) - delta_rows)
            if d_scale is not None:
                scale_sum += quarter_sums(ds * z)
                residue += quarter_sums(ds)
                mean += quarter_sums(p * z)
            if PARAMS > 0:
                # An empty tuple, of the type that the compiler expects.
                new_sums = param_sums[:0]
                for param in tl.static_range(PARAMS):
                    derivative = entry
                    if LOG_FACTOR and param == 0:
                        if row_scale is not None:
                            derivative = tl.where(entry > STEEP, entry, 0.0)
                    else:
                        derivative = entries(
                            jacobian
                            + (param - LOG_FACTOR) * tl.cast(jacobian_p, tl.int64)
                            + h * table_h,
                            start,
                            at,
                            rows,
                            cols,
                            q_place,
                            k_place,
                            seen,
                            index,
                            part == 0,
                        )
                    new_sums += (param_sums[param] + quarter_sums(ds * derivative),)
                param_sums = new_sums
            dq_sum += mm(narrow(ds, k_tile.dtype), k_tile)
            if LANES > 0:
                lanes_sum += mm(narrow(ds, k_tile.dtype), k_lanes)
    opaque_zero = start // (start + queries)
    outer = scale * (factor / LOG2E)
    dq_sum *= outer
    if LANES > 0:
        lanes_sum *= outer
        store_tile(
            dq + b * dqb + h * dqh, lanes_sum, start, dqt, queries, LANES, DL, BM, opaque_zero
        )
    store_tile(
        dq + b * dqb + h * dqh + LANES, dq_sum, start, dqt, queries, WIDTH_K, DK, BM, opaque_zero
    )
    tokens = start + tl.arange(0, BM)
    if d_scale is not None:
        scale_sum = tl.sum(scale_sum, 1)
        residue = tl.sum(residue, 1)
        mean = tl.sum(mean, 1)
        # δ of a rounded output leaves Σ_j ds off its value, by which what the row's logits have in
        # common would enter.
        if d_lse is not None:
            residue -= tl.load(d_lse + row * queries + tokens, mask=tokens < queries, other=0.0)
        tl.store(
            d_scale + row * queries + tokens,
            (scale_sum - residue * mean) / LOG2E,
            mask=tokens < queries,
        )
    for param in tl.static_range(PARAMS):
        sum_rows = param_sums[param] * scale / LOG2E
        # None of rows whose keys all have entries below STEEP.
        if LOG_FACTOR and param == 0 and row_scale is None:
            sum_rows = tl.where(lse_rows < STEEP, 0.0, sum_rows)
        tl.store(d_params + (param * batch_rows + row) * blocks + block, tl.sum(sum_rows))


def block_sizes(
    blocks: tuple[int, int, int, int], kept: int, width: int, size: int, limit: int
) -> tuple[int, int, int, int]:
    """(queries, keys, warps, stages), in proportion to a TILE smaller than 64, and smaller until
    they fit `limit` bytes of shared memory. Rows of axis `kept` (0 or 1) stay there, those of the
    other axis are pipelined; `width`: padded columns of both operands together, of `size` bytes."""
    rows, cols, warps, stages = blocks
    sides = [max(16, side * common.TILE // 64) for side in (rows, cols)]
    # 2 KiB stay for all else.
    available = limit - 2048
    while max(sides) > 16:
        held = sides[kept] + stages * sides[1 - kept]
        if held * width * size <= available:
            break
        longest = sides.index(max(sides))
        sides[longest] //= 2
    return sides[0], sides[1], warps, stages


def shape_arguments(call: Operands) -> dict[str, int | float | None]:
    """The integers named in LENGTHS, but the last, and the factor of q·k; None: there is none."""
    g = call.geometry
    table2 = call.table2
    origin = g.origin
    if table2 is not None and g.grid_width:
        # The column of displacement 0, in the middle.
        origin = table2.shape[-1] // 2
    return {
        "scale_b": scale_stride(call.row_scale),
        "table_h": 0 if table2 is None else table2.shape[-1],
        "heads": g.heads,
        "share": g.heads // g.groups,
        "queries": g.queries,
        "keys": g.keys,
        "offset": g.offset,
        "window": g.window or None,
        "prefix": g.prefix or None,
        "origin": origin,
        "q_tiles": cdiv(g.queries, common.TILE),
        "k_tiles": cdiv(g.keys, common.TILE),
        "factor": g.factor,
    }


def loops(q: Tensor, segments: Tensor | None) -> int:
    """Loops of a kernel over tiles: 2, masked ones and those wholly inside the mask; or 1, for
    documents in float32, where the second spills registers (the interpreter has none)."""
    return 1 if segments is not None and q.element_size() == 4 and not INTERPRET.value else 2


def _empty_like(x: Tensor) -> Tensor:
    """An empty tensor with the memory order of `x` and a contiguous last axis."""
    like = torch.empty_like(x)
    return like if like.stride(-1) == 1 else x.new_empty(x.shape)


def attention_backward(
    call: Operands,
    upstream: OutputGradient,
    plan: Plan | None = None,
    jacobian: Tensor | None = None,
    log_factor: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """dq, dk, dv in the dtypes of q, k, v; d_row_scale (B,H,T) float32, not yet summed over a batch
    that shares its scales, or None; d_params (P,H) float32, or None without jacobian.

    jacobian: (P, H, N) float32, ∂table/∂params. log_factor: the table is the derivative by the
    first of one param more.
    """
    g = call.geometry
    table2 = call.table2
    q = last_axis_contiguous(call.q)
    k = last_axis_contiguous(call.k)
    v = last_axis_contiguous(call.v)
    row_scale = None if call.row_scale is None else call.row_scale.contiguous()
    segments = None if call.segments is None else call.segments.contiguous()
    jacobian2 = None if jacobian is None else (jacobian * LOG2E.value).contiguous()
    dq = _empty_like(q)
    dk = _empty_like(k)
    dv = _empty_like(v)
    options = shape_options(g)
    # Arguments of both kernels.
    shared: dict[str, object] = {
        "grad_out": strided(upstream.grad_out),
        "q": strided(q),
        "k": strided(k),
        "v": strided(v),
        "table": table2,
        "row_scale": row_scale,
        "segments": segments,
        "lse": upstream.lse2,
        "delta": upstream.delta,
        "codes": call.codes,
        **shape_arguments(call),
        **options,
        "TILE": common.TILE,
        "PARTS": loops(q, segments),
    }
    width = max(options["DK"], options["DV"])
    columns_read = options["DK"] + options["DV"]
    if options["LANES"]:
        columns_read += options["DL"]
    small = q.element_size() == 2
    with on_device(q):
        limit = shared_limit(q.device.index or 0)
        plain = not (options["LANES"] or g.grid_width) and row_scale is None and segments is None
        if g.window or (g.grid_width and not small):
            blocks = (DKDV_WINDOW_16 if small else DKDV_WINDOW_32)[width]
        elif small and plain and (width > 64 or table2 is not None):
            blocks = DKDV_PLAIN_16[width]
        else:
            blocks = (DKDV_16 if small else DKDV_32)[width]
        bm, bn, warps, stages = block_sizes(blocks, 1, columns_read, q.element_size(), limit)
        _dkdv[(cdiv(g.keys, bn) * g.batch * g.groups,)](
            plan=None if plan is None else plan.cols,
            dk=strided(dk),
            dv=strided(dv),
            BM=bm,
            BN=bn,
            num_warps=warps,
            num_stages=stages,
            **shared,
        )
        params = 0 if jacobian2 is None else jacobian2.shape[0] + log_factor
        if not small:
            blocks = DQ_32[width]
        elif params and not (g.grid_width and width <= 64):
            blocks = DQ_PARAMS_16[width]
        else:
            blocks = DQ_16[width]
        bm, bn, warps, stages = block_sizes(blocks, 0, columns_read, q.element_size(), limit)
        parts = cdiv(g.queries, bm)
        # The sums of params take registers from the keys of a block: half for three or more, and
        # half for any in float32.
        if params > 2:
            bn //= 2
        if params > 0 and not small:
            bn //= 2
        bn = max(16, bn)
        d_scale = None if row_scale is None else torch.empty_like(upstream.lse2)
        partial = None
        if params:
            partial = upstream.lse2.new_empty(params, g.batch, g.heads, parts)
        _dq[(parts * g.batch * g.heads,)](
            d_lse=upstream.grad_lse,
            plan=None if plan is None else plan.rows,
            jacobian=jacobian2,
            dq=strided(dq),
            d_scale=d_scale,
            d_params=partial,
            jacobian_p=0 if jacobian2 is None else jacobian2.stride(0),
            BM=bm,
            BN=bn,
            PARAMS=params,
            LOG_FACTOR=log_factor,
            num_warps=warps,
            num_stages=stages,
            **shared,
        )
    d_params = None if partial is None else partial.sum((1, 3), dtype=torch.float64).float()
    return dq, dk, dv, d_scale, d_params
