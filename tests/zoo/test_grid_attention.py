"""Attention with the table of a grid: rows of its matrix without an index, in blocks, and what they cost."""

from __future__ import annotations

import pytest
import torch

from zoo import Positions, RelativeTable, prior_attention
from zoo.attention.base import AttentionCall
from zoo.attention.sdpa import SdpaKernel
from zoo.priors import PriorTerms

HEADS = 3
GRIDS = [
    Positions.grid(3, 5, num_prefix=2),
    Positions.grid(5, 2),
    Positions.grid(1, 4, num_prefix=5),
    Positions.grid(1, 1),
]
LINE = Positions.line(7, offset=4), Positions.line(11)


def tables() -> list[RelativeTable]:
    """On grids, on a line, and one that only its codes describe."""

    def numbers(count: int) -> torch.Tensor:
        return torch.randn(HEADS, count, dtype=torch.float64, requires_grad=True)

    torch.manual_seed(0)
    found = [RelativeTable.grid(numbers((2 * p.shape[0] - 1) * (2 * p.shape[1] - 1)), p) for p in GRIDS]
    found.append(RelativeTable.line(numbers(17), *LINE, center=6))
    codes = torch.tensor([3, 0, 2, 5]), torch.tensor([1, 4, 0])
    return [*found, RelativeTable(numbers(10), *codes, center=4, num_prefix=0)]


@pytest.mark.parametrize("n", range(6))
def test_rows_are_those_of_the_matrix_with_their_gradient(n: int) -> None:
    """Any rows, whole or cut inside a row of patches, any number of keys, and a buffer that held something else."""
    table = tables()[n]
    dense = table.dense()
    queries, keys = dense.shape[2:]
    for start in range(0, queries, 2):
        for stop in {start + 1, (start + queries + 1) // 2, queries} - {start}:
            rows = table.rows(start, stop, keys)
            assert torch.equal(rows, dense[:, :, start:stop])
            weight = torch.randn_like(rows)
            ours, oracle = (
                torch.autograd.grad((r * weight).sum(), table.table, retain_graph=True)[0]
                for r in (rows, dense[:, :, start:stop])
            )
            torch.testing.assert_close(ours, oracle, rtol=0, atol=1e-12)
            with torch.no_grad():
                out = torch.full_like(rows[:, 1:], torch.nan)
                some = table.of_heads(slice(1, HEADS)).unroll().rows(start, stop, keys - 1, out=out)
                assert torch.equal(some, dense[:, 1:, start:stop, : keys - 1])


def test_blocks_keep_to_their_limit() -> None:
    """The mask of a block, at every size and with documents that differ, and few blocks where one is enough."""
    for grid, batch, documents, most in ((14, 64, False, 1), (64, 1, False, 40), (24, 8, True, 8)):
        pos = Positions.grid(grid, grid, num_prefix=1)
        table = RelativeTable.grid(torch.zeros(6, (2 * grid - 1) ** 2), pos)
        q = torch.zeros(batch, 6, pos.length, 1)
        segments = torch.zeros(batch, pos.length, dtype=torch.long) if documents else None
        rows, heads = SdpaKernel().block_size(AttentionCall(q, q, q, PriorTerms(table=table), False, None, segments))
        rows = min(rows, pos.length)
        assert 4 * rows * heads * pos.length * (batch if documents else 1) <= 32 << 20
        assert -(-pos.length // rows) * -(-6 // heads) <= most


def test_a_strong_log_prior_is_not_rounded_to_half_precision() -> None:
    """Two keys whose log-priors are −100 and −100.2 must not tie: bfloat16 would read both as −100."""
    v = torch.tensor([1.0, 0.0]).view(1, 1, 2, 1).expand(-1, -1, -1, 8).bfloat16()
    k = torch.zeros(1, 1, 2, 8, dtype=torch.bfloat16)
    grid = RelativeTable.grid(torch.tensor([[-100.2, -100.0, -300.0]]), Positions.grid(1, 2))  # dx = −1, 0, 1
    line = RelativeTable(
        torch.tensor([[0.0, -100.2, -100.0, 0.0]]), torch.tensor([1]), torch.tensor([0, 1]), 1, origin=2
    )
    for table, kernel in ((grid, "sdpa"), (line, "sdpa"), (line, "toeplitz")):
        q, terms = k[:, :, : len(table.q_code)], PriorTerms(table=table)
        for tracked in (False, True):
            out = prior_attention(q.detach().requires_grad_(tracked), k, v, terms, causal=table is line, kernel=kernel)
            assert out.dtype == torch.bfloat16
            assert abs(out[0, 0, 0, 0].item() - 0.54983) < 2e-3  # 1 / (1 + e^−0.2)
