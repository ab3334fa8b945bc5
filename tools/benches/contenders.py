"""What computes attention, with a prior or without: a problem of one shape, our kernels on it, and peers.

Peers get the problem in the layout they like best; making a dense bias, a block mask or slopes is not counted. A contender that
cannot be measured gives the reason as text.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from zoo import Positions, create_prior, prior_attention
from zoo.attention.base import AttentionCall
from zoo.priors.base import Prior, RelativeTable
from zoo.priors.ggd import EPSILON

DENSE_BOUND = {"cuda": 8 * 2**30, "cpu": 256 * 2**20}  # bytes of the largest dense bias, (H, T, S)
PAGE = 64  # keys
GOAT, LAW, TABLE, SKIPPING = ("goat", "flash"), ("ggd", "triton"), ("ggd", "triton table"), ("ggd", "triton skipping")
PAGED = ("ggd", "triton paged")


@dataclass(frozen=True)
class Shape:
    """B sequences of H heads, S keys and T queries (T = S where `queries` is 0), D columns of a head."""

    batch: int
    heads: int
    length: int
    width: int
    queries: int = 0

    def __str__(self) -> str:
        text = f"B{self.batch} H{self.heads} L{self.length} D{self.width}"
        return f"{text} T{self.queries}" if self.queries else text

    @property
    def rows(self) -> int:
        return self.queries or self.length

    def flops(self, backward: bool) -> float:
        """Of causal attention: 4·B·H·D for each of the visible pairs, 2.5 times as many again backward. Tiles that are
        skipped count as done, so that the rate of a kernel that skips is a rate of work saved and done."""
        pairs = self.rows * self.length - self.rows * (self.rows - 1) / 2
        return 4.0 * self.batch * self.heads * self.width * pairs * (3.5 if backward else 1.0)


def trainable(module: nn.Module) -> dict[str, Tensor]:
    """Its parameters that require a gradient, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


