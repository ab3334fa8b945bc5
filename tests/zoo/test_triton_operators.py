"""The fused kernels as operators of torch, compiled; splits of keys, and rows far apart in
memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.device import DEVICE
from tests.zoo.priors_table import make
from tests.zoo.test_attention import Case, build, terms_of
from zoo import Positions
from zoo.attention import triton
from zoo.attention.call import AttentionCall
from zoo.catalog import create_model

pytest.importorskip("triton")
from zoo.attention.reference import attend
from zoo.attention.triton import backward, common, decode, forward, op, plan
from zoo.attention.triton.common import Operands
from zoo.attention.triton.forward import attention_forward
from zoo.priors.terms import PriorTerms

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    if DEVICE.type == "cpu":
        monkeypatch.setattr(common, "TILE", 16)
    monkeypatch.setattr(triton.TRITON, "least_keys", 1)


def call_of(case: Case, realised: str = "table", **sizes: int) -> AttentionCall:
    leaves, options = build(case, realised, **{"heads": 2} | sizes)
    leaves = {name: x.detach().to(DEVICE).float() for name, x in leaves.items()}
    scale = leaves.get("query_scale")
    segments = options.pop("segments")
    scale = scale[None] if scale is not None and scale.ndim == 2 else scale
    segments = None if segments is None else segments.to(DEVICE)
    q, k, v = (leaves[name] for name in "qkv")
    return AttentionCall(q, k, v, terms_of(leaves), query_scale=scale, segments=segments, **options)


def flat(call: AttentionCall) -> Operands:
    """What the kernels take."""
    q, k, v, row_scale, segments = triton._operands(call)
    table = None if call.table is None else call.table.table.float()
    return op.operands(q, k, v, table, row_scale, segments, *triton._scalars(call))


def tiny(name: str, **options) -> torch.nn.Module:
    """One layer of two heads, its prior moved off its init, where gradients of priors are rounding
    alone."""
    torch.manual_seed(0)
    model = create_model(name, num_layers=1, dim=32, num_heads=2, hidden_dim=16, **options).to(
        DEVICE
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "prior" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def tokens(length: int, rows: int = 2) -> Tensor:
    return torch.randint(
        0, 200, (rows, length), generator=torch.Generator().manual_seed(length)
    ).to(DEVICE)


def arguments(call: AttentionCall, monkeypatch: pytest.MonkeyPatch) -> tuple:
    """What the kernel hands to its operator for a call; what may have a gradient wants one."""
    recorded = []
    with monkeypatch.context() as patch:
        patch.setattr(op, "fused_attention", lambda *args: recorded.append(args) or call.q)
        triton.TRITON.run(call)
    [inputs] = recorded
    trained = {0, 1, 2, 4, 6} | ({3} if inputs[6] is None else set())  # a parametric table has none
    return tuple(
        x.detach().requires_grad_(n in trained)
        if isinstance(x, Tensor) and x.is_floating_point()
        else x
        for n, x in enumerate(inputs)
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lanes", "parametric"])
def test_operators_keep_torch_rules(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is mutated or aliased, fake tensors have the real shapes and strides, and autograd
    has its place."""
    call = call_of(
        Case(14, 14, 1, documents=(9, 4), scale="shared"), "both" if kind == "lanes" else "none"
    )
    if kind == "parametric":
        terms = (
            make("ggd", num_heads=2)
            .to(DEVICE)
            .float()(Positions.line(14), Positions.line(14), causal=True)
        )
        call = replace(
            call, q=call.q.bfloat16(), k=call.k.bfloat16(), v=call.v.bfloat16(), terms=terms
        )
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    inputs = arguments(call, monkeypatch)
    torch.library.opcheck(op.attention_op, inputs, test_utils=tests)
    plain = tuple(x.detach() if isinstance(x, Tensor) else x for x in inputs)
    out, *saved = op.attention_op(*plain)
    sums = torch.ones((), dtype=out.dtype, device=DEVICE).expand_as(
        out
    )  # a sum's gradient has no memory of its own
    grad_lse = torch.ones_like(saved[0]) if kind == "lanes" else None
    backward = (sums, grad_lse, *plain[:8], out, *saved, *plain[8:11], kind == "lanes")
    torch.library.opcheck(op._backward_op, backward, test_utils=tests[::2])
    place = [1, 0, plain[8][2] + 12, plain[8][3]]
    few = (plain[0][:, :, -2:], *plain[1:4], None, None, place, plain[9], kind == "lanes")
    torch.library.opcheck(op.decode_op, few, test_utils=tests[::2])


