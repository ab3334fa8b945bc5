"""Calls of `prior_attention` with one thing wrong: each is refused in one line that names it, by every kernel alike."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from zoo import Positions, create_prior, prior_attention
from zoo.priors.tables import whole_bias

BATCH, HEADS, QUERIES, KEYS, WIDTH = 2, 4, 5, 9, 8
PRIORS: dict[str, dict[str, Any]] = {"ggd": {}, "goat": {"train_context": 8}, "fire": {"train_context": 8}}
Call = dict[str, Any]


def good(prior: str | None, kernel: str, *, causal: bool = True) -> Call:
    """A call that every kernel which serves it computes."""
    q, k, v = (torch.randn(BATCH, HEADS, length, WIDTH) for length in (QUERIES, KEYS, KEYS))
    terms, line = None, Positions.line(KEYS)
    if prior is not None:
        terms = create_prior(prior, num_heads=HEADS, **PRIORS[prior])(line.tail(QUERIES), line, causal=causal)
    call: Call = dict(q=q, k=k, v=v, terms=terms, causal=causal, kernel=kernel, window=6)
    call["query_scale"] = torch.rand(HEADS, QUERIES)
    call["segments"] = (torch.arange(KEYS) // 4).expand(BATCH, -1)
    return call


def of(name: str, *changes: Callable[[Any], Any]) -> list[Callable[[Call], Any]]:
    """What a call has under a name, changed."""
    return [lambda call, change=change: change(call[name]) for change in changes]


def part(name: str, *changes: Callable[[Any], Any]) -> list[Callable[[Call], Any]]:
    """The call's terms with a part changed; a bias is a matrix then."""
    dense = whole_bias if name == "bias" else lambda x: x
    return [
        lambda call, change=change: replace(call["terms"], **{name: change(dense(getattr(call["terms"], name)))})
        for change in changes
    ]


def table(field: str, *changes: Callable[[Any], Any]) -> list[Callable[[Call], Any]]:
    return part("table", *(lambda t, c=c: replace(t, **{field: c(getattr(t, field))}) for c in changes))


def terms_of(
    prior: str, queries: int, keys: int, *, offset: int = 0, causal: bool = True, heads: int = HEADS
) -> list[Callable[[Call], Any]]:
    """Terms of other positions or heads."""
    module = create_prior(prior, num_heads=heads, **PRIORS[prior])
    return [lambda call: module(Positions.line(queries, offset=offset), Positions.line(keys), causal=causal)]


def constants(*values: Any) -> list[Callable[[Call], Any]]:
    return [lambda call, value=value: value for value in values]


def meta(x: Tensor) -> Tensor:
    return x.to("meta")


