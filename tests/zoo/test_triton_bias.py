"""A dense bias with its gradient in the fused kernel: in every company, shared or not, and no other T × S memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.device import DEVICE, some
from tests.zoo.test_attention import CASES, build, eager_in, evaluate
from tests.zoo.test_triton_attention import DECODING, PLANNING, budgets, moved, on_device
from zoo import Positions, create_prior
from zoo.attention import KERNELS, prior_attention, triton
from zoo.attention.base import AttentionCall
from zoo.priors.base import PriorTerms

common = pytest.importorskip("zoo.attention.triton.common", reason="needs Triton")
from zoo.attention.triton.backward import attention_backward, output_gradient  # noqa: E402
from zoo.attention.triton.bias_grad import bias_gradient  # noqa: E402
from zoo.attention.triton.common import Geometry, Operands  # noqa: E402
from zoo.attention.triton.forward import attention_forward  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        monkeypatch.setattr(common, "TILE", 16)
    monkeypatch.setitem(KERNELS, "triton", PLANNING)


# A case of the other kernels, its heads, what is beside the bias, and over how many batch rows and heads the bias has its own.
BESIDE = {
    "alone, of all": ("bidirectional-offset", 1, "none", 1, 1),
    "more queries than keys": ("more-queries", 1, "none", 2, 1),
    "row scale, of each batch row": ("scale", 2, "none", 2, 1),
    "lanes and documents, of each head": ("documents", 2, "lanes", 1, 2),
    "window": ("window-bidirectional", 1, "none", 2, 1),
    "grid": ("grid-prefix", 1, "table", 1, 1),
    "everything": ("everything", 4, "both", 2, 1),
}


def with_bias(name: str) -> tuple[dict[str, Tensor], dict[str, object], tuple[int, int, int] | None]:
    which, heads, realised, batch, shared = BESIDE[name]
    case = CASES[which]
    leaves, options = build(case, realised, heads=heads)
    torch.manual_seed(9)
    leaves["bias"] = torch.randn(batch, shared, case.queries, case.keys).double().requires_grad_()
    return leaves, options, case.grid


@pytest.mark.slow
@pytest.mark.parametrize("name", some(BESIDE, 2))
def test_every_gradient_is_the_oracles(name: str) -> None:
    leaves, options, grid = with_bias(name)
    low, exact = moved(leaves, torch.float32)
    truth = evaluate(exact, options, "reference", grid)
    got = evaluate(low, on_device(options), "triton", grid)
    for key, budget in budgets(truth).items():
        assert got[key].shape == truth[key].shape
        error = float((got[key].cpu().double() - truth[key]).abs().max())
        assert error <= budget, f"{key}: error {error:.2e} against a budget of {budget:.2e}"


@pytest.mark.parametrize("name", some(BESIDE, 2))
def test_torchs_kernel_serves_a_bias_that_heads_share(name: str) -> None:
    leaves, options, grid = with_bias(name)
    truth, got = (evaluate(leaves, options, kernel, grid) for kernel in ("reference", "sdpa"))
    for key, value in truth.items():
        torch.testing.assert_close(got[key], value, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["alone, of all"])
def test_bfloat16_with_a_bias_in_bfloat16(name: str) -> None:
    """Three times what the formula loses when every step of it rounds; the gradient has the bias's dtype."""
    leaves, options, grid = with_bias(name)
    low, exact = moved({key: leaf.detach().bfloat16() for key, leaf in leaves.items()}, torch.bfloat16)
    truth = evaluate(exact, options, "reference", grid)
    got = evaluate(low, on_device(options), "triton", grid)
    eager = eager_in(torch.bfloat16, exact, options, grid)
    assert got["bias"].dtype == torch.bfloat16
    for key, value in truth.items():
        budget = 3 * (eager[key].double() - value).abs().max() + 2 * torch.finfo(torch.bfloat16).eps * value.abs().max()
        assert (got[key].cpu().double() - value).abs().max() <= budget, key


