"""Lanes without a table on the GPU: flash attention on widened heads, from the flash-attn package
or from torch.

The package serves documents of T = S (its varlen call), windows and T ≠ S; torch's flash and cuDNN
kernels serve calls without a mask. Never a T × S matrix: other calls are refused.
"""

from __future__ import annotations

import importlib
import sys
import weakref
from collections.abc import Callable
from functools import cache
from typing import TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from zoo.attention.call import AttentionCall, fold_keys, fold_queries
from zoo.attention.heads import pad_heads, repeat_heads
from zoo.attention.masks import needs_mask, refuses_matrix
from zoo.attention.tracing import cuda_capability, traced_as_constant
from zoo.positions import document_starts

WIDEST = 256
# See `find_runs`.
Runs: TypeAlias = tuple[Tensor, int]

# FlashAttention 3, which is for compute capability 9 alone, 2, and 4, which is a beta: the first
# that is installed is taken.
PACKAGES = ("flash_attn_interface", "flash_attn", "flash_attn.cute")


def find_package() -> tuple[str, str]:
    """(the module with FlashAttention's functions, imported; or "", and why it cannot be used)"""
    why = "the flash-attn package is not installed"
    for name in PACKAGES:
        try:
            module = importlib.import_module(name)
            # 4 alone leaves `flash_attn` an empty package.
            complete = hasattr(module, "flash_attn_varlen_func")
            if complete and (name != PACKAGES[0] or cuda_capability("cuda")[0] == 9):
                return name, ""
        except ImportError as error:
            # It is built against another torch, or what it needs is not there.
            if error.name not in PACKAGES:
                why = f"the package {name} cannot be loaded ({error})"
    return "", why


class FlashKernel:
    """Serves bfloat16 and float16 calls without a table on CUDA; documents and windows where
    flash-attn is installed.

    `capability` gives the compute capability of a device; `package` is `find_package`, called once.
    """

    def __init__(
        self,
        *,
        dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16),
        capability: Callable[[str], tuple[int, int]] = cuda_capability,
        package: Callable[[], tuple[str, str]] = find_package,
    ) -> None:
        self.dtypes = dtypes
        self.capability = capability
        self._package = cache(package)
        # Runs of the last ids: all layers of a model share one tensor of ids, and finding runs
        # synchronises with the device.
        self._last: tuple[weakref.ref[Tensor], int, Runs | None] | None = None

    def refuses(self, call: AttentionCall) -> str | None:
        if not call.on_cuda:
            return f"it runs on CUDA, and the queries are on {call.q.device}"
        if call.table is not None or call.terms.bias is not None:
            return (
                "flash attention adds no bias to the logits; a prior with a table needs "
                "kernel='triton'"
            )
        dtypes = {call.q.dtype, call.k.dtype, call.v.dtype}
        if len(dtypes) > 1 or call.q.dtype not in self.dtypes:
            names = ", ".join(sorted(map(str, dtypes)))
            return f"q, k and v must all be bfloat16 or all float16, got {names}"
        lanes = 0 if call.terms.q_lanes is None else call.terms.q_lanes.shape[-1]
        width = max(call.q.shape[-1] + lanes, call.v.shape[-1])
        if width > WIDEST:
            return f"head width with lanes must be at most {WIDEST}, got {width}"
        if self.capability(str(call.q.device)) < (8, 0):
            return "flash attention needs an NVIDIA GPU of compute capability 8.0 or later"
        why = refuses_matrix(call)
        if why:
            return why
        if call.sinks or call.terms.sink is not None:
            return "it has no sinks; use kernel='triton'"
        if not needs_mask(call):
            return None
        if not self.package_name():
            return (
                f"{self._package()[1]}, and torch's kernel has no documents, windows or offsets; "
                "use kernel='triton'"
            )
        if call.segments is None:
            return None
        if torch.compiler.is_compiling():
            return (
                "document lengths are data, which torch.compile cannot trace; use kernel='triton'"
            )
        if call.offset:
            return "documents need as many queries as keys; use kernel='triton'"
        if self.runs_of(call.segments) is None:
            return "a document id recurs after another one; kernel='triton' compares ids one by one"
        return None

    def run(self, call: AttentionCall) -> Tensor:
        """The output (B, H, T, D).

        Queries and keys are [lanes, content]; all heads are padded to one width, a multiple of 8.
        """
        num_heads = call.q.shape[1]
        width = call.v.shape[-1]
        q = fold_queries(call)
        k = fold_keys(call)
        v = call.v
        if k.shape[1] != v.shape[1]:
            k = repeat_heads(k, num_heads)
            v = repeat_heads(v, num_heads)
        q, k, v = pad_heads(q, k, v)
        name = self.package_name()
        if not name:
            with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]):
                out = F.scaled_dot_product_attention(
                    q,
                    k,
                    v,
                    is_causal=call.causal and call.num_queries > 1,
                    scale=1.0,
                    enable_gqa=k.shape[1] != num_heads,
                )
            return out[..., :width]
        package = sys.modules[name]
        options = _options(call, name)
        q = q.transpose(1, 2)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        if call.segments is None:
            out = package.flash_attn_func(q, k, v, **options)
        else:
            # `refuses` saw that there are runs.
            bounds, longest = cast(Runs, self.runs_of(call.segments))
            out = package.flash_attn_varlen_func(
                q.flatten(0, 1),
                k.flatten(0, 1),
                v.flatten(0, 1),
                cu_seqlens_q=bounds,
                cu_seqlens_k=bounds,
                max_seqlen_q=longest,
                max_seqlen_k=longest,
                **options,
            )
        if isinstance(out, tuple):
            # FlashAttention 4 gives the log-sum-exp too.
            out = out[0]
        out = out.reshape(call.q.shape[0], call.num_queries, num_heads, -1)
        return out.transpose(1, 2)[..., :width]

    @traced_as_constant
    def package_name(self) -> str:
        """The module that has FlashAttention's functions; "" if none can be used."""
        return self._package()[0]

    def runs_of(self, segments: Tensor) -> Runs | None:
        """`find_runs`, kept for the next layer."""
        # Inference tensors have no version counter.
        if segments.is_inference():
            return find_runs(segments)
        last = self._last
        if last is not None and last[0]() is segments and last[1] == segments._version:
            return last[2]
        runs = find_runs(segments)
        self._last = (weakref.ref(segments), segments._version, runs)
        return runs


FLASH = FlashKernel()


def _options(call: AttentionCall, package: str) -> dict[str, object]:
    """Arguments of FlashAttention's functions."""
    if call.window is None:
        unbounded = None if package == "flash_attn.cute" else -1
        window_size = (unbounded, unbounded)
    else:
        window_size = (call.window - 1, 0 if call.causal else call.window - 1)
    return {
        "softmax_scale": 1.0,
        "causal": call.causal,
        "window_size": window_size,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def find_runs(segments: Tensor) -> Runs | None:
    """Where the documents of all rows of `segments` (B, S), concatenated, begin, and where the last
    one ends, (documents + 1,) int32; and the length of the longest. None if an id recurs after
    another one in its row."""
    ids = segments.cpu().long()
    length = segments.shape[1]
    row, first = document_starts(ids).nonzero().unbind(1)
    named = torch.stack([row, ids[row, first]])
    if named.unique(dim=1).shape[1] != named.shape[1]:
        return None
    bounds = F.pad(row * length + first, (0, 1), value=ids.numel())
    return bounds.int().to(segments.device), int(bounds.diff().max())
