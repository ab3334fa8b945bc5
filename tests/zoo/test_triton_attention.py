"""The fused kernels behind `prior_attention(kernel="triton")`: every case of the other kernels, in
float32 and below."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.device import DEVICE, some
from tests.zoo.priors_table import GRID, LINE, WIDTH, causal_modes, make
from tests.zoo.test_attention import CASES, HEADS, UNUSED, build, evaluate
from zoo import KVCache, Positions, prior_attention
from zoo.attention import KERNELS, triton
from zoo.attention.call import AttentionCall
from zoo.attention.triton import TritonKernel, common
from zoo.catalog import create_model
from zoo.methods import list_positions
from zoo.priors import Prior

pytestmark = pytest.mark.gpu

PLANNING = TritonKernel(least_keys=1, decode_queries=0)
DECODING = TritonKernel(least_keys=1)
# What the toeplitz kernel keeps is nothing to this one. Realisations beyond "both" where they make
# another kernel.
RUNS = [
    (name, "both")
    for name in CASES
    if name not in {"odd-recomputed", "scale-recomputed", "one-document"}
]
RUNS += [(name, "none") for name in ("odd", "documents", "grouped-values")]
RUNS += [(name, how) for how in ("lanes", "table") for name in ("offset", "scale", "grid-prefix")]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Short calls get several tiles, and a plan."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(common, "TILE", 16)
    monkeypatch.setitem(KERNELS, "triton", PLANNING)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "realised"), some(RUNS, 6))
def test_fused_kernel_equals_oracle(name, realised):
    """A logit is a sum of some 20 products, a gradient one of some 100 weights, each rounded: 2^−24
    of the largest value for each, in the worst case; rounding errors of logits multiply all that
    follows from them."""
    case = CASES[name]
    shares = min(case.groups, case.value_groups or HEADS) < HEADS
    leaves, options = build(case, realised, heads=HEADS if shares or DEVICE.type != "cpu" else 2)
    low = {key: leaf.detach().to(DEVICE).float().requires_grad_() for key, leaf in leaves.items()}
    exact = {key: leaf.detach().double().cpu().requires_grad_() for key, leaf in low.items()}
    truth = evaluate(exact, options, "reference", case.grid)
    options = {
        key: value.to(DEVICE) if isinstance(value, Tensor) else value
        for key, value in options.items()
    }
    got = evaluate(low, options, "triton", case.grid)
    for key, value in truth.items():
        error = float((got[key].cpu().double() - value).abs().max())
        assert error <= 200 * 2**-24 * max(1.0, float(value.abs().max())), key


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "causal"),
    some([(n, c) for n in LINE for c in causal_modes(n)] + [(n, False) for n in GRID], 4),
)
def test_every_prior_with_gradients(name, causal):
    """A prior registered today is covered today, GGD as a parametric table; a dense bias is refused
    with the reason."""
    prior = make(name, num_heads=2).to(DEVICE).float()
    pos = Positions.grid(4, 5, num_prefix=2) if name in GRID else Positions.line(21)
    torch.manual_seed(3)
    q, k, v = (
        torch.randn(1, 2, pos.length, 8, device=DEVICE, requires_grad=True) for _ in range(3)
    )
    terms = prior(pos, pos, causal=causal, x=torch.randn(1, pos.length, WIDTH, device=DEVICE))
    results = []
    if terms.bias is not None or terms.gain is not None:
        with pytest.raises(ValueError, match="no dense bias"):
            prior_attention(q, k, v, terms, causal=causal, kernel="triton")
        return
    leaves = [q, k, v, *(p for p in prior.parameters() if p.requires_grad)]
    for kernel in ("reference", "triton"):
        out = prior_attention(q, k, v, terms, causal=causal, kernel=kernel)
        results.append(
            [out, *torch.autograd.grad(out.sin().sum(), leaves, retain_graph=True, **UNUSED)]
        )
    for truth, got in zip(*results, strict=True):
        torch.testing.assert_close(
            got, truth, rtol=2e-4, atol=2e-5 * max(1.0, float(truth.detach().abs().max()))
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", some([name for name in list_positions() if name not in ("fire", "scale_invariant")], 3)
)
@torch.no_grad()
def test_decoding_equals_forward(name, monkeypatch):
    """Documents on grouped heads: a prompt, a few tokens, one at a time, against all of them at
    once by torch's kernel.

    float32: sums in another order, through one layer of logits of order 10.
    """
    monkeypatch.setitem(KERNELS, "triton", DECODING)
    torch.manual_seed(0)
    shape = dict(num_layers=1, dim=64, num_heads=4, num_kv_heads=2, hidden_dim=32)
    model = create_model(f"text_{name}_ssmax_tiny", **shape).to(DEVICE).eval()
    for module in model.modules():
        if isinstance(module, Prior):
            for parameter in module.parameters(recurse=False):
                parameter.add_(0.3 * torch.randn_like(parameter))
    tokens = torch.randint(0, 200, (2, 18), device=DEVICE)
    segments = torch.tensor([[0] * 8 + [1] * 10, [-1] * 5 + [0] * 13], device=DEVICE)
    expected = model(tokens, segments=segments, kernel="sdpa")
    cache = KVCache(1)
    sizes = [12, 4, 1, 1]
    found = [
        model(part, segments=ids, cache=cache, kernel="triton")
        for part, ids in zip(tokens.split(sizes, 1), segments.split(sizes, 1), strict=True)
    ]
    torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=1e-4, atol=3e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", some([torch.float32, torch.bfloat16], 1))
def test_t5_last_number(dtype):
    """The gradient of the bucket of far keys follows from the others', as exactly as if its
    diagonals were walked."""
    prior = make("t5", num_heads=1, num_buckets=8, max_distance=7).to(DEVICE).float()
    line = Positions.line(45)
    torch.manual_seed(4)
    q, k, v = torch.randn(3, 1, 1, 45, 16, device=DEVICE, dtype=dtype)
    call = AttentionCall(q, k, v, prior(line, line, causal=True), True)
    assert triton._constant_from(call) == 7
    exact = replace(call, q=q.double(), k=k.double(), v=v.double())
    results = []
    at = call.table.displacements()["d"].long()
    for kernel, inputs in ((PLANNING, call), (KERNELS["reference"], exact)):
        out = kernel.run(inputs).double() * torch.arange(16.0, device=DEVICE).sin()
        (columns,) = torch.autograd.grad(out.sum(), call.table.table, retain_graph=True)
        results.append(
            torch.cat([columns[0, (at >= 0) & (at < 7)], columns[0, at >= 7].sum()[None]])
        )
    room = 200 * 2**-24 if dtype == torch.float32 else 2**-6
    assert (results[0] - results[1]).abs().max() <= room * results[1].abs().max().clamp(min=1.0)
