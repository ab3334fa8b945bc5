"""Sinks: the first n tokens of a document are exempt from the prior and the window, in every
kernel, cache and model; and the learned sink, a logit in the denominator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from tests.device import DEVICE, some
from tests.refusals import refuses
from tests.zoo.test_attention import (
    CASES,
    HEADS,
    REALISED,
    build,
    evaluate,
    of_small_blocks,
    terms_of,
)
from tests.zoo.test_reach import SKIPPING, WHOLE, decaying
from zoo import Positions, create_model, create_prior, prior_attention
from zoo.attention import KERNELS, skipping, triton
from zoo.attention.call import AttentionCall
from zoo.attention.masks import visible
from zoo.attention.triton import TritonKernel
from zoo.layers import Attention
from zoo.methods import create_grid_position, create_position
from zoo.priors.tables import whole_bias
from zoo.priors.terms import PriorTerms

LINES = [name for name, case in CASES.items() if case.grid is None and name != "more-queries"]


@pytest.mark.parametrize(
    ("kernel", "name", "realised", "sinks", "learned"),
    [
        (kernel, name, REALISED[(n + k) % 4], (1, 4, 50, 0, 0)[(n + k) % 5], (n + k) % 5 > 1)
        for k, kernel in enumerate(("sdpa", "toeplitz"))
        for n, name in enumerate(LINES)
    ]
    + [("sdpa", name, REALISED[n % 4], 0, True) for n, name in enumerate(CASES) if CASES[name].grid]
    + [
        ("toeplitz", "window-bidirectional", REALISED[0], many, False) for many in (7, 13)
    ],  # some rows see them alone
)
def test_kernel_equals_oracle(
    kernel: str, name: str, realised: str, sinks: int, learned: bool
) -> None:
    """Kernel equals the oracle with every gradient."""
    case = CASES[name]
    leaves, options = build(case, realised)
    options |= {"sinks": sinks}
    if learned:
        leaves["sink"] = torch.randn(HEADS, dtype=torch.float64).requires_grad_()
    call = AttentionCall(
        leaves["q"], leaves["k"], leaves["v"], terms_of(leaves, case.grid), **options
    )
    attend = of_small_blocks(
        "sdpa" if zoo.attention.KERNELS[kernel].refuses(call) else kernel, case
    )
    expected, got = (evaluate(leaves, options, x, case.grid) for x in ("reference", attend))
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("name", "realised"),
    [("everything", "both"), ("window-bidirectional", "table"), ("documents", "lanes")],
)
def test_sinks_oracle_by_definition(name: str, realised: str) -> None:
    """By a bias with zeros in the columns of sinks, and a mask, document by document."""
    case = CASES[name]
    sinks = 3
    leaves, options = build(case, realised)
    got = evaluate(leaves, options | {"sinks": sinks}, "reference")["out"]
    prior = terms_of(leaves).dense().expand(2, -1, -1, -1).clone()
    shown = torch.zeros(2, 1, case.queries, case.keys)
    lanes = (
        PriorTerms(leaves.get("q_lanes"), leaves.get("k_lanes"))
        .dense()
        .expand(1, HEADS, case.queries, case.keys)
    )
    level = lanes[..., case.keys - case.queries :].diagonal(dim1=2, dim2=3)
    for b in range(2):
        documents = (
            [0] * case.keys if options["segments"] is None else options["segments"][b].tolist()
        )
        for j in range(case.keys):
            exempt = j - documents.index(documents[j]) < sinks
            if exempt:
                prior[b, :, :, j] = level[0]
            for i in range(case.queries):
                at = i + case.keys - case.queries
                near = case.window is None or abs(at - j) < case.window or exempt
                shown[b, 0, i, j] = (
                    near and documents[at] == documents[j] and not (case.causal and j > at)
                )
    plain = {"causal": False, "mask": shown.bool()}
    torch.testing.assert_close(
        got, evaluate(leaves, plain, "reference", terms=PriorTerms(bias=prior))["out"]
    )


@pytest.mark.parametrize(
    ("name", "realised"), [("everything", "both"), ("window", "table"), ("grouped", "lanes")]
)
def test_learned_sink_oracle(name: str, realised: str) -> None:
    """Of value 0 and with the sink's logit; where K is in lanes, that and K of the row's own
    key."""
    case = CASES[name]
    sink = torch.linspace(-1, 2, HEADS, dtype=torch.float64)
    leaves, options = build(case, realised)
    got = evaluate(leaves | {"sink": sink.requires_grad_()}, options, "reference")["out"]
    terms = terms_of(leaves)
    k = leaves["k"]
    v = leaves["v"]
    lanes = (
        PriorTerms(terms.q_lanes, terms.k_lanes).dense().expand(2, HEADS, case.queries, case.keys)
    )
    level = lanes[..., case.keys - case.queries :].diagonal(dim1=2, dim2=3)
    shown = visible(AttentionCall(leaves["q"], k, v, terms, **options)).expand(2, HEADS, -1, -1)
    scale = leaves.get("query_scale", torch.ones(HEADS, case.queries))
    scaled = (terms.dense() * scale[..., None]).expand_as(shown)
    bias = torch.cat([(sink[:, None] + level * scale)[..., None], scaled], dim=-1)
    q = leaves["q"] * scale[..., None]
    more = [torch.cat([torch.zeros_like(x[:, :, :1]), x], dim=2) for x in (k, v)]
    whole = dict(causal=False, mask=torch.nn.functional.pad(shown, (1, 0), value=True))
    torch.testing.assert_close(
        got, prior_attention(q, *more, PriorTerms(bias=bias), **whole, kernel="reference")
    )


def test_blocked_biases_and_half() -> None:
    """Biases that are made by blocks and half precision."""
    prior = create_prior("fire", num_heads=2, train_context=9)
    line = Positions.line(300)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 300, 16) for _ in range(3))
    terms = prior(line, line, causal=True)
    bias = whole_bias(terms.bias).index_fill(3, torch.arange(2), 0.0)
    expected = prior_attention(q, k, v, PriorTerms(bias=bias), causal=True)
    torch.testing.assert_close(prior_attention(q, k, v, terms, causal=True, sinks=2), expected)
    table = decaying("ggd")(line, line, causal=True)
    truth = prior_attention(
        q.double(), k.double(), v.double(), table, causal=True, sinks=2, kernel="reference"
    )
    half = prior_attention(
        *(x.bfloat16() for x in (q, k, v)), table, causal=True, sinks=2, kernel="toeplitz"
    )
    assert (half.double() - truth).abs().max() < 8 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("name", ["ggd", "alibi", "goat"])
@pytest.mark.parametrize("documents", [False, True])
def test_sinks_keep_reach(name: str, documents: bool) -> None:
    """As many logits are left out as without sinks, and outputs and gradients are those of all
    logits."""
    prior = decaying(name).float()
    line = Positions.line(900)
    segments = (torch.arange(900) >= 400).long()[None] if documents else None
    torch.manual_seed(0)
    q, k, v = (0.3 * torch.randn(1, 2, 900, 16) for _ in range(3))
    leaves = [x.requires_grad_() for x in (q, k, v)] + [
        p for p in prior.parameters() if p.requires_grad
    ]
    results = []
    left_out = []
    for kernel, sinks in ((WHOLE, 4), (SKIPPING, 4), (SKIPPING, 0)):
        with skipping(True) as tally:
            terms = prior(line, line, causal=True)
            out = prior_attention(
                q, k, v, terms, causal=True, segments=segments, sinks=sinks, kernel=kernel
            )
        results.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
        left_out.append(tally.left_out)
    assert left_out[0] == 0
    assert left_out[1] > 0.9 * left_out[2] > 0.1 * 2 * 900 * 450
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short calls of the fused kernel get several tiles, and a plan."""
    from zoo.attention.triton import common

    if DEVICE.type == "cpu":
        monkeypatch.setattr(common, "TILE", 16)
    monkeypatch.setitem(KERNELS, "triton", TritonKernel(least_keys=1))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "realised"),
    some([("everything", "both"), ("offset", "table"), ("grouped", "lanes")], 2),
)
def test_fused_kernel_equals_oracle(name: str, realised: str, small_tiles: None) -> None:
    """The fused kernel equals the oracle."""
    leaves, options = build(CASES[name], realised)
    low = {key: leaf.detach().to(DEVICE).float().requires_grad_() for key, leaf in leaves.items()}
    exact = {key: leaf.detach().double().cpu().requires_grad_() for key, leaf in low.items()}
    exact["sink"] = torch.randn(HEADS).double().requires_grad_()
    low["sink"] = exact["sink"].detach().float().to(DEVICE).requires_grad_()
    truth = evaluate(exact, options | {"sinks": 3}, "reference")
    options = {
        key: value.to(DEVICE) if isinstance(value, Tensor) else value
        for key, value in options.items()
    }
    for key, value in evaluate(low, options | {"sinks": 3}, "triton").items():
        error = float((value.cpu().double() - truth[key]).detach().abs().max())
        assert error <= 400 * 2**-24 * max(1.0, float(truth[key].detach().abs().max())), key


