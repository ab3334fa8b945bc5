"""Base class of all models: parameter groups for the optimiser, saving and loading."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from zoo.encodings import Rotary2d
from zoo.priors.base import Prior

__all__ = ["ZooModel"]


class ZooModel(nn.Module):
    """A model built by `type(model)(config)` from a frozen, JSON-serialisable dataclass.

    Attributes:
        config: all settings of the model.
        config_class: its dataclass.
    """

    config_class: ClassVar[type]
    config: Any

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that must not decay: norms, biases, SSMax's s, tokens, rotations, positions, all of priors."""
        owners = [name for name, module in self.named_modules() if isinstance(module, Prior | Rotary2d)]
        owners += ["position_embedding", "prefix_tokens"]
        return {
            name
            for name, parameter in self.named_parameters()
            if parameter.ndim < 2 or any(name == owner or name.startswith(owner + ".") for owner in owners)
        }

    def prior_parameters(self) -> set[str]:
        """Names of per-head, per-frequency and per-bucket parameters of priors and rotations, and SSMax's s; no linear."""
        layers = {name for name, module in self.named_modules() if isinstance(module, nn.Linear)}
        return {
            name
            for name, _ in self.named_parameters()
            if {"prior", "rotary", "ssmax"} & set(name.split(".")) and name.rpartition(".")[0] not in layers
        }

    def storable_state(
        self, dtype: torch.dtype | None = None, *, state: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """The state dict as it is stored: `dtype` casts matrices; vectors, priors and positions keep their dtype.

        Tensors in `state` replace the model's of that name, for example with an optimiser's float32 copies of bf16 weights.
        """
        keep, own = self.no_weight_decay(), self.state_dict()
        if unknown := sorted(set(state or {}) - set(own)):
            raise ValueError(f"the model has no tensors named {', '.join(unknown)}")
        return {
            name: (tensor if dtype is None or name in keep or tensor.ndim < 2 else tensor.to(dtype)).contiguous()
            for name, tensor in (own | (state or {})).items()
        }

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        state: dict[str, Tensor] | None = None,
    ) -> None:
        """Write config.json and model.safetensors: `storable_state(dtype, state=state)`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.storable_state(dtype, state=state), folder / "model.safetensors.part", metadata={"format": "pt"})
        (folder / "config.json.part").write_text(json.dumps(asdict(self.config), indent=2) + "\n")
        for name in ("model.safetensors", "config.json"):
            os.replace(folder / f"{name}.part", folder / name)

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str], **overrides: Any) -> Self:
        """The model that `save_pretrained` wrote; `overrides` replace entries of its config.

        Raises:
            FileNotFoundError: if one of the two files is missing.
            ValueError: for unknown config entries, or weights that do not match the config.
        """
        folder = Path(folder)
        missing = [name for name in ("config.json", "model.safetensors") if not (folder / name).is_file()]
        if missing:
            raise FileNotFoundError(f"{folder} is not a saved model: it lacks {' and '.join(missing)}")
        config = json.loads((folder / "config.json").read_text()) | overrides
        unknown = sorted(set(config) - {f.name for f in fields(cls.config_class)})
        if unknown:
            raise ValueError(f"{folder / 'config.json'} has entries this version does not know: {', '.join(unknown)}")
        model = cls(cls.config_class(**config))
        try:
            model.load_state_dict(load_file(folder / "model.safetensors"))
        except RuntimeError as error:
            raise ValueError(f"the weights in {folder} do not fit its config.json: {error}") from error
        return model
