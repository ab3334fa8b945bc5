"""Lanes put in front of q and k in one launch, against torch's operations: values and gradients to the bit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from tests.device import DEVICE, some
from zoo.attention import triton
from zoo.attention.base import AttentionCall
from zoo.attention.triton import TRITON, lanes
from zoo.priors import alibi
from zoo.priors.base import PriorTerms

pytestmark = pytest.mark.gpu
LENGTH, WIDTH = 70, 11


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, device=DEVICE).requires_grad_()


# Heads of k, then batch rows and heads of the lanes of q and of k; four query heads, two batch rows.
SHAPES = {
    "a lane of each head": (4, (1, 4), (1, 4)),
    "keys share theirs": (4, (1, 4), (1, 1)),
    "grouped keys": (2, (1, 4), (1, 1)),
    "grouped keys, repeated": (2, (2, 4), (2, 4)),
    "one key head, lanes of all, of each row": (1, (2, 1), (2, 1)),
}


def given(name: str, dtype: torch.dtype, of_lanes: torch.dtype, count: int) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    groups, of_q, of_k = SHAPES[name]
    q = random(2, LENGTH + 2, 4, WIDTH, dtype=dtype)[:, 2:].transpose(1, 2)
    k = random(2, LENGTH, groups, WIDTH, dtype=dtype).transpose(1, 2)
    q_lanes = random(*of_q, count, LENGTH, dtype=of_lanes).transpose(2, 3)
    return q, k, q_lanes, random(*of_k, LENGTH, count, dtype=of_lanes)


@pytest.mark.parametrize("name", some(SHAPES, 2))
@pytest.mark.parametrize(
    ("dtype", "of_lanes", "count"),
    [
        (torch.bfloat16, torch.float32, 5),
        (torch.float32, torch.float64, 1),
        (torch.float16, torch.float16, 17),
    ],
)
def test_as_torch_joins_them(name: str, dtype: torch.dtype, of_lanes: torch.dtype, count: int) -> None:
    q, k, q_lanes, k_lanes = given(name, dtype, of_lanes, count)
    call = AttentionCall(q, k, k, PriorTerms(q_lanes, k_lanes), True)
    found = lanes.fold(*(x.detach() for x in (q, k, q_lanes, k_lanes)))
    assert all(torch.equal(own, wanted) for own, wanted in zip(found, (call.unscaled, call.keys), strict=True))
    alone, none = lanes.fold(q.detach(), call.keys.detach(), q_lanes.detach(), None)
    assert none is None and torch.equal(alone, found[0])


@pytest.mark.parametrize(
    ("shape", "fewer", "dtype"),
    [((1, 3, 300), 0, torch.float32), ((2, 1, 7), 5, torch.float64), ((1, 1, 256), 5, torch.float32)],
)
def test_lanes_of_a_ramp_are_those_of_torch(shape: tuple[int, int, int], fewer: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ramp = torch.randn(shape, dtype=torch.float64, device=DEVICE) * 2.0 ** torch.randint(-30, 40, shape, device=DEVICE)
    ramp[0, 0, :4] = torch.tensor([0.0, float("inf"), float("nan"), 1e300], device=DEVICE)
    ramp.requires_grad_()
    at_query = ramp if not fewer else ramp.detach()[..., fewer:]
    wanted = alibi.ramp_lanes(ramp, at_query, dtype)
    found = lanes.ramp_lanes(ramp, at_query, alibi.RAMP_LANES, dtype)
    weights = torch.randn_like(wanted[1])
    for own, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, theirs, rtol=0, atol=0, equal_nan=True)
    of_found, of_wanted = (torch.autograd.grad((x[1].nan_to_num() * weights).sum(), ramp)[0] for x in (found, wanted))
    assert torch.equal(of_found, of_wanted) and not found[0].requires_grad


def test_where_no_kernel_is_trusted_torch_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """None before compute capability 8.0, none that computes what it should not, and none while torch.compile traces."""
    monkeypatch.setattr(TRITON, "capability", lambda device: (9, 0))
    monkeypatch.setattr(TRITON, "distrust", lambda device, dtype: None)
    on_gpu = SimpleNamespace(device=torch.device("cuda", 0))
    monkeypatch.setattr(triton, "Tensor", SimpleNamespace)
    assert alibi.ramp_kernel(on_gpu) is lanes.ramp_lanes
    assert alibi.ramp_kernel(SimpleNamespace(device=torch.device("cpu"))) is None
    with monkeypatch.context() as patch:
        patch.setattr(TRITON, "capability", lambda device: (7, 5))
        assert alibi.ramp_kernel(on_gpu) is None
    with monkeypatch.context() as patch:
        patch.setattr(TRITON, "distrust", lambda device, dtype: "it does not compute what it should")
        assert alibi.ramp_kernel(on_gpu) is None
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert alibi.ramp_kernel(on_gpu) is None
