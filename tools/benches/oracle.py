"""Whether a contender computes the attention it is named after: its output and gradients against float64."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tools.benches.contenders import Contender, Problem, Run
from tools.benches.harness import no_grad
from zoo.attention.selfcheck import relative_error

# How far outputs and gradients may be from float64, relative. Rounding of the operands alone is 2^-9 in bfloat16 and 2^-12 in
# float16, once in the logits and once in the weights; a prior that is missing or a tile that is lost is off by far more.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
# The gradient of a ramp's slope, sum of j·∂L/∂z[i,j] over positions j as large as the context, cancels to a sum of distances:
# rounded to two bytes it is as wrong as it is large, in torch's matrix products too (docs/KERNELS.md), and says nothing.
CANCELS = "raw_slope"


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
        x = problem.x.double()
        logits = logits + prior.log_prior(problem.q_pos, problem.k_pos, causal=True, x=x).to(logits.device)
    i, j = problem.q_pos.row_index(logits.device), problem.k_pos.row_index(logits.device)
    weights = logits.masked_fill(j[None, :] > i[:, None], -math.inf).softmax(dim=-1)
    out = weights @ wide["v"]
    grads = torch.autograd.grad(out, list(wide.values()), problem.grad.double(), allow_unused=True)
    return out.detach(), {name: g for name, g in zip(wide, grads, strict=True) if g is not None}


@dataclass(frozen=True)
class Verdict:
    """A contender against float64. error: the greatest relative one, of a row of the output or of a gradient (`worst`)."""

    error: float
    bound: float
    worst: str

    @property
    def correct(self) -> bool:
        return self.error <= self.bound


def check(contender: Contender, problem: Problem, *, backward: bool) -> Verdict:
    """Output, and with `backward` every gradient the oracle knows, against float64."""
    run = contender.prepare(problem)
    out, grads = oracle(run, problem)
    errors = {"output": relative_error(no_grad(run.forward)(), out, dim=-1)}
    if backward and contender.backward:
        found = dict(zip(run.leaves, run.step(problem.grad), strict=True))
        largest = max(float(gradient.norm()) for gradient in grads.values())
        for name, gradient in grads.items():  # a missing one counts as infinitely wrong
            if float(gradient.norm()) < 1e-10 * largest:  # 0 but for rounding: a constant added to all keys' logits
                continue
            given, what = found.get(name), f"gradient of {name}"
            errors[what] = math.inf if given is None else relative_error(given, gradient)
            if name.endswith(CANCELS) and problem.dtype.itemsize == 2 and math.isfinite(errors[what]):
                del errors[what]
    worst = max(errors, key=lambda name: errors[name])
    return Verdict(errors[worst], TOLERANCE[problem.dtype], worst)
