"""Priors as numbers: what lies beyond them, and saved models that need no numbers."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.refusals import refuses
from tests.zoo.priors_table import decoded
from zoo import Positions, create_model, load_model
from zoo.priors.table import IMPOSSIBLE, Table


@pytest.mark.parametrize("shape", [(7,), (2, 7)])
def test_table_by_numbers_or_function(shape: tuple[int, ...]) -> None:
    """A table of numbers and of a function."""
    numbers = np.random.default_rng(0).random(shape)
    table = Table(2, values=numbers)
    assert torch.equal(table.values, torch.from_numpy(numbers).expand(2, -1).float())
    assert not table.values.requires_grad
    assert Table(2, values=numbers.tolist(), learnable=True).values.requires_grad
    rates = torch.linspace(0.1, 0.7, len(shape)).double()
    of_function = Table(
        2, values=lambda d: (-rates[:, None] * d).squeeze(0), train_context=16
    ).values
    torch.testing.assert_close(
        of_function, (-rates[:, None] * torch.arange(16)).float().expand(2, -1)
    )


@pytest.mark.parametrize(
    ("beyond", "expected"),
    [("last", [-2.0, -2.0]), ("zero", [IMPOSSIBLE] * 2), ("linear", [-3.0, -12.0])],
)
def test_beyond_the_last_distance(beyond: str, expected: list[float]) -> None:
    prior = Table(1, values=[0.0, -0.5, -2.0], beyond=beyond)
    assert prior.curve(torch.tensor([3.0, 12.0]), causal=True)[0].tolist() == expected
    assert torch.equal(
        prior.curve(torch.tensor([-2.0]), causal=False),
        prior.curve(torch.tensor([2.0]), causal=False),
    )
    impossible = Table(1, values=[-math.inf, 0.0], beyond="zero").log_prior(
        *[Positions.line(5)] * 2, causal=True
    )
    assert impossible.softmax(-1)[0, 0, 4].tolist() == [0, 0, 0, 1, 0]
    assert (
        Table(1, values=[0.0, 1.0], beyond="linear").curve(torch.tensor([9.0]), causal=True).item()
        == 1.0
    )


def test_table_is_learned() -> None:
    """Without numbers a table is learned."""
    model = create_model("text_table_tiny", num_layers=1, train_context=20)
    prior = model.layers[0].attention.prior
    assert prior.values.shape == (4, 20)
    assert prior.values.requires_grad
    assert not prior.values.any()
    model(torch.randint(0, 256, (1, 30))).square().sum().backward()
    assert prior.values.grad.abs().sum() > 0


def test_bad_tables_are_named() -> None:
    for options, words in [
        ({"values": [1.0], "beyond": "lats"}, "did you mean 'last'"),
        ({"values": [[1.0]] * 3}, r"\(N,\) or \(2, N\), got \(3, 1\)"),
        ({"values": [[0.0, 1.0], [1.0, math.nan]]}, r"finite or −∞, got nan at \[1, 1\]"),
        ({"values": [-math.inf]}, "finite at least once"),
        ({"values": "pi.npy"}, "array of numbers.*got str"),
        ({"values": lambda d: d[1:], "length": 5}, "length 5 cannot hold 4 numbers"),
        ({}, "needs its length"),
    ]:
        refuses(words, Table, 2, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("table", {"values": -0.3 * np.arange(40.0), "beyond": "linear"}),
        ("table+key_bias", {"table": {"values": [0.0, -1.0]}}),
    ],
)
@torch.no_grad()
def test_saved_table_needs_no_numbers(name: str, options: dict[str, Any], tmp_path) -> None:
    """A saved model needs no numbers."""
    model = create_model(f"text_{name}_tiny", num_layers=2, position_options=options).eval()
    tokens = torch.randint(0, 256, (2, 40))
    expected = model(tokens)
    json.dumps(model.config.position_options)
    model.save_pretrained(tmp_path / "first")
    for folder in ("first", "second"):
        model = load_model(tmp_path / folder).eval()
        assert torch.equal(model(tokens), expected)
        assert not any(
            p.requires_grad for n, p in model.named_parameters() if n.endswith(".values")
        )
        model.save_pretrained(tmp_path / "second")
    torch.testing.assert_close(decoded(model, tokens), expected, atol=1e-4, rtol=1e-4)