def test_a_bias_of_any_strides_is_read_where_it_lies() -> None:
    """Pairs whose heads come last, as a linear layer over pairs leaves them, and a bias that is expanded."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 2, 20, 16, device=DEVICE) for _ in range(3))
    for bias in (torch.randn(2, 20, 20, 2).permute(0, 3, 1, 2), torch.randn(1, 2, 20, 20).expand(2, 2, 20, 20)):
        bias = bias.to(DEVICE).requires_grad_()
        found = []
        for kernel in ("triton", "reference"):
            out = prior_attention(q, k, v, PriorTerms(bias=bias), causal=False, kernel=kernel)
            found.append([out, *torch.autograd.grad(out.sin().sum(), bias)])
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_decoding_with_a_bias() -> None:
    """No decoding kernel reads it: few queries take the kernel of many."""
    torch.manual_seed(1)
    q, (k, v) = torch.randn(2, 2, 1, 16, device=DEVICE), torch.randn(2, 2, 2, 33, 16, device=DEVICE)
    terms = PriorTerms(bias=torch.randn(1, 2, 1, 33, device=DEVICE))
    got, wanted = (prior_attention(q, k, v, terms, causal=True, kernel=kernel) for kernel in (DECODING, "reference"))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_no_tile_is_skipped_beside_a_bias() -> None:
    """What decays by a table may grow by the bias: the farthest key has nearly all of the weight."""
    length = 100 if DEVICE.type == "cpu" else 300  # several tiles
    line = Positions.line(length)
    prior = create_prior("ggd", num_heads=1, init="alibi").to(DEVICE)
    with torch.no_grad():
        prior.theta_alpha.fill_(1.0)
        table = prior(line, line, causal=True).table
    q = torch.zeros(1, 1, length, 16, device=DEVICE)
    bias = torch.zeros(1, 1, length, length, device=DEVICE)
    bias[..., 0] = 1000.0
    plain, terms = PriorTerms(table=table), PriorTerms(table=table, bias=bias)
    assert triton.skipped_share(AttentionCall(q, q, q, plain, True)) > 0
    assert triton.skipped_share(AttentionCall(q, q, q, terms, True)) == 0
    v = torch.arange(float(length), device=DEVICE)[:, None].expand(1, 1, length, 16).contiguous()
    assert prior_attention(q, q, v, terms, causal=True, kernel="triton").abs().max() < 1e-5


def test_what_is_made_by_blocks_stays_with_torch() -> None:
    line = Positions.line(20)
    terms = create_prior("fire", num_heads=2, train_context=20).to(DEVICE)(line, line, causal=True)
    q = torch.randn(1, 2, 20, 16, device=DEVICE)
    with pytest.raises(ValueError, match="a block of rows at a time"):
        prior_attention(q, q, q, terms, causal=True, kernel="triton")


class Sizes(TorchDispatchMode):
    """The elements of every tensor that torch makes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        storages = {x.untyped_storage().data_ptr() for x in (*args, *(kwargs or {}).values()) if isinstance(x, Tensor)}
        if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in storages:
            self.made.append(out.untyped_storage().nbytes() // out.element_size())
        return out


class Unlaunched:
    """A kernel that is not run: the interpreter copies what it is handed."""

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *arguments, **options: None


def test_the_gradient_is_the_only_matrix_that_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward beside a bias that two batch rows and two heads share."""
    length, width = 96, 16
    q, k, v, do = (torch.randn(2, 2, length, width, device=DEVICE) for _ in range(4))
    bias = torch.randn(1, 1, length, length, device=DEVICE)
    call = Operands(q, k, v, None, None, None, Geometry(2, 2, 2, length, length, width, width), bias)
    for name in ("forward._forward", "backward._delta", "backward._dkdv", "backward._dq", "bias_grad._bias_tile"):
        monkeypatch.setattr(f"zoo.attention.triton.{name}", Unlaunched())
    with Sizes() as sizes:
        out, lse2 = attention_forward(call)
        upstream = output_gradient(do, out, lse2, call.geometry)
        attention_backward(call, upstream)
        gradient = bias_gradient(call, upstream)
    assert gradient.shape == bias.shape and sorted(sizes.made)[-2:] == [2 * 2 * length * width, length * length]
