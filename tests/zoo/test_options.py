"""Options that make no sense are refused where they are given, or do no harm: every number of every
prior and encoding."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.zoo.priors_table import OPTIONS, causal_modes, inputs, positions_for
from zoo import KVCache, Positions, list_priors
from zoo.layers import SSMax
from zoo.methods import ENCODINGS, GRID_ENCODINGS, create_grid_position, create_position
from zoo.priors import PRIORS
from zoo.rotary import SCALINGS

WRONG = [math.nan, math.inf, -math.inf, -1, 0, 2.5, "x", True, None, [], torch.tensor(math.nan)]
NUMBERS = ("int", "float", "bool", "tuple[int, int]")


def tries(
    make: Callable[..., Any], options: dict[str, Any], *, but: tuple[str, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """(option = value, what it makes) of every wrong value that is not refused, `but` of names that
    models set."""
    parameters = inspect.signature(make).parameters.values()
    numbers = {p.name for p in parameters if any(kind in str(p.annotation) for kind in NUMBERS)}
    for name in numbers - {*but}:
        for wrong in WRONG:
            try:
                made = make(**(options | {name: wrong}))
            except (ValueError, TypeError) as error:
                assert isinstance(error, TypeError) or str(error)
            else:
                yield f"{name}={wrong!r}", made


def test_prior_options_stay_finite() -> None:
    """A prior refuses an option or is finite."""
    for name in list_priors():
        pos = positions_for(name)
        x = inputs(pos.length)
        for what, prior in tries(PRIORS[name], {"num_heads": 3, **OPTIONS[name]}):
            for causal in causal_modes(name):
                assert prior.log_prior(pos, pos, causal=causal, x=x).isfinite().all(), what
                assert prior(pos, pos, causal=causal, x=x.float()).dense().isfinite().all(), what


GIVEN = {"dim": 16, "head_dim": 8, "num_heads": 2, "train_context": 16, "train_grid": (3, 5)}
ENCODED = [(name, {}) for name in (*ENCODINGS, *GRID_ENCODINGS)]
ENCODED += [("rope", {"scaling": scaling, "factor": 2.0}) for scaling in SCALINGS[1:]]


def test_encoding_options_stay_finite() -> None:
    """An encoding refuses an option or is finite."""
    for name, options in ENCODED:
        method = ENCODINGS.get(name) or GRID_ENCODINGS[name]
        takes = inspect.signature(method.make).parameters
        options = (
            {key: value for key, value in GIVEN.items() if key in takes} | method.fixed | options
        )
        on_grid = name in GRID_ENCODINGS and name not in ENCODINGS
        pos = Positions.grid(3, 5, num_prefix=1) if on_grid else Positions.line(16)
        for what, made in tries(method.make, options, but=("dim", "head_dim", "num_heads")):
            if method.part == "rotary":
                assert made(torch.ones(1, 2, pos.length, 8), pos).isfinite().all(), what
            else:
                assert made(pos, torch.ones(1, pos.length, 16)).isfinite().all(), what


SIZES = {"dim": 16, "num_heads": 2}
MAKERS: list[tuple[Callable[..., Any], dict[str, Any], tuple[str, ...]]] = [
    (create_position, SIZES | {"name": "ggd", "train_context": 8}, ()),
    (create_grid_position, SIZES | {"name": "lookhere", "train_grid": (3, 5)}, ("depth=None",)),
    (SSMax, {"num_heads": 2, "train_context": 8}, ("window=None", "start=None", "start=2.5")),
    (Positions.line, {"length": 4}, ()),
    (Positions.grid, {"height": 3, "width": 5}, ()),
    (Positions.line(4).tail, {}, ()),
    (KVCache, {"num_layers": 1}, ()),
]
ZERO = {"num_layers=0", "offset=0", "num_prefix=0", "capacity=0", "dropout=0"}


def test_a_constructor_takes_no_nonsense() -> None:
    for make, options, nothing in MAKERS:
        switches = [
            p.name
            for p in inspect.signature(make).parameters.values()
            if p.annotation in ("bool", bool)
        ]
        assert {text for text, _ in tries(make, options)} <= {
            *ZERO,
            *nothing,
            *(f"{name}=True" for name in switches),
        }
