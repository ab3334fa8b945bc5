"""The gradient of a bias of pairs: one program owns one of its tiles.

    d bias[b,h,i,j] = row_scale[b,h,i]·ds[b,h,i,j]

summed over the batch rows, and over the heads, that share the bias, one after the other in registers and rounded once: no
T × S memory beside the gradient's own, no atomic adds, the same bits in every run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.attention.triton.backward import LENGTHS, OutputGradient, block_sizes, shape_arguments, shape_options
from zoo.attention.triton.common import (
    Mask,
    Operands,
    TableIndex,
    cdiv,
    entries,
    last_axis_contiguous,
    located,
    mm,
    narrow,
    on_device,
    pair_bias,
    pairs_at,
    place_of,
    row_values,
    seen_of,
    shared_limit,
    strided,
    tile_at,
)

# (queries, keys, warps, stages) of a tile by padded width, for two-byte dtypes and for float32; see backward.py.
BLOCKS_16 = {**dict.fromkeys((16, 32, 64, 128), (64, 64, 8, 2)), 256: (64, 32, 8, 1)}
BLOCKS_32 = {**dict.fromkeys((16, 32), (32, 32, 8, 2)), **dict.fromkeys((64, 128), (32, 32, 8, 1)), 256: (16, 16, 8, 1)}


@triton.jit(do_not_specialize=[*LENGTHS[:-1], "batch_sum", "head_sum"])
def _bias_tile(
    grad_out, q, k, v, table, pairs, row_scale, segments, lse, delta, d_bias, batch_sum, head_sum,
    scale_b, table_h, heads, share, queries, keys, offset, window, grid_width, prefix, origin, q_tiles, k_tiles, factor,
    WIDTH_K: tl.constexpr, WIDTH_V: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    LANES: tl.constexpr, DL: tl.constexpr, CAUSAL: tl.constexpr
):  # fmt: skip
    """One tile of queries × keys of the gradient: the sum over `batch_sum` batch rows and `head_sum` heads, all or one."""
    grad_out, gob, goh, got = grad_out
    q, qb, qh, qt = q
    k, kb, kg, ks = k
    v, vb, vg, vs = v
    mask = Mask(queries, keys, offset, window)
    index = TableIndex(origin, grid_width, prefix)
    row_blocks, col_blocks = tl.cdiv(queries, BM), tl.cdiv(keys, BN)
    tile = tl.program_id(0) % (row_blocks * col_blocks)
    plane = tl.program_id(0) // (row_blocks * col_blocks)
    start, at = tile // col_blocks * BM, tile % col_blocks * BN
    own_heads = heads // head_sum
    first_b, first_h = plane // own_heads, plane % own_heads
    r, c = tl.arange(0, BM)[:, None], tl.arange(0, BN)[None, :]
    rows, cols = start + r, at + c
    q_place, k_place = place_of(rows, index), place_of(cols, index)
    members = batch_sum * head_sum
    if CAUSAL:  # a tile whose keys come after its queries is 0
        members = tl.where(start + BM - 1 + offset >= at, members, 0)
    if window is not None:
        near = (start + offset - (at + BN - 1) < window) & (at - (start + BM - 1 + offset) < window)
        members = tl.where(near, members, 0)
    total = tl.zeros([BM, BN], tl.float32)
    for member in tl.range(0, members):
        b, h = (first_b + member // head_sum).to(tl.int64), (first_h + member % head_sum).to(tl.int64)
        row = b * heads + h
        q_head, do_head = q + b * qb + h * qh, grad_out + b * gob + h * goh
        k_head, v_head = k + b * kb + h // share * kg, v + b * vb + h // share * vg
        q_tile = tile_at(q_head + LANES, start, qt, queries, WIDTH_K, DK, BM, True)
        k_tile = tile_at(k_head + LANES, at, ks, keys, WIDTH_K, DK, BN, True)
        z = mm(q_tile, tl.trans(k_tile))
        if LANES > 0:
            q_lanes = tile_at(q_head, start, qt, queries, LANES, DL, BM, True)
            k_lanes = tile_at(k_head, at, ks, keys, LANES, DL, BN, True)
            z = mm(q_lanes, tl.trans(k_lanes), z)
        z *= factor
        row_ids, col_ids = None, None
        if segments is not None:
            row_ids = row_values(segments + b * keys + offset, rows, queries, 0, True)
            col_ids = row_values(segments + b * keys, cols, keys, 0, True)
        seen = seen_of(rows, cols, row_ids, col_ids, mask, CAUSAL)
        if table is not None:
            z += entries(table + h * table_h, start, at, rows, cols, q_place, k_place, seen, index, True)
        z += pair_bias(pairs, b, h, start, at, r, c, seen, True)
        scale = tl.full([BM, 1], 1.0, tl.float32)
        if row_scale is not None:
            scale = row_values(row_scale + b * scale_b + h * queries, rows, queries, 0.0, True)
        p = tl.exp2(z * scale - row_values(lse + row * queries, rows, queries, float("inf"), True)) * scale
        do_tile = tile_at(do_head, start, got, queries, WIDTH_V, DV, BM, True)
        v_tile = tile_at(v_head, at, vs, keys, WIDTH_V, DV, BN, True)
        ds = p * (mm(do_tile, tl.trans(v_tile)) - row_values(delta + row * queries, rows, queries, 0.0, True))
        total += tl.where(seen, ds, 0.0)
    place = pairs_at(d_bias, first_b, first_h, start, at, r, c)
    tl.store(place, narrow(total, d_bias[0].dtype.element_ty), mask=(rows < queries) & (cols < keys))


def bias_gradient(call: Operands, upstream: OutputGradient) -> Tensor:
    """The gradient of the bias of a call that has one, in its shape and dtype: summed over what shares it."""
    g, bias = call.geometry, call.bias
    assert bias is not None
    q, k, v = (last_axis_contiguous(x) for x in (call.q, call.k, call.v))
    row_scale, segments = (None if x is None else x.contiguous() for x in (call.row_scale, call.segments))
    gradient = torch.empty_like(bias)
    batch_sum, head_sum = g.batch // bias.shape[0], g.heads // bias.shape[1]
    options = shape_options(g)
    blocks = (BLOCKS_16 if q.element_size() == 2 else BLOCKS_32)[max(options["DK"], options["DV"])]
    columns_read = options["DK"] + options["DV"] + (options["DL"] if options["LANES"] else 0)
    with on_device(q):
        limit = shared_limit(q.device.index or 0)
        bm, bn, warps, stages = block_sizes(blocks, 0, columns_read, q.element_size(), limit)
        tiles = cdiv(g.queries, bm) * cdiv(g.keys, bn)
        _bias_tile[(tiles * bias.shape[0] * bias.shape[1],)](
            *(strided(x) for x in (upstream.grad_out, q, k, v)), call.table2, call.pairs, row_scale, segments, upstream.lse2,
            upstream.delta, located(gradient), batch_sum, head_sum, *shape_arguments(call),
            BM=bm, BN=bn, num_warps=warps, num_stages=stages, **options,
        )  # fmt: skip
    return gradient
