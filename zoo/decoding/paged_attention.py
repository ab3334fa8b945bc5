"""Attention over a paged cache: by the Triton kernel, which reads pages in place, or by gathering those of each head."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from zoo.attention.base import AttentionCall, Kernel, Pages
from zoo.attention.dispatch import KERNELS, prior_attention
from zoo.attention.reach import TALLY
from zoo.positions import Positions

__all__ = ["attend_gathered", "paged_kernel"]


def paged_kernel(
    call: AttentionCall, kernel: str | Kernel, block: int
) -> Callable[[AttentionCall, Pages], Tensor] | None:
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
    if call.terms.bias is not None:
        return "its bias is of pairs, not of keys"
    table = None if call.table is None else call.table.table
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (call.q, table, call.query_scale)):
        return "it has no gradient; decode under torch.no_grad()"
    return None


@cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"pages of the KV cache are gathered at every step, which is slow on CUDA: {reason}", stacklevel=2)


def _decode_paged(call: AttentionCall, pages: Pages) -> Tensor:
    from zoo.attention.triton.common import Geometry, Operands, last_axis_contiguous
    from zoo.attention.triton.decode import decode_paged

    q, table = call.unscaled, call.table
    geometry = Geometry(
        *(q.shape[0], q.shape[1], pages.index.shape[1], q.shape[2], pages.length),
        width_k=q.shape[3],
        width_v=call.v.shape[3],
        lanes=0 if call.terms.q_lanes is None else call.terms.q_lanes.shape[3],
        window=call.window or 0,
        origin=0 if table is None or table.origin is None else table.origin,
        softmax_scale=call.softmax_scale,
    )
    scale = None if call.query_scale is None else call.query_scale.float().contiguous()
    values = None if table is None else last_axis_contiguous(table.table.float())
    return decode_paged(Operands(q, pages.keys, pages.values, values, scale, pages.segments, geometry), pages)


def attend_gathered(
    call: AttentionCall,
    pages: Pages,
    counts: list[int],
    *,
    fresh: tuple[Tensor, Tensor] | None = None,
    kernel: str | Kernel = "auto",
) -> Tensor:
    """(B, H, T, Dv): queries attend to the keys on pages, and to those of a chunk that is on no page yet.

    The keys that a head holds are its newest, without gaps. For heads that hold as many, attention over them is that of a
    shorter sequence, by `prior_attention`. Memory is a copy of their keys beside what the kernel needs.

    Args:
        call: queries, of the last T positions, terms (the table over the T + S − 1 distances of all keys), row scale,
            documents (B, S) and window.
        counts: pages.count on the host, length B·G.
        fresh: k (B, G, N, Dk) and v (B, G, N, Dv) of the chunk, key lanes first, N ≥ T.
        kernel: as in `prior_attention`.
    """
    (batch, groups), heads, device = call.k.shape[:2], call.q.shape[1], call.q.device
    size = heads // groups
    out = call.v.new_empty(batch, heads, call.num_queries, call.v.shape[3])
    rows_of: dict[tuple[int, int], list[int]] = {}  # pages, key head → batch rows
    for n, count in enumerate(counts):
        rows_of.setdefault((count, n % groups), []).append(n // groups)
    alike: dict[tuple[int, tuple[int, ...]], list[int]] = {}  # pages, batch rows → key heads
    for (count, group), batch_rows in rows_of.items():
        alike.setdefault((count, tuple(batch_rows)), []).append(group)
    table, lanes, scale = call.table, call.terms.q_lanes, call.query_scale
    for (count, members), key_heads in alike.items():
        rows, of = torch.tensor(members, device=device)[:, None], torch.tensor(key_heads, device=device)
        mine = (of[:, None] * size + torch.arange(size, device=device)).flatten()
        ids = pages.index[rows, of, :count].flatten()
        held = count * pages.keys.shape[1] - -pages.length % pages.keys.shape[1] if count else 0
        # index_select copies whole pages; pool[ids] takes 4× as long on the CPU.
        k, v = (
            pool.index_select(0, ids).view(len(members), len(key_heads), -1, pool.shape[2])[:, :, :held]
            for pool in (pages.keys, pages.values)
        )
        if fresh is not None:
            k, v = (torch.cat([old, new[rows, of]], dim=2) for old, new in zip((k, v), fresh, strict=True))
        if (tally := TALLY.get()) is not None:
            tally.left_out += len(members) * len(mine) * call.num_queries * (pages.length - held)
        line = Positions.line(k.shape[2])
        out[rows, mine] = prior_attention(
            call.q[rows, mine],
            k,
            v,
            replace(
                call.terms,
                q_lanes=None if lanes is None else lanes.expand(batch, heads, -1, -1)[rows, mine],
                table=None if table is None else table.of_heads(mine).shifted(line.tail(call.num_queries), line),
            ),
            causal=True,
            query_scale=None if scale is None else scale.expand(batch, -1, -1)[rows, mine],
            segments=None if call.segments is None else call.segments[rows[:, 0], -line.length :],
            window=call.window,
            kernel=kernel,
        )
    return out
