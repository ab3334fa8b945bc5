"""Muon by plain torch, for where DeepSpeed's is not installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["MuonAndAdamW"]


class MuonAndAdamW(torch.optim.Optimizer):
    """torch's Muon for the groups that say `use_muon`, torch's AdamW for all others, as one optimiser with one state.

    A step of a matrix W (m × n): momentum 0.95 with Nesterov's correction, five Newton–Schulz steps towards the nearest
    orthogonal matrix O, W ← (1 − lr·decay)·W − lr·√max(1, m/n)·O (https://kellerjordan.github.io/posts/muon/). torch iterates
    in bfloat16 and DeepSpeed on the Gram matrix in half or single precision, so their steps differ by rounding; the state is
    DeepSpeed's, and either goes on from the other's.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        muon, adam = ([group for group in groups if group["use_muon"] is is_muon] for is_muon in (True, False))
        self._parts: list[tuple[torch.optim.Optimizer, bool]] = [(torch.optim.Muon(muon), True)] if muon else []
        self._parts += [(torch.optim.AdamW(adam, fused=True), False)] if adam else []
        super().__init__(groups, {})

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ValueError("closure: expected none")
        for part, is_muon in self._parts:  # loading a state replaces both
            part.state, part.param_groups = self.state, [g for g in self.param_groups if g["use_muon"] is is_muon]
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Of this class, or DeepSpeed's, whose groups lack torch's settings and which counts steps in plain numbers."""
        own = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, settings in zip(self.param_groups, own, strict=True):
            for key, value in settings.items():
                group.setdefault(key, value)
        for values in self.state.values():
            if "step" in values:
                values["step"] = torch.as_tensor(values["step"], dtype=torch.float32)
