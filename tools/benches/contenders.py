"""What computes attention, with a prior or without: a problem of one shape, our kernels on it, and peers.

Peers get the problem in the layout they like best; making a dense bias, a block mask or slopes is not counted. What cannot be
measured at a shape raises Refused with the reason.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tools.benches.harness import Refused
from zoo import Positions, create_prior, prior_attention
from zoo.attention import skipped_share, skipping
from zoo.attention.base import AttentionCall, fold_lanes
from zoo.attention.dispatch import KERNELS, choose_kernel
from zoo.priors.base import Prior, PriorTerms, RelativeTable

DENSE_BOUND = {"cuda": 8 * 2**30, "cpu": 256 * 2**20}  # bytes of the largest dense bias, (H, T, S)
PAGE = 64  # keys
INPUT = 64  # columns of the layer's input that CABLE reads
DECODE_HEADS = 12  # of a decoding step, of which 3 look away from the query


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


class Problem:
    """Random inputs of one shape. Contenders share them; heads are (B, heads, length, columns) views of packed rows.

    Attributes:
        grad: (B, H, T, D) what the backward pass starts from.
        q_pos, k_pos: queries are the last T of the S positions.
        x: (B, S, INPUT) the layer's input, in float32.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.generator = torch.Generator(device).manual_seed(0)
        self.grad = self.random(shape.rows, shape.width)
        self.q_pos = Positions.line(shape.rows, offset=shape.length - shape.rows)
        self.k_pos = Positions.line(shape.length)
        self.x = torch.randn(shape.batch, shape.length, INPUT, generator=self.generator, device=device)
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
        content: columns of queries and keys that meet in the product; 0 for all.
        kernel: which one runs, where the contender leaves it to choose.
        skipped: share of the visible tiles left out.
    """

    forward: Callable[[], Tensor]
    leaves: dict[str, Tensor]
    prior: Prior | None = None
    table: RelativeTable | None = None
    content: int = 0
    kernel: str = ""
    skipped: Callable[[], float] | None = None

    def step(self, grad: Tensor) -> tuple[Tensor, ...]:
        """Forward and all gradients."""
        out = self.forward()
        # What a prior made of its parameters stays for the next step.
        return torch.autograd.grad(out, list(self.leaves.values()), grad, retain_graph=True, allow_unused=True)


@dataclass(frozen=True)
class Contender:
    """A way to compute attention: `method` is the prior, `kernel` the way; together they are its name.

    Attributes:
        prepare: makes it ready for a problem; raises Refused where it cannot run at the problem's shape or on its device.
        backward: whether it computes gradients.
        whole, decodes: whether it is measured on whole sequences, and with one query against a cache.
        package: the distribution it needs.
        cuda: whether it runs on CUDA only.
    """

    method: str
    kernel: str
    prepare: Callable[[Problem], Run]
    backward: bool = True
    whole: bool = True
    decodes: bool = True
    ours: bool = False
    package: str = ""
    cuda: bool = False

    @property
    def name(self) -> str:
        return self.kernel if self.method == "none" else f"{self.method}, {self.kernel}"

    def missing(self, device: torch.device) -> str | None:
        """Why it cannot run here at all; None where it can."""
        if self.package:
            try:
                importlib.metadata.version(self.package)
            except importlib.metadata.PackageNotFoundError:
                return f"{self.package} is not installed"
        return "it runs on CUDA only" if self.cuda and device.type != "cuda" else None


# --------------------------------------------------------------------------------------------------------------- priors


def ggd(heads: int) -> Prior:
    """GGD heads that decay as ALiBi's do."""
    return create_prior("ggd", num_heads=heads, init="alibi")


def mixed(heads: int) -> Prior:
    """GGD heads of which every fourth looks away from the query, a retrieval head, and the others decay as ALiBi's do."""
    prior = ggd(heads)
    with torch.no_grad():
        prior.theta_alpha[3::4], prior.theta_beta[3::4] = 0.0, -0.5
    return prior


def alibi(heads: int) -> Prior:
    return create_prior("alibi", num_heads=heads)


def cable(heads: int) -> Prior:
    """CABLE without weights: the form that forgetting attention has."""
    torch.manual_seed(0)
    return create_prior("cable", num_heads=heads, d_model=INPUT, weighted=False)


def goat(heads: int) -> Prior:
    return create_prior("goat", num_heads=heads, train_context=128)


