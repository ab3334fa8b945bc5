"""The fused kernels where models are trained: as operators of torch, compiled, checkpointed, under autocast and ZeRO-3."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.device import DEVICE, some
from tests.zoo.priors_table import make
from zoo import Positions
from zoo.attention import prior_attention, triton
from zoo.registry import create_model

pytest.importorskip("triton")
from zoo.attention.triton import common, op

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    if DEVICE.type == "cpu":
        monkeypatch.setattr(common, "TILE", 16)
    monkeypatch.setattr(triton.TRITON, "least_keys", 1)


def tiny(name: str, **options) -> torch.nn.Module:
    """One layer of two heads, its prior moved off its init, where gradients of priors are rounding alone."""
    torch.manual_seed(0)
    model = create_model(name, num_layers=1, dim=32, num_heads=2, hidden_dim=16, **options).to(DEVICE)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "prior" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def tokens(length: int, rows: int = 2) -> Tensor:
    return torch.randint(0, 200, (rows, length), generator=torch.Generator().manual_seed(length)).to(DEVICE)


def operands(
    *, table=False, parametric=False, lanes=0, dtype=torch.float32, grad=True, biased=False, apart=False
) -> tuple:
    """Arguments of the operator: grouped heads whose keys and values are views, documents and a shared row scale."""
    torch.manual_seed(0)
    heads, groups, length, columns = 2, 1, 14, 27

    def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=DEVICE)

    width = 8 if apart else 8 + lanes
    q = leaf(2, heads, length, width, dtype=dtype)
    k, v = (leaf(2, length, groups, columns, dtype=dtype).transpose(1, 2) for columns in (width, 8))
    q_lanes, k_lanes = (leaf(1, count, length, lanes) for count in (heads, 1)) if apart else (None, None)
    ids = (torch.arange(length, device=DEVICE) // 9).int().expand(2, -1).contiguous()
    params, jacobian = (leaf(2, heads), leaf(1, heads, columns)) if parametric else (None, None)
    bias = leaf(2, 1, length, length, dtype=dtype) if biased else None
    tensors = [q, k, v, leaf(heads, columns) if table else None, leaf(1, heads, length), ids, bias, params, jacobian]
    tensors += [None, q_lanes, k_lanes]
    for tensor in tensors:
        if grad and tensor is not None and tensor.is_floating_point():
            tensor.requires_grad_()
    if parametric:
        tensors[3].requires_grad_(False)
        jacobian.requires_grad_(False)
    return (*tensors, True, 0, length - 1, [], lanes, 0.3, 0, table)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        dict(table=True, lanes=3, apart=True),
        dict(table=True, parametric=True, dtype=torch.bfloat16),
        dict(biased=True),
    ],
    ids=["table-lanes-apart", "parametric-bfloat16", "bias"],
)
def test_operators_keep_the_rules_of_torch(case: dict) -> None:
    """Nothing is mutated or aliased, fake tensors have the real shapes and strides, and autograd has its place."""
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(op.attention_op, operands(**case), test_utils=tests)
    given = operands(**case, grad=False)
    out, *saved, q, k = op.attention_op(*given)
    folded = (q, k) if case.get("apart") else given[:2]
    sums = torch.ones((), dtype=out.dtype, device=DEVICE).expand_as(out)  # a sum's gradient has no memory of its own
    needs = (case.get("table", False) and not case.get("parametric", False), case.get("biased", False))
    backward = (sums, *folded, *given[2:9], out, *saved, *given[12:19], *needs)
    torch.library.opcheck(op._backward_op, backward, test_utils=tests[::2])
    few = (folded[0][:, :, -2:], folded[1], *given[2:4], None, None, True, 0, 25, [], case.get("lanes", 0), 0.3)
    torch.library.opcheck(op.decode_op, few, test_utils=tests[::2])


@pytest.mark.slow
@torch.no_grad()
def test_decoding_compiles_in_one_graph() -> None:
    model, graphs = tiny("text_ggd_ssmax_tiny"), []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    got = torch.compile(model, fullgraph=True, backend=backend)(tokens(5), kernel="triton")
    torch.testing.assert_close(got, model(tokens(5), kernel="triton"))
    assert any("attention_decode" in str(node.target) for node in graphs[-1].graph.nodes)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "reentrant"), [("ggd", False)])
def test_activation_checkpointing_gives_the_same_gradients(name: str, reentrant: bool) -> None:
    """The prior's terms are made anew in the backward pass: by its parametric, and by its table."""
    prior, line = make(name, num_heads=2).to(DEVICE).float(), Positions.line(20)
    torch.manual_seed(1)
    q = torch.randn(1, 2, 20, 16, device=DEVICE, requires_grad=True)

    def attend(x: Tensor) -> Tensor:
        return prior_attention(x, x, x, prior(line, line, causal=True), causal=True, kernel="triton")

    leaves = [q, *prior.parameters()]
    runs = (attend, partial(checkpoint, attend, use_reentrant=reentrant))
    first, again = (torch.autograd.grad(run(q).sin().sum(), leaves) for run in runs)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", some(["text_ggd_ssmax_tiny", "text_goat_tiny"], 1))
def test_autocast_of_float32_parameters(name: str) -> None:
    """Errors of gradients are at most three times those of `sdpa`."""
    model, ids = tiny(name), tokens(24, rows=1)
    grads = {}
    for kernel, low in (("reference", False), ("sdpa", True), ("triton", True)):
        model.zero_grad()
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=low):
            logits = model(ids, kernel=kernel)
        assert logits.dtype == torch.float32
        (logits * torch.arange(logits.numel(), device=DEVICE).sin().view_as(logits)).sum().backward()
        named = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
        grads[kernel] = torch.cat([g.flatten() for g in named.values()])
        assert all(p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None)
    ours, theirs = ((grads[kernel] - grads["reference"]).norm() for kernel in ("triton", "sdpa"))
    assert 0 < ours <= 3 * theirs
