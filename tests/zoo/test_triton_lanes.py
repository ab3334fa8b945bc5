"""Lanes put in front of q and k in one launch, against torch's operations: values and gradients to the bit."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from tests.device import DEVICE, some
from zoo.attention.base import AttentionCall
from zoo.attention.triton import lanes
from zoo.priors import alibi
from zoo.priors.base import PriorTerms

pytestmark = pytest.mark.gpu


# Heads of k, then batch rows and heads of the lanes of q and of k; four query heads, two batch rows.
SHAPES = {
    "keys share theirs": (4, (1, 4), (1, 1)),
    "grouped keys, repeated": (2, (2, 4), (2, 4)),
    "one key head, lanes of all, of each row": (1, (2, 1), (2, 1)),
}


@pytest.mark.parametrize("name", some(SHAPES, 2))
@pytest.mark.parametrize(
    ("dtype", "lane_dtype", "count"), [(torch.bfloat16, torch.float32, 5), (torch.float32, torch.float64, 1)]
)
def test_as_torch_joins_them(name: str, dtype: torch.dtype, lane_dtype: torch.dtype, count: int) -> None:
    torch.manual_seed(0)
    groups, q_shape, k_shape = SHAPES[name]
    q = torch.randn(2, 72, 4, 11, dtype=dtype, device=DEVICE)[:, 2:].transpose(1, 2)
    k = torch.randn(2, 70, groups, 11, dtype=dtype, device=DEVICE).transpose(1, 2)
    q_lanes = torch.randn(*q_shape, count, 70, dtype=lane_dtype, device=DEVICE).transpose(2, 3)
    k_lanes = torch.randn(*k_shape, 70, count, dtype=lane_dtype, device=DEVICE)
    call = AttentionCall(q, k, k, PriorTerms(q_lanes, k_lanes), True)
    wide_q, wide_k = lanes.fold(q, k, q_lanes, k_lanes)
    assert torch.equal(wide_q, call.unscaled) and torch.equal(wide_k, call.keys)
    alone, none = lanes.fold(q, call.keys, q_lanes, None)
    assert none is None and torch.equal(alone, wide_q)


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
