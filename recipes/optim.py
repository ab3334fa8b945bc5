"""Optimisers and learning-rate schedules: which parameters decay, at which rate each learns, and Muon without DeepSpeed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from recipes.config import ConfigError, Optim, has_deepspeed
from zoo.model import ZooModel
from zoo.naming import nearest

__all__ = ["create_optimizer", "lr_factor", "parameter_groups"]


def parameter_groups(model: ZooModel, optim: Optim) -> list[dict[str, Any]]:
    """Optimiser groups: matrices with weight decay; without it everything the model exempts, and the priors' parameters.

    Exempt are the names of `model.no_weight_decay()` (norms, position embeddings, every prior parameter, SSMax's s)
    and whatever has fewer than two dimensions. Of those, `model.prior_parameters()` learn at `optim.prior_lr_scale`
    times the rate: under Adam a parameter moves by about its rate a step, too little for an exponent θβ in a short run.
    Parameters that `optim.lr_scales` names by the end of their names learn at that multiple of the rate.

    Muon trains the matrices of the layers, at `optim.muon_lr_scale` times the rate: its updates have singular values near 1
    (https://kellerjordan.github.io/posts/muon/). The weight decay of a step is the same.
    """
    exempt = model.no_weight_decay()
    unknown = exempt - {name for name, _ in model.named_parameters()}
    if unknown:
        raise ConfigError(f"no_weight_decay() names no parameters of the model: {', '.join(sorted(unknown))}")
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    scales = _named_scales([name for name, _ in named], optim.lr_scales)
    priors = model.prior_parameters() if optim.prior_lr_scale != 1 else set()
    # The order of groups is part of every checkpoint.
    groups: dict[tuple[float, ...], dict[str, Any]] = {}
    for name, parameter in named:
        is_matrix = parameter.ndim >= 2 and name not in exempt
        settings: dict[str, Any] = {"weight_decay": optim.weight_decay if is_matrix else 0.0}
        scale, is_muon = 1.0, False
        if name in scales:
            scale = scales[name]
            order: tuple[float, ...] = (3, not is_matrix, scale)
            settings["lr"] = optim.lr * scale
        elif optim.name == "muon" and is_matrix and parameter.ndim == 2 and name.startswith("layers."):
            scale, order, is_muon = optim.muon_lr_scale, (4,), True
            settings = {"weight_decay": optim.weight_decay / scale, "lr": optim.lr * scale}
        elif name in priors:
            order, settings["lr"] = (2,), optim.lr * optim.prior_lr_scale
        else:
            order = (0,) if is_matrix else (1,)
        if optim.name == "muon":
            settings["use_muon"] = parameter.use_muon = is_muon  # type: ignore[attr-defined]  # DeepSpeed asks parameters
        groups.setdefault(order, {"params": [], **settings})["params"].append(parameter)
    if muon := groups.get((4,)):
        muon["params"].sort(
            key=lambda p: p.shape, reverse=True
        )  # in DeepSpeed's order, so that either continues the other
    return [groups[order] for order in sorted(groups)]


def _named_scales(names: Sequence[str], scales: Mapping[str, float]) -> dict[str, float]:
    """Multiple of the rate by full name, for scales by the end of names; ConfigError for an end that no parameter has."""
    by_name: dict[str, float] = {}
    for end, scale in scales.items():
        matches = [name for name in names if name == end or name.endswith(f".{end}")]
        if not matches:
            ends = sorted({name.rpartition(".")[2] for name in names})
            raise ConfigError(f"optim.lr_scales: no trained parameter is called {end!r}; {nearest(end, ends)}")
        by_name |= dict.fromkeys(matches, scale)
    return by_name


def create_optimizer(model: ZooModel, optim: Optim) -> torch.optim.Optimizer:
    """AdamW, RAdam or Muon, all with decoupled weight decay, on `parameter_groups`."""
    groups = parameter_groups(model, optim)
    if optim.name == "muon":
        adam = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps}
        groups = [group if group["use_muon"] else adam | group for group in groups]
        if not has_deepspeed():
            return MuonAndAdamW(groups)
        from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

        return MuonWithAuxAdam(groups)
    if optim.name == "adamw":
        return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
    return torch.optim.RAdam(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, decoupled_weight_decay=True)


def lr_factor(step: int, optim: Optim, steps: int) -> float:
    """Learning rate of step `step` (from 0) as a fraction of `optim.lr`.

    (step + 1) / warmup during warm-up, then floor + (1 − floor)·(1 + cos π·t)/2, or linear floor + (1 − floor)·(1 − t), t from
    0 at its end to 1 at the last step. A pure function of the step, so that a resumed run and a run of another length need no
    stored schedule.
    """
    if step < optim.warmup:
        return (step + 1) / optim.warmup
    if optim.schedule == "constant":
        return 1.0
    t = min(1.0, (step - optim.warmup) / max(1, steps - 1 - optim.warmup))
    if optim.schedule == "linear":
        return optim.floor + (1 - optim.floor) * (1 - t)
    return optim.floor + (1 - optim.floor) * 0.5 * (1 + math.cos(math.pi * t))


class MuonAndAdamW(torch.optim.Optimizer):
    """torch's Muon for the groups that say `use_muon`, torch's AdamW for all others, as one optimiser with one state.

    For where DeepSpeed is not installed. torch iterates in bfloat16 and DeepSpeed on the Gram matrix in half or single
    precision, so their steps differ by rounding; the state is DeepSpeed's, and either goes on from the other's.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        muon, adam = ([group for group in groups if group["use_muon"] is is_muon] for is_muon in (True, False))
        self._parts: list[tuple[torch.optim.Optimizer, bool]] = [(torch.optim.Muon(muon), True)] if muon else []
        self._parts += [(torch.optim.AdamW(adam, fused=True), False)] if adam else []
        super().__init__(groups, {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for part, is_muon in self._parts:  # loading a state replaces both
            part.state, part.param_groups = self.state, [g for g in self.param_groups if g["use_muon"] is is_muon]
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, or DeepSpeed's, whose groups lack torch's settings and whose steps are plain numbers."""
        before = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, settings in zip(self.param_groups, before, strict=True):
            group.update({key: value for key, value in settings.items() if key not in group})
        for values in self.state.values():
            if "step" in values:
                values["step"] = torch.as_tensor(values["step"], dtype=torch.float32)
