"""Every kernel against the float64 oracle: outputs and all gradients, and what a kernel must
refuse."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.pairs import pairs
from tests.refusals import refuses
from tests.zoo.priors_table import CASES as PRIOR_CASES
from tests.zoo.priors_table import GRID, WIDTH, make
from zoo import Positions, create_prior
from zoo.attention import KERNELS, prior_attention
from zoo.attention.call import AttentionCall, Kernel, spread_gain
from zoo.attention.sdpa import SdpaKernel
from zoo.attention.toeplitz import ToeplitzKernel
from zoo.priors.base import RelativeTable
from zoo.priors.compose import Compose
from zoo.priors.terms import PriorTerms

HEADS = 4
HEAD_WIDTH = 8
LANES = 3
# "triton" and "flash" compute below float64: tests/zoo/test_triton_attention.py,
# tests/zoo/test_dispatch.py.
FAST = [name for name in KERNELS if name not in ("reference", "triton", "flash")]


@dataclass(frozen=True)
class Case:
    """One call. documents: column where each batch row's second document starts (0: it has one), or
    None for no ids."""

    queries: int = 37
    keys: int = 37
    groups: int = HEADS
    value_groups: int | None = None
    causal: bool = True
    documents: tuple[int, int] | None = None
    window: int | None = None
    scale: str | None = None  # "shared" (H, T) or "batch" (B, H, T)
    block: int = 16  # rows of the toeplitz kernel's blocks, so that short tests have several
    kept: bool = True  # whether the toeplitz kernel may keep P from the forward pass
    grid: tuple[int, int, int] | None = (
        None  # (height, width, prefix tokens), whose table it then is
    )


def on_grid(height: int, width: int, prefix: int, **options) -> Case:
    length = height * width + prefix
    return Case(length, length, causal=False, grid=(height, width, prefix), **options)


CASES = {
    "odd": Case(),
    "odd-recomputed": Case(kept=False),
    "one": Case(queries=1, keys=1),
    "offset": Case(queries=19, keys=45),
    "decode": Case(queries=1, keys=45, groups=2),
    "decode-documents": Case(queries=1, keys=45, groups=2, documents=(0, 9)),
    "decode-scale": Case(queries=1, keys=45, groups=2, scale="batch"),
    "grouped": Case(groups=2),
    "grouped-values": Case(groups=4, value_groups=1),
    "bidirectional": Case(causal=False, kept=False),
    "bidirectional-offset": Case(queries=19, keys=45, causal=False),
    "more-queries": Case(queries=45, keys=19, causal=False, kept=False),
    "one-document": Case(documents=(0, 0)),
    "documents": Case(documents=(20, 0)),
    "documents-offset": Case(queries=19, keys=45, documents=(30, 11), kept=False),
    "documents-bidirectional": Case(causal=False, documents=(20, 5), window=12),
    "window": Case(window=7, kept=False),
    "window-bidirectional": Case(window=7, causal=False),
    "window-of-one": Case(window=1),
    "scale": Case(scale="shared"),
    "scale-recomputed": Case(scale="shared", kept=False),
    "scale-per-document": Case(scale="batch", documents=(20, 0), kept=False),
    "grid": on_grid(3, 5, 0),
    "grid-prefix": on_grid(5, 3, 1, scale="shared"),
    "grid-registers": on_grid(2, 7, 5, groups=2, scale="batch"),
    "grid-row": on_grid(1, 9, 1),
    "grid-column": on_grid(9, 1, 0),
    "grid-documents": on_grid(4, 3, 2, documents=(5, 9), window=8),
    "everything": Case(19, 45, 2, None, True, (30, 11), 9, "batch", 5, False),
}
UNUSED = dict(allow_unused=True, materialize_grads=True)
REALISED = ["none", "lanes", "table", "both"]
LOW_PRECISION = [
    "odd",
    "odd-recomputed",
    "offset",
    "documents",
    "window",
    "scale",
    "bidirectional",
    "grid-prefix",
]


def build(
    case: Case, realised: str, heads: int = HEADS, width: int = HEAD_WIDTH, lanes: int = LANES
) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Leaves (float64) and the keyword arguments that are no leaves."""
    torch.manual_seed(0)
    groups = min(case.groups, heads)
    batch = 2
    leaves = {
        "q": torch.randn(batch, heads, case.queries, width),
        "k": torch.randn(batch, groups, case.keys, width),
        "v": torch.randn(batch, case.value_groups or groups, case.keys, width),
    }
    if realised in ("lanes", "both"):
        leaves["q_lanes"] = torch.randn(1, heads, case.queries, lanes)
        leaves["k_lanes"] = torch.randn(1, 1, case.keys, lanes)
    if realised in ("table", "both"):
        height, width, _ = case.grid or (1, 1, 0)
        places = (2 * height - 1) * (2 * width - 1) if case.grid else case.queries + case.keys - 1
        leaves["table"] = torch.randn(heads, places)
    if case.scale:
        lead = (batch,) if case.scale == "batch" else ()
        # SSMax at n = 1: a row of scale 0, where 0 · −∞ would be no number.
        leaves["query_scale"] = torch.randn(*lead, heads, case.queries).index_fill(
            -1, torch.tensor([0]), 0.0
        )
    segments = None
    if case.documents is not None:
        segments = torch.stack(
            [(torch.arange(case.keys) >= start).long() + start for start in case.documents]
        )
    return (
        {name: leaf.double().requires_grad_() for name, leaf in leaves.items()},
        {"causal": case.causal, "segments": segments, "window": case.window},
    )


