"""Position methods by the name they have in model names: a prior, or an encoding beside the uniform prior.

A model asks for `create_position("ggd", ...)` and gets the four parts a method may have. On a line of tokens every 1-D prior
is a method under its own name; what is not a prior is a line of `ENCODINGS`. On a grid of patches the methods are `GRIDS`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from zoo.encodings import Learned, Learned2d, Rotary, Rotary2d, Sinusoidal, Sinusoidal2d
from zoo.naming import did_you_mean
from zoo.priors import PRIORS, Prior, create_prior

__all__ = ["Position", "create_grid_position", "create_position", "list_grid_positions", "list_positions"]


@dataclass(frozen=True)
class Position:
    """The parts of one layer's position method; `embedding` belongs to the model and is made once.

    Attributes:
        prior: the log-prior of attention; uniform where the method is not one.
        rotary: turns q and k, or None.
        embedding: adds to the token embedding, or None.
        window: sliding window in tokens, or None.
    """

    prior: Prior
    rotary: nn.Module | None = None
    embedding: nn.Module | None = None
    window: int | None = None


@dataclass(frozen=True)
class Method:
    """A method: which part `make` makes, options that its name fixes, and whether attention is cut to the training context."""

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

GRIDS: dict[str, Method] = {
    "nope": Method("prior", PRIORS["uniform"]),
    "goat": Method("prior", PRIORS["goat2d"]),
    "spectral2d": Method("prior", PRIORS["spectral2d"]),
    "key_bias": Method("prior", PRIORS["key_bias2d"]),
    "ggd2d": Method("prior", PRIORS["ggd2d"], {"form": "isotropic"}),
    "ggd2d_separable": Method("prior", PRIORS["ggd2d"], {"form": "separable"}),
    "alibi": Method("prior", PRIORS["alibi2d"]),
    "t5": Method("prior", PRIORS["t5_2d"]),
    "kerple": Method("prior", PRIORS["kerple2d"]),
    "fire": Method("prior", PRIORS["fire2d"]),
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
        train_context: tokens seen in training; given to what asks for it.
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
    valid = [p for p in parameters if p not in taken or p in ("train_context", "train_grid")]
    for option in options:
        if option not in valid:
            hint = did_you_mean(option, valid)
            raise ValueError(f"{name!r} has no option {option!r}; {hint}It takes: {', '.join(valid) or 'none'}")
    missing = [p for p, kind in parameters.items() if kind.default is kind.empty and p not in taken | options]
    if missing:
        raise ValueError(f"{name!r} needs the option {missing[0]!r}")
    made = method.make(**taken | options)
    if isinstance(made, Prior):
        return Position(made)
    parts: dict[str, Any] = {method.part: made}
    return Position(create_prior("uniform", num_heads=num_heads), **parts)