@pytest.mark.gpu
@pytest.mark.slow
def test_fused_kernel_skips_and_trains(small_tiles: None) -> None:
    """A law that decays, whose constant no log-sum-exp may lose; decoding, whose splits are
    joined."""
    prior = decaying("ggd").float().to(DEVICE)
    line = Positions.line(90)
    torch.manual_seed(0)
    q, k, v = (0.3 * torch.randn(1, 2, 90, 16, device=DEVICE).requires_grad_() for _ in range(3))
    scale = torch.linspace(0.5, 2, 90, device=DEVICE).expand(2, 90).clone().requires_grad_()
    leaves = [q, k, v, scale, *(p for p in prior.parameters() if p.requires_grad)]
    results = []
    for kernel in ("reference", "triton"):
        terms = prior(line, line, causal=True)
        out = prior_attention(
            q, k, v, terms, causal=True, query_scale=scale, sinks=3, kernel=kernel
        )
        results.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
    assert triton.skipped_share(AttentionCall(q, k, v, terms, True, scale[None], sinks=3)) > 0.05
    for truth, got in zip(*results, strict=True):
        if truth is not None:
            torch.testing.assert_close(
                got, truth, rtol=1e-4, atol=1e-5 * max(1.0, float(truth.detach().abs().max()))
            )
    with torch.no_grad():
        last = q[:, :, -1:], k, v, prior(line.tail(1), line, causal=True)
        expected, got = (
            prior_attention(*last, causal=True, sinks=3, kernel=x) for x in ("reference", "triton")
        )
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "position",
    ["ggd", "ggd_goat", "local", "cable", "key_bias+alibi+sink", ["alibi+sink", "local"]],
)
@torch.no_grad()
def test_cache_keeps_sinks(position: str | list[str]) -> None:
    """Chunks and single tokens of packed and padded rows, on whole texts, whose last rows would
    differ without sinks."""
    torch.manual_seed(0)
    names = [position] if isinstance(position, str) else position
    options: dict[str, Any] = (
        {"sinks": 3} if isinstance(position, str) else {name: {"sinks": 3} for name in names}
    )
    sizes = dict(num_layers=2, dim=64, num_heads=2, num_kv_heads=1, hidden_dim=64, train_context=16)
    make = dict(position=position, ssmax=True, **sizes)
    model = create_model("text_ggd_tiny", position_options=options, **make).eval()
    without = create_model("text_ggd_tiny", position_options={}, **make).eval()
    for parameter in (p for layer in model.layers for p in layer.attention.prior.parameters()):
        parameter.add_(0.5 * torch.rand_like(parameter))
    without.load_state_dict(model.state_dict())
    ids = torch.randint(0, 256, (2, 60))
    segments = (torch.arange(60) >= torch.tensor([[25], [7]])).long() - 1
    for documents in (None, segments):
        whole = model(ids, segments=documents)
        cache = model.new_cache()
        assert (whole - without(ids, segments=documents))[:, 55:].abs().max() > 1e-3
        for part in (
            slice(2),
            slice(2, 3),
            slice(3, 30),
            *(slice(n, n + 1) for n in range(30, 60)),
        ):
            out = model(
                ids[:, part],
                segments=None if documents is None else documents[:, part],
                cache=cache,
            )
            torch.testing.assert_close(out, whole[:, part], atol=1e-4, rtol=1e-4)


