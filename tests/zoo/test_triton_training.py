"""The fused kernels where models are trained: as operators of torch, compiled, checkpointed, under autocast and ZeRO-3."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.device import DEVICE, some
from tests.zoo.priors_table import make
from tests.zoo.test_attention import Case
from tests.zoo.test_triton_forward import call_of
from zoo import Positions
from zoo.attention import triton
from zoo.attention.base import AttentionCall
from zoo.catalog import create_model
from zoo.priors.base import PriorTerms

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


def arguments(call: AttentionCall, monkeypatch: pytest.MonkeyPatch) -> tuple:
    """What the kernel hands to its operator for a call; what may have a gradient wants one."""
    recorded = []
    with monkeypatch.context() as patch:
        patch.setattr(op, "fused_attention", lambda *args: recorded.append(args) or call.q)
        triton.TRITON.run(call)
    [inputs] = recorded
    trained = {0, 1, 2, 4, 6, 7, 10, 11} | ({3} if inputs[7] is None else set())  # a parametric table has none
    return tuple(
        x.detach().requires_grad_(n in trained) if isinstance(x, Tensor) and x.is_floating_point() else x
        for n, x in enumerate(inputs)
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lanes", "parametric", "bias"])
def test_operators_keep_the_rules_of_torch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is mutated or aliased, fake tensors have the real shapes and strides, and autograd has its place."""
    call = call_of(Case(14, 14, 1, documents=(9, 4), scale="shared"), "both" if kind == "lanes" else "none")
    if kind == "parametric":
        terms = make("ggd", num_heads=2).to(DEVICE).float()(Positions.line(14), Positions.line(14), causal=True)
        call = replace(call, q=call.q.bfloat16(), k=call.k.bfloat16(), v=call.v.bfloat16(), terms=terms)
    if kind == "bias":
        call = replace(call, terms=PriorTerms(bias=torch.randn(2, 1, 14, 14, device=DEVICE)))
    tests, inputs = ("test_schema", "test_autograd_registration", "test_faketensor"), arguments(call, monkeypatch)
    torch.library.opcheck(op.attention_op, inputs, test_utils=tests)
    plain = tuple(x.detach() if isinstance(x, Tensor) else x for x in inputs)
    out, *saved, q, k = op.attention_op(*plain)
    folded = (q, k) if kind == "lanes" else plain[:2]
    sums = torch.ones((), dtype=out.dtype, device=DEVICE).expand_as(out)  # a sum's gradient has no memory of its own
    backward = (
        sums,
        torch.ones_like(saved[0]) if kind == "bias" else None,
        *folded,
        *plain[2:9],
        out,
        *saved,
        *plain[12:19],
        kind == "lanes",
        kind == "bias",
    )
    torch.library.opcheck(op._backward_op, backward, test_utils=tests[::2])
    few = (
        folded[0][:, :, -2:],
        folded[1],
        *plain[2:4],
        None,
        None,
        True,
        0,
        plain[14] + 12,
        [],
        *plain[16:18],
        kind == "bias",
    )
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
