"""Few queries against many keys: keys are split among programs, and a second kernel combines the
partial softmaxes.

Decoding is limited by memory bandwidth, so keys and values are read once for all heads of a group:
a program's rows are the queries of those heads, row ρ = query ρ // r of head ρ % r with r = H/G.
(FlashDecoding, with tables.)
"""

from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.attention.triton import common
from zoo.attention.triton.common import (
    LOG2E,
    Mask,
    Operands,
    cdiv,
    mm,
    narrow,
    on_device,
    padded_width,
    power_of_two,
    scale_stride,
    seen_of,
    strided,
)

# Bytes of keys, and of values, per step of a program. Nothing spills on compute capability 9.0, and
# two programs fit on a multiprocessor.
STEP_BYTES = 16384
STAGES = 3
# Of a split, if the call has as many.
FEWEST_KEYS = 256
# Fixed cost of a program, in keys.
PROGRAM_COST = 128
MOST_SPLITS = 512
# Splits summed per step.
CHUNK = tl.constexpr(16)


@triton.jit
def _span(first, last, mask, CAUSAL: tl.constexpr):
    """Positions [lo, hi) that hold every key the queries first..last see."""
    lo = 0
    hi = mask.keys
    if CAUSAL:
        hi = tl.minimum(hi, last + mask.offset + 1)
    if mask.window is not None:
        lo = tl.maximum(first + mask.offset - mask.window + 1, 0)
        if not CAUSAL:
            hi = tl.minimum(hi, last + mask.offset + mask.window)
    return lo, tl.maximum(hi, lo)


# What changes from token to token must not trigger recompilation: lengths, and the strides of a
# growing cache, whose common factor is UNIT.
LENGTHS = [
    "skb",
    "skg",
    "sks",
    "svb",
    "svg",
    "svs",
    "ssb",
    "ssh",
    "sth",
    "sib",
    "queries",
    "keys",
    "offset",
    "window",
    "origin",
    "splits",
    "fewest",
]


