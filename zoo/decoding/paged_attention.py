"""Attention over a paged cache: by the Triton kernel, which reads pages in place, or by gathering those of each head."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.attention.base import AttentionCall, Pages, join, pad_heads
from zoo.attention.dispatch import KERNELS, prior_attention
from zoo.positions import Positions
from zoo.slices import slices

__all__ = ["attend_chunk", "attend_gathered", "paged_kernel"]

# Logits in memory at once: 16 MiB of float32.
LOGITS = 1 << 22


def paged_kernel(call: AttentionCall, kernel: str, block: int) -> Callable[[AttentionCall, Pages], Tensor] | None:
    """The Triton kernel if `kernel` is "triton", or "auto" on CUDA; None for `attend_gathered`. `block`: keys per page.

    Raises:
        ValueError: for kernel="triton" if it cannot serve the call.
    """
    if kernel != "triton" and (kernel != "auto" or call.q.device.type != "cuda"):
        return None
    reason = KERNELS["triton"].refuses(call) or _refuses_pages(call, block)
    if reason is None:
        return _decode_paged
    if kernel == "triton":
        raise ValueError(f"kernel 'triton' cannot read pages for this call: {reason}; kernel='auto' gathers them")
    _warn_once(reason)
    return None


def _refuses_pages(call: AttentionCall, block: int) -> str | None:
    """What reading pages in place requires beyond `TritonKernel.refuses`."""
    if block < 16 or block & (block - 1):
        return f"a page must hold a power of two of keys, at least 16, got {block}"
    table = None if call.table is None else call.table.table
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (call.q, table, call.query_scale)):
        return "it has no gradient; decode under torch.no_grad()"
    return None


@cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"pages of the KV cache are gathered at every step, which is slow on CUDA: {reason}", stacklevel=2)


def _decode_paged(call: AttentionCall, pages: Pages) -> Tensor:
    from zoo.attention.triton.common import Geometry, last_axis_contiguous
    from zoo.attention.triton.decode import decode_paged
    from zoo.attention.triton.op import two_based

    q, table = call.queries, call.table
    geometry = Geometry(
        *(q.shape[0], q.shape[1], pages.index.shape[1], q.shape[2], pages.length),
        width_k=q.shape[3],
        width_v=call.v.shape[3],
        lanes=0 if call.terms.q_lanes is None else call.terms.q_lanes.shape[3],
        window=call.window or 0,
        origin=0 if table is None or table.origin is None else table.origin,
    )
    if table is None:
        return decode_paged(q, pages, None, None, geometry)
    scale = None if call.query_scale is None else call.query_scale.float().contiguous()
    values = last_axis_contiguous(table.table.float())
    return decode_paged(q, pages, values, two_based(scale, q), geometry)


def attend_chunk(
    call: AttentionCall, pages: Pages, counts: list[int], k: Tensor, v: Tensor, *, kernel: str = "auto"
) -> Tensor:
    """(B, H, T, Dv): a chunk of queries attend to the keys on pages and to those of the chunk, which are on no page yet.

    What a key head holds is one stretch, its newest keys: `prior_attention` over that and the chunk is the same call with the
    sequence cut off before it. Memory is the keys of one stretch beside what the kernel needs.

    Args:
        call: queries, terms (the table's column of a distance d is d + center), row scale, documents (B, S) and window.
        counts: pages.count on the host, length B·G.
        k, v: (B, G, T, Dk) and (B, G, T, Dv) of the chunk, key lanes first.
        kernel: as in `prior_attention`.
    """
    (batch, groups), heads = k.shape[:2], call.q.shape[1]
    out = call.v.new_empty(batch, heads, call.num_queries, v.shape[3])
    stretches: dict[tuple[int, int], list[int]] = {}  # key head and pages → batch rows
    for n, count in enumerate(counts):
        stretches.setdefault((n % groups, count), []).append(n // groups)
    for (group, count), members in stretches.items():
        rows = torch.tensor(members, device=k.device)
        mine = rows, slice(group * heads // groups, (group + 1) * heads // groups)
        ids = pages.index[rows, group, :count].flatten()
        held = _filled(pages, count)
        keys, values = (
            torch.cat([pool.index_select(0, ids).view(len(rows), -1, new.shape[3])[:, :held], new[rows, group]], dim=1)
            for pool, new in ((pages.keys, k), (pages.values, v))
        )
        line = Positions.line(keys.shape[1])
        table, lanes, scale = call.table, call.terms.q_lanes, call.query_scale
        terms = replace(
            call.terms,
            q_lanes=None if lanes is None else lanes.expand(batch, heads, -1, -1)[mine],
            table=None if table is None else table.of_heads(mine[1]).shifted(line.tail(call.num_queries), line),
        )
        out[mine] = prior_attention(
            call.q[mine],
            keys[:, None],
            values[:, None],
            terms,
            causal=True,
            query_scale=None if scale is None else scale.expand(batch, -1, -1)[mine],
            segments=None if call.segments is None else call.segments[rows, -line.length :],
            window=call.window,
            kernel=kernel,
        )
    return out


def _filled(pages: Pages, count: int) -> int:
    """Keys on the newest `count` pages of a head."""
    return count * pages.keys.shape[1] - -pages.length % pages.keys.shape[1] if count else 0


def attend_gathered(call: AttentionCall, pages: Pages, counts: list[int]) -> Tensor:
    """(B, H, T, Dv): the call's few queries, the newest, attend to the keys on pages, their own among them.

    Heads with equal page counts are batched; memory is the pages of one such set plus a block of logits.

    Args:
        call: queries, of the last T positions, terms (the table's column of a distance d is d + center), row scale,
            documents and window.
        counts: pages.count on the host, length B·G.
    """
    batch, groups = call.k.shape[:2]
    tokens = call.num_queries
    queries = call.queries.unflatten(1, (groups, -1)).flatten(0, 1)  # (B·G, r, T, Dk)
    out = call.v.new_empty(batch * groups, queries.shape[1], tokens, call.v.shape[3])
    index, start = pages.index.flatten(0, 1), pages.start.flatten(0, 1)
    block = pages.keys.shape[1]
    rows_of: dict[int, list[int]] = {}
    for row, count in enumerate(counts):
        rows_of.setdefault(count, []).append(row)
    for count, members in rows_of.items():
        rows = torch.tensor(members, device=index.device)
        filled = _filled(pages, count)
        ids = index[rows, :count].flatten()
        # index_select copies whole pages; pool[ids] takes 4× as long on the CPU.
        k, v = (
            pool.index_select(0, ids).view(len(rows), count * block, -1)[:, :filled]
            for pool in (pages.keys, pages.values)
        )
        place = torch.arange(block, device=index.device)
        at = (start[rows, :count, None] + place).flatten(1)[:, :filled]
        out[rows] = _attend(call, queries[rows], k, v, at, rows, pages.length - tokens)
    return out.unflatten(0, (batch, groups)).flatten(1, 2)


def _attend(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, at: Tensor, rows: Tensor, first: int) -> Tensor:
    """(u, r, T, Dv) of the key heads `rows` (u,), flat over batch and group; keys (u, S, Dk) are at positions (u, S).

    The heads of a group become rows that share its keys.
    """
    width, dtype = v.shape[2], q.dtype
    wide = dtype if call.table is None else torch.promote_types(dtype, torch.float32)
    q, k, v = pad_heads(q, k, v)
    k, v = k[:, None].to(wide), v[:, None].to(wide)
    parts = []
    for block in slices(call.num_queries, max(LOGITS // max(q.shape[0] * q.shape[1] * k.shape[2], 1), 1)):
        mask = _mask(call, at, rows, first, block)
        if mask is not None:
            mask = mask.expand(-1, q.shape[1], -1, -1).flatten(1, 2)[:, None]
        part = q[:, :, block].to(wide)
        with torch.autocast(q.device.type, enabled=False):  # autocast would round the bias to half precision
            found = F.scaled_dot_product_attention(part.flatten(1, 2)[:, None], k, v, attn_mask=mask, scale=1.0)
        parts.append(found[:, 0].unflatten(1, part.shape[1:3])[..., :width].to(dtype))
    return join(parts, dim=2)


def _mask(call: AttentionCall, at: Tensor, rows: Tensor, first: int, block: slice) -> Tensor | None:
    """(u, 1 or r, t, S) for the queries of a block: None if one query sees all, bool, or the additive bias."""
    groups = call.k.shape[1]
    i = torch.arange(first + block.start, first + block.stop, device=at.device)
    distance = i[:, None] - at[:, None, :]  # (u, t, S)
    shown = None if call.num_queries == 1 else distance >= 0
    if call.window is not None:
        near = distance < call.window
        shown = near if shown is None else shown & near
    if call.segments is not None:
        ids = call.segments[rows // groups]
        same = ids[:, i, None] == ids.gather(1, at.long())[:, None]
        shown = same if shown is None else shown & same
    if call.table is None:
        return None if shown is None else shown[:, None]
    table = call.table.table.unflatten(0, (groups, -1)).index_select(0, rows % groups)  # (u, r, N)
    column = (distance.clamp(min=0) + call.table.center)[:, None].expand(-1, table.shape[1], -1, -1)
    bias = table.gather(2, column.flatten(2)).view(column.shape)
    if call.query_scale is not None:
        scale = call.query_scale.expand(call.q.shape[0], -1, -1).unflatten(1, (groups, -1)).flatten(0, 1)
        bias = bias * scale[rows, :, block, None]
    if shown is not None:
        bias = bias.masked_fill(~shown[:, None], -torch.inf)
    return bias.to(torch.promote_types(call.q.dtype, torch.float32))