def test_saved_model_has_sinks(tmp_path) -> None:
    """A saved model has them and a row scale counts them."""
    model = create_model(
        "text_local_ssmax_tiny", train_context=16, position_options={"sinks": 4}
    ).eval()
    model.save_pretrained(tmp_path)
    again = zoo.load_model(tmp_path)
    layer = again.layers[0].attention
    assert (layer.sinks, layer.window, layer.ssmax.window) == (4, 16, 20)
    ids = torch.arange(40)[None]
    torch.testing.assert_close(again(ids), model(ids))


@pytest.mark.parametrize("sinks", [-1, 1.5, True, "4"])
def test_what_are_no_sinks(sinks: Any) -> None:
    q = torch.randn(1, 2, 4, 8)
    for call in (
        lambda: prior_attention(q, q, q, causal=True, sinks=sinks),
        lambda: create_position(
            "ggd", dim=16, num_heads=2, train_context=8, options={"sinks": sinks}
        ),
        lambda: Attention(16, 2, prior=create_prior("ggd", num_heads=2), sinks=sinks),
    ):
        refuses(r"sinks.* must be a whole number of 0 or more", call)


def test_where_there_are_no_sinks() -> None:
    refuses(
        "of a line",
        create_grid_position,
        "ggd2d",
        dim=16,
        num_heads=2,
        train_grid=(3, 3),
        options={"sinks": 2},
    )
    grid = Positions.grid(2, 2)
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match="of a line"):
        prior_attention(
            q,
            q,
            q,
            create_prior("ggd2d", num_heads=2)(grid, grid, causal=False),
            causal=False,
            sinks=1,
        )
    with pytest.raises(ValueError, match="neither a prior nor a window"):
        create_position("rope", dim=16, num_heads=2, train_context=8, options={"sinks": 2})
