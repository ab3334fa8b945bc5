"""Position methods by the name they have in model names: a prior, or an encoding beside the uniform prior.

`create_position("ggd", ...)` returns the four parts a method may have. On a line of tokens every 1-D prior is a method under
its own name; methods that are not priors are listed in `ENCODINGS`. On a grid of patches a prior NAME2d is the method NAME,
apart from the exceptions in `GRID_NAMES`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from zoo.encodings import Learned, Learned2d, Rotary, Rotary2d, Sinusoidal, Sinusoidal2d
from zoo.naming import check_options, did_you_mean
from zoo.priors import PRIORS, Prior, create_prior

__all__ = ["Position", "create_grid_position", "create_position", "list_grid_positions", "list_positions"]


@dataclass(frozen=True)
class Position:
    """The parts of one layer's position method; `embedding` belongs to the model and is made once.

    Attributes:
        prior: the log-prior of attention; uniform if the method is not a prior.
        rotary: rotates q and k, or None.
        embedding: adds to the token embedding, or None.
        window: sliding window in tokens, or None.
    """

    prior: Prior
    rotary: nn.Module | None = None
    embedding: nn.Module | None = None
    window: int | None = None


@dataclass(frozen=True)
class Method:
    """A method: the part that `make` returns, options its name fixes, and whether attention is cut to the training context."""

    part: str
    make: Callable[..., nn.Module]
    fixed: dict[str, Any] = field(default_factory=dict)
    windowed: bool = False


# `local` is RoPE whose queries see the last train_context keys only.
ENCODINGS: dict[str, Method] = {
    "rope": Method("rotary", Rotary),
    "local": Method("rotary", Rotary, windowed=True),
    "sinusoidal": Method("embedding", Sinusoidal),
    "learned": Method("embedding", Learned),
}
LINES: dict[str, Method] = {
    "nope" if name == "uniform" else name: Method("prior", prior)
    for name, prior in PRIORS.items()
    if not name.endswith("2d")
} | ENCODINGS

# The methods of 2-D priors whose names do not follow the rule, with the options that a name fixes.
GRID_NAMES: dict[str, dict[str, dict[str, Any]]] = {
    "spectral2d": {"spectral2d": {}},
    "ggd2d": {"ggd2d": {"form": "isotropic"}, "ggd2d_separable": {"form": "separable"}},
}
GRIDS: dict[str, Method] = {
    "nope": Method("prior", PRIORS["uniform"]),
    **{
        method: Method("prior", prior, fixed)
        for name, prior in PRIORS.items()
        if name.endswith("2d")
        for method, fixed in GRID_NAMES.get(name, {name.removesuffix("2d").removesuffix("_"): {}}).items()
    },
    "rope2d_axial": Method("rotary", Rotary2d, {"form": "axial"}),
    "rope2d_mixed": Method("rotary", Rotary2d, {"form": "mixed"}),
    "sinusoidal": Method("embedding", Sinusoidal2d),
    "learned": Method("embedding", Learned2d),
}


def list_positions() -> list[str]:
    """Methods of a line of tokens: every 1-D prior, and the encodings."""
    return sorted(LINES)


def list_grid_positions() -> list[str]:
    """Methods of a grid of patches."""
    return sorted(GRIDS)


def create_position(
    name: str, *, dim: int, num_heads: int, train_context: int, options: dict[str, Any] | None = None
) -> Position:
    """The parts of a position method for one layer of a model along a line.

    Args:
        name: one of `list_positions()`.
        dim: C, the model's width.
        num_heads: H.
        train_context: tokens seen in training; passed to methods that take it.
        options: the method's own options, as its class documents them.

    Raises:
        ValueError: for an unknown method or option.
    """
    given = {"dim": dim, "d_model": dim, "head_dim": dim // num_heads, "train_context": train_context}
    position = _create(LINES, name, num_heads, given, options or {})
    return position if not LINES[name].windowed else Position(position.prior, position.rotary, window=train_context)


def create_grid_position(
    name: str, *, dim: int, num_heads: int, train_grid: tuple[int, int], options: dict[str, Any] | None = None
) -> Position:
    """The parts of a position method for one layer of a model over patches; `train_grid` is (height, width) in patches.

    The rest, and errors, as in `create_position`; names are those of `list_grid_positions()`.
    """
    given = {"dim": dim, "head_dim": dim // num_heads, "train_grid": tuple(train_grid)}
    return _create(GRIDS, name, num_heads, given, options or {})


def _create(
    methods: dict[str, Method], name: str, num_heads: int, given: dict[str, Any], options: dict[str, Any]
) -> Position:
    if name not in methods:
        raise ValueError(
            f"unknown position method {name!r}; {did_you_mean(name, methods)}Known: {', '.join(sorted(methods))}"
        )
    method = methods[name]
    parameters = inspect.signature(method.make).parameters
    taken = {key: value for key, value in {**given, "num_heads": num_heads}.items() if key in parameters} | method.fixed
    defaults = {"train_context", "train_grid"} & taken.keys()
    check_options(repr(name), method.make, options, fixed=taken.keys() - defaults, defaults=defaults)
    made = method.make(**taken | options)
    if isinstance(made, Prior):
        return Position(made)
    parts: dict[str, Any] = {method.part: made}
    return Position(create_prior("uniform", num_heads=num_heads), **parts)