def ggd_of(problem: Problem) -> tuple[Prior, RelativeTable]:
    """The ggd prior of a problem, with retrieval heads where it is decoding, and its relative table."""
    prior = (mixed if problem.shape.queries else ggd)(problem.shape.heads).to(problem.device)
    table = prior(problem.q_pos, problem.k_pos, causal=True).table
    assert table is not None and table.origin is not None
    return prior, table


# ----------------------------------------------------------------------------------------------------------------- ours


def by_prior(
    problem: Problem,
    *,
    make: Callable[[int], Prior],
    kernel: str,
    parametric: bool = False,
    skip: bool | None = None,
    whole: bool = False,
) -> Run:
    """`prior_attention` with the prior `make` gives for a number of heads.

    parametric: gradients are of the prior's own parameters; otherwise of what it hands to attention, lanes or table.
    whole: the prior's own work is a part of every pass, as in a layer; the gradients are of its parameters.
    skip: whether keys may be left out; None for the kernel's own choice.
    """
    shape = problem.shape
    prior = make(shape.heads).to(problem.device)
    if shape.width <= prior.num_lanes:
        raise Refused(f"its lanes leave no room for content in heads of {shape.width}")
    leaves = problem.leaves(shape.width - prior.num_lanes)

    def make_terms() -> PriorTerms:
        return prior(problem.q_pos, problem.k_pos, causal=True, x=problem.x)

    terms = make_terms()
    if parametric or whole:
        leaves |= {name: p for name, p in prior.named_parameters() if p.requires_grad}
    elif terms.table is not None:
        leaves["table"] = terms.table.table.detach().requires_grad_()
        terms = replace(terms, table=replace(terms.table, table=leaves["table"], parametric=None, constant_from=None))
    else:
        lanes = {name: getattr(terms, name).detach().requires_grad_() for name in ("q_lanes", "k_lanes")}
        leaves, terms = leaves | lanes, replace(terms, **lanes)
    keys = leaves["k"]
    if shape.queries and terms.k_lanes is not None:  # a cache holds keys with their lanes
        keys, terms = fold_lanes(keys.detach(), terms.k_lanes.detach()), replace(terms, k_lanes=None, offset=None)
    call = AttentionCall(leaves["q"], keys, leaves["v"], terms, True)
    chosen = choose_kernel(call) if kernel == "auto" else kernel
    if reason := KERNELS[chosen].refuses(call):
        raise Refused(reason)

    def forward() -> Tensor:
        return prior_attention(call.q, call.k, call.v, make_terms() if whole else terms, causal=True, kernel=kernel)

    run = Run(forward, leaves, prior, terms.table if "table" in leaves else None)
    if kernel == "auto":
        run.kernel = f"{chosen} with prior" if whole else chosen
    if skip is not None:
        from zoo.attention import triton

        def with_or_without() -> Tensor:
            with skipping(skip):
                return forward()

        run.forward = with_or_without
        share = triton.skipped_share if chosen == "triton" else skipped_share
        run.skipped = (lambda: float(share(call))) if skip else None
    return run


def paged(problem: Problem) -> Run:
    """One query against our paged cache, filled as a model fills it and without the pages that no later query of a
    decaying head can use, by the longest of this problem's queries and keys. Its skipped share is that of the pages evicted."""
    from zoo.decoding.paged_attention import paged_kernel

    prior = mixed(problem.shape.heads).to(problem.device)
    leaves, rows = problem.leaves(problem.shape.width), problem.shape.rows
    q, k, v = (leaf.detach() for leaf in leaves.values())
    terms = prior(problem.q_pos, problem.k_pos, causal=True)
    terms = replace(terms, table=replace(terms.table, table=terms.table.table.detach(), parametric=None))

    def call() -> AttentionCall:
        return AttentionCall(q, k[:, :, -rows:], v[:, :, -rows:], terms, True)

    if reason := KERNELS["triton"].refuses(call()):
        raise Refused(reason)
    store = filled_pages(prior, q, k, v)
    kernel = paged_kernel(call(), "triton", PAGE)
    every = len(store.counts) * -(-problem.shape.length // PAGE)
    # A fresh call each time: calls remember what they made.
    return Run(lambda: kernel(call(), store.pages), leaves, prior, skipped=lambda: 1 - sum(store.counts) / every)


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


# ---------------------------------------------------------------------------------------------------------------- peers


def rows_first(x: Tensor) -> Tensor:
    """(B, H, L, D) as (B, L, H, D) and back."""
    return x.transpose(1, 2)


def sdpa(problem: Problem, backend: SDPBackend | None = None) -> Run:
    """torch's scaled_dot_product_attention without bias, by one backend or by its own choice."""
    leaves, causal = problem.leaves(problem.shape.width), not problem.shape.queries

    def forward() -> Tensor:
        if backend is None:
            return F.scaled_dot_product_attention(*leaves.values(), is_causal=causal)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*leaves.values(), is_causal=causal)

    return Run(forward, leaves)