def terms_of(leaves: dict[str, Tensor], grid: tuple[int, int, int] | None = None) -> PriorTerms:
    terms = PriorTerms(
        leaves.get("q_lanes"),
        leaves.get("k_lanes"),
        bias=leaves.get("bias"),
        sink=leaves.get("sink"),
    )
    if "table" in leaves and grid is not None:
        height, width, prefix = grid
        pos = Positions.grid(height, width, num_prefix=prefix)
        terms = replace(terms, table=RelativeTable.grid(leaves["table"], pos))
    elif "table" in leaves:
        queries = leaves["q"].shape[2]
        keys = leaves["k"].shape[2]
        places = Positions.line(queries, offset=max(keys - queries, 0)), Positions.line(keys)
        lowest = places[0].offset - (keys - 1)
        terms = replace(terms, table=RelativeTable.line(leaves["table"], *places, center=-lowest))
    return terms


def evaluate(
    leaves: dict[str, Tensor],
    options: dict[str, object],
    kernel: str | Kernel,
    grid: tuple[int, int, int] | None = None,
    terms: PriorTerms | None = None,
) -> dict[str, Tensor]:
    """What prior_attention gives, with gradients; terms: others than those of the leaves."""
    out = prior_attention(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        terms_of(leaves, grid) if terms is None else terms,
        query_scale=leaves.get("query_scale"),
        kernel=kernel,
        **options,
    )
    return with_gradients(out, leaves)