class Problem:
    """Random inputs of one shape. Contenders share them; heads are (B, heads, length, columns) views of packed rows.

    Attributes:
        grad: (B, H, T, D) what the backward pass starts from.
        q_pos, k_pos: queries are the last T of the S positions.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> None:
        self.shape, self.dtype, self.device = shape, dtype, torch.device(device)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.grad = self.random(shape.rows, shape.width)
        self.q_pos = Positions.line(shape.rows, offset=shape.length - shape.rows)
        self.k_pos = Positions.line(shape.length)
        self._kept: dict[tuple[str, int], Tensor] = {}

    def random(self, rows: int, width: int) -> Tensor:
        shape = (self.shape.batch, rows, self.shape.heads, width)
        made = torch.randn(shape, generator=self.generator, device=self.device, dtype=torch.float32)
        return made.to(self.dtype).transpose(1, 2)

    def leaf(self, name: str, width: int) -> Tensor:
        """ "q", "k" or "v" with `width` columns; one tensor for all contenders."""
        if (name, width) not in self._kept:
            rows = self.shape.rows if name == "q" else self.shape.length
            self._kept[name, width] = self.random(rows, width).requires_grad_()
        return self._kept[name, width]

    def leaves(self, content: int) -> dict[str, Tensor]:
        """Queries and keys of `content` columns, values of the whole width."""
        return {"q": self.leaf("q", content), "k": self.leaf("k", content), "v": self.leaf("v", self.shape.width)}


@dataclass
class Run:
    """A contender made ready for one problem.

    Attributes:
        forward: returns (B, H, T, D).
        leaves: the tensors that gradients are computed for, by name; "q", "k" and "v" among them.
        prior: whose `log_prior` this is attention with, and whose parameters the other leaves may be; None for no prior.
        table: the relative table whose entries are the leaf "table".
        x: (B, S, C) the layer's input, for CABLE.
        content: columns of queries and keys that meet in the product; 0 for all.
        skipped: share of the visible tiles left out.
    """

    forward: Callable[[], Tensor]
    leaves: dict[str, Tensor]
    prior: Prior | None = None
    table: RelativeTable | None = None
    x: Tensor | None = None
    content: int = 0
    skipped: Callable[[], float] | None = None

    def step(self, grad: Tensor) -> tuple[Tensor, ...]:
        """Forward and all gradients."""
        out = self.forward()
        # What a prior made of its parameters stays for the next step.
        return torch.autograd.grad(out, list(self.leaves.values()), grad, retain_graph=True, allow_unused=True)


class Contender:
    """A way to compute attention. `method` is the prior, `kernel` the way; together they are its name.

    Subclasses give `prepare`; `available` and `refuses` say why not, in words, where it cannot be measured.
    """

    method: str
    kernel: str
    backward = True
    decodes = True
    ours = False

    @property
    def key(self) -> tuple[str, str]:
        return self.method, self.kernel

    @property
    def name(self) -> str:
        return self.kernel if self.method == "none" else f"{self.method}, {self.kernel}"

    def available(self, device: torch.device) -> str | None:
        """Why it cannot run here at all; None where it can."""
        return None

    def refuses(self, problem: Problem) -> str | None:
        """Why it cannot run at this shape; None where it can."""
        return None

    def prepare(self, problem: Problem) -> Run:
        raise NotImplementedError


@dataclass
class Ours(Contender):
    """`prior_attention` with one prior and kernel.

    Attributes:
        make: the prior for a number of heads.
        call_kernel: what is passed as `kernel`.
        gradient: "given": of what the prior hands to attention (lanes, table); "law": of the prior's own parameters, which
            the table carries with it; "none" for a prior without parameters.
        skip: whether tiles may be skipped; None where the kernel has no such thing.
        scaled: with SSMax's ln n on the rows.
    """

    method: str
    kernel: str
    make: Callable[[int], Prior]
    call_kernel: str = "auto"
    gradient: str = "given"
    skip: bool | None = None
    scaled: bool = False
    backward: bool = True
    decodes: bool = True
    ours: bool = field(default=True, init=False)

    def available(self, device: torch.device) -> str | None:
        from zoo.attention.dispatch import KERNELS

        if self.call_kernel != "auto" and self.call_kernel not in KERNELS:
            return f"this version has no kernel {self.call_kernel!r}"
        return None

    def refuses(self, problem: Problem) -> str | None:
        from zoo.attention.dispatch import KERNELS

        if problem.shape.width <= self.make(problem.shape.heads).num_lanes:
            return f"its lanes leave no room for content in heads of {problem.shape.width}"
        if self.call_kernel == "auto":
            return None
        return KERNELS[self.call_kernel].refuses(self._call(problem)[0])

    def chosen(self, problem: Problem) -> str:
        """The kernel that runs: what "auto" takes here."""
        from zoo.attention.dispatch import choose_kernel

        return choose_kernel(self._call(problem)[0]) if self.call_kernel == "auto" else self.kernel

    def _call(self, problem: Problem):
        """The checked call, its leaves, its prior and the prior's input."""
        torch.manual_seed(0)
        shape = problem.shape
        prior = self.make(shape.heads).to(problem.device)
        leaves = problem.leaves(shape.width - prior.num_lanes)
        x = torch.randn(shape.batch, shape.length, 64, device=problem.device)
        terms = prior(problem.q_pos, problem.k_pos, causal=True, x=x)
        if self.gradient == "law":
            leaves |= trainable(prior)
        elif terms.table is not None:
            table = terms.table.table.detach().requires_grad_()
            terms = replace(terms, table=replace(terms.table, table=table, parametric=None))
            leaves["table"] = table
        elif self.gradient == "given" and terms.q_lanes is not None:
            lanes = {"q_lanes": terms.q_lanes.detach(), "k_lanes": terms.k_lanes.detach()}
            terms = replace(terms, **lanes)
            leaves |= {name: lane.requires_grad_() for name, lane in lanes.items()}
        scale = None
        if self.scaled:
            places = torch.arange(shape.length - shape.rows, shape.length, device=problem.device)
            scale = (places + 2.0).log().expand(shape.heads, -1).clone().requires_grad_()
            leaves["scale"] = scale
        row = None if scale is None else scale[None]
        return AttentionCall(leaves["q"], leaves["k"], leaves["v"], terms, True, row), leaves, prior, x

    def prepare(self, problem: Problem) -> Run:
        call, leaves, prior, x = self._call(problem)

        def forward() -> Tensor:
            return prior_attention(
                call.q, call.k, call.v, call.terms, causal=True, query_scale=call.query_scale, kernel=self.call_kernel
            )

        table = call.terms.table if "table" in leaves else None
        if self.skip is None:
            return Run(forward, leaves, prior, table, x)
        from zoo.attention import triton

        def with_or_without() -> Tensor:
            with triton.skipping(self.skip):
                return forward()

        skipped = (lambda: float(triton.skipped_share(call))) if self.skip else None
        return Run(with_or_without, leaves, prior, table, x, skipped=skipped)


