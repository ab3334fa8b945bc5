"""The cases of tests/zoo/kernel_cases.py: the fused kernel against float64, memory filled with NaN, two runs equal to the bit.

On CUDA at 1,031 tokens with the kernel's own tiles; in the interpreter, which runs one program after another and so the same
way each time, once at 40 tokens in tiles of 16.
"""

from __future__ import annotations

import pytest
import torch

from tests.device import DEVICE, some

pytest.importorskip("triton")
from tests.zoo.kernel_cases import CASES, QUICK, Comparison, compare
from zoo.attention.triton import common, op, table_grad

pytestmark = pytest.mark.gpu

CUDA = DEVICE.type == "cuda"
ON_GPU = pytest.mark.skipif(not CUDA, reason="takes seconds where Triton is interpreted")
SIZES: dict[str, int | None] = {"length": None, "tile": None} if CUDA else {"length": 40, "tile": 16}
FORMATS = [(16, torch.float32)]
if CUDA:
    FORMATS = [(64, torch.bfloat16), (128, torch.bfloat16), (64, torch.float16), (64, torch.float32)]


@pytest.fixture(autouse=True)
def fewer_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if not CUDA:
        monkeypatch.setattr(table_grad, "PROGRAMS", 16)  # idle programs cost the interpreter time


def compared(name: str) -> Comparison:
    """A case in the first of FORMATS; in the interpreter of two tiles."""
    return compare(CASES[name], *FORMATS[0], DEVICE, **SIZES | ({} if CUDA else {"length": 20}))


@pytest.mark.parametrize(("width", "dtype"), FORMATS, ids=lambda x: str(x).removeprefix("torch."))
@pytest.mark.parametrize("name", CASES if CUDA else some(QUICK, 3))
def test_a_case_is_as_exact_as_rounding_allows(name: str, width: int, dtype: torch.dtype) -> None:
    case = CASES[name]
    found = compare(case, width, dtype, DEVICE, repeat=2 if CUDA else 1, **SIZES)
    assert not found.bad and found.same_bits
    wanted, errors = {"out", "out, worst row"}, set(found.errors)
    assert wanted | {"q", "k", "v"} < errors if case.gradients else wanted == errors


def test_a_gradient_that_lacks_a_tile_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = op.attention_backward

    def wrong(*given):
        dq, dk, dv, *others = right(*given)
        dv[:, :, : common.TILE] = 0
        return dq, dk, dv, *others

    monkeypatch.setattr(op, "attention_backward", wrong)
    assert set(compared("bare").bad) == {"v", "v, worst tile"}


class NanGradient(torch.autograd.Function):
    """What is given; its gradient has one NaN."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        grad[-1, -1] = torch.nan
        return grad


@pytest.mark.parametrize("dtype", [torch.float32] if not CUDA else [torch.bfloat16, torch.float16, torch.float32])
def test_ligers_loss_agrees_with_float64(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("liger_kernel")
    from modalities.decoder import fused_loss

    states = torch.get_rng_state(), torch.cuda.get_rng_state() if CUDA else None
    for around in (torch.inference_mode(), torch.device("meta")):
        fused_loss.agrees.cache_clear()
        with around:
            assert fused_loss.agrees(DEVICE, dtype)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert not CUDA or torch.equal(torch.cuda.get_rng_state(), states[1])
    right = fused_loss.fused_losses

    wrongs = {
        "off by 0.1": lambda *given: right(*given) * 1.1,
        "off by inf": lambda features, weight, *others: right(features, NanGradient.apply(weight), *others),
        "fails on .*zero": lambda *given: 1 / 0,
    }
    for said, wrong in wrongs.items():
        fused_loss.agrees.cache_clear()
        monkeypatch.setattr(fused_loss, "fused_losses", wrong)
        with pytest.warns(UserWarning, match=said):
            assert not fused_loss.agrees(DEVICE, dtype)
    fused_loss.agrees.cache_clear()
