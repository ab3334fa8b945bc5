"""Lanes put in front of q and k in one launch, against torch's operations: values and gradients to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from tests.device import DEVICE
from zoo.attention.base import AttentionCall
from zoo.attention.triton import lanes
from zoo.attention.triton.op import fused_attention
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


@pytest.mark.parametrize("name", SHAPES)
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


@pytest.mark.parametrize("name", SHAPES)
def test_gradients_are_those_of_what_torch_joins(name: str) -> None:
    leaves = [x.detach()[:, :, :20].requires_grad_() for x in given(name, torch.bfloat16, torch.float32, 3)]
    q, k, q_lanes, k_lanes = leaves
    call = AttentionCall(q, k, k, PriorTerms(q_lanes, k_lanes), True)
    v = random(2, call.keys.shape[1], 20, WIDTH, dtype=torch.bfloat16)
    results = []
    for first, apart in (((call.unscaled, call.keys), (None, None)), ((q, k), (q_lanes, k_lanes))):
        out = fused_attention(*first, v, *[None] * 7, *apart, True, 0, 0, [], 3, 1.0, 0, False)
        results.append([out, *torch.autograd.grad(out.float().sin().sum(), (*leaves, v))])
    assert all(torch.equal(own, wanted) for own, wanted in zip(*results, strict=True))
