"""Optimisers and their groups of parameters, learning rates, and the average of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from recipes.commands import ConfigError
from recipes.recipe import Json, Optim
from zoo.files import read_tensors, replacing_path
from zoo.model import ZooModel


def parameter_groups(model: ZooModel, optim: Optim) -> list[Json]:
    """Optimiser groups: matrices with weight decay; `model.no_weight_decay()` and parameters of
    fewer dimensions without it.

    `model.prior_parameters()` learn at `optim.prior_lr_scale` times the rate: under Adam a
    parameter moves by about its rate a step, too little for an exponent in a short run. Muon trains
    the matrices of the layers, at `optim.muon_lr_scale` times the rate: its updates have singular
    values near 1 (https://kellerjordan.github.io/posts/muon/).

    | parameters | rate | weight decay |
    |---|---|---|
    | matrices, such as the embedding | lr | weight_decay |
    | norms, biases and other exempt ones | lr | 0 |
    | of priors, and SSMax's s | lr · prior_lr_scale | 0 |
    | the layers' matrices, by Muon | lr · muon_lr_scale | weight_decay / muon_lr_scale |
    """
    exempt = model.no_weight_decay()
    priors = model.prior_parameters() if optim.prior_lr_scale != 1 else set()
    muon = optim.name == "muon"
    matrices: Json = {"params": [], "weight_decay": optim.weight_decay}
    vectors: Json = {"params": [], "weight_decay": 0.0}
    prior_group: Json = {
        "params": [],
        "weight_decay": 0.0,
        "lr": optim.lr * optim.prior_lr_scale,
    }
    muon_group: Json = {
        "params": [],
        "weight_decay": optim.weight_decay / optim.muon_lr_scale,
        "lr": optim.lr * optim.muon_lr_scale,
    }
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_matrix = parameter.ndim >= 2 and name not in exempt
        in_layer = parameter.ndim == 2 and name.startswith("layers.")
        if muon and is_matrix and in_layer:
            group = muon_group
        elif name in priors:
            group = prior_group
        elif is_matrix:
            group = matrices
        else:
            group = vectors
        group["params"].append(parameter)
        if muon:
            # DeepSpeed asks every parameter.
            parameter.use_muon = group is muon_group  # type: ignore[attr-defined]
    # DeepSpeed sorts Muon's matrices alike.
    muon_group["params"].sort(key=lambda p: p.shape, reverse=True)
    # Their order is part of every checkpoint.
    groups = [matrices, vectors, prior_group, muon_group]
    if muon:
        for group in groups:
            group["use_muon"] = group is muon_group
    return [group for group in groups if group["params"]]


def create_optimizer(model: ZooModel, optim: Optim) -> torch.optim.Optimizer:
    """AdamW, RAdam or Muon, all with decoupled weight decay, on `parameter_groups`."""
    groups = parameter_groups(model, optim)
    adam: Json = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps}
    if optim.name == "muon":
        from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

        return MuonWithAuxAdam([group if group["use_muon"] else adam | group for group in groups])
    if optim.name == "adamw":
        return torch.optim.AdamW(groups, **adam, fused=True)
    return torch.optim.RAdam(groups, **adam, decoupled_weight_decay=True)


def lr_factor(step: int, optim: Optim, steps: int) -> float:
    """Learning rate of step `step` (from 0) as a fraction of `optim.lr`."""
    if step < optim.warmup:
        return (step + 1) / optim.warmup
    if optim.schedule == "constant":
        return 1.0
    # 0 at warm-up's end and 1 at the last step.
    progress = min(1.0, (step - optim.warmup) / max(1, steps - 1 - optim.warmup))
    if optim.schedule == "linear":
        return optim.floor + (1 - optim.floor) * (1 - progress)
    return optim.floor + (1 - optim.floor) * 0.5 * (1 + math.cos(math.pi * progress))


class WeightAverage:
    """a ← d·a + (1 − d)·w after every step, d = min(decay, (1 + t)/(10 + t)) at step t: short runs
    forget their start too.

    In float32: torch's AveragedModel has the model's dtype, and bf16 loses a step of 1 − d = 1e−4.
    """

    FILE = "ema.safetensors"

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.steps = 0
        self.average = {name: p.detach().float().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        averages = list(self.average.values())
        weights = [p.detach().float() for p in model.parameters()]
        torch._foreach_lerp_(averages, weights, 1 - decay)

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
        tensors = {name: value.contiguous() for name, value in self.average.items()}
        with replacing_path(folder / self.FILE) as path:
            save_file(tensors, path, metadata={"format": "pt"})

    def load(self, folder: Path, *, steps: int) -> None:
        if not (folder / self.FILE).is_file():
            raise ConfigError(
                f"{folder} was written without train.ema: resume with --set train.ema=0, "
                "or start anew"
            )
        stored = read_tensors(folder / self.FILE)
        for name, value in self.average.items():
            value.copy_(stored[name])
        self.steps = steps
