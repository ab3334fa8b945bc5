"""The fused kernels behind `prior_attention(kernel="triton")`: every case of the other kernels, in float32 and below."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.device import DEVICE, some
from tests.zoo.priors_table import GRID, LINE, WIDTH, causal_modes, make
from tests.zoo.test_attention import CASES, HEADS, LOW_PRECISION, Case, build, evaluate
from zoo import KVCache, Positions, create_prior, prior_attention
from zoo.attention import KERNELS, triton
from zoo.attention.base import AttentionCall
from zoo.attention.triton import TritonKernel, common, table_grad
from zoo.methods import list_positions
from zoo.priors import Prior
from zoo.priors.base import PriorTerms, RelativeTable
from zoo.priors.tables import BlockedBias
from zoo.registry import create_model

pytestmark = pytest.mark.gpu

# Realisations beyond "both" are tried where they make another kernel: no table, no lanes.
FEWER = {
    "none": ["odd", "documents", "grouped-values"],
    "lanes": ["offset", "scale", "grid-prefix"],
    "table": ["documents", "scale", "grid-prefix"],
}
# What the toeplitz kernel keeps is nothing to this one, and one document on the CPU is a call without.
SAME = {"odd-recomputed", "scale-recomputed", "one-document"}
RUNS = [(name, "both") for name in CASES if name not in SAME or DEVICE.type != "cpu"]
RUNS += [(name, how) for how, names in FEWER.items() for name in names]
LOW = [(name, torch.bfloat16) for name in LOW_PRECISION if name not in SAME]
LOW += [(name, torch.float16) for name in ("odd", "scale", "grid-prefix")]


PLANNING = TritonKernel(least_keys=1, decode_queries=0)
DECODING = TritonKernel(least_keys=1)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Short calls get several tiles, and a plan."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(common, "TILE", 16)
    monkeypatch.setitem(KERNELS, "triton", PLANNING)


def moved(leaves: dict[str, Tensor], dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The leaves rounded to `dtype`, where a kernel has them so, on the device; and the same values in float64."""
    wide = {"table", "query_scale", "q_lanes", "k_lanes"}
    low = {
        key: leaf.detach().to(DEVICE, torch.float32 if key in wide else dtype).requires_grad_()
        for key, leaf in leaves.items()
    }
    return low, {key: leaf.detach().double().cpu().requires_grad_() for key, leaf in low.items()}


# Of four heads in two groups, and of two heads with keys of their own; in other cases what differs is not the heads.
GROUPS, APART = {"grouped", "everything"}, {"odd", "grid-prefix", "scale-per-document"}


def sized(name: str) -> tuple[Case, int]:
    """The case and its heads, as few as it needs where programs are interpreted: two that share keys or values, or one."""
    case = CASES[name]
    shares = min(case.groups, case.value_groups or HEADS) < HEADS
    if DEVICE.type != "cpu":
        return case, HEADS if shares else 2
    if name in GROUPS:
        return case, HEADS
    if shares:
        return (case if case.value_groups else replace(case, groups=1)), 2
    return case, 2 if name in APART else 1


def on_device(options: dict[str, object]) -> dict[str, object]:
    return {key: value.to(DEVICE) if isinstance(value, Tensor) else value for key, value in options.items()}


def budgets(truth: dict[str, Tensor]) -> dict[str, float]:
    """float32: a logit is a sum of some 20 products, a gradient one of some 100 weights, each rounded: 2^−24 times the
    largest value for each, in the worst case; rounding errors of logits multiply all that follows from them."""
    return {key: 200 * 2**-24 * max(1.0, float(value.abs().max())) for key, value in truth.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "realised"), some(RUNS, 5))
def test_fused_kernel_equals_the_oracle_with_every_gradient(name, realised):
    case, heads = sized(name)
    leaves, options = build(case, realised, heads=heads)
    low, exact = moved(leaves, torch.float32)
    truth = evaluate(exact, options, "reference", case.grid)
    got = evaluate(low, on_device(options), "triton", case.grid)
    for key, budget in budgets(truth).items():
        error = float((got[key].cpu().double() - truth[key]).abs().max())
        assert error <= budget, f"{key}: error {error:.2e} against a budget of {budget:.2e}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "causal"),
    some([(n, c) for n in LINE for c in causal_modes(n)] + [(n, False) for n in GRID], 4),
)
def test_every_prior_with_gradients_of_its_parameters(name, causal):
    """A prior registered today is covered today, GGD as a parametric table; FIRE's blocks are refused with the reason."""
    prior = make(name, num_heads=2).to(DEVICE).float()
    pos = Positions.grid(4, 5, num_prefix=2) if name in GRID else Positions.line(21)
    torch.manual_seed(3)
    q, k, v = (torch.randn(1, 2, pos.length, 8, device=DEVICE, requires_grad=True) for _ in range(3))
    x = torch.randn(1, pos.length, WIDTH, device=DEVICE)
    results = []
    for kernel in ("reference", "triton"):
        terms = prior(pos, pos, causal=causal, x=x)
        if isinstance(terms.bias, BlockedBias):
            with pytest.raises(ValueError, match="a block of rows at a time"):
                prior_attention(q, k, v, terms, causal=causal, kernel="triton")
            return
        out = prior_attention(q, k, v, terms, causal=causal, kernel=kernel)
        leaves = [q, k, v, *(p for p in prior.parameters() if p.requires_grad)]
        grads = torch.autograd.grad(out.sin().sum(), leaves, allow_unused=True)
        results.append([out, *(torch.zeros(()) if g is None else g for g in grads)])
    for truth, got in zip(*results, strict=True):
        torch.testing.assert_close(
            got.cpu(), truth.cpu(), rtol=2e-4, atol=2e-5 * max(1.0, float(truth.detach().abs().max()))
        )


