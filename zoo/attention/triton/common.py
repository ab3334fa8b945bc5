"""Shared by the kernels: a call as data, and the parts of a tile of logits.

Kernels work in base 2: z2 = row_scale·(softmax_scale·log2 e·(q·k) + table2) with table2
= table·log2 e, and weights are exp2(z2 − lse2). All of it is float32: q is not scaled, and so not
rounded, before its product with k.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

INTERPRET = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
# The assembly that reads tables is pure, since they are constant. Triton 3.9 moves results of
# impure assembly through shared memory, and then spills; under earlier ones pure assembly spills at
# 256 columns.
PURE = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9))
LOG2E = tl.constexpr(1.4426950408889634)
NOWHERE = nullcontext()
# Of a block of queries or keys.
MOST_ROWS = 128

# Table entries below it, −1e4 in natural units, are constants: a key there has a weight only where
# its row sees no other.
STEEP = tl.constexpr(-1e4 * 1.4426950408889634)

# Rows and keys of the smallest block and of a tile of the plan. Tests lower it, so that short calls
# have several tiles.
TILE = 64


@dataclass(frozen=True)
class Geometry:
    """The shape of a call and its mask. Widths count the lanes, leading columns of q and k; window
    0: all keys; origin: on a line the table's column of (first query, first key); prefix: leading
    tokens off the grid, of 0 patches on a line."""

    batch: int
    heads: int
    groups: int
    queries: int
    keys: int
    width_k: int
    width_v: int
    lanes: int = 0
    causal: bool = True
    window: int = 0
    origin: int = 0
    grid_height: int = 0
    grid_width: int = 0
    prefix: int = 0
    softmax_scale: float = 1.0

    @property
    def factor(self) -> float:
        """Of q·k in base-2 logits."""
        return self.softmax_scale * LOG2E.value

    @property
    def offset(self) -> int:
        """Position of the first query; queries are the last T of the S positions."""
        return self.keys - self.queries


@dataclass(frozen=True)
class Operands:
    """What every host function of this folder is handed: q (B,H,T,Dk), k (B,G,S,Dk), v (B,G,S,Dv)
    of one dtype, lanes first; table (H, N) and row_scale (1 or B, H, T) float32; segments (B, S)
    int32. Logits are

        z[i,j] = row_scale[h,i]·(softmax_scale·<q_i, k_j> + table[h, index(i, j)])
    """

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor | None
    row_scale: Tensor | None
    segments: Tensor | None
    geometry: Geometry

    @cached_property
    def table2(self) -> Tensor | None:
        """(H, N) contiguous: the table in base 2, times log2 e."""
        return None if self.table is None else (self.table * LOG2E.value).contiguous()

    @cached_property
    def codes(self) -> Tensor | None:
        """(S + MOST_ROWS,) int32, −(y·(2·width − 1) + x) of a patch, or None on a line. A column of
        the table is origin + codes[key] − codes[query]. A load takes fewer instructions than y and
        x. Blocks read beyond the last key."""
        g = self.geometry
        if self.table is None or not g.grid_width:
            return None
        # −(y·width + x) of each patch; y·(width − 1) more makes it the code.
        patch = torch.arange(
            g.prefix,
            g.prefix - g.keys - MOST_ROWS,
            -1,
            dtype=torch.int32,
            device=self.q.device,
        )
        return patch.add_(patch.div(g.grid_width, rounding_mode="trunc"), alpha=g.grid_width - 1)


def lanes_apart(g: Geometry) -> int:
    """Leading columns of q and k that get their own tile: the lanes, if they would double the
    padded width of q and k."""
    return g.lanes if padded_width(g.width_k - g.lanes) < padded_width(g.width_k) else 0


def strided(x: Tensor) -> tuple[Tensor | int, ...]:
    """A tensor (B, heads, length, columns) with its strides but the last, which is 1: one argument
    of a kernel."""
    return x, *x.stride()[:3]


def describable(*tensors: Tensor) -> bool:
    """Whether these tensors (B, heads, length, columns) are read by descriptors: all of 64 or all
    of 128 columns of two bytes, addresses and strides multiples of 16 bytes, on compute capability
    9.0; in the interpreter any that need no padding."""
    places = []
    for x in tensors:
        strides = [x.element_size() * stride for stride in x.stride()[:3]]
        # Expanded, empty, or narrower than its tile.
        if 0 in strides or x.numel() == 0 or padded_width(x.shape[-1]) > x.shape[-1]:
            return False
        places += [x.data_ptr(), *strides]
    if any(place % 16 for place in places):
        return False
    if INTERPRET.value:
        return True
    columns = {x.shape[-1] for x in tensors}
    fits = columns in ({64}, {128}) and tensors[0].element_size() == 2
    return fits and driver.active.get_current_target().arch == 90


def descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """Of `rows` rows at a time of one head of a tensor for which `describable` holds."""
    return TensorDescriptor.from_tensor(x, [1, 1, rows, x.shape[-1]])


def cdiv(a: int, b: int) -> int:
    """⌈a/b⌉. `triton.cdiv`, which unwraps constants of kernels, takes longer than an empty
    tensor."""
    return -(-a // b)


def power_of_two(least: int) -> int:
    """The smallest power of two that is at least `least`."""
    return 1 << (least - 1).bit_length()


def padded_width(width: int) -> int:
    """Columns of a tile that holds `width`: the next power of two, at least 16, as tensor cores
    require."""
    return max(16, power_of_two(width))


def shape_options(g: Geometry) -> dict[str, int | bool]:
    """Constexpr arguments shared by all kernels."""
    lanes = lanes_apart(g)
    return {
        "WIDTH_K": g.width_k - lanes,
        "WIDTH_V": g.width_v,
        "LANES": lanes,
        "DK": padded_width(g.width_k - lanes),
        "DV": padded_width(g.width_v),
        "DL": padded_width(lanes),
        "CAUSAL": g.causal,
    }


def last_axis_contiguous(x: Tensor) -> Tensor:
    """`x`, copied if its last axis is strided: kernels read rows with contiguous columns."""
    return x if x.stride(-1) == 1 else x.contiguous()


@cache
def shared_limit(device: int) -> int:
    """Shared memory limit per block, in bytes, of the device of this index; unlimited in the
    interpreter."""
    if INTERPRET.value:
        return 1 << 30
    return driver.active.utils.get_device_properties(device)["max_shared_mem"]


def scale_stride(row_scale: Tensor | None) -> int:
    """Batch stride of the row scales (1 or B, H, T); 0 where all batch rows share them."""
    return 0 if row_scale is None or row_scale.shape[0] == 1 else row_scale.stride(0)


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Make the device of `x` current for a launch."""
    return torch.cuda.device(x.device) if x.is_cuda else NOWHERE


