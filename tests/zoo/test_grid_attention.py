"""Attention with the table of a grid: rows of its matrix without an index, in blocks, and what they cost."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.zoo.priors_table import GRID, make
from zoo import Positions, RelativeTable, prior_attention
from zoo.attention import Kernel
from zoo.attention.sdpa import SdpaKernel
from zoo.priors import Prior, PriorTerms

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


def call(prior: Prior, pos: Positions, kernel: str | Kernel) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Output and the gradients of q, k, v and every parameter."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, HEADS, pos.length, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    leaves = [q, k, v, *(p for p in prior.parameters() if p.requires_grad)]
    scale = torch.linspace(0.5, 2, HEADS * pos.length, dtype=torch.float64).view(HEADS, -1)
    out = prior_attention(q, k, v, prior(pos, pos, causal=False), causal=False, query_scale=scale, kernel=kernel)
    grads = torch.autograd.grad(out.sin().sum(), leaves, allow_unused=True)
    return out, [torch.zeros(()) if g is None else g for g in grads]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "pos"), [(name, GRIDS[n % 3]) for n, name in enumerate(GRID)], ids=str)
def test_every_prior_on_a_grid_in_blocks(name: str, pos: Positions) -> None:
    """A prior registered today is covered today, with every gradient; without gradients, in a buffer, it is the same."""
    prior = make(name)
    expected, expected_grads = call(prior, pos, "reference")
    kernel = SdpaKernel(small_limit=4 * pos.length, block_rows=2)
    out, grads = call(prior, pos, kernel)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-11)
    for got, truth in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(got, truth, rtol=1e-8, atol=1e-10)
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, HEADS, pos.length, 8, dtype=torch.float64) for _ in range(3))
    scale = torch.linspace(0.5, 2, HEADS * pos.length, dtype=torch.float64).view(HEADS, -1)
    with torch.no_grad():
        again = prior_attention(q, k, v, prior(pos, pos, causal=False), causal=False, query_scale=scale, kernel=kernel)
    torch.testing.assert_close(again, expected, rtol=1e-9, atol=1e-11)


def test_blocks_keep_to_their_limit() -> None:
    """The mask of a block, at every size and with documents that differ, and few blocks where one is enough."""
    from zoo.attention.base import AttentionCall

    for grid, batch, documents, most in ((14, 64, False, 1), (24, 8, False, 1), (64, 1, False, 40), (24, 8, True, 8)):
        pos = Positions.grid(grid, grid, num_prefix=1)
        table = RelativeTable.grid(torch.zeros(6, (2 * grid - 1) ** 2), pos)
        q = torch.zeros(batch, 6, pos.length, 1)
        segments = torch.zeros(batch, pos.length, dtype=torch.long) if documents else None
        rows, heads = SdpaKernel().block_size(AttentionCall(q, q, q, PriorTerms(table=table), False, None, segments))
        rows = min(rows, pos.length)
        assert 4 * rows * heads * pos.length * (batch if documents else 1) <= 32 << 20
        assert -(-pos.length // rows) * -(-6 // heads) <= most


def test_a_strong_log_prior_of_a_grid_is_not_rounded_to_half_precision() -> None:
    """Two patches whose log-priors are −100 and −100.2 must not tie: bfloat16 would read both as −100."""
    pos = Positions.grid(1, 2)
    table = RelativeTable.grid(torch.tensor([[-100.2, -100.0, -300.0]]), pos)  # dx = −1, 0, 1
    q = torch.zeros(1, 1, 2, 8, dtype=torch.bfloat16)
    v = torch.tensor([1.0, 0.0]).view(1, 1, 2, 1).expand(-1, -1, -1, 8).bfloat16()
    for tracked in (False, True):
        out = prior_attention(q.requires_grad_(tracked), q, v, PriorTerms(table=table), causal=False)
        assert out.dtype == torch.bfloat16
        assert out[0, 0, 0, 0].item() == pytest.approx(0.54983, abs=2e-3)  # 1 / (1 + e^−0.2)


MEMORY = """
import sys
from pathlib import Path
import torch
from zoo import Positions, create_prior, prior_attention
torch.set_num_threads(1)
torch.set_grad_enabled(False)
heads = int(sys.argv[1])
prior = create_prior("ggd2d", num_heads=heads)
def resident(what):
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
def attend(side):
    grid = Positions.grid(side, side, num_prefix=1)
    q, k, v = (torch.randn(1, grid.length, heads, 64).transpose(1, 2) for _ in range(3))
    output = torch.ones_like(q)  # what any implementation returns
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    del output
    prior_attention(q, k, v, prior(grid, grid, causal=False), causal=False)
    return (resident("VmHWM") - before) // 1024
attend(8)
print(attend(64))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("heads", [6])
def test_a_large_image_needs_no_matrix(heads: int) -> None:
    """1024 px in patches of 16, one image: the matrix alone would take 64 MiB a head, an index for it 128."""
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # freed tensors go back to the system, so the peak repeats
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(heads)], capture_output=True, text=True, timeout=120, check=True, env=env
    )
    assert int(done.stdout) < 64, f"{done.stdout.strip()} MiB"
