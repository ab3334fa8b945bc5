"""Which of our kernels the attention benchmark measures on each kind of device, and what is promised of them."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tools.benches.kit import Result, Shape
from tools.benches.peers import alibi, cable, ggd, goat, mixed
from tools.benches.problem import Contender, Ours, Problem, Run
from tools.benches.sweep import PASSES, Findings, Judgement, Promise

TRAINING = Shape(32, 4, 128, 32)  # a training step of the smallest language model, on the CPU

GOAT, LAW, TABLE, SKIPPING = ("goat", "flash"), ("ggd", "triton"), ("ggd", "triton table"), ("ggd", "triton skipping")
PAGED = ("ggd", "triton paged")
PAGE = 64


def ours_on(device: torch.device) -> list[Contender]:
    """Ours on this kind of device. On the CPU what `kernel="auto"` takes; on CUDA each kernel by name.

    ggd heads decay as ALiBi's do. "triton": every visible tile, gradients of the law's numbers; "triton table": of the whole
    table; "triton skipping": as the first, without the tiles that provably do not matter.
    """
    if device.type == "cpu":
        return [Ours("goat", "auto", goat), Ours("ggd", "auto", ggd)]
    triton = dict(call_kernel="triton")
    return [
        Ours(*GOAT, goat, call_kernel="flash"),
        Ours("goat", "sdpa", goat, call_kernel="sdpa"),
        Ours("goat", "triton", goat, **triton, skip=False),
        Ours(*LAW, ggd, **triton, gradient="law", skip=False),
        Ours(*TABLE, ggd, **triton, skip=False),
        Ours(*SKIPPING, ggd, **triton, gradient="law", skip=True),
        Ours("alibi", "flash", alibi, call_kernel="flash", gradient="none"),
        Ours("alibi", "triton skipping", alibi, **triton, gradient="none", skip=True),
        Ours("cable", "flash", cable, call_kernel="flash"),
        Ours("cable", "triton skipping", cable, **triton, skip=True),
    ]


PROMISES = [
    Promise("goat against plain attention", GOAT, None, PASSES, most=1.03),
    Promise("ggd, every tile, against plain attention", LAW, None, ("forward",), most=1.20),
    Promise("ggd, every tile, against plain attention", LAW, None, ("fwd+bwd",), most=1.30),
    Promise("ggd with a learned table against plain attention", TABLE, None, ("forward",), most=1.20),
    Promise("ggd with a learned table against plain attention", TABLE, None, ("fwd+bwd",), most=1.30),
    Promise("ggd faster than FlexAttention with a table", TABLE, ("ggd", "flex table"), ("forward",), least=1.5),
    Promise("ggd faster than FlexAttention with a table", TABLE, ("ggd", "flex table"), ("fwd+bwd",), least=3.0),
    Promise(
        "paged cache faster than dense, 3 of 12 heads retrieve", PAGED, LAW, ("decode",), least=2.5, shortest=524288
    ),
    Promise("skipping faster than every tile, ALiBi-like", SKIPPING, LAW, PASSES, least=6.0, shortest=65536),
]


def cpu_target(shape: Shape, method: str, what: str) -> float | None:
    """The most a ratio may be on the CPU; None where nothing was promised."""
    if shape.length < 1024 or what == "decode":
        return None
    if method == "goat":
        return 1.10
    if method == "ggd":
        return 2.0 if what == "fwd+bwd" else 1.35 if shape.length >= 8192 else None
    return None


def no_target(shape: Shape, method: str, what: str) -> None:
    """On CUDA promises say it all."""


def shapes_on_cuda(lengths: list[int], widths: list[int], rows: int, tokens: int) -> list[Shape]:
    """`rows` = B·H of them, fewer where B·H·L would pass `tokens`; at most 16 heads, the rest is batch."""
    found = []
    for length in lengths:
        count = max(1, min(rows, tokens // length))
        heads = max(h for h in range(1, min(16, count) + 1) if count % h == 0)
        found += [Shape(count // heads, heads, length, width) for width in widths]
    return found


def scaled_ggd() -> Contender:
    """ggd with SSMax's scale on the rows, for the training shape on the CPU."""
    return Ours("ggd+ssmax", "auto", ggd, scaled=True)