@pytest.mark.slow
@torch.no_grad()
def test_decoding_compiles_in_one_graph() -> None:
    model = tiny("text_ggd_ssmax_tiny")
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    got = torch.compile(model, fullgraph=True, backend=backend)(tokens(5), kernel="triton")
    torch.testing.assert_close(got, model(tokens(5), kernel="triton"))
    assert any("attention_decode" in str(node.target) for node in graphs[-1].graph.nodes)


@pytest.mark.slow
def test_few_queries_split_keys() -> None:
    """A logit is a sum of some 20 products, an output one of some 100 weights, each rounded: 2^−24
    for each."""
    call = call_of(
        Case(5, 50, 2, documents=(30, 47), window=29, scale="batch"),
        "both",
        heads=4,
        width=19,
        lanes=2,
    )
    exact = attend(replace(call, q=call.q.double(), k=call.k.double(), v=call.v.double()))[0]
    for splits in (1, 2, 7):
        out, _ = decode.decode(flat(call), splits=splits)
        assert float((out.double() - exact).abs().max()) <= 200 * 2**-24 * max(
            1.0, float(exact.abs().max())
        )


def far_apart(count: int, width: int, stride: int, path: Path) -> list[Tensor]:
    """Three (1, 1, count, width) matrices in one memory, whose rows are `stride` numbers apart; on
    the CPU in a sparse file."""
    size = (count - 1) * stride + 3 * width
    if DEVICE.type == "cpu":
        memory = torch.from_file(str(path), shared=True, size=size, dtype=torch.bfloat16)
    else:
        memory = torch.empty(size, dtype=torch.bfloat16, device=DEVICE)
    return [
        memory.as_strided((1, 1, count, width), (0, 0, stride, 1), part * width)
        for part in range(3)
    ]


def test_rows_past_32_bits(tmp_path: Path) -> None:
    """Rows of 2^26 numbers: the 33rd starts at 2^31, as the 524289th of 4096 numbers does."""
    call = call_of(Case(36, 36), "none", heads=1, width=16)
    call = replace(call, q=call.q[:1].bfloat16(), k=call.k[:1].bfloat16(), v=call.v[:1].bfloat16())
    heads = far_apart(36, 16, 2**26, tmp_path / "rows")
    for memory, x in zip(heads, (call.q, call.k, call.v), strict=True):
        memory.copy_(x)
    for outer in (64, 0):  # strides of batch and heads: by tensor descriptors, and by pointers
        near, far = (
            AttentionCall(
                *(x.as_strided(x.shape, (outer, outer, *x.stride()[2:])) for x in rows),
                PriorTerms(),
                True,
            )
            for rows in ((call.q, call.k, call.v), heads)
        )
        assert torch.equal(attention_forward(flat(far))[0], attention_forward(flat(near))[0])
        assert torch.equal(plan.make_plan(flat(far)).rows, plan.make_plan(flat(near)).rows)
        assert common.describable(far.k, far.v) == (outer > 0)
        assert not common.describable(far.k[:0], far.v[:0])
    one, far_one = (
        AttentionCall(x.q[:, :, -1:], x.k, x.v, PriorTerms(), True) for x in (call, far)
    )
    assert torch.equal(
        decode.decode(flat(far_one), splits=2)[0], decode.decode(flat(one), splits=2)[0]
    )


def test_table_codes_beyond_block() -> None:
    """Codes are those of the table and reach beyond the last block."""
    place = Positions.grid(5, 7, num_prefix=2)
    q = torch.zeros(1, 1, 37, 8, device=DEVICE)
    call = AttentionCall(
        q, q, q, make("alibi2d").to(DEVICE)(place, place, causal=False), causal=False
    )
    codes = flat(call).codes
    assert call.table is not None
    assert torch.equal(codes[2:37].long(), -call.table.q_code[2:])
    blocks = [forward.GRID_64, *forward.CROWDED_16.values(), *forward.CROWDED_32.values()]
    blocks += [
        *forward.UNEVEN_BLOCKS_16.values(),
        *backward.DKDV_16.values(),
        *backward.DQ_16.values(),
    ]
    blocks += [
        *backward.DQ_PARAMS_16.values(),
        *backward.DKDV_32.values(),
        *backward.DQ_32.values(),
    ]
    assert len(codes) == 37 + max(max(block[:2]) for block in blocks)