@pytest.mark.slow
def test_a_flat_prior_has_no_gradient_but_rounding():
    """θβ = 0 is the same for every key, so no θα is better than another: in bfloat16 too, or Adam would walk at random."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 16, device=DEVICE).bfloat16() for _ in range(3))
    prior = make("ggd", num_heads=2).to(DEVICE).float()
    torch.nn.init.zeros_(prior.theta_beta)
    line = Positions.line(40)
    out = prior_attention(q, k, v, prior(line, line, causal=True), causal=True, kernel="triton")
    alpha, beta = torch.autograd.grad(
        (out.float() * torch.randn_like(out.float())).sum(), [prior.theta_alpha, prior.theta_beta]
    )
    assert alpha.abs().max() < 1e-5 * beta.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", some([torch.float32, torch.bfloat16], 1))
def test_rows_that_see_nothing_but_minus_infinity_are_zero_with_finite_gradients(dtype):
    """Keys nearer than 3 are −∞: the first rows of a causal call have no others. As with a mask that hides those keys."""
    line, near = Positions.line(21), 3
    torch.manual_seed(5)
    leaves = [torch.randn(1, 2, 21, 16, device=DEVICE, dtype=dtype).requires_grad_() for _ in range(3)]
    leaves += [torch.randn(2, 41, device=DEVICE).requires_grad_()]
    hidden = torch.arange(41, device=DEVICE) - 20 < near
    distance = torch.arange(21, device=DEVICE)[:, None] - torch.arange(21, device=DEVICE)
    results = []
    for kernel, options in (("triton", {}), ("reference", {"mask": (distance >= near)[None, None]})):
        given = [x if kernel == "triton" else x.double() for x in leaves]
        table = given[3] if options else given[3].masked_fill(hidden, -math.inf)
        terms = PriorTerms(table=RelativeTable.line(table, line, line, center=20))
        out = prior_attention(*given[:3], terms, causal=True, kernel=kernel, **options)
        results.append([out, *torch.autograd.grad((out.float() ** 2).sum(), leaves)])
    assert not results[0][0][:, :, :near].any()
    for got, truth in zip(*results, strict=True):
        scale = max(1.0, float(truth.detach().abs().max()))
        room = 200 * 2**-24 if dtype == torch.float32 else 2**-6
        assert float((got.double() - truth.double()).detach().abs().max()) <= room * scale


def biased(queries: int, dtype: torch.dtype = torch.float32, scaled: bool = False, **options) -> AttentionCall:
    """A call of T5 over 45 keys, all farther than 6 in one bucket."""
    prior, line = make("t5", num_heads=1, num_buckets=8, max_distance=7).to(DEVICE).float(), Positions.line(45)
    torch.manual_seed(4)
    q, k, v = (torch.randn(1, 1, n, 16, device=DEVICE, dtype=dtype) for n in (queries, 45, 45))
    rows = 0.5 + torch.rand(1, 1, queries, device=DEVICE) if scaled else None
    causal = options.pop("causal", True)
    return AttentionCall(q, k, v, prior(line.tail(queries), line, causal=causal), causal, rows, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "room"), some([(torch.float32, 200 * 2**-24), (torch.bfloat16, 2**-6)], 1))
@pytest.mark.parametrize(
    "options", some([dict(scaled=True, queries=45), dict(queries=30), dict(queries=45, window=30)], 1)
)
def test_the_last_of_t5s_numbers_is_minus_the_others(options, dtype, room):
    """The gradient of the bucket of far keys follows from the others', as exactly as if its diagonals were walked."""
    call = biased(**options, dtype=dtype)
    assert triton._constant_from(call) == 7 and call.table is not None
    exact = replace(call, q=call.q.double(), k=call.k.double(), v=call.v.double())
    of, found = call.table.table, []
    for kernel, given in ((PLANNING, call), (KERNELS["reference"], exact)):
        out = kernel.run(given).double() * torch.arange(16.0, device=DEVICE).sin()
        (columns,) = torch.autograd.grad(out.sum(), of, retain_graph=True)
        at = call.table.displacements()["d"].long()
        found.append(torch.cat([columns[0, (at >= 0) & (at < 7)], columns[0, at >= 7].sum()[None]]))
    assert (found[0] - found[1]).abs().max() <= room * found[1].abs().max().clamp(min=1.0)


@pytest.mark.slow
def test_gradients_are_the_same_bits_in_every_run(monkeypatch):
    """Also where a diagonal of the table's gradient is summed in parts."""
    monkeypatch.setattr(table_grad, "PROGRAMS", 12)
    length = 20 if DEVICE.type == "cpu" else 500  # programs are interpreted one after the other: nothing can vary
    leaves, options = build(Case(length, length, groups=1), "both", heads=2)
    low, _ = moved(leaves, torch.float32)
    first, second = (evaluate(low, on_device(options), "triton") for _ in range(2))
    for key in first:
        assert torch.equal(first[key], second[key]), key


@pytest.mark.slow
@pytest.mark.parametrize("name", some([name for name in list_positions() if name != "fire"], 3))
@torch.no_grad()
def test_decoding_with_a_cache_is_the_whole_forward_pass(name, monkeypatch):
    """Documents on grouped heads: a prompt, a few tokens, one at a time, against all of them at once by torch's kernel.

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
    cache, sizes = KVCache(1), [12, 4, 1, 1]
    found = [
        model(part, segments=ids, cache=cache, kernel="triton")
        for part, ids in zip(tokens.split(sizes, 1), segments.split(sizes, 1), strict=True)
    ]
    torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=1e-4, atol=3e-5)


# ------------------------------------------------------------------------------------------ a dense bias


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
