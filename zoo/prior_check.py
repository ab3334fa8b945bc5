"""Compare attention with a prior of another package with the prior's own formula in float64."""

from __future__ import annotations

import copy

import torch

from zoo.attention.dispatch import prior_attention
from zoo.attention.selfcheck import BOUNDS, HEADS, Verdict, relative_error
from zoo.positions import Positions
from zoo.priors import PriorTerms, create_prior, on_grid

# Tokens of a line, and patches of a side, at which priors of other packages are compared.
PRIOR_TOKENS = 2048
PRIOR_SIDE = 12
# A prior computes its lanes in float32, whatever the queries are in: at 2,048 tokens a lane that
# grows is off by so much.
LEAST_BOUND = 1e-3


def check_prior(name: str, device: str, dtype: torch.dtype) -> Verdict:
    """Compare attention with a registered prior, made without options, with its formula in float64:
    `forward` and lanes that grow with position against `log_prior`, at 2,048 tokens or a grid of
    12 × 12 patches."""
    verdict = Verdict({}, [])
    try:
        error = _prior_error(name, device, dtype)
    except Exception as failure:
        # Of the prior's own code, whatever it is.
        first_line = str(failure).partition("\n")[0]
        verdict.wrong.append(f"{type(failure).__name__}: {first_line}"[:300])
        return verdict
    verdict.errors[name] = {"output": error}
    if not error <= max(BOUNDS[dtype], LEAST_BOUND):
        verdict.wrong.append(f"output is off by {error:.1g} from log_prior")
    return verdict


def _prior_error(name: str, device: str, dtype: torch.dtype) -> float:
    """Relative error of attention's output with a prior, of 16 queries at the end."""
    grid = on_grid(name)
    k_pos = Positions.grid(PRIOR_SIDE, PRIOR_SIDE) if grid else Positions.line(PRIOR_TOKENS)
    q_pos = k_pos if grid else k_pos.tail(16)
    wide = torch.promote_types(dtype, torch.float32)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        prior = create_prior(name, num_heads=HEADS)
        q = torch.randn(1, HEADS, q_pos.length, 64).to(dtype)
        k = torch.randn(1, HEADS, k_pos.length, 64).to(dtype)
        v = torch.randn(1, HEADS, k_pos.length, 64).to(dtype)
        exact = copy.deepcopy(prior).double().log_prior(q_pos, k_pos, causal=not grid)
        truth = prior_attention(
            q.double(),
            k.double(),
            v.double(),
            PriorTerms(bias=exact),
            causal=not grid,
            kernel="reference",
        )
        q = q.to(device)
        terms = prior.to(device, wide)(q_pos, k_pos, causal=not grid, x=q[:, 0])
        output = prior_attention(q, k.to(device), v.to(device), terms, causal=not grid)
    return relative_error(output.cpu(), truth)