def with_gradients(out: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """An output and, if it has gradients, that of every leaf for one fixed direction."""
    if not out.requires_grad:
        return {"out": out}
    weight = (
        torch.sin(torch.arange(out.numel()) * 0.7).view(out.shape).bfloat16().to(out)
    )  # exact in every dtype
    grads = torch.autograd.grad((out * weight).sum(), list(leaves.values()), **UNUSED)
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def of_small_blocks(kernel: str, case: Case) -> Kernel:
    """The kernel, so that it cuts short sequences into many blocks, as it does long ones."""
    if kernel == "sdpa":
        # On a grid 5 queries of 2 heads end inside its rows.
        return SdpaKernel(mask_limit=16 * 45, small_limit=200, block_rows=4)
    if kernel != "toeplitz":
        return KERNELS[kernel]
    rows = dict.fromkeys(("forward_rows", "backward_rows", "short_rows", "least_rows"), case.block)
    return ToeplitzKernel(
        **rows, **{} if case.kept else {"keep_keys": 0, "one_block": 0}, workspace=1500
    )


def refused(kernel: str, realised: str, case: Case) -> bool:
    leaves, options = build(case, realised)
    call = AttentionCall(
        leaves["q"], leaves["k"], leaves["v"], terms_of(leaves, case.grid), **options
    )
    return KERNELS[kernel].refuses(call) is not None


# Both kernels with each case, in two of its four realisations.
RUNS = [
    (kernel, name, REALISED[(n + 2 * k + n // 4) % 4])
    for k, kernel in enumerate(FAST)
    for n, name in enumerate(CASES)
]


@pytest.mark.parametrize(("kernel", "name", "realised"), RUNS)
def test_kernel_equals_oracle(kernel, name, realised):
    """Kernel equals the oracle with every gradient."""
    case = CASES[name]
    leaves, options = build(case, realised)
    if refused(kernel, realised, case):
        refuses(f"'{kernel}' cannot serve", evaluate, leaves, options, kernel, case.grid)
        return
    both = "reference", of_small_blocks(kernel, case)
    expected, got = (evaluate(leaves, options, which, case.grid) for which in both)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)  # which names the leaf


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "realised", "name", "dtype"),
    pairs(FAST, ["lanes", "table"], LOW_PRECISION, [torch.bfloat16, torch.float16, torch.float32]),
)
def test_low_precision_loses_some_roundings(kernel, realised, name, dtype):
    """Of inputs that the dtype holds exactly; tables, lanes and row scales are float32. What plain
    attention loses when every step of it rounds to the dtype is up to 5 roundings of the largest
    value; in float32 exponentials add 20."""
    case = CASES[name]
    leaves, options = build(case, realised)
    if refused(kernel, realised, case):
        return
    exact = {key: leaf.detach().to(dtype).double().requires_grad_() for key, leaf in leaves.items()}
    low = {
        key: x.detach().to(dtype if key in "qkv" else torch.float32).requires_grad_()
        for key, x in exact.items()
    }
    truth = evaluate(exact, options, "reference", case.grid)
    got = evaluate(low, options, of_small_blocks(kernel, case), case.grid)
    for key, value in truth.items():
        error = float((got[key].double() - value).abs().max() / value.abs().max().clamp(min=1.0))
        assert error <= (40 if dtype == torch.float32 else 8) * torch.finfo(dtype).eps, key


@pytest.mark.parametrize(
    ("kernel", "name", "causal"),
    [(FAST[n % len(FAST)], *case) for n, case in enumerate(PRIOR_CASES)],
)
def test_every_prior(kernel, name, causal):
    """A prior registered today is covered today: a kernel in blocks and `auto` against the oracle,
    with every gradient."""
    prior = make(name, num_heads=HEADS)
    pos = Positions.grid(3, 5, num_prefix=2) if name in GRID else Positions.line(29)
    torch.manual_seed(3)
    q, k, v = (
        torch.randn(2, HEADS, pos.length, HEAD_WIDTH).double().requires_grad_() for _ in range(3)
    )
    scale = torch.linspace(0.5, 2, HEADS * pos.length, dtype=torch.float64).view(HEADS, -1)
    terms = prior(pos, pos, causal=causal, x=torch.randn(2, pos.length, WIDTH, dtype=torch.float64))
    if KERNELS[kernel].refuses(spread_gain(AttentionCall(q, k, v, terms, causal))):
        kernel = "sdpa"
    leaves = [q, k, v, *(p for p in prior.parameters() if p.requires_grad)]
    results = []
    for which in ("reference", of_small_blocks(kernel, Case()), "auto"):
        out = prior_attention(q, k, v, terms, causal=causal, query_scale=scale, kernel=which)
        results.append(
            [out, *torch.autograd.grad(out.sin().sum(), leaves, retain_graph=True, **UNUSED)]
        )
        with torch.no_grad():
            again = prior_attention(q, k, v, terms, causal=causal, query_scale=scale, kernel=which)
        torch.testing.assert_close(again, out, rtol=1e-9, atol=1e-11)
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-8, atol=1e-10)


def test_second_derivatives_are_refused():
    leaves, options = build(Case(), "table")
    out = prior_attention(
        leaves["q"], leaves["k"], leaves["v"], terms_of(leaves), kernel="toeplitz", **options
    )
    refuses(
        "no second derivative",
        torch.autograd.grad,
        out.sum(),
        leaves["q"],
        create_graph=True,
        error=RuntimeError,
    )