AFTER, LANES = KEYS - QUERIES, ("q_lanes", "k_lanes")
# (prior or None for any), argument, its wrong values, what the message says
WRONG: list[tuple[str | None, str, list[Callable[[Call], Any]], str]] = [
    *((None, name, of(name, Tensor.long), "one dtype of") for name in "qkv"),
    *((None, name, of(name, lambda x: x[0]), "axes") for name in "qkv"),
    *((None, name, of(name, lambda x: x[:, :0], lambda x: x[..., :0]), "at least one head") for name in "qkv"),
    *((None, name, of(name, meta), "q is") for name in "kv"),
    *((None, name, of(name, lambda x: x[:, :3]), "must divide 4 query heads") for name in "kv"),
    (None, "k", of("k", lambda x: x[..., :-1]), "wide"),
    (None, "q", of("k", lambda x: x.repeat(1, 1, 2, 1)), "needs as many keys"),
    (None, "causal", constants("yes", 2, None, math.nan), "causal must be"),
    (None, "window", constants(2.5, True, 0, -3, math.nan, "4", torch.tensor(3)), "window must be"),
    (None, "dropout", constants(1.0, -0.1, math.nan, math.inf, True), "dropout must be"),
    (None, "kernel", constants("spda", "", None, 3), "kernel"),
    (None, "terms", constants(3, "ggd", (), torch.zeros(1)), "PriorTerms"),
    ("ggd", "terms", [lambda call: call["terms"].table], r"PriorTerms\(table="),
    (None, "query_scale", of("query_scale", lambda x: x[None, None], lambda x: x.expand(3, -1, -1)), "scale must be"),
    (None, "query_scale", of("query_scale", Tensor.long, meta, lambda x: 2.0), "query_scale must be"),
    (None, "segments", of("segments", Tensor.float, Tensor.bool), "segments must be whole numbers"),
    (None, "segments", of("segments", lambda x: x[:1], lambda x: x[:, :-1], lambda x: x[0]), "segments must be"),
    (None, "segments", of("segments", meta, Tensor.tolist), "segments must be"),
    (None, "mask", constants(torch.ones(QUERIES, KEYS).bool(), torch.ones(1, 3, QUERIES, KEYS).bool()), "mask must be"),
    (None, "mask", constants(torch.ones(1, 1, QUERIES, KEYS)), "mask must be bool"),
    ("fire", "terms", part("bias", lambda x: x[:, :3], lambda x: x.expand(3, -1, -1, -1)), "bias must be"),
    ("fire", "terms", part("bias", lambda x: x[:, :, 1:], lambda x: x[..., 1:], lambda x: x[0]), "bias must be"),
    ("fire", "terms", part("bias", meta), "on the device of x"),
    ("goat", "terms", part("q_lanes", lambda x: None), "expected as many"),
    ("goat", "terms", part("k_lanes", lambda x: None), "wide"),
    ("ggd", "terms", table("table", lambda x: x[:3], lambda x: x[0]), "heads, q has 4"),
    ("ggd", "terms", table("table", lambda x: x[:, 1:]), "columns"),
    ("ggd", "terms", table("q_code", lambda x: x[1:]), "of 4 positions, the call has 5"),
    ("ggd", "terms", table("k_code", lambda x: x[1:]), "of 8 positions, the call has 9"),
    ("ggd", "terms", terms_of("ggd", QUERIES, KEYS, offset=AFTER, causal=False), "are for causal=False"),
    *(("goat", "terms", part(name, lambda x: x[:, :3].expand(-1, 3, -1, -1)), "lanes must be") for name in LANES),
    *(("goat", "terms", part(name, lambda x: x[:, :, :-1], Tensor.long), "lanes must be") for name in LANES),
    *(("goat", "terms", part(name, meta), "on the device of x") for name in LANES),
    *((prior, "terms", terms_of(prior, QUERIES, KEYS, heads=3, offset=AFTER), "head|must be") for prior in PRIORS),
    *((prior, "terms", terms_of(prior, QUERIES, KEYS), "the first query 0 rows after") for prior in PRIORS),
    *((prior, "terms", terms_of(prior, QUERIES + 1, KEYS, offset=AFTER - 1), "position|must be") for prior in PRIORS),
    *((prior, "causal", constants(False), "are for causal=True and the call has causal=False") for prior in PRIORS),
]


def test_a_call_with_one_thing_wrong_is_refused() -> None:
    kernels = {prior: ["reference", "sdpa", "auto", *["toeplitz"] * (prior != "fire")] for prior in PRIORS}
    for prior, names in kernels.items():
        for kernel in names:
            assert prior_attention(**good(prior, kernel)).isfinite().all()
    draw = random.Random(0)
    for prior, argument, changes, words in WRONG:
        for change in changes:
            name = draw.choice(sorted(PRIORS)) if prior is None else prior
            call = good(name, draw.choice(kernels[name]))
            for unneeded in {"query_scale", "segments", "window"} - {argument}:
                if draw.random() < 0.5:
                    del call[unneeded]
            call[argument] = change(call)
            with pytest.raises(ValueError, match=words) as raised:
                prior_attention(**call)
            assert "\n" not in str(raised.value) and len(str(raised.value)) < 300, raised.value


def test_terms_that_do_not_fit_each_other_are_not_added() -> None:
    line = Positions.line(KEYS)
    goat, t5 = create_prior("goat", num_heads=HEADS, train_context=8), create_prior("t5", num_heads=HEADS)
    with pytest.raises(ValueError, match="one has causal=True, the other causal=False"):
        goat(line, line, causal=True) + t5(line, line, causal=False)
    with pytest.raises(ValueError, match="one has offset=0, the other offset=4"):
        goat(line, line, causal=True) + goat(Positions.line(KEYS, offset=4), line, causal=True)
