"""`optimizer` and `scheduler` of a DeepSpeed file as settings of a recipe, where both mean the same.

The recipe's own optimiser trains, with its parameter groups: a file says which one, and its numbers. "auto", and whatever a
file leaves out, is the recipe's value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from zoo.naming import nearest

__all__ = ["SECTIONS", "Claim", "claims"]


class Claim(NamedTuple):
    """A key of the file, and the recipe's setting that it says a value of."""

    key: str
    setting: str
    value: Any


@dataclass(frozen=True)
class _Kind:
    """What a type of a section means.

    Attributes:
        means: recipe settings that follow from the type itself.
        same: parameters, and the recipe setting that each is.
        only: parameters that have one value here.
    """

    means: Mapping[str, Any]
    same: Mapping[str, str]
    only: Mapping[str, Any] = field(default_factory=dict)


_ADAM = {name: f"optim.{name}" for name in ("lr", "betas", "eps", "weight_decay")}
# Under either name DeepSpeed decouples weight decay unless adam_w_mode is false. torch's Adam is what a recipe has.
_ADAMW = _Kind(
    {"optim.name": "adamw"}, _ADAM, {"adam_w_mode": True, "torch_adam": True, "bias_correction": True, "amsgrad": False}
)
_WARM_UP = {"warmup_num_steps": "optim.warmup", "warmup_max_lr": "optim.lr"}
_FROM_ZERO = {"warmup_min_lr": 0, "warmup_type": "linear", "last_batch_iteration": -1}
SECTIONS: dict[str, dict[str, _Kind]] = {
    "optimizer": {"AdamW": _ADAMW, "Adam": _ADAMW},
    "scheduler": {
        "WarmupLR": _Kind({"optim.schedule": "constant"}, _WARM_UP, _FROM_ZERO),
        "WarmupDecayLR": _Kind(
            {"optim.schedule": "linear", "optim.floor": 0.0}, _WARM_UP | {"total_num_steps": "train.steps"}, _FROM_ZERO
        ),
        "WarmupCosineLR": _Kind(
            {"optim.schedule": "cosine"},
            {"warmup_num_steps": "optim.warmup", "total_num_steps": "train.steps", "cos_min_ratio": "optim.floor"},
            {"warmup_min_ratio": 0, "warmup_type": "linear", "last_batch_iteration": -1},
        ),
    },
}
_INSTEAD = {
    "optimizer": "or remove the section and set optim.name (adamw, radam or muon), optim.lr, …",
    "scheduler": "or remove the section and set optim.schedule, optim.warmup, …",
}


def claims(name: str, section: Any) -> Iterator[Claim]:
    """What a section of the file says of the recipe.

    Raises:
        ValueError: for a type, a parameter or a value that has no counterpart; it names the recipe's setting to use.
    """
    kinds, instead = SECTIONS[name], _INSTEAD[name]
    if not isinstance(section, dict) or not isinstance(section.get("params", {}), dict):
        raise ValueError(f"{name}: expected an object with 'type' and 'params'")
    for key in section:
        if key not in ("type", "params"):
            raise ValueError(f"{name}.{key} has no counterpart in the recipe: remove it")
    given = str(section.get("type"))
    found = [known for known in kinds if known.lower() == given.lower()]
    if not found:
        raise ValueError(f"{name}.type={given!r} has no counterpart in the recipe; {nearest(given, kinds)}; {instead}")
    kind = kinds[found[0]]
    for setting, value in kind.means.items():
        yield Claim(f"{name}.type", setting, value)
    for key, value in section.get("params", {}).items():
        path = f"{name}.params.{key}"
        if key in kind.same:
            if value != "auto":
                yield Claim(path, kind.same[key], tuple(value) if isinstance(value, list) else value)
        elif key not in kind.only:
            raise ValueError(f"{path} has no counterpart in the recipe; {nearest(key, kind.same)}; {instead}")
        elif value not in ("auto", kind.only[key]):
            raise ValueError(f"{path}={value!r}: the recipe's own has {kind.only[key]!r} alone; write that, {instead}")
