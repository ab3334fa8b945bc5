"""Position methods by the name they have in model names: a prior, or an encoding beside the uniform prior.

A model asks for `create_position("ggd", ...)` and gets the four parts a method may have. What is not a prior is a line of
`ENCODINGS`; every prior is a method under its own name, and `nope` is the uniform one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from zoo.encodings import Learned, Rotary, Sinusoidal
from zoo.naming import did_you_mean
from zoo.priors import PRIORS, Prior, create_prior

__all__ = ["Position", "create_position", "list_positions"]


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
class Encoding:
    """A method that is not a prior: which part it makes, and whether attention is cut to the training context."""

    part: str
    make: Callable[..., nn.Module]
    windowed: bool = False


# `local` is RoPE whose queries see the last train_context keys only.
ENCODINGS: dict[str, Encoding] = {
    "rope": Encoding("rotary", Rotary),
    "local": Encoding("rotary", Rotary, windowed=True),
    "sinusoidal": Encoding("embedding", Sinusoidal),
    "learned": Encoding("embedding", Learned),
}


def list_positions() -> list[str]:
    """Methods of a line of tokens: every 1-D prior, and the encodings."""
    priors = ["nope" if name == "uniform" else name for name in PRIORS if not name.endswith("2d")]
    return sorted([*priors, *ENCODINGS])


def create_position(
    name: str, *, dim: int, num_heads: int, train_context: int, options: dict[str, Any] | None = None
) -> Position:
    """The parts of a position method for one layer.

    Args:
        name: one of `list_positions()`.
        dim: C, the model's width.
        num_heads: H.
        train_context: tokens seen in training; given to what asks for it.
        options: the method's own options, as its class documents them.

    Raises:
        ValueError: for an unknown method or option.
    """
    if name not in list_positions():
        hint = did_you_mean(name, list_positions())
        raise ValueError(f"unknown position method {name!r}; {hint}Known: {', '.join(list_positions())}")
    given = {"dim": dim, "d_model": dim, "head_dim": dim // num_heads, "train_context": train_context}
    options = options or {}
    encoding = ENCODINGS.get(name)
    if encoding is None:
        prior = "uniform" if name == "nope" else name
        return Position(create_prior(prior, num_heads=num_heads, **_wanted(PRIORS[prior], given), **options))
    taken = _wanted(encoding.make, given)
    valid = [p for p in inspect.signature(encoding.make).parameters if p not in given]
    for option in options:
        if option not in valid:
            raise ValueError(f"{name!r} has no option {option!r}; it takes: {', '.join(valid) or 'none'}")
    parts: dict[str, Any] = {encoding.part: encoding.make(**taken, **options)}
    window = train_context if encoding.windowed else None
    return Position(create_prior("uniform", num_heads=num_heads), window=window, **parts)


def _wanted(make: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """What `make` takes of the model's own numbers."""
    parameters = inspect.signature(make).parameters
    return {key: value for key, value in given.items() if key in parameters}
