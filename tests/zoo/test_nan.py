"""NaN in queries, keys and values reaches every row that sees it, and no other row by way of the queries."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.device import DEVICE
from zoo import Positions, create_prior, prior_attention

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice")  # of Triton's interpreter

HEADS, WIDTH = 2, 8
CALLS = {
    "causal": {"causal": True},
    "bidirectional": {"causal": False},
    "window": {"causal": True, "window": 1},
    "documents": {"causal": True, "segments": 3},
    "ggd": {"causal": True, "prior": "ggd"},
    "goat": {"causal": True, "prior": "goat"},
}
# Each call by one kernel or two, each kernel with two calls or three.
COMBINED = [
    ("reference", "causal"),
    ("sdpa", "causal"),
    ("sdpa", "bidirectional"),
    ("sdpa", "goat"),
    ("toeplitz", "window"),
    ("toeplitz", "ggd"),
    ("auto", "bidirectional"),
    ("auto", "documents"),
]
COMBINED += [pytest.param("triton", call, marks=pytest.mark.gpu) for call in ("causal", "documents", "goat")]


def heads(length: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, HEADS, length, WIDTH, generator=generator) for _ in range(3)]


def nan_rows(q: Tensor, k: Tensor, v: Tensor, kernel: str, *, prior: str | None = None, **options) -> list[bool]:
    """Which rows are NaN, all heads and columns of them; raises where only some are."""
    keys, queries = k.shape[2], q.shape[2]
    if "segments" in options:
        options["segments"] = (torch.arange(keys) // options["segments"])[None]
    device = DEVICE if kernel == "triton" else "cpu"
    terms = None
    if prior is not None:
        made = create_prior(prior, num_heads=HEADS, **({"train_context": 8} if prior == "goat" else {})).to(device)
        line = Positions.line(keys)
        terms = made(line.tail(queries), line, causal=True)
    q, k, v = (x.to(device) for x in (q, k, v))
    if kernel == "triton" and "segments" in options:
        options["segments"] = options["segments"].to(device)
    found = prior_attention(q, k, v, terms, kernel=kernel, **options)[0].isnan()
    assert torch.equal(found.all((0, 2)), found.any((0, 2)))
    return found.all((0, 2)).tolist()


def lengths(kernel: str) -> list[int]:
    return [3, 17] if kernel == "triton" else [1, 2, 3, 8, 17, 33]


@pytest.mark.parametrize(("kernel", "call"), COMBINED)
def test_a_query_of_nan_is_one_row_of_nan(kernel: str, call: str) -> None:
    for length in lengths(kernel):
        q, k, v = heads(length)
        row = length // 2
        q[:, :, row, 3] = math.nan
        expected = [i == row for i in range(length)]
        assert nan_rows(q, k, v, kernel, **CALLS[call]) == expected, length
        last = nan_rows(q[:, :, row : row + 1], k[:, :, : row + 1], v[:, :, : row + 1], kernel, **CALLS[call])
        assert last == [True], length


@pytest.mark.parametrize("what", [1, 2], ids=["key", "value"])
@pytest.mark.parametrize(("kernel", "call"), COMBINED)
def test_every_row_that_sees_a_key_or_value_of_nan_is_nan(kernel: str, call: str, what: int) -> None:
    options = CALLS[call]
    for length in lengths(kernel):
        for column in {0, length - 1}:
            given = heads(length)
            given[what][:, :, column] = math.nan
            found = nan_rows(*given, kernel, **options)
            i = torch.arange(length)
            sees = (i >= column) if options["causal"] else torch.ones(length, dtype=torch.bool)
            sees &= (i - column < options.get("window", length)) & (
                i // options.get("segments", length) == column // options.get("segments", length)
            )
            assert all(got for got, seen in zip(found, sees.tolist(), strict=True) if seen), (length, column)


@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
def test_rows_that_see_nothing_are_zero_beside_a_row_of_nan(kernel: str) -> None:
    q, k, v = heads(6)
    q[:, :, 1] = math.nan
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    mask[:, :, 2:4] = False
    out = prior_attention(q, k, v, causal=False, mask=mask, kernel=kernel)[0]
    assert out[:, 1].isnan().all() and not out[:, [0, 2, 3, 4, 5]].isnan().any()
    assert not out[:, 2:4].any() and out[:, 4:].all()
