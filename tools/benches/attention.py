"""Attention with priors as ratios to the fastest attention without one, and to other ways to
compute the same."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tools.benches.timing import Call, Record, Refused, device_of, numbers, parser, words
from zoo import Positions, create_prior, prior_attention
from zoo.attention import skipping
from zoo.attention.selfcheck import BOUNDS, relative_error
from zoo.priors.base import Prior
from zoo.priors.terms import PriorTerms

OPTIONS: dict[str, dict[str, object]] = {"ggd": {"init": "alibi"}, "goat": {"train_context": 128}}
# Tokens at which each contender is compared with float64.
CHECK = 300
# Of the largest dense bias.
DENSE_BYTES = {"cuda": 8 * 2**30, "cpu": 256 * 2**20}


@dataclass
class Problem:
    """Random q, k, v (B, H, L, D) and what priors make for them."""

    batch: int
    heads: int
    length: int
    width: int
    dtype: torch.dtype
    device: torch.device

    def __post_init__(self) -> None:
        self.line = Positions.line(self.length)
        generator = torch.Generator(self.device).manual_seed(0)
        shape = (self.batch, self.length, self.heads, self.width)

        def heads() -> Tensor:
            x = torch.randn(shape, generator=generator, device=self.device)
            return x.to(self.dtype).transpose(1, 2)

        self.q = heads().requires_grad_()
        self.k = heads().requires_grad_()
        self.v = heads().requires_grad_()
        self.grad = heads()
        self.qkv = [self.q, self.k, self.v]
        self.x = torch.randn(
            self.batch, self.length, self.width, generator=generator, device=self.device
        )

    def __str__(self) -> str:
        return f"B{self.batch} H{self.heads} L{self.length} D{self.width}"

    def prior(self, method: str) -> Prior:
        torch.manual_seed(0)
        options = OPTIONS.get(method, {})
        if method == "cable":
            options = {"d_model": self.width}
        return create_prior(method, num_heads=self.heads, **options).to(self.device)

    def terms(self, prior: Prior) -> PriorTerms:
        return prior(self.line, self.line, causal=True, x=self.x)


@dataclass(frozen=True)
class Run:
    """A contender made ready: `forward` computes (B, H, L, D), `leaves` have gradients, `method` is
    its prior."""

    forward: Callable[[], Tensor]
    leaves: Sequence[Tensor]
    method: str = ""

    def step(self, grad: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.forward(), self.leaves, grad, allow_unused=True)


# ---- contenders


def plain(problem: Problem, backend: SDPBackend | None = None) -> Run:
    """torch's causal attention, by one backend or by its own choice."""

    def forward() -> Tensor:
        if backend is None:
            return F.scaled_dot_product_attention(*problem.qkv, is_causal=True)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*problem.qkv, is_causal=True)

    return Run(forward, problem.qkv)


def ours(problem: Problem, method: str, *, skip: bool = True) -> Run:
    """`zoo.prior_attention` with a prior, whose own work and gradients are part of every pass, as
    in a layer."""
    prior = problem.prior(method)
    columns = problem.width - prior.num_lanes
    if columns < 1:
        raise Refused(f"its lanes leave no room for content in heads of {problem.width}")
    q = problem.q[..., :columns].detach().requires_grad_()
    k = problem.k[..., :columns].detach().requires_grad_()
    leaves = [q, k, problem.v, *(p for p in prior.parameters() if p.requires_grad)]

    def forward() -> Tensor:
        with skipping(skip):
            return prior_attention(q, k, problem.v, problem.terms(prior), causal=True)

    return Run(forward, leaves, method)


def dense_bias(problem: Problem) -> Run:
    """torch's attention with GGD's log-prior as a dense bias, made beforehand, whose gradient is
    computed."""
    length = problem.length
    size = problem.heads * length**2 * problem.dtype.itemsize
    bound = DENSE_BYTES[problem.device.type]
    if size > bound:
        raise Refused(f"its bias takes {size / 2**30:.2g} GiB, bound {bound / 2**30:.2g}")
    hidden = torch.ones(length, length, dtype=torch.bool, device=problem.device).triu(1)
    log_prior = problem.terms(problem.prior("ggd")).dense().detach()
    bias = log_prior.masked_fill(hidden, -math.inf).to(problem.dtype).requires_grad_()
    mask = bias.expand(problem.batch, -1, -1, -1)

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(*problem.qkv, attn_mask=mask)

    return Run(forward, [*problem.qkv, bias], "ggd")