class Paged(Contender):
    """One query against our paged cache, filled key by key as a model would and shorn of the pages that decaying heads can
    never use again, by the longest of this problem's queries and keys. Its skipped share is that of the pages dropped."""

    ours, backward = True, False

    def __init__(self, kernel: str) -> None:
        self.method, self.kernel = ("ggd", f"{kernel} paged")
        self.by = kernel

    def refuses(self, problem: Problem) -> str | None:
        if self.by != "triton":
            return None
        from zoo.attention.dispatch import KERNELS

        return KERNELS["triton"].refuses(self._call(problem)[0])

    def _call(self, problem: Problem):
        from zoo.attention.base import AttentionCall

        prior = mixed(problem.shape.heads).to(problem.device)
        leaves, rows = problem.leaves(problem.shape.width), problem.shape.rows
        q, k, v = (leaf.detach() for leaf in leaves.values())
        terms = prior(problem.q_pos, problem.k_pos, causal=True)
        terms = replace(terms, table=replace(terms.table, table=terms.table.table.detach(), parametric=None))
        return AttentionCall(q, k[:, :, -rows:], v[:, :, -rows:], terms, True), prior, leaves

    def prepare(self, problem: Problem) -> Run:
        from zoo.attention.base import AttentionCall
        from zoo.decoding.paged_attention import attend_gathered, paged_kernel

        given, prior, leaves = self._call(problem)
        store = filled_pages(prior, given.q, leaves["k"].detach(), leaves["v"].detach())
        kernel = paged_kernel(given, "triton", PAGE) if self.by == "triton" else None

        def forward() -> Tensor:
            call = AttentionCall(
                given.q, given.k, given.v, given.terms, True
            )  # a fresh one: calls remember what they made
            if kernel is None:
                return attend_gathered(call, store.pages, store.counts)
            return kernel(call, store.pages)

        every = len(store.counts) * -(-problem.shape.length // PAGE)
        return Run(forward, leaves, prior, skipped=lambda: 1 - sum(store.counts) / every)


@torch.no_grad()
def filled_pages(prior, q: Tensor, k: Tensor, v: Tensor):
    """Pages of k and v (B, H, S, D), less those that no query as long as the longest of q can use from S − T on."""
    from zoo.decoding.eviction import EvictionBound
    from zoo.decoding.pages import PageStore

    rows, keys, width = q.shape[2], k.shape[2], k.shape[3]
    longest = [x.float().norm(dim=-1).amax((0, 2)).double() for x in (q, k)]
    places = torch.arange(0, keys, PAGE, device=k.device)
    bound = EvictionBound(longest[0] / math.sqrt(width), longest[1], prior.tail(places, keys), PAGE, keys)
    store = PageStore(k, v, block=PAGE, width=width)
    for part in (slice(0, keys - rows), slice(keys - rows, keys)):
        store.append(k[:, :, part], v[:, :, part], partial(bound.evictable, now=keys - rows, documents=False))
    return store


def decoders_on(device: torch.device) -> list[Contender]:
    """Ours for one query against a cache, dense or paged, of 12 heads of which 3 look away from the query."""
    if device.type == "cpu":
        return [Ours("goat", "auto", goat), Ours("ggd", "auto", mixed), Paged("gathered")]
    dense = Ours(*LAW, mixed, call_kernel="triton")
    return [Ours("goat", "flash", goat, call_kernel="flash"), dense, Paged("triton")]


def judge_memory(findings: Findings) -> None:
    """Memory O(L): what a pass adds per token and head at the longest length, by what it adds at 8k or the next above."""
    mine = {LAW, TABLE, SKIPPING}
    found: dict[tuple[str, str, str, int], list[Result]] = {}
    for r in findings.results:
        if (r.method, r.kernel) in mine and r.shape.length >= 8192 and r.extra_mib is not None:
            found.setdefault((r.method, r.kernel, r.what, r.shape.width), []).append(r)
    for (method, kernel, what, _), rows in found.items():
        first, last = (choose(rows, key=lambda r: r.shape.length) for choose in (min, max))
        if first is last:
            continue
        each = [r.extra_mib / (r.shape.batch * r.shape.heads * r.shape.length) for r in (first, last)]
        growth = each[1] / max(each[0], 1e-12)
        name = f"memory per token and head of {method}, {kernel}, against that at {first.shape.length}"
        findings.judgements.append(Judgement(name, last.shape, what, growth, "≤ 1.25×", growth <= 1.25))
