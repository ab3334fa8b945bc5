"""The forward kernel by itself, beside float64: widths and lanes in every padding, blocks of all sizes, far memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from tests.device import DEVICE, some
from tests.zoo.test_triton_decode import Case, make
from zoo.attention.triton import common, decode, forward
from zoo.attention.triton.common import Geometry, Operands
from zoo.attention.triton.forward import attention_forward
from zoo.attention.triton.plan import make_plan

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "TILE", 16)


def ours(case: Case, planned: bool = False) -> Tensor:
    segments = None if case.segments is None else case.segments[:, : case.g.keys].contiguous()
    call = Operands(case.q, case.k, case.v, case.table, case.row_scale, segments, case.g)
    return attention_forward(call, make_plan(call) if planned else None)[0]


# Columns of q: lanes, then content. Where the two together would double the padded width, lanes are multiplied apart.
WIDTHS = {
    "2 + 16, apart": make(1, 2, 1, 21, 37, 16, lanes=2),
    "16 + 16, apart, nothing padded": make(1, 2, 2, 35, 35, 16, lanes=16),
    "2 + 6, together": make(1, 1, 1, 21, 21, 6, width_v=16, lanes=2, scale=1),
    "8 + 64, apart": make(1, 1, 1, 20, 34, 64, lanes=8, scale=1),
    "16 + 64, apart, nothing padded": make(1, 1, 1, 20, 34, 64, lanes=16),
    "5 + 60, apart, no column at sixteen": make(1, 1, 1, 34, 34, 60, width_v=48, lanes=5),
    "4 + 64 without a table": make(1, 2, 1, 34, 34, 64, lanes=4, table=False),
    "scaled rows without a table": make(1, 2, 1, 34, 34, 19, lanes=4, table=False, scale=1),
}


@pytest.mark.parametrize("name", some(WIDTHS, 3))
def test_lanes_and_widths(name: str) -> None:
    assert WIDTHS[name].excess(ours(WIDTHS[name])) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("queries", "keys", "causal"),
    some([(1, 1, 1), (1, 17, 0), (5, 5, 1), (16, 16, 0), (17, 33, 1), (3, 48, 0), (16, 16, 1), (17, 33, 0)], 3),
)
def test_lengths_around_a_block(queries: int, keys: int, causal: int) -> None:
    case = make(1, 2, 1, queries, keys, scale=1, causal=causal)
    assert case.excess(ours(case)) <= 1 and case.excess(ours(case, planned=True)) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planned", "dtype"), some([(True, torch.float32), (False, torch.bfloat16), (True, torch.bfloat16)], 1)
)
def test_blocks_smaller_and_larger_than_a_tile_of_the_plan(
    dtype: torch.dtype, planned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float32: 16 × 16 of the plan's 32 × 32. bfloat16: 64 × 32, of which the call's last has a half in no tile."""
    monkeypatch.setattr(common, "TILE", 32)
    case = make(1, 2, 1, 75, 90, 16, scale=1, window=40, dtype=dtype)
    found, (wanted, room) = ours(case, planned).double(), case.oracle()
    if dtype == torch.bfloat16:  # each weight and the output are rounded, a relative 2^-9 each
        case.v = case.v.abs()
        room = room + 2.0**-9 * (1 + 2.0**-7) * (case.oracle()[0] + wanted.abs())
    assert ((found - wanted).abs() <= room).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "planned"),
    some([({}, True), ({"causal": 0}, False), ({"causal": 0, "window": 30}, True), ({"lanes": 2}, False)], 2),
)
def test_documents_of_many_tiles(options: dict[str, int], planned: bool) -> None:
    """Blocks inside one document need no mask: the documents of batch row b are S/(2 + b) long, and ids that come again
    after others are not taken for the same stretch of keys."""
    case = make(2, 1, 1, 100, 112, documents=True, **options)
    assert case.segments is not None
    case.segments[0, 40:48] = 5
    assert case.excess(ours(case, planned)) <= 1


def test_documents_that_change_at_every_token() -> None:
    case = make(1, 1, 1, 40, 40, documents=True)
    case.segments = torch.arange(40, dtype=torch.int32, device=DEVICE)[None] % 3 - 1
    assert case.excess(ours(case)) <= 1


def far_apart(count: int, width: int, stride: int, path: Path) -> list[Tensor]:
    """Three (1, 1, count, width) matrices in one memory, whose rows are `stride` numbers apart. On the CPU it is a file with
    holes."""
    size = (count - 1) * stride + 3 * width
    if DEVICE.type == "cpu":
        with path.open("wb") as file:
            file.truncate(2 * size)
        memory = torch.from_file(str(path), shared=True, size=size, dtype=torch.bfloat16)
    else:
        memory = torch.empty(size, dtype=torch.bfloat16, device=DEVICE)
    return [memory.as_strided((1, 1, count, width), (0, 0, stride, 1), part * width) for part in range(3)]


def test_rows_may_lie_past_the_range_of_32_bits(tmp_path: Path) -> None:
    """Rows of 2^26 numbers: the 33rd starts at 2^31, as the 524289th of 4096 numbers does."""
    case = make(1, 1, 1, 36, 36, 16, dtype=torch.bfloat16)
    near = ours(case)
    last = make(1, 1, 1, 1, 36, 16, dtype=torch.bfloat16)
    last.q, last.k, last.v, last.table = case.q[:, :, -1:], case.k, case.v, case.table
    one = last.dense(2)
    far = far_apart(36, 16, 2**26, tmp_path / "rows")
    for memory, x in zip(far, (case.q, case.k, case.v), strict=True):
        memory.copy_(x)
    case.q, case.k, case.v = far
    last.q, last.k, last.v = far[0][:, :, -1:], *far[1:]
    assert torch.equal(ours(case), near)
    assert torch.equal(last.dense(2), one)


class Grids:
    """A kernel that is not run; the grids of programs it is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]):
        self.asked.append(grid)
        return lambda *arguments, **options: None


def test_no_axis_but_the_first_counts_heads_or_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA takes 2^31 − 1 programs along the first axis of a launch, 65535 along the others."""
    grids = Grids()
    monkeypatch.setattr(forward, "_forward", grids)
    monkeypatch.setattr(decode, "_partial", grids)
    monkeypatch.setattr(decode, "_combine", grids)
    x = torch.zeros(16, device=DEVICE)
    many, long = x.expand(70000, 2, 3, 16), x.expand(1, 2, 1 << 22, 16)
    for q, rows in ((many, 70000 * 2), (long, (1 << 22) // 64)):
        g = Geometry(q.shape[0], 2, 2, q.shape[2], q.shape[2], 16, 16)
        call = Operands(q, q, q, None, None, None, g)
        attention_forward(call)
        decode.decode(call, splits=1)
        if q is many:
            decode.decode(call, splits=5)
        for grid in grids.asked:
            assert grid[0] >= rows and all(size <= 65535 for size in grid[1:])
        assert len(grids.asked) >= 2
        grids.asked.clear()
