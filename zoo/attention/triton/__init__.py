"""Fused attention on the GPU: content, lanes and a relative table in one kernel, forward and
backward (Triton).

README.md here follows a gradient step by step. On the CPU the kernels run only in Triton's
interpreter (TRITON_INTERPRET=1), for tests.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from zoo.attention.call import AttentionCall, fold_keys, fold_unscaled_queries
from zoo.attention.heads import repeat_heads
from zoo.attention.masks import refuses_matrix
from zoo.attention.reach import SKIPS
from zoo.attention.sinks import attend_with_sinks
from zoo.attention.tracing import cuda_capability, has_values, needs_grad, traced_as_constant
from zoo.priors.tables import FusedTable

__all__ = ["TRITON", "TritonKernel", "skipped_share"]

WIDEST = 256


@traced_as_constant
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@traced_as_constant
def _interpreted() -> bool:
    from zoo.attention.triton.common import INTERPRET

    return INTERPRET.value


@traced_as_constant
def _find_distrust(device: str, dtype: torch.dtype) -> str | None:
    from zoo.attention.selfcheck import find_distrust

    return find_distrust("triton", TRITON, device, dtype)


class TritonKernel:
    """Serves tables on lines and grids, lanes, documents and windows, in float32, bfloat16 and
    float16, on CUDA.

    Attributes:
        least_keys: below this many keys, or a quarter of them with documents, the plan costs more
            than it saves.
        decode_queries: up to this many queries without gradients take the decoding kernel.
    """

    def __init__(
        self,
        *,
        least_keys: int = 4096,
        decode_queries: int = 8,
        capability: Callable[[str], tuple[int, int]] = cuda_capability,
        interpreted: Callable[[], bool] = _interpreted,
        distrust: Callable[[str, torch.dtype], str | None] = _find_distrust,
    ) -> None:
        self.least_keys = least_keys
        self.decode_queries = decode_queries
        self.capability = capability
        self.interpreted = interpreted
        self.distrust = distrust

    def refuses(self, call: AttentionCall) -> str | None:
        why = self._cannot_serve(call)
        # A self-check would compute with fake tensors.
        if why is not None or not call.on_cuda or not has_values(call.q):
            return why
        return self.distrust(str(call.q.device), call.q.dtype)

    def cannot_run_on(self, device: torch.device) -> str | None:
        """Why no kernel of this folder runs on a device; None if they do."""
        if not _installed():
            return "the package triton is not installed"
        if device.type != "cuda" and not (device.type == "cpu" and self.interpreted()):
            return f"it runs on CUDA devices, and the queries are on {device}"
        if device.type == "cuda" and self.capability(str(device)) < (8, 0):
            return "it needs an NVIDIA GPU of compute capability 8.0 or later"
        return None

    def _cannot_serve(self, call: AttentionCall) -> str | None:
        why = self.cannot_run_on(call.q.device)
        if why is not None:
            return why
        if call.terms.bias is not None:
            return "it adds no dense bias"
        if len({call.q.dtype, call.k.dtype, call.v.dtype}) > 1:
            dtypes = f"{call.q.dtype}, {call.k.dtype} and {call.v.dtype}"
            return f"q, k and v must be of one dtype, got {dtypes}"
        if call.q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"it computes in float32, bfloat16 and float16, not in {call.q.dtype}"
        lanes = 0 if call.terms.q_lanes is None else call.terms.q_lanes.shape[-1]
        width = max(call.q.shape[-1] + lanes, call.v.shape[-1])
        if width > WIDEST:
            return f"head width with lanes must be at most {WIDEST}, got {width}"
        if call.table is not None and call.table.origin is None and call.table.shape is None:
            return "its table is neither over a line nor over a grid"
        if call.segments is not None and call.offset < 0:
            return "documents need a key for every query"
        return refuses_matrix(call)

    def run(self, call: AttentionCall) -> Tensor:
        """(B, H, T, D) in q's dtype; logits and sums in float32. Few queries without gradients use
        the decoding kernel."""
        return attend_with_sinks(call, self.attend)

    def attend(self, call: AttentionCall, *, wants_lse: bool = True) -> tuple[Tensor, Tensor]:
        """The output, and the log-sum-exp of the logits (B, H, T), no numbers where it is not
        wanted."""
        from zoo.attention.triton.op import decode_op, fused_attention, fused_decode

        table = call.table
        scalars = _scalars(call)
        q, k, v, row_scale, segments = _operands(call)
        on_grid = call.table is not None and call.table.shape is not None
        few = call.num_queries <= self.decode_queries and not on_grid
        if few and not needs_grad(q, k, v, row_scale, None if table is None else table.table):
            by_operator = torch.compiler.is_compiling() or not has_values(q)
            decode = decode_op if by_operator else fused_decode
            values = None if table is None else table.table.float()
            out, lse2 = decode(q, k, v, values, row_scale, segments, *scalars, wants_lse)
            return out, lse2 * math.log(2.0)
        values = None
        params = None
        jacobian = None
        if table is not None:
            # A log-sum-exp is of the table itself, and not of one that is less a constant.
            source = replace(table, origin=None) if wants_lse else table
            fused = FusedTable.of(source, causal=call.causal)
            values = fused.values
            params = fused.params
            jacobian = fused.jacobian
        least = self.least_keys if segments is None else self.least_keys // 4
        # Only a bound on logits that varies between tiles leaves some out; that of content alone
        # does not.
        bounded = any(x is not None for x in (table, call.terms.q_lanes, segments))
        skip = bounded and call.num_keys >= least and _skips()
        out, lse2 = fused_attention(
            q,
            k,
            v,
            values,
            row_scale,
            segments,
            params,
            jacobian,
            *scalars,
            0 if wants_lse else _constant_from(call),
            skip,
        )
        if wants_lse:
            lse2 = lse2 * math.log(2.0)
        return out, lse2


# The one that `prior_attention(kernel="triton")` runs.
TRITON = TritonKernel()


@traced_as_constant
def _skips() -> bool:
    return SKIPS.get()


def skipped_share(call: AttentionCall) -> float:
    """Fraction of the visible tiles of this call that are skipped. Synchronises with the device."""
    from zoo.attention.triton.op import operands
    from zoo.attention.triton.plan import skipped_share

    q, k, v, row_scale, segments = _operands(call)
    table = None if call.table is None else call.table.table.float()
    return skipped_share(operands(q, k, v, table, row_scale, segments, *_scalars(call)))


def _constant_from(call: AttentionCall) -> int:
    """`constant_from` of `table_gradient`. Where documents or a window hide all keys that are so
    far, the rounding of other gradients is not to be theirs; a bidirectional call has two such
    ends."""
    table = call.table
    if table is None or table.origin is None or table.constant_from is None or not call.causal:
        return 0
    farthest = call.num_keys if call.window is None else min(call.num_keys, call.window)
    if call.segments is not None or table.constant_from >= farthest:
        return 0
    return table.constant_from


def _operands(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """q, k, v with equal numbers of key heads, the row scale, and document ids, as the kernels take
    them."""
    q = fold_unscaled_queries(call)
    k = fold_keys(call)
    v = call.v
    if k.shape[1] != v.shape[1]:
        groups = max(k.shape[1], v.shape[1])
        if groups % min(k.shape[1], v.shape[1]) != 0:
            groups = q.shape[1]
        k = repeat_heads(k, groups)
        v = repeat_heads(v, groups)

    # A tensor with one column may report any stride as contiguous.
    def with_unit_stride(x: Tensor) -> Tensor:
        return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)

    row_scale = None if call.query_scale is None else call.query_scale.float().contiguous()
    segments = None if call.segments is None else call.segments.to(torch.int32).contiguous()
    return with_unit_stride(q), with_unit_stride(k), with_unit_stride(v), row_scale, segments


def _scalars(call: AttentionCall) -> tuple[list[int], float]:
    """`place`, of `op.operands`, and the softmax scale: the operator's scalar arguments."""
    origin = 0
    grid = []
    if call.table is not None and call.table.shape is not None:
        origin = call.table.center
        grid = [*call.table.shape, call.table.num_prefix]
    elif call.table is not None:
        origin = call.table.origin or 0
    lanes = 0 if call.terms.q_lanes is None else call.terms.q_lanes.shape[-1]
    return [int(call.causal), call.window or 0, origin, lanes, *grid], call.softmax_scale
