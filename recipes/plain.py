"""The engine of plain torch, where DeepSpeed is not installed: the losses and weights of its one rank at ZeRO 0.

In float32 they are equal to the bit, but for Muon (`recipes.optim`). In bfloat16 there are float32 copies of the weights, as
in DeepSpeed's optimiser, which rounds otherwise where it clips. Checkpoints have the form of DeepSpeed's at stage 0: either
engine continues the other's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from recipes.engine import Engine
from zoo.model import ZooModel

__all__ = ["PlainEngine"]

STATES = "mp_rank_00_model_states.pt"  # DeepSpeed's name


class PlainEngine(Engine):
    """`Engine` without DeepSpeed: one rank, stage 0, fp32 or bf16."""

    def _prepare(
        self,
        model: ZooModel,
        optimizer: torch.optim.Optimizer,
        schedule: torch.optim.lr_scheduler.LRScheduler,
        **_: bool,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._steps, self._micro = 0, 0
        self._groups: list[list[torch.nn.Parameter]] = []  # in bf16: what the model computes with, group by group
        if self.plan.recipe.train.precision == "bf16":
            model.bfloat16()
            for group in optimizer.param_groups:
                self._groups.append(group["params"])
                group["params"] = [p.detach().clone().float().requires_grad_() for p in group["params"]]

    @property
    def model(self) -> ZooModel:
        return self._model

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def train(self, mode: bool = True) -> None:
        self._model.train(mode)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / (self.plan.recipe.train.accumulation or 1)).backward()

    def step(self) -> float | None:
        train = self.plan.recipe.train
        self._micro += 1
        if self._micro % (train.accumulation or 1):
            return None
        for copy, parameter in self._copies():
            copy.grad = torch.zeros_like(copy) if parameter.grad is None else parameter.grad.float()
        copies = {id(parameter): copy for copy, parameter in self._copies()}
        trained = [p for p in (copies.get(id(p), p) for p in self._model.parameters()) if p.grad is not None]
        norms = [p.grad.norm() for p in trained if p.grad is not None]
        norm = torch.stack(norms).pow(2).sum().pow(0.5)  # in DeepSpeed's order of operations
        if train.clip:
            torch.nn.utils.clip_grads_with_norm_(trained, train.clip, norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            for copy, parameter in self._copies():
                parameter.copy_(copy)
        self._model.zero_grad()
        self._schedule.step()
        self._steps += 1
        if self.average is not None:
            self.average.update(self._model)
        return float(norm)

    def _copies(self) -> list[tuple[torch.Tensor, torch.nn.Parameter]]:
        """(float32 copy, parameter) of all that is trained in bf16."""
        pairs = zip(self._optimizer.param_groups, self._groups, strict=False)  # no groups in fp32
        return [pair for group, own in pairs for pair in zip(group["params"], own, strict=True)]

    def _masters(self) -> dict[str, torch.Tensor]:
        copies = {id(parameter): copy.detach() for copy, parameter in self._copies()}
        return {name: copies[id(p)] for name, p in self._model.named_parameters() if id(p) in copies}

    def _write(self, folder: Path, state: dict[str, Any]) -> None:
        optimizer: dict[str, Any] = self._optimizer.state_dict()
        if self._groups:
            copies = [group["params"] for group in self._optimizer.param_groups]
            scale = {"dynamic_loss_scale": False, "cur_scale": 1.0, "cur_iter": self._steps}
            optimizer = {**scale, "optimizer_state_dict": optimizer, "fp32_groups": copies}
        counts = {"global_steps": self._steps, "skipped_steps": 0, "dp_world_size": 1, "mp_world_size": 1}
        states = {
            "module": self._model.state_dict(),
            "optimizer": optimizer,
            "lr_scheduler": self._schedule.state_dict(),
        }
        folder.mkdir(parents=True)
        torch.save({**states, **counts, "priorzoo": state}, folder / STATES)

    def _read(self, folder: Path) -> dict[str, Any]:
        stored = torch.load(folder / STATES, map_location=self.ranks.device, weights_only=True)
        self._model.load_state_dict(stored["module"])
        optimizer = stored["optimizer"]
        with torch.no_grad():
            for group, copies in zip(self._optimizer.param_groups, optimizer.get("fp32_groups", ()), strict=False):
                for ours, theirs in zip(group["params"], copies, strict=True):
                    ours.copy_(theirs)
        self._optimizer.load_state_dict(optimizer.get("optimizer_state_dict", optimizer))
        self._schedule.load_state_dict(stored["lr_scheduler"])
        self._steps = stored["global_steps"]
        return stored["priorzoo"]
