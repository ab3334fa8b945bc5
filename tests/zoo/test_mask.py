"""Boolean masks and dropout of `prior_attention`: outputs and gradients by definition, who serves
them, who refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.zoo.test_attention import (
    CASES,
    HEADS,
    Case,
    build,
    evaluate,
    of_small_blocks,
    terms_of,
    with_gradients,
)
from zoo.attention import KERNELS, prior_attention, skipped_share
from zoo.attention.call import AttentionCall, Kernel
from zoo.attention.dispatch import choose_kernel
from zoo.attention.heads import repeat_heads
from zoo.attention.masks import visible
from zoo.priors.terms import PriorTerms

SHAPES = {"shared": (1, 1), "by row": (2, 1), "by head": (1, HEADS), "by both": (2, HEADS)}
REALISED = ["none", "lanes", "table", "both", "bias"]
WITH_MASK = [
    "odd", "one", "offset", "decode", "decode-documents", "grouped-values", "bidirectional", "more-queries", "documents",
    "window-bidirectional", "scale", "scale-per-document", "grid-prefix", "everything",
]  # fmt: skip


def masked(
    name: str, realised: str, shape: tuple[int, int]
) -> tuple[dict[str, Tensor], PriorTerms, dict[str, Any]]:
    """Leaves, their terms and the options of a case with a mask, under which some rows see
    nothing."""
    case = CASES[name]
    leaves, options = build(case, realised)
    if realised == "bias":
        torch.manual_seed(4)
        leaves["bias"] = torch.randn(
            1, HEADS, case.queries, case.keys, dtype=torch.float64, requires_grad=True
        )
    mask = (
        torch.rand(*shape, case.queries, case.keys, generator=torch.Generator().manual_seed(1))
        < 0.6
    )
    mask[..., :: case.queries // 3 + 1, :] = (
        case.queries == 1
    )  # rows 0, … see nothing, but in a call of one query
    mask[..., 0] |= case.queries == 1
    return (
        leaves,
        replace(terms_of(leaves, case.grid), bias=leaves.get("bias")),
        {**options, "mask": mask},
    )


def by_definition(leaves: dict[str, Tensor], terms: PriorTerms, options: dict[str, Any]) -> Tensor:
    """Σ_j e^z_j m_j v_j / Σ_j e^z_j m_j over the keys that are seen, m = 1; 0 where there are
    none."""
    q = leaves["q"]
    k = leaves["k"]
    v = leaves["v"]
    logits = (
        torch.einsum("bhtd,bhsd->bhts", q, repeat_heads(k, HEADS)) / math.sqrt(q.shape[-1])
        + terms.dense()
    )
    if "query_scale" in leaves:
        logits = logits * leaves["query_scale"][..., None]
    shown = visible(
        AttentionCall(q, k, v, terms, **{key: x for key, x in options.items() if key != "mask"})
    )
    shown = options["mask"] if shown is None else options["mask"] & shown
    shown = shown.expand_as(logits).double()
    unnormed = (logits - logits.detach().amax(-1, keepdim=True)).exp() * shown
    total = unnormed.sum(-1, keepdim=True)
    return unnormed @ repeat_heads(v, HEADS) / (total + (total == 0))


# Each case with two realisations, and every realisation with every kernel and shape of mask.
COMBINED = [
    (name, REALISED[(n + k) % 5], ("reference", "sdpa", "auto")[n % 3], list(SHAPES)[(n + k) % 4])
    for k in (0, 2)
    for n, name in enumerate(WITH_MASK)
]


@pytest.mark.parametrize(("name", "realised", "kernel", "shape"), COMBINED)
def test_mask_by_definition(name: str, realised: str, kernel: str, shape: str) -> None:
    """A mask by definition with every gradient."""
    leaves, terms, options = masked(name, realised, SHAPES[shape])
    which: str | Kernel = kernel if kernel != "sdpa" else of_small_blocks("sdpa", CASES[name])
    expected = with_gradients(by_definition(leaves, terms, options), leaves)
    torch.testing.assert_close(
        evaluate(leaves, options, which, terms=terms), expected, rtol=1e-9, atol=1e-11
    )


def _heads(leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return leaves["q"], leaves["k"], leaves["v"]


@pytest.mark.parametrize(
    ("realised", "options"),
    [
        ("table", {"mask": torch.ones(1, 1, 300, 300, dtype=torch.bool)}),
        ("lanes", {"dropout": 0.1}),
    ],
)
def test_auto_finds_serving_kernel(realised: str, options: dict) -> None:
    """Kernels without a matrix refuse and auto finds one that serves."""
    leaves, given = build(Case(queries=300, keys=300), realised)
    terms = terms_of(leaves)
    call = AttentionCall(*_heads(leaves), terms, **given, **options)
    assert choose_kernel(call) == "sdpa"
    assert skipped_share(call) == 0
    reason = "reads no T × S mask" if "mask" in options else "does not drop weights"
    assert reason in str(KERNELS["toeplitz"].refuses(call))
    with pytest.raises(ValueError, match=f"'toeplitz' cannot serve this call: it {reason}"):
        prior_attention(*_heads(leaves), terms, kernel="toeplitz", **given, **options)
    for kernel in ("triton", "flash"):
        with pytest.raises(ValueError, match=f"'{kernel}' cannot serve"):
            prior_attention(*_heads(leaves), terms, kernel=kernel, **given, **options)


@pytest.mark.parametrize(("kernel", "realised"), [("reference", "lanes"), ("sdpa", "table")])
def test_dropout_agrees_in_backward(kernel: str, realised: str) -> None:
    """Forward and backward drop the same weights."""
    leaves, options = build(Case(queries=5, keys=7, groups=2), realised)
    options["mask"] = torch.rand(1, HEADS, 5, 7, generator=torch.Generator().manual_seed(0)) < 0.8

    def attention(*values: Tensor) -> Tensor:
        tensors = dict(zip(leaves, values, strict=True))
        torch.manual_seed(11)
        return prior_attention(
            *_heads(tensors), terms_of(tensors), kernel=kernel, dropout=0.4, **options
        )

    assert torch.autograd.gradcheck(attention, tuple(leaves.values()), fast_mode=True)
