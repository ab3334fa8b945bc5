"""NaN in queries, keys and values reaches every row that sees it, and no other row by way of the
queries."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.device import DEVICE
from zoo import Positions, create_prior, prior_attention

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice")  # of Triton's interpreter

HEADS = 2
WIDTH = 8
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
COMBINED += [
    pytest.param("triton", call, marks=pytest.mark.gpu) for call in ("causal", "documents", "goat")
]


def heads(length: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, HEADS, length, WIDTH, generator=generator) for _ in range(3)]


def attend(tensors: list[Tensor], kernel: str, *, prior: str | None = None, **options) -> Tensor:
    """(H, T, D) of one batch row."""
    device = DEVICE if kernel == "triton" else "cpu"
    q, k, v = (x.to(device) for x in tensors)
    if "segments" in options:
        options["segments"] = (torch.arange(k.shape[2], device=device) // options["segments"])[None]
    terms = None
    if prior is not None:
        torch.manual_seed(0)
        module = create_prior(
            prior, num_heads=HEADS, **({"train_context": 8} if prior == "goat" else {})
        ).to(device)
        line = Positions.line(k.shape[2])
        terms = module(line.tail(q.shape[2]), line, causal=True)
    return prior_attention(q, k, v, terms, kernel=kernel, **options)[0]


def nan_rows(tensors: list[Tensor], kernel: str, **options) -> list[bool]:
    """Which rows are NaN, all heads and columns of them; fails where only some are."""
    out = attend(tensors, kernel, **options).isnan()
    assert torch.equal(out.all((0, 2)), out.any((0, 2)))
    return out.all((0, 2)).tolist()


def lengths(kernel: str) -> list[int]:
    return [3, 17] if kernel == "triton" else [1, 2, 3, 8, 17, 33]


@pytest.mark.parametrize(("kernel", "call"), COMBINED)
def test_nan_query_is_one_row(kernel: str, call: str) -> None:
    """A query of nan is one row of nan."""
    for length in lengths(kernel):
        q, k, v = heads(length)
        row = length // 2
        q[:, :, row, 3] = math.nan
        assert nan_rows([q, k, v], kernel, **CALLS[call]) == [i == row for i in range(length)], (
            length
        )
        decoded = [q[:, :, row : row + 1], k[:, :, : row + 1], v[:, :, : row + 1]]
        assert nan_rows(decoded, kernel, **CALLS[call]) == [True], length


@pytest.mark.parametrize("what", [1, 2], ids=["key", "value"])
@pytest.mark.parametrize(("kernel", "call"), COMBINED)
def test_nan_key_reaches_its_rows(kernel: str, call: str, what: int) -> None:
    """Every row that sees a key or value of nan is nan."""
    options = CALLS[call]
    for length in lengths(kernel):
        i = torch.arange(length)
        document = options.get("segments", length)
        for column in {0, length - 1}:
            tensors = heads(length)
            tensors[what][:, :, column] = math.nan
            sees = (i >= column) | (not options["causal"])
            sees &= (i - column < options.get("window", length)) & (
                i // document == column // document
            )
            out = torch.tensor(nan_rows(tensors, kernel, **options))
            assert out[sees].all(), (length, column)
            if (
                what == 1
            ):  # a value of NaN reaches rows that do not see it, in torch's attention too: 0 · NaN is NaN
                assert torch.equal(out, sees), (length, column)
