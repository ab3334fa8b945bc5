"""Calls of `prior_attention` with one thing wrong: each is refused in one line that names it, by
every kernel alike."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.refusals import refuses
from zoo import Positions, compose, create_prior, prior_attention
from zoo.priors.tables import whole_bias
from zoo.priors.terms import PriorTerms

BATCH = 2
HEADS = 4
QUERIES = 5
KEYS = 9
WIDTH = 8
PRIORS: dict[str, dict[str, Any]] = {
    "ggd": {},
    "goat": {"train_context": 8},
    "fire": {"train_context": 8},
}
Call = dict[str, Any]


def good(prior: str, kernel: str) -> Call:
    """A call that every kernel which serves it computes."""
    q, k, v = (torch.randn(BATCH, HEADS, length, WIDTH) for length in (QUERIES, KEYS, KEYS))
    segments = (torch.arange(KEYS) // 4).expand(BATCH, -1)
    options = dict(
        causal=True,
        kernel=kernel,
        window=6,
        query_scale=torch.rand(HEADS, QUERIES),
        segments=segments,
    )
    return dict(q=q, k=k, v=v, terms=terms_of(prior)(None), **options)


def terms_of(
    prior: str,
    queries: int = QUERIES,
    *,
    offset: int = KEYS - QUERIES,
    causal: bool = True,
    heads: int = HEADS,
) -> Callable[[Any], PriorTerms]:
    """Makes terms of other positions or heads."""
    module = create_prior(prior, num_heads=heads, **PRIORS[prior])
    return lambda _: module(
        Positions.line(queries, offset=offset), Positions.line(KEYS), causal=causal
    )


def part(name: str, change: Callable[[Any], Any]) -> Callable[[PriorTerms], PriorTerms]:
    """Changes a part of terms; a bias is a matrix then."""
    dense = whole_bias if name == "bias" else lambda x: x
    return lambda terms: replace(terms, **{name: change(dense(getattr(terms, name)))})


def table(field: str, change: Callable[[Any], Any]) -> Callable[[PriorTerms], PriorTerms]:
    return part("table", lambda x: replace(x, **{field: change(getattr(x, field))}))


def meta(x: Tensor) -> Tensor:
    return x.to("meta")


LANES = ("q_lanes", "k_lanes")
# (prior or "" for any, argument, what the message says, wrong values or functions that make them of
# the good one)
WRONG: list[tuple[str, str, str, list[Any]]] = [
    *(("", name, "one dtype of", [Tensor.long]) for name in "qkv"),
    *(("", name, "axes", [lambda x: x[0]]) for name in "qkv"),
    *(("", name, "at least one head", [lambda x: x[:, :0], lambda x: x[..., :0]]) for name in "qkv"),
    *(("", name, "q is", [meta]) for name in "kv"),
    *(("", name, "must divide 4 query heads", [lambda x: x[:, :3]]) for name in "kv"),
    ("", "k", "wide", [lambda x: x[..., :-1]]),
    ("", "q", "needs as many keys", [torch.randn(BATCH, HEADS, 2 * KEYS, WIDTH)]),
    ("", "causal", "causal must be", ["yes", 2, None, math.nan]),
    ("", "window", "window must be", [2.5, True, 0, -3, math.nan, "4", torch.tensor(3)]),
    ("", "dropout", "dropout must be", [1.0, -0.1, math.nan, math.inf, True]),
    ("", "kernel", "kernel", ["spda", "", None, 3]),
    ("", "terms", "PriorTerms", [3, "ggd", (), torch.zeros(1)]),
    ("ggd", "terms", r"PriorTerms\(table=", [lambda terms: terms.table]),
    ("", "query_scale", "scale must be", [lambda x: x[None, None], lambda x: x.expand(3, -1, -1)]),
    ("", "query_scale", "query_scale must be", [Tensor.long, meta, 2.0]),
    ("", "segments", "segments must be whole numbers", [Tensor.float, Tensor.bool]),
    ("", "segments", "segments must be", [lambda x: x[:1], lambda x: x[:, :-1], lambda x: x[0], meta, Tensor.tolist]),
    ("", "mask", "mask must be", [torch.ones(QUERIES, KEYS).bool(), torch.ones(1, 3, QUERIES, KEYS).bool()]),
    ("", "mask", "mask must be bool", [torch.ones(1, 1, QUERIES, KEYS)]),
    ("fire", "terms", "bias must be", [part("bias", lambda x: x[:, :3]), part("bias", lambda x: x.expand(3, -1, -1, -1))]),
    ("fire", "terms", "bias must be", [part("bias", lambda x: x[:, :, 1:]), part("bias", lambda x: x[0])]),
    ("fire", "terms", "on the device of x", [part("bias", meta)]),
    ("goat", "terms", "expected as many", [part("q_lanes", lambda x: None)]),
    ("goat", "terms", "wide", [part("k_lanes", lambda x: None)]),
    ("ggd", "terms", "heads, q has 4", [table("table", lambda x: x[:3]), table("table", lambda x: x[0])]),
    ("ggd", "terms", "columns", [table("table", lambda x: x[:, 1:])]),
    ("ggd", "terms", "of 4 positions, the call has 5", [table("q_code", lambda x: x[1:])]),
    ("ggd", "terms", "of 8 positions, the call has 9", [table("k_code", lambda x: x[1:])]),
    ("ggd", "terms", "are for causal=False", [terms_of("ggd", causal=False)]),
    *(("goat", "terms", "lanes must be", [part(name, lambda x: x[:, :3].expand(-1, 3, -1, -1))]) for name in LANES),
    *(("goat", "terms", "lanes must be", [part(name, lambda x: x[:, :, :-1]), part(name, Tensor.long)]) for name in LANES),
    *(("goat", "terms", "on the device of x", [part(name, meta)]) for name in LANES),
    *((prior, "terms", "head|must be", [terms_of(prior, heads=3)]) for prior in PRIORS),
    *((prior, "terms", "the first query 0 rows after", [terms_of(prior, offset=0)]) for prior in PRIORS),
    *((prior, "terms", "position|must be", [terms_of(prior, QUERIES + 1, offset=KEYS - 6)]) for prior in PRIORS),
    *((prior, "causal", "are for causal=True and the call has causal=False", [False]) for prior in PRIORS),
]  # fmt: skip


def test_wrong_call_is_refused() -> None:
    """A call with one thing wrong is refused."""
    kernels = {
        prior: ["reference", "sdpa", "auto", *["toeplitz"] * (prior != "fire")] for prior in PRIORS
    }
    for prior, names in kernels.items():
        for kernel in names:
            assert prior_attention(**good(prior, kernel)).isfinite().all()
    draw = random.Random(0)
    for prior, argument, words, changes in WRONG:
        for change in changes:
            name = prior or draw.choice(sorted(PRIORS))
            call = good(name, draw.choice(kernels[name]))
            for unneeded in {"query_scale", "segments", "window"} - {argument}:
                if draw.random() < 0.5:
                    del call[unneeded]
            call[argument] = change(call[argument]) if callable(change) else change
            assert len(refuses(words, prior_attention, **call)) < 300


def test_unfit_terms_are_not_added() -> None:
    """Terms that do not fit each other are not added."""
    goat = create_prior("goat", num_heads=HEADS, train_context=8)
    t5 = create_prior("t5", num_heads=HEADS)
    refuses("part '1' of a composed prior must be", compose, goat, "ggd")
    line = Positions.line(KEYS)
    with pytest.raises(ValueError, match="one has causal=True, the other causal=False"):
        goat(line, line, causal=True) + t5(line, line, causal=False)
    with pytest.raises(ValueError, match="one has offset=0, the other offset=4"):
        goat(line, line, causal=True) + goat(Positions.line(KEYS, offset=4), line, causal=True)


def test_mask_may_make_causal() -> None:
    """A mask may make a bidirectional call causal."""
    line, (q, k, v) = Positions.line(KEYS), torch.randn(3, 1, HEADS, KEYS, WIDTH)
    terms = create_prior("goat", num_heads=HEADS, train_context=8)(line, line, causal=True)
    masked = prior_attention(
        q, k, v, terms, causal=False, mask=torch.ones(1, 1, KEYS, KEYS, dtype=torch.bool).tril()
    )
    torch.testing.assert_close(masked, prior_attention(q, k, v, terms, causal=True))