def dense_bias(problem: Problem) -> Run:
    """SDPA with the ggd log-prior as a dense (1, H, T, S) bias, made beforehand, whose gradient is computed."""
    shape, device = problem.shape, problem.device
    size = shape.heads * shape.rows * shape.length * problem.dtype.itemsize
    if size > DENSE_BOUND[device.type]:
        raise Refused(f"its bias takes {size / 2**30:.2g} GiB, bound {DENSE_BOUND[device.type] / 2**30:.2g}")
    leaves, (prior, table) = problem.leaves(shape.width), ggd_of(problem)
    i, j = problem.q_pos.row_index(device), problem.k_pos.row_index(device)
    dense = table.dense().detach().masked_fill(j[None, :] > i[:, None], float("-inf"))
    bias = dense.to(problem.dtype).requires_grad_()
    given = bias.expand(shape.batch, -1, -1, -1)
    on_cuda = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    backends = on_cuda if device.type == "cuda" else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]

    def forward() -> Tensor:
        with sdpa_kernel(backends):
            return F.scaled_dot_product_attention(leaves["q"], leaves["k"], leaves["v"], attn_mask=given)

    return Run(forward, leaves | {"bias": bias}, prior)


def flex(problem: Problem, *, backend: str = "AUTO") -> Run:
    """FlexAttention, compiled for the shape, causal by its block mask; a score_mod reads ggd's (H, T+S−1) table, whose
    gradient is computed on CUDA (on the CPU it has no backward pass). backend: its own kernel, or FlashAttention 4's
    ("FLASH"), whose table is a constant: it computes no gradient of what a score_mod reads."""
    import torch._dynamo
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    config = torch._dynamo.config  # more shapes than dynamo keeps are an error and no silent dense attention
    config.recompile_limit, config.accumulated_recompile_limit = 512, 4096
    config.fail_on_recompile_limit_hit = True
    learns, (prior, table) = problem.device.type == "cuda", ggd_of(problem)
    values, origin = table.table.detach().requires_grad_(learns and backend == "AUTO"), table.origin
    leaves = problem.leaves(problem.shape.width)
    inputs = [leaf if learns else leaf.detach() for leaf in leaves.values()]

    def score_mod(score, b, h, i, j):
        return score + values[h, i - j + origin]

    mask, size = None, problem.shape.length
    if not problem.shape.queries:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, size, size, device=str(problem.device))
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(options: dict[str, object]) -> Tensor:
        return compiled(*inputs, score_mod=score_mod, block_mask=mask, kernel_options=options)

    # Its own choice of blocks and stages asks for more shared memory than an H200 has, for heads of 64 in torch 2.11.
    tried = [{"num_stages": 2}, {"num_stages": 1}] if learns and backend == "AUTO" else []
    given: dict[str, object] = {} if backend == "AUTO" else {"BACKEND": backend}
    for fewer in tried:
        try:
            attend(given)
            break
        except Exception as error:
            if "out of resource" not in str(error):
                raise
            given = fewer
    forward = partial(attend, given)
    if learns and not values.requires_grad:
        return Run(forward, leaves, prior)
    return Run(forward, leaves | {"table": values}, prior, table)


def flash_attn(problem: Problem, *, sloped: bool = False) -> Run:
    """The flash-attn package, without bias or with its built-in ALiBi slopes, which are constants."""
    from flash_attn import flash_attn_func, flash_attn_with_kvcache

    if problem.dtype not in (torch.float16, torch.bfloat16):
        raise Refused(f"it takes float16 and bfloat16, not {problem.dtype}")
    leaves = problem.leaves(problem.shape.width)
    prior = alibi(problem.shape.heads) if sloped else None
    slopes = None if prior is None else prior.slopes(problem.device).float()
    attend = flash_attn_with_kvcache if problem.shape.queries else flash_attn_func

    def forward() -> Tensor:
        q, k, v = (rows_first(leaf) for leaf in leaves.values())
        return rows_first(attend(q, k, v, causal=True, alibi_slopes=slopes))

    return Run(forward, leaves, prior)


