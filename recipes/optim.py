"""Optimisers, learning-rate schedules, and the average of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from recipes.config import ConfigError, Optim
from zoo.files import read_tensors
from zoo.model import ZooModel

__all__ = ["WeightAverage", "create_optimizer", "lr_factor", "parameter_groups"]


def parameter_groups(model: ZooModel, optim: Optim) -> list[dict[str, Any]]:
    """Optimiser groups: matrices with weight decay; without it what the model exempts, and the priors' parameters.

    Exempt are `model.no_weight_decay()` and whatever has fewer than two dimensions. `model.prior_parameters()` learn at
    `optim.prior_lr_scale` times the rate: under Adam a parameter moves by about its rate a step, too little for an exponent
    in a short run.

    Muon trains the matrices of the layers, at `optim.muon_lr_scale` times the rate: its updates have singular values near 1
    (https://kellerjordan.github.io/posts/muon/). The weight decay of a step is the same.
    """
    exempt = model.no_weight_decay()
    priors = model.prior_parameters() if optim.prior_lr_scale != 1 else set()
    groups: dict[int, dict[str, Any]] = {}  # their order is part of every checkpoint
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_matrix = parameter.ndim >= 2 and name not in exempt
        is_muon = optim.name == "muon" and is_matrix and parameter.ndim == 2 and name.startswith("layers.")
        order, settings = int(not is_matrix), {"weight_decay": optim.weight_decay if is_matrix else 0.0}
        if is_muon:
            scale = optim.muon_lr_scale
            order, settings = 3, {"weight_decay": optim.weight_decay / scale, "lr": optim.lr * scale}
        elif name in priors:
            order, settings["lr"] = 2, optim.lr * optim.prior_lr_scale
        if optim.name == "muon":
            settings["use_muon"] = parameter.use_muon = is_muon  # type: ignore[attr-defined]  # DeepSpeed asks parameters
        groups.setdefault(order, {"params": [], **settings})["params"].append(parameter)
    if 3 in groups:  # in DeepSpeed's order
        groups[3]["params"].sort(key=lambda p: p.shape, reverse=True)
    return [groups[order] for order in sorted(groups)]


def create_optimizer(model: ZooModel, optim: Optim) -> torch.optim.Optimizer:
    """AdamW, RAdam or Muon, all with decoupled weight decay, on `parameter_groups`."""
    groups = parameter_groups(model, optim)
    if optim.name == "muon":
        adam = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps}
        groups = [group if group["use_muon"] else adam | group for group in groups]
        from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

        return MuonWithAuxAdam(groups)
    if optim.name == "adamw":
        return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
    return torch.optim.RAdam(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, decoupled_weight_decay=True)


def lr_factor(step: int, optim: Optim, steps: int) -> float:
    """Learning rate of step `step` (from 0) as a fraction of `optim.lr`.

    (step + 1) / warmup during warm-up, then floor + (1 − floor)·(1 + cos π·t)/2, or linear floor + (1 − floor)·(1 − t), t from
    0 at its end to 1 at the last step.
    """
    if step < optim.warmup:
        return (step + 1) / optim.warmup
    if optim.schedule == "constant":
        return 1.0
    t = min(1.0, (step - optim.warmup) / max(1, steps - 1 - optim.warmup))
    if optim.schedule == "linear":
        return optim.floor + (1 - optim.floor) * (1 - t)
    return optim.floor + (1 - optim.floor) * 0.5 * (1 + math.cos(math.pi * t))


class WeightAverage:
    """a ← d·a + (1 − d)·w after every step, d = min(decay, (1 + t)/(10 + t)) at step t: short runs forget their start too.

    Every rank keeps it whole, in float32: torch's AveragedModel has the model's dtype, and bf16 loses a step of 1 − d = 1e−4.
    """

    FILE = "ema.safetensors"

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.steps = decay, 0
        self.average = {name: p.detach().float().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take in the weights after a step."""
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        weights = [p.detach().float() for p in model.parameters()]
        torch._foreach_lerp_(list(self.average.values()), weights, 1 - decay)

    @contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """The model with the averaged weights, for a `with` block."""
        trained = {name: p.detach().clone() for name, p in model.named_parameters()}
        self._copy(model, self.average)
        try:
            yield
        finally:
            self._copy(model, trained)

    @staticmethod
    @torch.no_grad()
    def _copy(model: nn.Module, values: dict[str, Tensor]) -> None:
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])

    def save(self, folder: Path) -> None:
        save_file({k: v.contiguous() for k, v in self.average.items()}, folder / self.FILE, metadata={"format": "pt"})

    def load(self, folder: Path, *, steps: int) -> None:
        """The average as `save` left it after `steps` steps."""
        if not (folder / self.FILE).is_file():
            raise ConfigError(f"{folder} was written without train.ema: resume with --set train.ema=0, or start anew")
        stored = read_tensors(folder / self.FILE)
        for name, value in self.average.items():
            value.copy_(stored[name])
        self.steps = steps
