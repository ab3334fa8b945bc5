"""The row that a new prior adds: how to make it for the tests that run over every registered
prior."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zoo import Positions, create_prior, list_priors
from zoo.priors import Prior

WIDTH = 12
TRAIN_CONTEXT = 16

# Options a prior cannot be made without. A prior that needs none still has its row, so that none is
# forgotten.
OPTIONS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "sink": {},
    "by_heads": {"parts": ["ggd", "alibi"], "options": {"alibi": {"learnable": True}}},
    "nape": {},
    "alibi": {"learnable": True},
    "alibi2d": {"learnable": True},
    "spectral": {"rank": 3, "init": "seeded"},
    "spectral2d": {"rank": 2, "train_grid": (3, 5)},
    "key_bias": {"train_context": TRAIN_CONTEXT},
    "key_bias2d": {},
    "goat": {"train_context": TRAIN_CONTEXT},
    "goat2d": {"rank": 2, "train_grid": (3, 5)},
    "ggd": {"train_mu": True},
    "ggd2d": {"form": "separable", "train_mu": True},
    "cable": {"d_model": WIDTH},
    "fox": {"d_model": WIDTH, "half_lives": [4, 64]},
    "t5": {},
    "t5_2d": {"train_grid": (3, 4)},
    "kerple": {},
    "scale_invariant": {"tau": 3.0},
    "kerple2d": {},
    "lookhere2d": {"depth": (1, 4)},
    "fire": {"train_context": 6},
    "fire2d": {"train_grid": (3, 4)},
    "table": {"values": [1.0, 0.0, -0.5, -2.0], "beyond": "linear", "learnable": True},
}
LINE = [name for name in list_priors() if not name.endswith("2d")]
GRID = [name for name in list_priors() if name.endswith("2d")]


def make(name: str, *, num_heads: int = 3, seed: int = 0, **options: Any) -> Prior:
    """A float64 prior with its parameters moved off their inits, so that no identity holds by
    accident."""
    torch.manual_seed(seed)
    prior = create_prior(name, num_heads=num_heads, **{**OPTIONS[name], **options}).double()
    with torch.no_grad():
        for parameter in prior.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return prior


def inputs(length: int, *, batch: int = 2, seed: int = 1) -> torch.Tensor:
    """x (B, L, C) float64, for the priors that read it."""
    return torch.randn(
        batch, length, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def positions_for(name: str) -> Positions:
    return Positions.grid(3, 5, num_prefix=2) if name in GRID else Positions.line(11)


def causal_modes(name: str) -> list[bool]:
    return {"cable": [True], "fox": [True]}.get(name, [False] if name in GRID else [True, False])


CASES = [(name, causal) for name in list_priors() for causal in causal_modes(name)]


@torch.no_grad()
def decoded(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The model's logits by its cache: 20 tokens at once, then one after the other."""
    cache = model.new_cache(40)  # type: ignore[operator]
    return torch.cat(
        [model(part, cache=cache) for part in (tokens[:, :20], *tokens[:, 20:].split(1, 1))], dim=1
    )