# --------------------------------------------------------------------------------------------------------------- priors


def ggd(heads: int):
    """GGD heads that decay as ALiBi's do."""
    return create_prior("ggd", num_heads=heads, init="alibi")


def mixed(heads: int):
    """GGD heads of which every fourth looks away from the query, a retrieval head, and the others decay as ALiBi's do."""
    prior = ggd(heads)
    with torch.no_grad():
        prior.theta_alpha[3::4], prior.theta_beta[3::4] = 0.0, -0.5
    return prior


def alibi(heads: int):
    return create_prior("alibi", num_heads=heads)


def cable(heads: int):
    """CABLE without weights, over inputs of 64 columns: the form that forgetting attention has."""
    return create_prior("cable", num_heads=heads, d_model=64, weighted=False)


def goat(heads: int):
    return create_prior("goat", num_heads=heads, train_context=128)


def ggd_of(problem: Problem):
    """The ggd prior of a problem, with retrieval heads where it is decoding, and its relative table."""
    prior = (mixed if problem.shape.queries else ggd)(problem.shape.heads).to(problem.device)
    table = prior(problem.q_pos, problem.k_pos, causal=True).table
    assert table is not None and table.origin is not None
    return prior, table


# ---------------------------------------------------------------------------------------------------------------- peers


def installed(package: str) -> str | None:
    """Why a package of this distribution name cannot be used; None where it is installed."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"{package} is not installed"
    return None


def needs_cuda(device: torch.device) -> str | None:
    return None if device.type == "cuda" else "it runs on CUDA only"


def rows_first(x: Tensor) -> Tensor:
    """(B, H, L, D) as (B, L, H, D) and back."""
    return x.transpose(1, 2)


class Sdpa(Contender):
    """torch's scaled_dot_product_attention without bias, by one backend or by its own choice."""

    method = "none"

    def __init__(self, backend: str = "") -> None:
        self.kernel = f"sdpa {backend}".strip()
        named = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
        self.backend = named[backend] if backend else None

    def available(self, device: torch.device) -> str | None:
        return needs_cuda(device) if self.backend else None

    def prepare(self, problem: Problem) -> Run:
        leaves, causal = problem.leaves(problem.shape.width), not problem.shape.queries

        def forward() -> Tensor:
            if self.backend is None:
                return F.scaled_dot_product_attention(*leaves.values(), is_causal=causal)
            with sdpa_kernel(self.backend):
                return F.scaled_dot_product_attention(*leaves.values(), is_causal=causal)

        return Run(forward, leaves)


class DenseBias(Contender):
    """SDPA with the ggd log-prior as a dense (1, H, T, S) bias, made beforehand, whose gradient is computed."""

    method, kernel = "ggd", "sdpa dense bias"

    def refuses(self, problem: Problem) -> str | None:
        shape = problem.shape
        size = shape.heads * shape.rows * shape.length * problem.dtype.itemsize
        bound = DENSE_BOUND[problem.device.type]
        return None if size <= bound else f"its bias takes {size / 2**30:.2g} GiB, bound {bound / 2**30:.2g}"

    def prepare(self, problem: Problem) -> Run:
        leaves, (prior, table) = problem.leaves(problem.shape.width), ggd_of(problem)
        i, j = problem.q_pos.row_index(problem.device), problem.k_pos.row_index(problem.device)
        dense = table.dense().detach().masked_fill(j[None, :] > i[:, None], float("-inf"))
        bias = dense.to(problem.dtype).requires_grad_()
        given = bias.expand(problem.shape.batch, -1, -1, -1)
        backends = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
        if problem.device.type == "cpu":
            backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]

        def forward() -> Tensor:
            with sdpa_kernel(backends):
                return F.scaled_dot_product_attention(leaves["q"], leaves["k"], leaves["v"], attn_mask=given)

        return Run(forward, leaves | {"bias": bias}, prior)