@triton.jit
def uniform(x):
    """The int32 `x` of all threads, so that the compiler knows it to be one: what a loop bounded by
    it reads then has addresses in uniform registers. It is not pure, since it needs all lanes:
    nothing may move it into a branch."""
    if not INTERPRET:
        x = tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [x], tl.int32, is_pure=False, pack=1
        )
    return x


@triton.jit
def mm(a, b, acc=None):
    """a @ b (+ acc) with float32 sums; float32 operands are not rounded to tf32.

    The interpreter multiplies bit patterns of bfloat16, so operands are cast there; float32
    products are exact.
    """
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc=acc, input_precision="ieee")
    return tl.dot(a, b, acc=acc, input_precision="ieee")


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 `x` rounded to nearest in `dtype`; the interpreter's own cast truncates to
    bfloat16."""
    if INTERPRET and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        x = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(dtype)


class Mask(NamedTuple):
    """In a kernel, which makes it: Triton would compile for every length inside a tuple argument.
    window None: any."""

    queries: tl.tensor
    keys: tl.tensor
    offset: tl.tensor
    window: tl.tensor | None


class TableIndex(NamedTuple):
    """In a kernel: which column of a table a query and a key have. codes: `Operands.codes`, None on
    a line; prefix None: all tokens are on the line or grid."""

    origin: tl.tensor
    codes: tl.tensor | None
    prefix: tl.tensor | None


@triton.jit
def seen_of(rows, cols, row_ids, col_ids, mask, CAUSAL: tl.constexpr):
    """bool: which keys `cols` each query of `rows` sees, in the shape that both broadcast to;
    document ids, or None, alike."""
    seen = (rows < mask.queries) & (cols < mask.keys)
    distance = rows + mask.offset - cols
    if CAUSAL:
        seen &= distance >= 0
    if mask.window is not None:
        seen &= (distance < mask.window) & (distance > -mask.window)
    if row_ids is not None:
        seen &= row_ids == col_ids
    return seen


@triton.jit
def place_of(tokens, index):
    """A token's index on a line, where columns of the table are query − key; its code on a grid:
    key − query."""
    if index.codes is not None:
        return tl.load(index.codes + tokens)
    return tokens


@triton.jit
def unstaged_load(at, seen, MASKED: tl.constexpr):
    """The float32 numbers at the pointers `at`, 0 where not `seen`, if MASKED.

    On the device the load is inline assembly: Triton would pipeline it through shared memory
    because the logits feed a matrix product, a table's gather four bytes at a time, and double the
    shared memory of a block.
    """
    if INTERPRET:
        return tl.load(at, mask=seen if MASKED else None, other=0.0 if MASKED else None)
    elif MASKED:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, 0; @$2 ld.global.nc.b32 $0, [$1];",
            "=&r,l,b",
            [at, seen],
            tl.float32,
            is_pure=PURE,
            pack=1,
        )
    else:
        return tl.inline_asm_elementwise(
            "ld.global.nc.b32 $0, [$1];", "=r,l", [at], tl.float32, is_pure=PURE, pack=1
        )


@triton.jit
def same_document(ids_ptr, row_ids, own, lo, hi, BN: tl.constexpr):
    """The part of blocks [lo, hi) of BN keys, all inside the call, around position `own` in the
    document of all rows; empty if the rows are of several. Reads the ids of [lo, hi) once, four
    bytes per key. Keys and rows may change places."""
    SPAN: tl.constexpr = 1024
    document = tl.max(row_ids)
    one = tl.min(row_ids) == document
    before = tl.full([SPAN], -1, tl.int32)
    after = tl.zeros([SPAN], tl.int32) + hi * BN
    for start in range(lo * BN, tl.where(one, hi * BN, 0), SPAN):
        places = start + tl.arange(0, SPAN)
        other = tl.load(ids_ptr + places, mask=places < hi * BN, other=document) != document
        before = tl.maximum(before, tl.where(other & (places <= own), places, -1))
        after = tl.minimum(after, tl.where(other & (places > own), places, hi * BN))
    return uniform(tl.maximum(lo, (tl.max(before) + BN) // BN)), uniform(
        tl.where(one, tl.min(after) // BN, 0)
    )


@triton.jit
def key_range(
    first,
    plan_rows,
    plan_step,
    segments,
    row_ids,
    mask,
    index,
    BM: tl.constexpr,
    BN: tl.constexpr,
    TILE: tl.constexpr,
    CAUSAL: tl.constexpr,
    SAME: tl.constexpr,
):
    """Blocks of BN keys for the BM queries from `first` on: (lo, full_lo, full_hi, hi); in
    [full_lo, full_hi) nothing is masked. `plan_rows` points at this head's part of the plan, see
    `planned`, or is None; `segments` at the batch row's document ids, `row_ids` (BM, 1) are of the
    queries, or both None; SAME: blocks in one document may be unmasked."""
    # Position of the last query.
    last = tl.minimum(first + BM, mask.queries) - 1 + mask.offset
    lo = 0
    hi = mask.keys
    if CAUSAL:
        hi = tl.minimum(hi, last + 1)
    if mask.window is not None:
        lo = tl.maximum(first + mask.offset - mask.window + 1, 0)
        if not CAUSAL:
            hi = tl.minimum(hi, last + mask.window)
    if plan_rows is not None:
        lo_plan, hi_plan = planned(
            plan_rows, plan_step, tl.cdiv(mask.queries, TILE), first, mask.keys, BM, TILE
        )
        lo = tl.maximum(lo, lo_plan)
        hi = tl.minimum(hi, hi_plan)
    lo = lo // BN
    hi = tl.cdiv(tl.maximum(hi, 0), BN)
    full_lo = lo
    full_hi = tl.minimum(mask.keys // BN, hi)
    if CAUSAL:
        full_hi = tl.minimum(full_hi, (first + mask.offset + 1) // BN)
    if mask.window is not None:
        full_lo = tl.maximum(full_lo, tl.maximum(last - mask.window + BN, 0) // BN)
        if not CAUSAL:
            full_hi = tl.minimum(full_hi, tl.maximum(first + mask.offset + mask.window, 0) // BN)
    if index.prefix is not None:
        full_lo = tl.maximum(full_lo, tl.cdiv(index.prefix, BN))
        full_hi = tl.where(first < index.prefix, 0, full_hi)
    full_hi = tl.where(first + BM > mask.queries, 0, full_hi)
    if segments is not None:
        if SAME:
            full_lo, full_hi = same_document(
                segments, row_ids, first + mask.offset, full_lo, full_hi, BN
            )
        else:
            full_hi = 0
    none = full_lo >= full_hi
    # An empty range of unmasked blocks begins and ends at lo, so that all blocks are masked ones.
    return lo, tl.where(none, lo, full_lo), tl.where(none, lo, full_hi), hi


@triton.jit
def tile_at(
    matrix,
    start,
    stride,
    count,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
    opaque_zero=0,
):
    """(BLOCK, PADDED) rows from `start` on of a (count, WIDTH) matrix, zeros beyond its last column
    and, if MASKED, row. The compiler cannot fold `opaque_zero`, and so does not hoist address
    arithmetic out of earlier loops and spill it."""
    r = tl.arange(0, BLOCK) + opaque_zero
    c = tl.arange(0, PADDED)
    at = (
        matrix + start * tl.cast(stride, tl.int64) + (r[:, None].to(tl.int64) * stride + c[None, :])
    )
    if MASKED and WIDTH < PADDED:
        return tl.load(at, mask=(start + r[:, None] < count) & (c[None, :] < WIDTH), other=0.0)
    if MASKED:
        return tl.load(at, mask=start + r[:, None] < count, other=0.0)
    if WIDTH < PADDED:
        return tl.load(at, mask=c[None, :] < WIDTH, other=0.0)
    return tl.load(at)


@triton.jit
def rows_of(
    tensor,
    b,
    h,
    first,
    start,
    count,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
    TMA: tl.constexpr,
    opaque_zero=0,
):
    """`tile_at` of head h of batch row b, columns from `first` on. `tensor` is a descriptor, if
    TMA, or `strided`."""
    if TMA:
        return tensor.load([b.to(tl.int32), h.to(tl.int32), start, 0]).reshape(BLOCK, PADDED)
    else:
        pointer, stride_b, stride_h, stride = tensor
        pointer += b * stride_b + h * stride_h + first
        return tile_at(pointer, start, stride, count, WIDTH, PADDED, BLOCK, MASKED, opaque_zero)


@triton.jit
def row_values(vector, rows, count, beyond: tl.constexpr, MASKED: tl.constexpr):
    """One value per row, in the shape of `rows`; `beyond` for rows from `count` on, if MASKED."""
    return (
        tl.load(vector + rows, mask=rows < count, other=beyond)
        if MASKED
        else tl.load(vector + rows)
    )


@triton.jit
def store_tile(
    matrix,
    tile,
    start,
    stride,
    count,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    opaque_zero=0,
):
    """Store the rows of `tile` inside a (count, WIDTH) matrix, rounded to its dtype. `opaque_zero`:
    as for `tile_at`."""
    r = tl.arange(0, BLOCK) + opaque_zero
    c = tl.arange(0, PADDED)
    at = (
        matrix + start * tl.cast(stride, tl.int64) + (r[:, None].to(tl.int64) * stride + c[None, :])
    )
    tl.store(
        at,
        narrow(tile, matrix.dtype.element_ty),
        mask=(start + r[:, None] < count) & (c[None, :] < WIDTH),
    )


@triton.jit
def entries(
    table, row_start, col_start, rows, cols, q_place, k_place, seen, index, MASKED: tl.constexpr
):
    """float32 in the shape that `rows` and `cols` broadcast to, of the tile whose first query and
    key are at the starts: table[index] of one head; 0 where not `seen`, if MASKED, else all lies
    inside, off the prefix.

    On a line a thread of the MMA layout holds rows r, r + 8, … and columns c, c + 8, …: of its 64
    elements of a 128 × 64 tile only 34 differ in r − c. The compiler loads each distinct entry
    once, from one address plus a constant, if the ranges of rows and columns are constant, used
    nowhere else, and added to the pointer one after the other. Hence the ranges that start at R and
    C.
    """
    if index.codes is not None:
        # A pointer to each row of the tile and a 32-bit offset of each column are one instruction
        # an entry.
        first = table + index.origin
        at = (first - q_place) + k_place if rows.shape[0] > 1 else (first + k_place) - q_place
    else:
        R: tl.constexpr = rows.numel
        C: tl.constexpr = cols.numel
        r = tl.reshape(tl.arange(R, 2 * R), rows.shape).to(tl.int64)
        c = tl.reshape(tl.arange(C, 2 * C), cols.shape).to(tl.int64)
        at = (table + (index.origin + C - R) + row_start + r) - col_start - c
    if index.prefix is not None and MASKED:
        seen = seen & (rows >= index.prefix) & (cols >= index.prefix)
    return unstaged_load(at, seen, MASKED)


@triton.jit
def planned(plan, step, tiles, start, other, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """[lo, hi) in tokens of the other axis, of length `other`, for the block at `start`. `plan`
    points at the first of a head's `tiles` starts; the ends are `step` further."""
    tile = start // TILE + tl.arange(0, (BLOCK + TILE - 1) // TILE)
    lo = tl.min(tl.load(plan + tile, mask=tile < tiles, other=0x7FFFFFFF), 0)
    hi = tl.max(tl.load(plan + step + tile, mask=tile < tiles, other=0), 0)
    return uniform(tl.minimum(lo, other) * TILE), uniform(hi * TILE)


@triton.jit
def split(first, last, full_first, full_last, BLOCK: tl.constexpr):
    """Blocks [lo, hi) that hold tokens [first, last), and [full_lo, full_hi) of them wholly in
    [full_first, full_last)."""
    lo = tl.maximum(first, 0) // BLOCK
    hi = tl.maximum(tl.cdiv(tl.maximum(last, 0), BLOCK), lo)
    full_lo = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(full_first, 0), BLOCK), lo), hi)
    full_hi = tl.minimum(tl.maximum(tl.maximum(full_last, 0) // BLOCK, full_lo), hi)
    return lo, full_lo, full_hi, hi
