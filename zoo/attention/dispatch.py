"""prior_attention: the one attention call of the project."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, MutableSet
from contextlib import contextmanager

import torch
from torch import Tensor

from zoo.attention import triton
from zoo.attention.base import AttentionCall, Kernel, needs_mask, single_documents, traced_as_constant
from zoo.attention.flash import FlashKernel
from zoo.attention.reach import TALLY, Tally
from zoo.attention.reference import ReferenceKernel
from zoo.attention.sdpa import SdpaKernel
from zoo.attention.toeplitz import ToeplitzKernel
from zoo.attention.triton import TRITON
from zoo.naming import did_you_mean
from zoo.priors.base import PriorTerms

__all__ = ["KERNELS", "MaskWarning", "Observer", "choose_kernel", "prior_attention", "skipped_share", "skipping"]

TOEPLITZ = ToeplitzKernel()
# To add a kernel: a file with a class that implements `Kernel`, and a line here.
KERNELS: dict[str, Kernel] = {
    "reference": ReferenceKernel(),
    "sdpa": SdpaKernel(),
    "toeplitz": TOEPLITZ,
    "triton": TRITON,
    "flash": FlashKernel(),
}

# Without a table, up to this many logits per head one masked call is faster than blocks without a mask
# (measured by `tools/bench.py attention`: 0.65 to 0.9 of the time up to 256 × 256, 1.4 times at 512 × 512).
SMALL_MASK = 256 * 256


class MaskWarning(RuntimeWarning):
    """On CUDA no fused kernel serves a call, which falls back to materialising T × S logits. Warned once per reason."""


_WARNED: set[str] = set()


def choose_kernel(
    call: AttentionCall, kernels: Mapping[str, Kernel] = KERNELS, *, warned: MutableSet[str] = _WARNED
) -> str:
    """The kernel of `kernels` that `kernel="auto"` selects. `warned`: the warnings given so far, not to be repeated.

    On CUDA the first that serves the call: without a mask `flash`, then `sdpa`; with documents, windows or causal offsets
    but no table `flash` (its package), then `triton`; with a table `triton`. If none does, `sdpa` with a T × S mask and a
    `MaskWarning`. A mask and dropout are served by `sdpa` everywhere.

    Elsewhere `sdpa` where no T × S mask is needed, else `toeplitz`, whose memory is O(T + S), and which long calls with
    lanes take too: it leaves out keys that a prior hides, where there are any. What `toeplitz` refuses (a
    grid's table, for example) and what torch.compile traces, which cannot trace `toeplitz`, goes to `sdpa`, which makes
    its mask a block at a time. What torch.export traces goes to `sdpa` on every device: the graph is for others.
    """
    if torch.compiler.is_exporting():
        return "sdpa"
    if call.on_cuda:
        return _choose_on_cuda(call, kernels, warned)
    if torch.compiler.is_compiling() or not (needs_mask(call) or TOEPLITZ.may_skip(call)):
        return "sdpa"
    if call.table is None and call.num_queries * call.num_keys <= SMALL_MASK:
        return "sdpa"
    return "sdpa" if kernels["toeplitz"].refuses(call) else "toeplitz"


@contextmanager
def skipping(enabled: bool) -> Iterator[Tally]:
    """Inside the context, whether kernels leave out keys of provably negligible weight (below 2^−24 of a row's sum in all).
    They do by default. Yields a tally of the logits that calls on the CPU leave out. Other threads are not affected."""
    token = TALLY.set(tally := Tally())
    try:
        with triton.skipping(enabled):
            yield tally
    finally:
        TALLY.reset(token)


def skipped_share(call: AttentionCall) -> float:
    """The share of a call's visible logits that `kernel="auto"` leaves out: of tiles on CUDA, of blocks on the CPU."""
    if call.on_cuda:
        return 0.0 if call.mask is not None or call.dropout else triton.skipped_share(call)
    return 0.0 if TOEPLITZ.refuses(call) else TOEPLITZ.skipped_share(call)


class Observer:
    """A kernel that shows each call to a function, and computes it as `kernel="auto"` does."""

    def __init__(self, see: Callable[[AttentionCall], object]) -> None:
        self.see = see

    def refuses(self, call: AttentionCall) -> str | None:
        return None

    def run(self, call: AttentionCall) -> Tensor:
        self.see(call)
        return KERNELS[choose_kernel(call)].run(call)


def _choose_on_cuda(call: AttentionCall, kernels: Mapping[str, Kernel], warned: MutableSet[str]) -> str:
    masked = needs_mask(call)
    names = ["flash"] if not masked else ["triton"]
    if masked and call.table is None and call.terms.bias is None:
        names.insert(0, "flash")
    why = ""
    for name in names:
        reason = kernels[name].refuses(call)
        if not reason:
            return name
        why = f"kernel {name!r} refuses it: {reason}"
    # Torch's memory-efficient attention takes float32 and wide heads where no mask is needed, but nothing takes float64.
    if masked or call.q.dtype == torch.float64:
        _warn_once(
            f"attention materialises T × S logits on CUDA, which is slow and large, because {why}. {_advice(call)}",
            warned,
        )
    return "sdpa"


def _advice(call: AttentionCall) -> str:
    """How a user avoids the mask on CUDA."""
    if call.terms.bias is not None:
        return "A prior with a relative table or lanes has no such bias."
    if call.mask is not None:
        return "Causality, windows and documents (segments=) need no such mask."
    if call.q.dtype == torch.float64:
        return "Fused kernels compute in float32, bfloat16 and float16."
    return "Fix that and kernel='auto' uses a fused kernel; kernel='sdpa' takes this path without a warning."


@traced_as_constant
def _warn_once(message: str, warned: MutableSet[str]) -> None:
    """Issue a MaskWarning unless it was `warned`; under torch.compile while it traces."""
    if message not in warned:
        warned.add(message)
        warnings.warn(message, MaskWarning, stacklevel=2)


def prior_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: PriorTerms | None = None,
    *,
    causal: bool,
    query_scale: Tensor | None = None,
    segments: Tensor | None = None,
    window: int | None = None,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    kernel: str | Kernel = "auto",
) -> Tensor:
    """Attention with a log-prior K on its logits (GOAT eq. 5).

        out[i] = Σ_j softmax_j( (<q_i, k_j>/sqrt(d_c) + K[h,i,j]) · query_scale[h,i] ) v_j

    Args:
        q: (B, H, T, d_c). The queries are the last T of the S positions.
        k: (B, G, S, d_c), G dividing H; or (B, G, S, R + d_c) with the key lanes in front already (a KV cache).
        v: (B, G, S, D).
        terms: what a `Prior` returned; None for no prior.
        causal: keys after the query are hidden.
        query_scale: (H, T) or (B, H, T); SSMax's s·ln n.
        segments: (B, S) document ids, below 2^31; no attention crosses documents.
        window: a query sees keys at distance 0 … window−1 (on both sides unless causal).
        mask: (1 or B, 1 or H, T, S) bool, True where a key may be seen; causality, documents and window hide more. It is T × S
            memory, and a fused kernel without such a matrix does not serve it: where they can say the same, use those three.
        dropout: p in [0, 1): each weight is set to 0 with probability p, or divided by 1 − p. It applies whenever it is given:
            pass 0 outside training. On the CPU it keeps T × S weights for gradients.
        kernel: "auto" (see `choose_kernel`), "reference", "sdpa", "toeplitz", "triton", "flash", or a kernel of one's own.

    Returns:
        (B, H, T, D) in q's dtype; 0 in rows that see no key.

    Raises:
        ValueError: for shapes that do not fit, an unknown kernel, or a kernel that cannot serve the call.
    """
    if query_scale is not None and query_scale.ndim == 2:
        query_scale = query_scale[None]
    segments = None if segments is not None and _hides_nothing(segments, q, k) else segments
    call = AttentionCall(q, k, v, terms or PriorTerms(), causal, query_scale, segments, window, mask, dropout)
    _check(call)
    if isinstance(kernel, str):
        name = choose_kernel(call) if kernel == "auto" else kernel
        if name not in KERNELS:
            hint = did_you_mean(name, ["auto", *KERNELS])
            raise ValueError(f"unknown kernel {name!r}; {hint}Known: auto, {', '.join(KERNELS)}")
        kernel = KERNELS[name]
    else:
        name = type(kernel).__name__
    reason = kernel.refuses(call)
    if reason:
        raise ValueError(f"kernel {name!r} cannot serve this call: {reason}; kernel='auto' picks one that can")
    return kernel.run(call)


def _hides_nothing(segments: Tensor, q: Tensor, k: Tensor) -> bool:
    """Whether each row is one document, so that ids mask nothing.

    Checked on the CPU only: elsewhere it needs a device synchronisation, and torch.compile cannot trace control flow on data.
    """
    if q.device.type != "cpu" or torch.compiler.is_compiling() or segments.shape != (q.shape[0], k.shape[2]):
        return False
    return bool(single_documents(segments).all())


def _check(call: AttentionCall) -> None:
    q, k, v, terms = call.q, call.k, call.v, call.terms
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ValueError(f"q, k, v must be (B, heads, length, width), got {q.ndim}, {k.ndim} and {v.ndim} axes")
    if not (q.shape[0] == k.shape[0] == v.shape[0] and k.shape[2] == v.shape[2]):
        raise ValueError(f"q, k, v disagree: {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
    if q.shape[1] % k.shape[1] or q.shape[1] % v.shape[1]:
        raise ValueError(f"key heads must divide {q.shape[1]} query heads, got {k.shape[1]} for k, {v.shape[1]} for v")
    inside = terms.q_lanes is not None and terms.k_lanes is None
    width = q.shape[3] + (terms.q_lanes.shape[3] if inside and terms.q_lanes is not None else 0)
    if k.shape[3] != width:
        raise ValueError(f"keys must be {width} wide ({q.shape[3]} content columns as in q), got {k.shape[3]}")
    if call.causal and call.num_queries > call.num_keys:
        raise ValueError(f"causal attention of {call.num_queries} queries needs as many keys, got {call.num_keys}")
    for what, tensor, length in (
        ("q_lanes", terms.q_lanes, call.num_queries),
        ("k_lanes", terms.k_lanes, call.num_keys),
        ("bias rows", terms.bias, call.num_queries),
        ("table's queries", None if terms.table is None else terms.table.q_code[:, None], call.num_queries),
        ("table's keys", None if terms.table is None else terms.table.k_code[:, None], call.num_keys),
    ):
        if tensor is not None and tensor.shape[-2] != length:
            raise ValueError(f"the prior's {what} are of {tensor.shape[-2]} positions, the call has {length}")
    _check_terms(call)
    if call.mask is not None:
        _check_mask(call, call.mask)
    if not 0 <= call.dropout < 1:
        raise ValueError(f"dropout must be a probability below 1, got {call.dropout}")
    if call.window is not None and call.window < 1:
        raise ValueError(f"window must be at least 1, got {call.window}")
    if call.segments is not None and call.segments.shape != (q.shape[0], call.num_keys):
        raise ValueError(f"segments must be {(q.shape[0], call.num_keys)}, got {tuple(call.segments.shape)}")
    if call.segments is not None and call.num_queries > call.num_keys:
        raise ValueError(f"documents need a key for every query, got {call.num_queries} queries, {call.num_keys} keys")
    if call.query_scale is not None and call.query_scale.shape[-2:] != q.shape[1:3]:
        raise ValueError(f"query_scale must end in {tuple(q.shape[1:3])}, got {tuple(call.query_scale.shape)}")
    if call.query_scale is not None and call.query_scale.shape[0] not in (1, q.shape[0]):
        raise ValueError(f"query_scale is for a batch of {call.query_scale.shape[0]}, expected 1 or {q.shape[0]}")


def _check_mask(call: AttentionCall, mask: Tensor) -> None:
    shape = (*call.q.shape[:3], call.num_keys)
    if mask.ndim != 4 or mask.shape[2:] != shape[2:] or any(mask.shape[n] not in (1, shape[n]) for n in (0, 1)):
        raise ValueError(f"mask must be {shape}, or 1 on its first two axes, got {tuple(mask.shape)}")
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool, True where a key may be seen, got {mask.dtype}; a bias adds to logits")


def _check_terms(call: AttentionCall) -> None:
    """Bounds that kernels rely on without checking: they would read past the end of a table that is too short."""
    q, terms, table = call.q, call.terms, call.table
    if terms.k_lanes is not None and (terms.q_lanes is None or terms.q_lanes.shape[3] != terms.k_lanes.shape[3]):
        have = "no" if terms.q_lanes is None else terms.q_lanes.shape[3]
        raise ValueError(f"the prior has {have} query lanes and {terms.k_lanes.shape[3]} key lanes, expected as many")
    if table is not None:
        heads, columns = table.table.shape
        if heads != q.shape[1]:
            raise ValueError(f"the prior's table is of {heads} heads, q has {q.shape[1]}")
        first, last = 0, columns - 1
        if table.shape is not None:
            last = (2 * table.shape[0] - 1) * (2 * table.shape[1] - 1) - 1
        elif table.origin is not None:
            first = table.origin - (call.offset if call.causal else call.num_keys - 1)
            last = table.origin + call.num_queries - 1
        if first < 0 or last >= columns:
            raise ValueError(f"the prior's table has {columns} columns, and the call reads columns {first} to {last}")
    for what, tensor in (
        ("k", call.k),
        ("v", call.v),
        ("prior's query lanes", terms.q_lanes),
        ("prior's key lanes", terms.k_lanes),
        ("prior's table", None if table is None else table.table),
        ("prior's bias", terms.bias),
        ("query_scale", call.query_scale),
        ("segments", call.segments),
        ("mask", call.mask),
    ):
        if tensor is not None and tensor.device != q.device:
            hint = "; a prior without parameters makes its terms on the device of x" if what.startswith("prior") else ""
            raise ValueError(f"the {what} must be on {q.device} as q is, got {tensor.device}{hint}")