class Flex(Contender):
    """FlexAttention, compiled for the shape, causal by its block mask, with the ggd prior as a score_mod.

    "table": the score_mod reads a captured (H, T+S−1) table; "law": it computes the GGD from captured (H,) parameters.
    Gradients of either are computed.
    """

    method = "ggd"

    def __init__(self, form: str, *, forward_only: bool = False) -> None:
        self.form, self.kernel, self.backward = form, f"flex {form}", not forward_only

    def available(self, device: torch.device) -> str | None:
        if importlib.util.find_spec("torch.nn.attention.flex_attention") is None:
            return "this torch has no FlexAttention"
        if self.backward and device.type == "cpu":
            return "FlexAttention has no backward pass on the CPU"
        return None

    def prepare(self, problem: Problem) -> Run:
        from torch.nn.attention.flex_attention import create_block_mask

        leaves, (prior, table) = problem.leaves(problem.shape.width), ggd_of(problem)
        offset, origin = problem.q_pos.offset, table.origin
        if self.form == "table":
            values = table.table.detach().requires_grad_(self.backward)
            extra = {"table": values}

            def score_mod(score, b, h, i, j):
                return score + values[h, i - j + origin]
        else:
            extra = trainable(prior)
            alpha, beta = (extra[n] if self.backward else extra[n].detach() for n in ("theta_alpha", "theta_beta"))

            def score_mod(score, b, h, i, j):
                distance = (i + offset - j).abs().to(torch.float32) + EPSILON
                return score - alpha[h].exp() * torch.exp(beta[h] * distance.log())

        mask = None
        if not problem.shape.queries:
            size = problem.shape.length
            mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, size, size, device=str(problem.device))
        compiled = compiled_flex()
        inputs = [leaf if self.backward else leaf.detach() for leaf in leaves.values()]

        def forward() -> Tensor:
            return compiled(*inputs, score_mod=score_mod, block_mask=mask)

        return Run(forward, leaves | extra, prior, table if self.form == "table" else None)


def compiled_flex() -> Any:
    """flex_attention compiled for each shape; more shapes than dynamo keeps are an error and no silent dense attention."""
    import torch._dynamo
    from torch.nn.attention.flex_attention import flex_attention

    for name, value in (("recompile_limit", 512), ("accumulated_recompile_limit", 4096)):
        if hasattr(torch._dynamo.config, name):
            setattr(torch._dynamo.config, name, value)
    if hasattr(torch._dynamo.config, "fail_on_recompile_limit_hit"):
        torch._dynamo.config.fail_on_recompile_limit_hit = True
    return torch.compile(flex_attention, dynamic=False)


class FlashAttn(Contender):
    """The flash-attn package, without bias or with its built-in ALiBi slopes, which are constants."""

    def __init__(self, method: str = "none") -> None:
        self.method, self.kernel = method, "flash-attn"

    def available(self, device: torch.device) -> str | None:
        return installed("flash-attn") or needs_cuda(device)

    def refuses(self, problem: Problem) -> str | None:
        half = problem.dtype in (torch.float16, torch.bfloat16)
        return None if half else f"it takes float16 and bfloat16, not {problem.dtype}"

    def prepare(self, problem: Problem) -> Run:
        from flash_attn import flash_attn_func, flash_attn_with_kvcache

        leaves = problem.leaves(problem.shape.width)
        prior = create_prior("alibi", num_heads=problem.shape.heads) if self.method == "alibi" else None
        slopes = None if prior is None else prior.slopes(problem.device).float()
        attend = flash_attn_with_kvcache if problem.shape.queries else flash_attn_func

        def forward() -> Tensor:
            q, k, v = (rows_first(leaf) for leaf in leaves.values())
            return rows_first(attend(q, k, v, causal=True, alibi_slopes=slopes))

        return Run(forward, leaves, prior)


class GoatPackage(Contender):
    """The goat-attention package's module at K = 0, its projections replaced by the identity: attention and lanes alone."""

    method, kernel, decodes = "goat", "goat-attention", False

    def available(self, device: torch.device) -> str | None:
        return installed("goat-attention")

    def refuses(self, problem: Problem) -> str | None:
        return None if problem.shape.width > 5 else f"its 5 lanes leave no content in heads of {problem.shape.width}"

    def prepare(self, problem: Problem) -> Run:
        from goat import GoatAttention

        shape, leaves = problem.shape, problem.leaves(problem.shape.width)
        module = GoatAttention(
            embed_dim=shape.heads * shape.width, num_heads=shape.heads, batch_first=True, pos_rank=2, abs_rank=8,
            enable_key_bias=True, prior_init="uniform", device=problem.device, dtype=problem.dtype,
        )  # fmt: skip
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            setattr(module, name, nn.Identity())

        def forward() -> Tensor:
            q, k, v = (rows_first(leaf).flatten(2) for leaf in leaves.values())
            out, _ = module(q, k, v, is_causal=True, need_weights=False)
            return rows_first(out.unflatten(2, (shape.heads, shape.width)))

        used = [p for name, p in module.named_parameters() if "gate" not in name]
        lanes = {f"package {n}": p for n, p in enumerate(used)}
        return Run(forward, leaves | lanes, content=module.content_dim)


