"""One attention problem for every contender: its inputs, how it is run, and what float64 says it should return."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from tools.benches.kit import TOLERANCE, Shape, no_grad, norm_error, row_error
from zoo import Positions
from zoo.priors.base import Prior, RelativeTable

BASELINES = {"cuda": ("none", "sdpa flash"), "cpu": ("none", "sdpa")}


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
        """ "q", "k" or "v" with `width` columns, the same tensor for all who ask for it."""
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
        leaves: what gradients are asked for, by name; "q", "k" and "v" among them.
        prior: whose `log_prior` this is attention with, and whose parameters the other leaves may be; None for no prior.
        table: the relative table that the leaf "table" is the numbers of.
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
        from zoo.attention.base import AttentionCall

        torch.manual_seed(0)
        shape = problem.shape
        prior = self.make(shape.heads).to(problem.device)
        leaves = problem.leaves(shape.width - prior.num_lanes)
        x = torch.randn(shape.batch, shape.length, 64, device=problem.device)
        terms = prior(problem.q_pos, problem.k_pos, causal=True, x=x)
        if self.gradient == "law":
            leaves |= {name: p for name, p in prior.named_parameters() if p.requires_grad}
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
        from zoo import prior_attention

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


# --------------------------------------------------------------------------------------------------------- checks


def oracle(run: Run, problem: Problem) -> tuple[Tensor, dict[str, Tensor]]:
    """Output (B, H, T, D) and gradients by name, in float64, from the same inputs: softmax of <q, k>/√d_c + K with K from
    the prior's formula (`log_prior`) or, where the table is a leaf, from its numbers. O(T·S)."""
    wide = {name: leaf.detach().double().requires_grad_() for name, leaf in run.leaves.items() if "lanes" not in name}
    content = run.content or wide["q"].shape[-1]
    logits = wide["q"][..., :content] @ wide["k"][..., :content].transpose(-1, -2) / math.sqrt(content)
    if run.table is not None:
        logits = logits + replace(run.table, table=wide["table"]).dense()
    elif run.prior is not None:
        prior = copy.deepcopy(run.prior).double()
        wide |= {name: p for name, p in prior.named_parameters() if name in wide}
        x = None if run.x is None else run.x.double()
        logits = logits + prior.log_prior(problem.q_pos, problem.k_pos, causal=True, x=x).to(logits.device)
    if "scale" in wide:
        logits = logits * wide["scale"][..., None]
    i, j = problem.q_pos.row_index(logits.device), problem.k_pos.row_index(logits.device)
    weights = logits.masked_fill(j[None, :] > i[:, None], -math.inf).softmax(dim=-1)
    out = weights @ wide["v"]
    grads = torch.autograd.grad(out, list(wide.values()), problem.grad.double(), allow_unused=True)
    return out.detach(), {name: g for name, g in zip(wide, grads, strict=True) if g is not None}


@dataclass(frozen=True)
class Verdict:
    """How a contender did against float64. error: the greatest relative one, of a row of the output or of a gradient."""

    error: float
    bound: float
    worst: str
    deterministic: bool | None

    @property
    def right(self) -> bool:
        return self.error <= self.bound


def check(contender: Contender, problem: Problem, *, backward: bool) -> Verdict:
    """Output, and with `backward` every gradient the oracle knows, against float64; a second step must agree bit for bit to
    be called deterministic."""
    run = contender.prepare(problem)
    out, grads = oracle(run, problem)
    found = {"output": no_grad(run.forward)()}
    errors = {"output": row_error(found["output"], out)}
    deterministic = None
    if backward and contender.backward:
        first, again = (dict(zip(run.leaves, run.step(problem.grad), strict=True)) for _ in range(2))
        errors |= _gradient_errors(first, grads)
        deterministic = all(_same(first[name], again[name]) for name in first)
    worst = max(errors, key=lambda name: errors[name])
    return Verdict(errors[worst], TOLERANCE[problem.dtype], worst, deterministic)


def _gradient_errors(found: Mapping[str, Tensor | None], right: Mapping[str, Tensor]) -> dict[str, float]:
    """By name; a gradient that should be there and is not counts as infinitely wrong."""
    errors = {}
    for name, gradient in right.items():
        given = found.get(name)
        errors[f"gradient of {name}"] = math.inf if given is None else norm_error(given, gradient)
    return errors


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def parameters_of(module: nn.Module) -> dict[str, Tensor]:
    """Trainable parameters by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}
