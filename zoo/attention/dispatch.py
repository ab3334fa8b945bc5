"""prior_attention: the one attention call of the project."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, MutableSet
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zoo.attention.call import AttentionCall, Kernel, spread_gain
from zoo.attention.checks import check_call
from zoo.attention.heads import in_half_precision
from zoo.attention.masks import bad_keys, needs_mask, single_documents
from zoo.attention.reach import SKIPS, TALLY, Tally
from zoo.attention.sdpa import SdpaKernel
from zoo.attention.toeplitz import ToeplitzKernel
from zoo.attention.tracing import has_values, traced_as_constant
from zoo.errors import did_you_mean
from zoo.positions import document_starts
from zoo.priors.terms import PriorTerms


def _reference() -> Kernel:
    from zoo.attention.reference import REFERENCE

    return REFERENCE


def _triton() -> Kernel:
    from zoo.attention.triton import TRITON

    return TRITON


def _flash() -> Kernel:
    from zoo.attention.flash import FLASH

    return FLASH


@dataclass(frozen=True)
class _Later:
    """A kernel whose file is imported when it is used."""

    load: Callable[[], Kernel]

    def refuses(self, call: AttentionCall) -> str | None:
        return self.load().refuses(call)

    def run(self, call: AttentionCall) -> Tensor:
        return self.load().run(call)


TOEPLITZ = ToeplitzKernel()
# To add a kernel: a file with a class that implements `Kernel`, and a line here.
KERNELS: dict[str, Kernel] = {
    "reference": _Later(_reference),
    "sdpa": SdpaKernel(),
    "toeplitz": TOEPLITZ,
    "triton": _Later(_triton),
    "flash": _Later(_flash),
}

# Without a table, up to this many logits per head one masked call is faster than blocks without a
# mask (measured by `tools/bench.py attention`: 0.65 to 0.9 of the time up to 256 × 256, 1.4 times
# at 512 × 512).
SMALL_MASK = 256 * 256


class MaskWarning(RuntimeWarning):
    """On CUDA no fused kernel serves a call, which falls back to materialising T × S logits.

    Warned once per reason.
    """


_WARNED: set[str] = set()


def choose_kernel(
    call: AttentionCall,
    kernels: Mapping[str, Kernel] = KERNELS,
    *,
    warned: MutableSet[str] = _WARNED,
) -> str:
    """The kernel of `kernels` that `kernel="auto"` selects.

    `warned`: the warnings given so far, not to be repeated.

    On CUDA the first that serves the call: without a mask `flash`, then `sdpa`; with documents,
    windows or causal offsets but no table `flash` (its package), then `triton`; with a table
    `triton`; else, and with a dense bias, `sdpa` with a T × S mask and a `MaskWarning`. Elsewhere
    `sdpa` where no T × S mask is needed, else `toeplitz`, whose memory is O(T + S),
    and which long calls with lanes take too: it leaves out keys that a prior hides. What `toeplitz`
    refuses or torch.compile traces goes to `sdpa`, which makes its mask a block at a time.
    """
    if call.on_cuda:
        return _choose_on_cuda(call, kernels, warned)
    if torch.compiler.is_compiling() or not has_values(call.q):
        return "sdpa"
    if not needs_mask(call) and not TOEPLITZ.may_skip(call):
        return "sdpa"
    if call.table is None and not call.sinks and call.num_queries * call.num_keys <= SMALL_MASK:
        return "sdpa"
    return "sdpa" if kernels["toeplitz"].refuses(call) else "toeplitz"


@contextmanager
def skipping(enabled: bool) -> Iterator[Tally]:
    """Whether kernels leave out keys of provably negligible weight (below 2^−24 of a row's sum) in
    this thread; default: yes.

    Yields a tally of the logits that calls on the CPU leave out.
    """
    tally = Tally()
    token = TALLY.set(tally)
    skips = SKIPS.set(enabled)
    try:
        yield tally
    finally:
        SKIPS.reset(skips)
        TALLY.reset(token)


def skipped_share(call: AttentionCall) -> float:
    """The share of a call's visible logits that `kernel="auto"` leaves out: of tiles on CUDA, of
    blocks on the CPU."""
    call = replace(call, sinks=0)
    if not call.on_cuda:
        return 0.0 if TOEPLITZ.refuses(call) else TOEPLITZ.skipped_share(call)
    if call.mask is not None or call.terms.bias is not None or call.dropout:
        return 0.0
    from zoo.attention.triton import skipped_share

    return skipped_share(call)


class Observer:
    """A kernel that shows each call to a function, and computes it as `kernel="auto"` does."""

    def __init__(self, see: Callable[[AttentionCall], object]) -> None:
        self.see = see

    def refuses(self, call: AttentionCall) -> str | None:
        return None

    def run(self, call: AttentionCall) -> Tensor:
        self.see(call)
        kernel = KERNELS[choose_kernel(call)]
        return _without_bad_keys(kernel, call).run(call)


def _choose_on_cuda(
    call: AttentionCall, kernels: Mapping[str, Kernel], warned: MutableSet[str]
) -> str:
    masked = needs_mask(call)
    names = ["triton"] if masked else ["flash"]
    if masked and call.table is None and call.terms.bias is None:
        names.insert(0, "flash")
    why = ""
    for name in names:
        reason = kernels[name].refuses(call)
        if not reason:
            return name
        why = f"kernel {name!r} refuses it: {reason}"
    # Torch's memory-efficient attention takes float32 and wide heads where no mask is needed, but
    # nothing takes float64.
    if masked or call.q.dtype == torch.float64:
        advice = "kernel='sdpa' takes this path without a warning."
        if call.mask is not None:
            advice = "Causality, windows and documents (segments=) need no such mask."
        message = "attention materialises T × S logits on CUDA, slow and large"
        _warn_once(f"{message}, because {why}. {advice}", warned)
    return "sdpa"


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
    sinks: int = 0,
    kernel: str | Kernel = "auto",
) -> Tensor:
    """Attention with a log-prior K on its logits (GOAT eq. 5).

        out[i] = Σ_j softmax_j( (<q_i, k_j>/sqrt(d_c) + K[h,i,j]) · query_scale[h,i] ) v_j

    Args:
        q: (B, H, T, d_c). The queries are the last T of the S positions.
        k: (B, G, S, d_c), G dividing H; or (B, G, S, R + d_c) with the key lanes in front already
            (a KV cache).
        v: (B, G, S, D).
        terms: what a `Prior` returned; None for no prior.
        causal: keys after the query are hidden.
        query_scale: (H, T) or (B, H, T); SSMax's s·ln n.
        segments: (B, S) document ids, below 2^31; no attention crosses documents.
        window: a query sees keys at distance 0 … window−1 (on both sides unless causal).
        mask: (1 or B, 1 or H, T, S) bool, True where a key may be seen; causality, documents and
            window hide more. It takes T × S memory and no fused kernel serves it: prefer those
            three where they can say the same.
        dropout: p in [0, 1): each weight is set to 0 with probability p, or divided by 1 − p; pass
            0 outside training.
        sinks: the first so many tokens of each document, a run of ids, have K = 0 and are in every
            window; K in lanes, which is one but for a constant of each row, is that of the row's
            own key.
        kernel: "auto" (see `choose_kernel`), a name of `KERNELS`, or a `Kernel`.

    Returns:
        (B, H, T, D) in q's dtype; 0 in rows that see no key.

    Raises:
        ValueError: for types, shapes, dtypes, devices or positions that do not fit, an unknown
            kernel, or one that cannot serve the call.
    """
    if isinstance(query_scale, Tensor) and query_scale.ndim == 2:
        query_scale = query_scale[None]
    terms = PriorTerms() if terms is None else terms
    call = AttentionCall(
        q=q,
        k=k,
        v=v,
        terms=terms,
        causal=causal,
        query_scale=query_scale,
        segments=segments,
        window=window,
        mask=mask,
        dropout=dropout,
        sinks=sinks,
    )
    check_call(call)
    if call.terms.k_lanes is not None and in_half_precision(call.q):
        call = replace(call, terms=call.terms.cut_lanes())
    call = spread_gain(call)
    if segments is not None and _hides_nothing(segments):
        call = replace(call, segments=None)
    if sinks and terms == PriorTerms() and window is None:
        # Nothing hides them.
        call = replace(call, sinks=0)
    if call.sinks and call.segments is not None:
        # Ids that rise by 1 where a document begins, so that each document has its own sinks.
        call = replace(call, segments=document_starts(call.segments).cumsum(1))
    name, chosen = _find_kernel(kernel, call)
    reason = chosen.refuses(call)
    if reason:
        raise ValueError(
            f"kernel {name!r} cannot serve this call: {reason}; kernel='auto' picks one that can"
        )
    return _without_bad_keys(chosen, call).run(call)


def _find_kernel(kernel: str | Kernel, call: AttentionCall) -> tuple[str, Kernel]:
    """A kernel and its name, from either, or from "auto"."""
    if not isinstance(kernel, str):
        if not hasattr(kernel, "refuses"):
            raise ValueError(f"kernel must be a name or a zoo.attention.Kernel, got {kernel!r}")
        return type(kernel).__name__, kernel
    name = choose_kernel(call) if kernel == "auto" else kernel
    if name not in KERNELS:
        hint = did_you_mean(name, ["auto", *KERNELS])
        raise ValueError(f"unknown kernel {name!r}; {hint}Known: auto, {', '.join(KERNELS)}")
    return name, KERNELS[name]


def _without_bad_keys(kernel: Kernel, call: AttentionCall) -> Kernel:
    """`kernel`, or `sdpa` in place of `toeplitz` where a key has a NaN or an infinity, which only
    rows that see it may get."""
    return KERNELS["sdpa"] if kernel is TOEPLITZ and bad_keys(call) is not None else kernel


def _hides_nothing(segments: Tensor) -> bool:
    """Whether each row is one document, on the CPU: elsewhere the question synchronises, and
    torch.compile cannot trace it."""
    if segments.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return has_values(segments) and bool(single_documents(segments).all())