class Forgetting(Contender):
    """flash-linear-attention's forgetting attention: K[i,j] = G_i − G_j with G the running sum of log forget gates g.

    "alibi": g = −slope; "cable": g = −relu(W x + b), CABLE without its weights w. Its gradient in g is computed.
    """

    kernel, decodes = "fla forgetting", False

    def __init__(self, method: str) -> None:
        self.method = method

    def available(self, device: torch.device) -> str | None:
        if importlib.util.find_spec("fla") is None:
            return "flash-linear-attention is not installed"
        return needs_cuda(device)

    def prepare(self, problem: Problem) -> Run:
        from fla.ops.forgetting_attn import parallel_forgetting_attn

        shape, leaves = problem.shape, problem.leaves(problem.shape.width)
        torch.manual_seed(0)
        prior = (alibi if self.method == "alibi" else cable)(shape.heads).to(problem.device)
        x = torch.randn(shape.batch, shape.length, 64, device=problem.device)
        if self.method == "alibi":
            rates = prior.slopes(problem.device).expand(shape.batch, shape.length, -1)
        else:
            rates = prior.rates(x, torch.float32)[0].transpose(1, 2)
        gates = (-rates).detach().float().contiguous().requires_grad_()

        def forward() -> Tensor:
            q, k, v = (rows_first(leaf) for leaf in (leaves["q"], leaves["k"], leaves["v"]))
            return rows_first(parallel_forgetting_attn(q, k, v, gates))

        return Run(forward, leaves | {"gates": gates}, prior, x=x)


def peers_on(device: torch.device) -> list[Contender]:
    """Every peer that is ever measured on this kind of device, the baseline first, available or not."""
    if device.type == "cuda":
        first: list[Contender] = [Sdpa("flash"), Sdpa("cudnn"), DenseBias(), Flex("table"), Flex("law")]
    else:
        first = [Sdpa(), DenseBias(), Flex("table", forward_only=True)]
    return [*first, FlashAttn(), FlashAttn("alibi"), GoatPackage(), Forgetting("alibi"), Forgetting("cable")]


# ----------------------------------------------------------------------------------------------------------------- ours


class Paged(Contender):
    """One query against our paged cache, filled as a model fills it and without the pages that no later query of a
    decaying head can use, by the longest of this problem's queries and keys. Its skipped share is that of the pages evicted."""

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
        prior = mixed(problem.shape.heads).to(problem.device)
        leaves, rows = problem.leaves(problem.shape.width), problem.shape.rows
        q, k, v = (leaf.detach() for leaf in leaves.values())
        terms = prior(problem.q_pos, problem.k_pos, causal=True)
        terms = replace(terms, table=replace(terms.table, table=terms.table.table.detach(), parametric=None))
        return AttentionCall(q, k[:, :, -rows:], v[:, :, -rows:], terms, True), prior, leaves

    def prepare(self, problem: Problem) -> Run:
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


def ours_on(device: torch.device) -> list[Contender]:
    """Ours on this kind of device. On the CPU what `kernel="auto"` takes; on CUDA each kernel by name.

    ggd heads decay as ALiBi's do. "triton": every visible tile, gradients of the prior's parameters; "triton table":
    of the whole table; "triton skipping": as the first, without the tiles that provably do not matter.
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


def scaled_ggd() -> Contender:
    """ggd with SSMax's scale on the rows, for the training shape on the CPU."""
    return Ours("ggd+ssmax", "auto", ggd, scaled=True)


def decoders_on(device: torch.device) -> list[Contender]:
    """Ours for one query against a cache, dense or paged, of 12 heads of which 3 look away from the query."""
    if device.type == "cpu":
        return [Ours("goat", "auto", goat), Ours("ggd", "auto", mixed), Paged("gathered")]
    dense = Ours(*LAW, mixed, call_kernel="triton")
    return [Ours("goat", "flash", goat, call_kernel="flash"), dense, Paged("triton")]