def flex(problem: Problem) -> Run:
    """FlexAttention compiled for the shape, with a block mask and a score_mod that reads GGD's
    table."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    table = problem.terms(problem.prior("ggd")).table
    assert table is not None and table.origin is not None
    values = table.table.detach()
    origin = table.origin
    qkv = problem.qkv
    leaves = [*qkv, values]
    if problem.device.type == "cuda":
        values.requires_grad_()
    else:
        # On CPUs it has no backward pass.
        qkv = [x.detach() for x in qkv]
        leaves = []
    length = problem.length
    mask = create_block_mask(
        lambda b, h, i, j: i >= j, None, None, length, length, device=str(problem.device)
    )
    attend = torch.compile(flex_attention, dynamic=False)

    def add_prior(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + values[h, i - j + origin]

    def forward() -> Tensor:
        return attend(*qkv, score_mod=add_prior, block_mask=mask)

    return Run(forward, leaves, "ggd")


def flash_attn(problem: Problem, *, slopes: bool = False) -> Run:
    """The flash-attn package, without bias or with ALiBi's slopes, which are constants."""
    if importlib.util.find_spec("flash_attn") is None:
        raise Refused("flash-attn is not installed")
    from flash_attn import flash_attn_func

    alibi = problem.prior("alibi").slopes(problem.device).float() if slopes else None

    def forward() -> Tensor:
        qkv = [x.transpose(1, 2) for x in problem.qkv]
        return flash_attn_func(*qkv, causal=True, alibi_slopes=alibi).transpose(1, 2)

    return Run(forward, problem.qkv, "alibi" if slopes else "")


Contenders = dict[str, Callable[[Problem], Run]]


def contenders(device: torch.device, methods: Sequence[str]) -> tuple[Contenders, list[str]]:
    """All by name, and the names of those without a prior, which are the baselines."""
    cuda = device.type == "cuda"
    makers: Contenders = {}
    if cuda:
        makers["sdpa flash"] = partial(plain, backend=SDPBackend.FLASH_ATTENTION)
        makers["sdpa cudnn"] = partial(plain, backend=SDPBackend.CUDNN_ATTENTION)
        makers["flash-attn"] = flash_attn
    else:
        makers["sdpa"] = plain
    baselines = list(makers)
    for method in methods:
        makers[f"ours: {method}"] = partial(ours, method=method)
    for method in methods:
        makers[f"ours: {method}, nothing skipped"] = partial(ours, method=method, skip=False)
    makers["ggd as dense bias"] = dense_bias
    makers["ggd by FlexAttention"] = flex
    if cuda:
        makers["alibi by flash-attn"] = partial(flash_attn, slopes=True)
    return makers, baselines


# ---- measurement


def error_of(run: Run, problem: Problem) -> float:
    """How far the output is from float64, relative to its norm."""
    wide = replace(problem, dtype=torch.float64)
    for name, x in zip("qkv", problem.qkv, strict=True):
        setattr(wide, name, x.detach().double())
    terms = PriorTerms()
    columns = problem.width
    if run.method:
        prior = problem.prior(run.method).double()
        wide.x = problem.x.double()
        terms = wide.terms(prior)
        if run.leaves:
            columns = run.leaves[0].shape[-1]
    q = wide.q[..., :columns]
    k = wide.k[..., :columns]
    truth = prior_attention(q, k, wide.v, terms, causal=True, kernel="reference")
    return relative_error(run.forward().detach(), truth.detach())


def main(argv: Sequence[str]) -> int:
    """Ratios to the fastest attention without bias, forward and with all gradients; a contender
    that is wrong is not timed."""
    options = parser("attention", main.__doc__)
    options.add_argument(
        "--lengths", type=numbers, help="default 1k to 64k on CUDA, 1k to 16k on the CPU"
    )
    options.add_argument("--width", type=int, default=64, help="of a head")
    options.add_argument("--methods", type=words, default=["alibi", "goat", "ggd", "cable"])
    options.add_argument(
        "--without", type=words, default=[], help="leave out names that contain one of these"
    )
    args = options.parse_args(argv)
    device = device_of(args)
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    record = Record(args, device, dtype=str(dtype))
    makers, baselines = contenders(device, args.methods)
    short = Problem(1, 2, CHECK, args.width, dtype, device)
    bound = 2 * BOUNDS[dtype]
    correct = {}
    for name, make in makers.items():
        if any(word in name for word in args.without):
            continue
        with record.guard(name, "check"):
            error = error_of(make(short), short)
            if error > bound:
                raise ValueError(f"wrong by {error:.2g} of its norm, allowed {bound:.2g}")
            correct[name] = make
    lengths = args.lengths or [1024, 4096, 16384]
    if cuda and not args.lengths:
        lengths.append(65536)
    for length in lengths:
        # On CUDA at most 2²⁰ tokens over all rows and heads.
        rows = max(1, min(64, 2**20 // length)) if cuda else 2
        heads = min(16, rows)
        problem = Problem(rows // heads, heads, length, args.width, dtype, device)
        runs = {}
        for name, make in correct.items():
            with record.guard(name, str(problem)):
                runs[name] = make(problem)
        forwards: dict[str, Call] = {}
        steps: dict[str, Call] = {}
        for name, run in runs.items():
            forwards[name] = torch.no_grad()(run.forward)
            if run.leaves:
                steps[name] = partial(run.step, problem.grad)
        record.compare(str(problem), "forward", forwards, baselines)
        record.compare(str(problem), "forward and backward", steps, baselines)
    return record.finish()
