"""Keys left out on the CPU: that they have no weight, that outputs and gradients are the same, and
what is never left out."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.zoo.priors_table import make
from zoo import Positions, prior_attention
from zoo.attention import reach as planning
from zoo.attention import skipped_share, skipping
from zoo.attention.call import AttentionCall, fold_keys, fold_queries
from zoo.attention.dispatch import choose_kernel
from zoo.attention.reach import find_reach
from zoo.attention.reference import attend as oracle
from zoo.attention.toeplitz import ToeplitzKernel, _reversed_mask, _reversed_table
from zoo.priors import Prior

ROWS = 64
BLOCKS = dict.fromkeys(("forward_rows", "backward_rows", "short_rows", "least_keys"), ROWS)
SKIPPING = ToeplitzKernel(**BLOCKS, least_rows=ROWS // 4, one_head=100 * ROWS, keep_keys=0)
WHOLE = replace(SKIPPING, skips=False)
WIDTH = 16


@dataclass(frozen=True)
class Case:
    prior: str = "ggd"
    queries: int = 700
    keys: int = 700
    groups: int = 2
    causal: bool = True
    window: int | None = None
    documents: tuple[int, ...] = ()  # where the second document of each batch row starts
    ssmax: bool = False


CASES = {
    "table": Case(),
    "lanes": Case("alibi"),
    "both": Case("goat"),
    "lanes of content": Case("cable"),
    "grouped": Case(groups=1),
    "offset": Case(queries=323, keys=901),
    "offset, lanes": Case("alibi", queries=323, keys=901),
    "ssmax": Case(ssmax=True),
    "ssmax, lanes": Case("goat", ssmax=True, groups=1),
    "window": Case(window=333),
    "documents": Case(documents=(300, 511)),
    "documents, lanes": Case("alibi", documents=(300, 0)),
    "both sides": Case(causal=False),
    "both sides, ssmax": Case(causal=False, ssmax=True, queries=500, keys=640),
}


# One head forgets within some dozen keys, one within some hundred, as far as its kind does.
DECAY = {
    "ggd": {"theta_alpha": [-0.7, -2.3], "theta_beta": [1.0, 1.0]},
    "alibi": {"raw_slope": [0.5, -2.5]},
    "cable": {},
    "goat": {"key_bias.raw_slope": [0.5, -2.0]},
}


def decaying(name: str) -> Prior:
    """A prior of two heads that decay."""
    prior = make(name, num_heads=2, **{"train_mu": False} if name == "ggd" else {})
    with torch.no_grad():
        for parameter, values in DECAY[name].items():
            prior.get_parameter(parameter).copy_(torch.tensor(values))
        if name == "cable":
            prior.get_parameter("decay.weight").mul_(3.0)
    return prior


def build(case: Case, dtype: torch.dtype, seed: int = 0) -> tuple[AttentionCall, list[Tensor]]:
    """A call, and the tensors whose gradients are compared; the same numbers in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.promote_types(dtype, torch.float32)
    prior = decaying(case.prior).float().to(wide)
    batch = max(1, len(case.documents))
    of_keys = case.groups, case.keys, WIDTH
    shapes = [(2, case.queries, WIDTH), of_keys, of_keys, (case.keys, 12)]
    q, k, v, x = (
        torch.randn(batch, *shape, generator=generator).bfloat16().to(dtype) for shape in shapes
    )
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    q_pos = Positions.line(case.queries, offset=case.keys - case.queries)
    terms = prior(q_pos, Positions.line(case.keys), causal=case.causal, x=x.to(wide))
    scale = segments = None
    if case.ssmax:
        scale = (
            (0.4 * torch.arange(2, case.queries + 2).log())
            .repeat(1, 2, 1)
            .to(wide)
            .requires_grad_()
        )
        leaves.append(scale)
    if case.documents:
        segments = torch.stack(
            [(torch.arange(case.keys) >= start).long() for start in case.documents]
        )
    leaves += [p for p in prior.parameters() if p.requires_grad]
    return AttentionCall(q, k, v, terms, case.causal, scale, segments, case.window), leaves


def attend(call: AttentionCall, kernel: ToeplitzKernel | str) -> Tensor:
    return prior_attention(
        call.q, call.k, call.v, call.terms, causal=call.causal, query_scale=call.query_scale, segments=call.segments,
        window=call.window, kernel=kernel,
    )  # fmt: skip


def reach_of(call: AttentionCall) -> planning.Reach:
    table = _reversed_table(call)
    mask = _reversed_mask(call, torch.float64)
    with torch.no_grad():
        table = table.double() if mask is None else table.double() + mask
        scale = call.query_scale if call.table is not None else None
        return find_reach(call, fold_queries(call), fold_keys(call), table, scale, ROWS)