def goat_package(problem: Problem) -> Run:
    """The goat-attention package's module at K = 0, its projections replaced by the identity: attention and lanes alone."""
    from goat import GoatAttention

    shape, leaves = problem.shape, problem.leaves(problem.shape.width)
    if shape.width <= 5:
        raise Refused(f"its 5 lanes leave no content in heads of {shape.width}")
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


def forgetting(problem: Problem) -> Run:
    """flash-linear-attention's forgetting attention: K[i,j] = G_i − G_j with G the running sum of log forget gates
    g = −relu(W x + b), CABLE without its weights w. Its gradient in g is computed."""
    from fla.ops.forgetting_attn import parallel_forgetting_attn

    leaves, prior = problem.leaves(problem.shape.width), cable(problem.shape.heads).to(problem.device)
    rates = prior.rates(problem.x, torch.float32)[0].transpose(1, 2)
    gates = (-rates).detach().float().contiguous().requires_grad_()

    def forward() -> Tensor:
        q, k, v = (rows_first(leaf) for leaf in leaves.values())
        return rows_first(parallel_forgetting_attn(q, k, v, gates))

    return Run(forward, leaves | {"gates": gates}, prior)


# ------------------------------------------------------------------------------------------------------------------ all


def ours(method: str, name: str, make: Callable[[int], Prior], *, step: bool = False, **options) -> Contender:
    """One of ours by its kernel's name; step: for one query against a dense cache, else for whole sequences."""
    how = {"kernel": name.split()[0], **options}
    return Contender(method, name, partial(by_prior, make=make, **how), whole=not step, decodes=step, ours=True)


def contenders_on(device: torch.device) -> list[Contender]:
    """All that is measured on this kind of device, the baseline first, whether installed or not.

    Ours are on the CPU what `kernel="auto"` takes; on CUDA each kernel by name. ggd's "triton": every visible tile,
    gradients of the prior's parameters; "triton table": of the whole table; "triton skipping": as the first, without the
    tiles that provably do not matter.
    """
    peers = [
        Contender("ggd", "sdpa dense bias", dense_bias),
        Contender("ggd", "flex table", flex, backward=device.type == "cuda"),
        Contender("ggd", "flex flash", partial(flex, backend="FLASH"), decodes=False, cuda=True),
        Contender("none", "flash-attn", flash_attn, package="flash-attn", cuda=True),
        Contender("alibi", "flash-attn", partial(flash_attn, sloped=True), package="flash-attn", cuda=True),
        Contender("goat", "goat-attention", goat_package, decodes=False, package="goat-attention"),
        Contender(
            "cable", "fla forgetting", forgetting, decodes=False, package="flash-linear-attention", cuda=True
        ),
    ]  # fmt: skip
    if device.type == "cpu":
        own = [ours(name, "auto", make) for name, make in (("goat", goat), ("ggd", ggd))]
        own += [ours(name, "auto with prior", make, whole=True) for name, make in (("goat", goat), ("ggd", ggd))]
        steps = [ours(name, "auto", make, step=True) for name, make in (("goat", goat), ("ggd", mixed))]
        return [Contender("none", "sdpa", sdpa), *own, *steps, *peers]
    return [
        Contender("none", "sdpa flash", partial(sdpa, backend=SDPBackend.FLASH_ATTENTION)),
        Contender("none", "sdpa cudnn", partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION)),
        ours("goat", "flash", goat),
        ours("goat", "flash with prior", goat, whole=True),
        ours("goat", "triton", goat, skip=False),
        ours("ggd", "triton", ggd, parametric=True, skip=False),
        ours("ggd", "triton with prior", ggd, whole=True, skip=False),
        ours("ggd", "triton table", ggd, skip=False),
        ours("ggd", "triton skipping", ggd, parametric=True, skip=True),
        ours("alibi", "flash", alibi, parametric=True),
        ours("alibi", "triton skipping", alibi, parametric=True, skip=True),
        ours("cable", "flash", cable),
        ours("cable", "triton skipping", cable, skip=True),
        ours("goat", "flash", goat, step=True),
        ours("ggd", "triton", mixed, step=True),
        Contender("ggd", "triton paged", paged, backward=False, whole=False, ours=True),
        *peers,
    ]