@triton.jit(
    do_not_specialize=LENGTHS, do_not_specialize_on_alignment=["table", "row_scale", "segments"]
)
def _partial(
    q,
    k_ptr,
    v_ptr,
    table,
    row_scale,
    segments,
    out,
    lse,
    # Strides and sizes, as LENGTHS says.
    skb,
    skg,
    sks,
    svb,
    svg,
    svs,
    ssb,
    ssh,
    sth,
    sib,
    groups,
    group,
    queries,
    keys,
    offset,
    window,
    origin,
    splits,
    fewest,
    softmax_scale,
    WK: tl.constexpr,
    WV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    UNIT: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """One split of one key head's keys for BM rows. Strides of keys and values are in UNITs, which
    gives the compiler their alignment; `lse`: None where there is one split."""
    # A tensor comes with its strides as one tuple (`strided`); `q` becomes the tile of queries.
    q_ptr, sqb, sqh, sqt = q
    out_ptr, sob, soh, sot = out
    mask = Mask(queries, keys, offset, window)
    # On the first grid axis with the heads, since the others are limited to 65535.
    blocks = tl.cdiv(group * queries, BM)
    bg = (tl.program_id(0) // blocks).to(tl.int64)
    split = tl.program_id(1)
    first_row = tl.program_id(0) % blocks * BM
    b = bg // groups
    g = bg % groups
    row = first_row + tl.arange(0, BM)
    dk = tl.arange(0, DK)
    dv = tl.arange(0, DV)
    r = tl.arange(0, BN)
    t = row // group
    held = row < group * queries
    h = g * group + row % group
    q = tl.load(
        q_ptr + b * sqb + (h * sqh + t.to(tl.int64) * sqt)[:, None] + dk[None, :],
        mask=held[:, None] & (dk[None, :] < WK),
        other=0.0,
    )
    if table is not None:
        table += (h * sth)[:, None]
    # The table is in natural units, so that one that is as long as a cache is not copied for every
    # token.
    row_ids = None
    scale = tl.full([BM], LOG2E, tl.float32)
    if segments is not None:
        segments += b * sib
        row_ids = tl.load(segments + offset + t, mask=held, other=-2)
    if row_scale is not None:
        scale *= tl.load(row_scale + b * ssb + h * ssh + t, mask=held, other=0.0)

    last = tl.minimum((first_row + BM - 1) // group, queries - 1)
    lo, hi = _span(first_row // group, last, mask, CAUSAL)
    k_ptr += (b * skb + g * skg) * UNIT
    v_ptr += (b * svb + g * svg) * UNIT
    lo = lo // BN * BN
    per = tl.cdiv(tl.maximum(tl.cdiv(hi - lo, splits), fewest), BN) * BN
    lo += split * per
    hi = tl.minimum(hi, lo + per)

    acc = tl.zeros([BM, DV], tl.float32)
    total = tl.zeros([BM], tl.float32)
    top = tl.full([BM], float("-inf"), tl.float32)
    for n in range(lo, hi, BN):
        cols = n + r
        k_row = cols.to(tl.int64) * sks * UNIT
        v_row = cols.to(tl.int64) * svs * UNIT
        # Unfilled slots may hold any bits, NaN and infinities included.
        valid = (cols < keys)[:, None]
        k = tl.load(
            k_ptr + k_row[:, None] + dk[None, :], mask=valid & (dk[None, :] < WK), other=0.0
        )
        v = tl.load(
            v_ptr + v_row[:, None] + dv[None, :], mask=valid & (dv[None, :] < WV), other=0.0
        )
        seen = seen_of(t[:, None], cols[None, :], None, None, mask, CAUSAL)
        z = mm(q, tl.trans(k)) * softmax_scale
        if table is not None:
            z += tl.load(table + (t[:, None] - cols[None, :] + origin), mask=seen, other=0.0)
        z *= scale[:, None]
        # After the table loads, which would otherwise wait for the ids.
        if row_ids is not None:
            col_ids = tl.load(segments + cols, mask=cols < keys, other=-1)
            seen &= row_ids[:, None] == col_ids[None, :]
        z = tl.where(seen, z, float("-inf"))
        new_top = tl.maximum(top, tl.max(z, 1))
        # Keep the pivot finite for rows without a visible key so far: −∞ − (−∞) = NaN.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(z - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(p, 1)
        acc = acc * fade[:, None] + mm(narrow(p, v.dtype), v)
        top = new_top

    # Rows that see a key: a total of NaN is one too.
    some = held & (total != 0.0)
    total = tl.where(some, total, 1.0)
    result = acc / total[:, None]
    if lse is None:
        out_at = b * sob + (h * soh + t.to(tl.int64) * sot)[:, None] + dv[None, :]
        tl.store(
            out_ptr + out_at,
            narrow(result, out_ptr.dtype.element_ty),
            mask=held[:, None] & (dv[None, :] < WV),
        )
    else:
        at = (bg * splits + split) * (group * queries) + row
        tl.store(lse + at, top + tl.log2(total), mask=held)
        # lse = −∞ marks a row without visible keys; its sums are not read.
        tl.store(
            out_ptr + at[:, None] * WV + dv[None, :],
            result,
            mask=some[:, None] & (dv[None, :] < WV),
        )


@triton.jit(do_not_specialize=["queries", "splits"])
def _combine(
    part_ptr,
    lse_ptr,
    out_ptr,
    total_ptr,
    sob,
    soh,
    sot,
    groups,
    group,
    queries,
    splits,
    WV: tl.constexpr,
    DV: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """out = Σ_s 2^(lse_s − max lse)·part_s / Σ_s 2^(lse_s − max lse) of one row, splits in
    ascending order."""
    rows = group * queries
    at = tl.program_id(0).to(tl.int64)
    bg = at // rows
    row = (at % rows).to(tl.int32)
    dv = tl.arange(0, DV)
    first = bg * splits * rows + row
    every = tl.arange(0, SPLITS)
    lse = tl.load(
        lse_ptr + first + every.to(tl.int64) * rows, mask=every < splits, other=float("-inf")
    )
    top = tl.max(lse, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(lse - top), 0)
    h = bg % groups * group + row % group
    if total_ptr is not None:
        tl.store(
            total_ptr + ((bg // groups) * (groups * group) + h) * queries + row // group,
            top + tl.log2(total),
        )
    acc = tl.zeros([DV], tl.float32)
    for s in range(0, splits, CHUNK):
        some = s + tl.arange(0, CHUNK)
        part = first + some.to(tl.int64) * rows
        logs = tl.load(lse_ptr + part, mask=some < splits, other=float("-inf"))
        # −∞: the split saw no key. NaN is valid.
        valid = (logs != float("-inf"))[:, None] & (dv[None, :] < WV)
        values = tl.load(part_ptr + part[:, None] * WV + dv[None, :], mask=valid, other=0.0)
        acc += tl.sum(tl.exp2(logs - top)[:, None] * values, 0)
    out = narrow(acc / tl.where(total > 0.0, total, 1.0), out_ptr.dtype.element_ty)
    out_at = bg // groups * sob + h * soh + (row // group).to(tl.int64) * sot
    tl.store(out_ptr + out_at + dv, out, mask=dv < WV)


def split_count(programs: int, keys: int, slots: int) -> int:
    """Number of splits of `keys` if one split takes `programs` programs and the device runs `slots`
    at once.

    Minimises  waves · (keys/splits + PROGRAM_COST)  among counts that fill one to four waves.
    """
    most = max(1, min(MOST_SPLITS, keys // FEWEST_KEYS))
    fillings = [wave * slots // programs for wave in (1, 2, 3, 4)]
    choices = sorted({1, *(min(max(count, 1), most) for count in fillings)})

    def cost(splits: int) -> float:
        waves = cdiv(programs * splits, slots)
        return waves * (keys / splits + PROGRAM_COST)

    # The fewest splits among those of equal cost.
    return min(choices, key=cost)


def _blocks(rows: int, width: int, size: int) -> tuple[int, int, int]:
    """Rows and keys of a step, and warps, for heads padded to `width` elements of `size` bytes."""
    most_rows = 64 if size == 2 else 32
    bm = min(most_rows, max(16, power_of_two(rows)))
    most_keys = common.TILE if bm == 64 else 2 * common.TILE
    bn = max(16, min(most_keys, STEP_BYTES // (width * size)))
    warps = 4 if bm == 16 and size == 2 else 8
    return bm, bn, warps


@cache
def _slots_of(device: torch.device, warps: int) -> int:
    """Programs the device runs concurrently, limited by registers and shared memory; 1 in the
    interpreter."""
    if device.type != "cuda":
        return 1
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return multiprocessors * 2 if warps == 4 else multiprocessors


def decode(
    call: Operands, *, splits: int | None = None, wants_lse: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention of few queries on a line, whose keys are read once per 64 rows of T·H/G, in float32
    per 32: (B,H,T,Dv) in q's dtype, in memory (B,T,H,Dv); log2-sum-exp (B,H,T) float32, empty
    unless it is wanted. The same bits in every run.

    splits: of the keys; None chooses for the device.
    """
    q = common.last_axis_contiguous(call.q)
    k = call.k
    v = call.v
    table = call.table
    row_scale = call.row_scale
    segments = call.segments
    g = call.geometry
    skb, skg, sks = k.stride()[:3]
    svb, svg, svs = v.stride()[:3]
    out = q.new_empty(g.batch, g.queries, g.heads, g.width_v).transpose(1, 2)
    group = g.heads // g.groups
    rows = group * g.queries
    dk = padded_width(g.width_k)
    dv = padded_width(g.width_v)
    bm, bn, warps = _blocks(rows, max(dk, dv), q.element_size())
    programs = g.batch * g.groups * cdiv(rows, bm)
    fewest = bn
    if splits is None:
        seen_keys = g.keys
        if g.window:
            # The window reaches ahead too where the call is not causal.
            reach = g.window if g.causal else 2 * g.window
            seen_keys = min(g.keys, reach + g.queries)
        splits = split_count(programs, seen_keys, _slots_of(q.device, warps))
        fewest = FEWEST_KEYS
    # The elements of 16 bytes, or fewer if a stride is no multiple of them.
    unit = math.gcd(16 // q.element_size(), skb, skg, sks, svb, svg, svs)
    partial = out
    lse = None
    total = torch.empty(out.shape[:3] if wants_lse else 0, dtype=torch.float32, device=q.device)
    if splits > 1 or wants_lse:
        partial = q.new_empty(g.batch * g.groups, splits, rows, g.width_v, dtype=torch.float32)
        lse = q.new_empty(g.batch * g.groups, splits, rows, dtype=torch.float32)
    with on_device(q):
        _partial[(programs, splits)](
            q=strided(q),
            k_ptr=k,
            v_ptr=v,
            table=table,
            row_scale=row_scale,
            segments=segments,
            out=(partial, *out.stride()[:3]),
            lse=lse,
            skb=skb // unit,
            skg=skg // unit,
            sks=sks // unit,
            svb=svb // unit,
            svg=svg // unit,
            svs=svs // unit,
            ssb=scale_stride(row_scale),
            ssh=0 if row_scale is None else row_scale.stride(1),
            sth=0 if table is None else table.stride(0),
            sib=0 if segments is None else segments.stride(0),
            groups=g.groups,
            group=group,
            queries=g.queries,
            keys=g.keys,
            offset=g.offset,
            window=g.window or None,
            origin=g.origin,
            splits=splits,
            fewest=fewest,
            softmax_scale=g.softmax_scale,
            WK=g.width_k,
            WV=g.width_v,
            DK=dk,
            DV=dv,
            BM=bm,
            BN=bn,
            UNIT=unit,
            CAUSAL=g.causal,
            num_warps=warps,
            num_stages=STAGES,
        )
        if lse is not None:
            sob, soh, sot = out.stride()[:3]
            _combine[(g.batch * g.groups * rows,)](
                part_ptr=partial,
                lse_ptr=lse,
                out_ptr=out,
                total_ptr=total if wants_lse else None,
                sob=sob,
                soh=soh,
                sot=sot,
                groups=g.groups,
                group=group,
                queries=g.queries,
                splits=splits,
                WV=g.width_v,
                DV=dv,
                SPLITS=power_of_two(splits),
                num_warps=4,
            )
    return out, total