def weights_of(call: AttentionCall) -> Tensor:
    """(B, H, T, S) float64 weights, without blocks."""
    wide = replace(call, q=call.q.double(), k=call.k.double(), v=call.v.double())
    with torch.no_grad():
        return oracle(wide)[1]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, (torch.float64, torch.float32, torch.bfloat16)[n % 3]) for n, name in enumerate(CASES)],
)
def test_left_out_changes_nothing(name: str, dtype: torch.dtype) -> None:
    """Outputs and all gradients are as near to those of float64 as without leaving anything out."""
    errors = []
    # Priors' numbers sum the rounding of δ and of lanes' gradients times distances: of one draw
    # that is any number.
    for seed in range(1 if dtype == torch.float64 else 4):
        results = []
        for kernel, precision in ((WHOLE, torch.float64), (WHOLE, dtype), (SKIPPING, dtype)):
            call, leaves = build(CASES[name], precision, seed)
            out = attend(call, kernel)
            direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(
                out.dtype
            )
            grads = torch.autograd.grad((out * direction).sum(), leaves, allow_unused=True)
            results.append([out.detach(), *(grad for grad in grads if grad is not None)])
        assert kernel_skips(call)
        truth, *both = results
        pairs = ([*zip(result, truth, strict=True)] for result in both)
        errors.append(
            [[float((a.double() - b).abs().max()) for a, b in result] for result in pairs]
        )
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for of, (whole, skipped) in zip(truth, torch.tensor(errors).amax(0).mT.tolist(), strict=True):
        assert skipped <= 4 * whole + tolerance * max(1.0, float(of.abs().max()))


def kernel_skips(call: AttentionCall) -> bool:
    with torch.no_grad():
        table = _reversed_table(call)
        scale = call.query_scale if call.table is not None else None
        return (
            SKIPPING.find_reach(call, fold_queries(call), fold_keys(call), table, scale)[0]
            is not None
        )


@pytest.mark.parametrize("name", CASES)
def test_left_out_weight_is_bounded(name: str) -> None:
    """All that is left out of a row weighs less than 2 to the minus 24."""
    call, _ = build(CASES[name], torch.float32)
    reach = reach_of(call)
    weights = weights_of(call)
    columns = torch.arange(call.num_keys)
    first, last = (
        x.repeat_interleave(ROWS, 2)[:, :, : call.num_queries, None]
        for x in (reach.first, reach.last)
    )
    left_out = (columns < first) | (columns >= last)
    assert left_out.any()
    assert weights.masked_fill(~left_out, 0.0).sum(-1).max() < 2**-24


def test_far_important_key_is_kept() -> None:
    """One huge key at the start of the text, which every row that looks its way reads."""
    call, _ = build(Case("alibi", groups=2), torch.float32)
    with torch.no_grad():
        call.q[..., 0], call.k[:, :, 5] = 3.0, 0.0
        call.k[:, :, 5, 0] = 900.0
    assert bool((reach_of(call).first == 0).all())
    torch.testing.assert_close(attend(call, SKIPPING), attend(call, WHOLE))


@pytest.mark.parametrize(
    ("where", "wrong"), [("q", math.nan), ("k", math.inf), ("table", math.nan), ("scale", math.inf)]
)
def test_non_finite_leaves_nothing_out(where: str, wrong: float) -> None:
    """Nothing is left out where a number is not finite."""
    call, _ = build(Case(ssmax=True), torch.float32)
    with torch.no_grad():
        if where == "table":
            assert call.table is not None
            table = call.table.table.clone()
            table[:, call.table.origin + 600] = wrong
            call = replace(
                call,
                terms=replace(call.terms, table=replace(call.table, table=table, parametric=None)),
            )
        elif where == "scale":
            call.query_scale[..., 650] = wrong
        else:
            getattr(call, where)[:, :, 600 if where == "k" else 650, 3] = wrong
    # Rows 640 to 699: all keys, or those up to the one that makes them NaN.
    assert bool((reach_of(call).first[:, :, 10] <= (576 if where == "k" else 0)).all())


@pytest.mark.parametrize("prior", ["ggd", "alibi"])
@torch.no_grad()
def test_long_calls_skip(prior: str) -> None:
    """Long calls leave out by themselves."""
    call, _ = build(Case(prior, queries=4096, keys=4096), torch.float32)
    call.q.mul_(0.3)
    assert choose_kernel(call) == "toeplitz"
    assert skipped_share(call) > 0.4
    with skipping(False):
        whole = attend(call, "auto")
        assert skipped_share(call) == 0.0
    with skipping(True) as tally:
        torch.testing.assert_close(attend(call, "auto"), whole, rtol=1e-5, atol=1e-6)
    assert tally.left_out / (2 * 4096 * 4097 // 2) == pytest.approx(skipped_share(call), abs=0.05)
    short, _ = build(Case(prior), torch.float32)
    assert skipped_share(short) == 0.0
    assert (choose_kernel(short) == "sdpa") == (prior == "alibi")