@pytest.mark.parametrize(
    ("kernel", "name", "queries", "keys", "window"),
    [
        ("sdpa", "alibi", 1, 45, None),
        ("toeplitz", "alibi+spectral", 2, 67, None),
        ("sdpa", "alibi+ggd", 3, 517, None),
        ("toeplitz", "alibi", 259, 261, None),
        ("toeplitz", "alibi+ggd", 35, 300, 66),
    ],
)
def test_odd_shapes_are_exact(
    kernel: str, name: str, queries: int, keys: int, window: int | None
) -> None:
    """Lanes of a slope are as large as the position: 131,072 here, of which nothing may reach
    weights or gradients."""
    far = 1 << 17
    prior = Compose(**{part: create_prior(part, num_heads=2) for part in name.split("+")})

    def error(queries: int, keys: int) -> float:
        torch.manual_seed(0)
        inputs = [torch.randn(1, 2, n, 16) for n in (queries, keys, keys)]
        places = (
            Positions.line(queries, offset=far - queries),
            Positions.line(keys, offset=far - keys),
        )
        results = []
        for dtype, used in ((torch.float64, "reference"), (torch.float32, kernel)):
            q, k, v = (t.to(dtype).requires_grad_() for t in inputs)
            terms = copy.deepcopy(prior).to(dtype)(*places, causal=True)
            out = prior_attention(q, k, v, terms, causal=True, window=window, kernel=used)
            results.append([out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))])
        return max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))

    assert error(queries, keys) < 1e-5 + 10 * error(-(-queries // 16) * 16, -(-keys // 16) * 16)


def test_blocked_bias_equals_matrix() -> None:
    """FIRE makes its bias a block of rows at a time."""
    prior = create_prior("fire", num_heads=4, train_context=9)
    line = Positions.line(37)
    terms = prior(line, line, causal=True)
    dense = torch.randn(1, 4, 37, 37)
    for both in (terms + PriorTerms(bias=dense), PriorTerms(bias=dense) + terms):
        torch.testing.assert_close(both.dense(), terms.dense() + dense)
        torch.testing.assert_close(both.of_heads([1, 2]).dense(), (terms.dense() + dense)[:, 1:3])
        assert both.bias.shape == (1, 4, 37, 37)
        assert both.bias.requires_grad
    torch.testing.assert_close(
        terms.bias.padded(3, 5).block(slice(1, 3), slice(3, 40), 37), terms.dense()[:, 1:3]
    )


def test_hidden_row_is_zero() -> None:
    """A row whose bias hides all keys is zero with a gradient too."""
    q = torch.randn(1, 2, 5, 8)
    bias = torch.randn(1, 2, 5, 5)
    bias[:, :, 2] = -torch.inf
    bias.requires_grad_()
    out = prior_attention(q, q, q, PriorTerms(bias=bias), causal=False)
    [grad] = torch.autograd.grad(out.sum(), bias)
    assert not out[:, :, 2].any()
    assert out.isfinite().all()
    assert grad.isfinite().all()


def test_strong_prior_is_not_rounded() -> None:
    """Two keys whose log-priors are −100 and −100.2 must not tie: bfloat16 would read both as
    −100."""
    v = torch.tensor([1.0, 0.0]).view(1, 1, 2, 1).expand(-1, -1, -1, 8).bfloat16()
    k = torch.zeros(1, 1, 2, 8, dtype=torch.bfloat16)
    grid = RelativeTable.grid(
        torch.tensor([[-100.2, -100.0, -300.0]]), Positions.grid(1, 2)
    )  # dx = −1, 0, 1
    line = RelativeTable(
        torch.tensor([[0, -100.2, -100, 0]]), torch.tensor([1]), torch.tensor([0, 1]), 1, origin=2
    )
    for table, kernel in ((grid, "sdpa"), (line, "sdpa"), (line, "toeplitz")):
        q = k[:, :, : len(table.q_code)]
        terms = PriorTerms(table=table)
        for tracked in (False, True):
            out = prior_attention(
                q.detach().requires_grad_(tracked), k, v, terms, causal=table is line, kernel=kernel
            )
            assert out.dtype == torch.bfloat16
            assert abs(out[0, 0, 0, 0].item() - 0.54983) < 2e-3  # 1 / (1 + e^−0.2)
