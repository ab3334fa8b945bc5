"""Calls of `prior_attention` with one thing wrong: each is refused in one line that names it, by every kernel alike."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from zoo import Positions, PriorTerms, create_prior, prior_attention
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


def of(name: str, change: Callable[[Any], Any]) -> Callable[[Call], Any]:
    """What a call has under a name, changed."""
    return lambda call: change(call[name])


def part(name: str, change: Callable[[Any], Any]) -> Callable[[Call], Any]:
    """The call's terms with a part changed."""
    return lambda call: replace(call["terms"], **{name: change(getattr(call["terms"], name))})


def matrix(change: Callable[[Any], Any]) -> Callable[[Call], Any]:
    """The call's terms with their bias as a matrix, changed."""
    return part("bias", lambda bias: change(whole_bias(bias)))


def told(
    prior: str, queries: int, keys: int, *, offset: int = 0, causal: bool = True, heads: int = HEADS
) -> Callable[[Call], Any]:
    """Terms of other positions or heads."""
    made = create_prior(prior, num_heads=heads, **PRIORS[prior])
    return lambda call: made(Positions.line(queries, offset=offset), Positions.line(keys), causal=causal)


def table(**changes: Callable[[Any], Any]) -> Callable[[Call], Any]:
    return part("table", lambda t: replace(t, **{name: change(getattr(t, name)) for name, change in changes.items()}))


def constant(value: Any) -> Callable[[Call], Any]:
    return lambda call: value


def whole(x: Tensor) -> Tensor:
    return x.long()


LATE = QUERIES + 1
LANES = ("q_lanes", "k_lanes")
TWO_WAYS = ("ggd", "goat")  # whose terms for bidirectional attention are for that alone
# (prior or None for any), argument, its wrong value, what the message says
WRONG: list[tuple[str | None, str, Callable[[Call], Any], str]] = [
    *((None, name, of(name, whole), "one dtype of") for name in ("q", "k", "v")),
    *((None, name, of(name, lambda x: x[0]), "axes") for name in ("q", "k", "v")),
    *((None, name, of(name, lambda x: x[:1]), "disagree") for name in ("q", "k", "v")),
    *((None, name, of(name, lambda x: x[:, :0]), "at least one head") for name in ("q", "k", "v")),
    *((None, name, of(name, lambda x: x[..., :0]), "at least one head") for name in ("q", "k", "v")),
    *((None, name, of(name, lambda x: x.numpy()), "must be tensors") for name in ("q", "k", "v")),
    *((None, name, of(name, lambda x: x.to("meta")), "q is") for name in ("k", "v")),
    *((None, name, of(name, lambda x: x[:, :3]), "must divide 4 query heads") for name in ("k", "v")),
    *((None, name, of(name, lambda x: x[:, :, :-1]), "disagree") for name in ("k", "v")),
    (None, "k", of("k", lambda x: x[..., :-1]), "wide"),
    (None, "q", of("k", lambda x: x.repeat(1, 1, 2, 1)), "needs as many keys"),
    *((None, "causal", constant(value), "causal must be") for value in ("yes", 2, None, math.nan)),
    *((None, "window", constant(value), "window must be") for value in (2.5, True, 0, -3, math.nan, "4", torch.tensor(3))),
    *((None, "dropout", constant(value), "dropout must be") for value in (1.0, -0.1, math.nan, math.inf, True)),
    *((None, "kernel", constant(value), "kernel") for value in ("spda", "", None, 3)),
    *((None, "terms", constant(value), "PriorTerms") for value in (3, "ggd", (), torch.zeros(1))),
    ("ggd", "terms", lambda call: call["terms"].table, r"PriorTerms\(table="),
    (None, "query_scale", of("query_scale", lambda x: x[None, None]), "query_scale must be"),
    (None, "query_scale", of("query_scale", lambda x: x.expand(3, -1, -1)), "query_scale must be"),
    (None, "query_scale", of("query_scale", lambda x: x[:2]), "query_scale must be"),
    (None, "query_scale", of("query_scale", lambda x: x[:, :1]), "query_scale must be"),
    (None, "query_scale", of("query_scale", lambda x: x[0]), "query_scale must be"),
    (None, "query_scale", of("query_scale", whole), "floating numbers"),
    (None, "query_scale", of("query_scale", lambda x: x.to("meta")), "query_scale must be on cpu"),
    (None, "query_scale", constant(2.0), "query_scale must be a tensor"),
    (None, "segments", of("segments", Tensor.float), "segments must be whole numbers"),
    (None, "segments", of("segments", Tensor.bool), "segments must be whole numbers"),
    (None, "segments", of("segments", lambda x: x[:1]), "segments must be"),
    (None, "segments", of("segments", lambda x: x[:, :-1]), "segments must be"),
    (None, "segments", of("segments", lambda x: x[0]), "segments must be"),
    (None, "segments", of("segments", lambda x: x.to("meta")), "segments must be on cpu"),
    (None, "segments", of("segments", lambda x: x.tolist()), "segments must be a tensor"),
    (None, "mask", constant(torch.ones(QUERIES, KEYS, dtype=torch.bool)), "mask must be"),
    (None, "mask", constant(torch.ones(1, 3, QUERIES, KEYS, dtype=torch.bool)), "mask must be"),
    (None, "mask", constant(torch.ones(1, 1, QUERIES, KEYS)), "mask must be bool"),
    (None, "mask", constant(np.ones((1, 1, QUERIES, KEYS), dtype=bool)), "mask must be a tensor"),
    ("fire", "terms", matrix(lambda x: x[:, :3]), "bias must be"),
    ("fire", "terms", matrix(lambda x: x[:, :2]), "bias must be"),
    ("fire", "terms", matrix(lambda x: x.expand(3, -1, -1, -1)), "bias must be"),
    ("fire", "terms", matrix(lambda x: x[:, :, 1:]), "bias must be"),
    ("fire", "terms", matrix(lambda x: x[..., 1:]), "bias must be"),
    ("fire", "terms", matrix(lambda x: x[0]), "bias must be"),
    ("fire", "terms", matrix(whole), "bias must be floating"),
    ("fire", "terms", matrix(lambda x: x.to("meta")), "on the device of x"),
    *(("goat", "terms", part(lanes, lambda x: x[:, :3].expand(-1, 3, -1, -1)), "lanes must be") for lanes in LANES),
    *(("goat", "terms", part(lanes, lambda x: x[:, :, :-1]), "lanes must be") for lanes in LANES),
    *(("goat", "terms", part(lanes, lambda x: x.expand(3, -1, -1, -1)), "lanes must be") for lanes in LANES),
    *(("goat", "terms", part(lanes, whole), "lanes must be floating") for lanes in LANES),
    *(("goat", "terms", part(lanes, lambda x: x[0, 0, 0, 0]), "expected as many") for lanes in LANES),
    *(("goat", "terms", part(lanes, lambda x: x.to("meta")), "on the device of x") for lanes in LANES),
    *(("goat", "terms", part(lanes, lambda x: x[..., 1:]), "expected as many") for lanes in LANES),
    ("goat", "terms", part("q_lanes", lambda x: None), "expected as many"),
    ("goat", "terms", part("k_lanes", lambda x: None), "wide"),
    ("ggd", "terms", table(table=lambda x: x[:3]), "3 heads, q has 4"),
    ("ggd", "terms", table(table=lambda x: x[0]), "heads, q has 4"),
    ("ggd", "terms", table(table=lambda x: x[:, 1:]), "columns"),
    ("ggd", "terms", table(table=lambda x: x.long()), "table must be floating"),
    ("ggd", "terms", table(table=lambda x: x.to("meta")), "on the device of x"),
    ("ggd", "terms", table(q_code=lambda x: x[1:]), "of 4 positions, the call has 5"),
    ("ggd", "terms", table(k_code=lambda x: x[1:]), "of 8 positions, the call has 9"),
    *((prior, "terms", told(prior, QUERIES, KEYS, heads=3, offset=KEYS - QUERIES), "head|must be") for prior in PRIORS),
    *((prior, "terms", told(prior, QUERIES, KEYS), "the first query 0 rows after") for prior in PRIORS),
    *((prior, "terms", told(prior, QUERIES, KEYS, offset=2), "the first query 2 rows after") for prior in PRIORS),
    *((prior, "terms", told(prior, LATE, KEYS, offset=KEYS - LATE), "position|must be") for prior in PRIORS),
    *((prior, "terms", told(prior, QUERIES, KEYS + 1, offset=KEYS + 1 - QUERIES), "position|must be") for prior in PRIORS),
    *((prior, "causal", constant(False), "are for causal=True and the call has causal=False") for prior in PRIORS),
    *((prior, "terms", told(prior, QUERIES, KEYS, offset=4, causal=False), "are for causal=False") for prior in TWO_WAYS),
]  # fmt: skip
CASES = [(entry, seed) for entry in range(len(WRONG)) for seed in range(2)]


def test_a_call_with_one_thing_wrong_is_refused() -> None:
    served = {
        prior: ["reference", "sdpa", "auto", *(["toeplitz"] if prior != "fire" else [])] for prior in (None, *PRIORS)
    }
    for prior, kernels in served.items():
        for kernel in kernels:
            assert prior_attention(**good(prior, kernel)).isfinite().all()
    for entry, seed in CASES:
        prior, argument, change, words = WRONG[entry]
        draw = random.Random(1000 * entry + seed)
        prior = draw.choice(sorted(PRIORS)) if prior is None else prior
        call = good(prior, draw.choice(served[prior]))
        for unneeded in {"query_scale", "segments", "window"} - {argument}:
            if draw.random() < 0.5:
                del call[unneeded]
        call[argument] = change(call)
        with pytest.raises(ValueError, match=words) as raised:
            prior_attention(**call)
        assert "\n" not in str(raised.value) and len(str(raised.value)) < 300, raised.value


def test_a_mask_may_make_a_bidirectional_call_causal() -> None:
    line, (q, k, v) = Positions.line(KEYS), torch.randn(3, 1, HEADS, KEYS, WIDTH)
    terms = create_prior("goat", num_heads=HEADS, train_context=8)(line, line, causal=True)
    past = torch.ones(1, 1, KEYS, KEYS, dtype=torch.bool).tril()
    found = prior_attention(q, k, v, terms, causal=False, mask=past)
    torch.testing.assert_close(found, prior_attention(q, k, v, terms, causal=True))


def test_terms_that_do_not_fit_each_other_are_not_added() -> None:
    line = Positions.line(KEYS)
    goat, t5 = create_prior("goat", num_heads=HEADS, train_context=8), create_prior("t5", num_heads=HEADS)
    with pytest.raises(ValueError, match="one has causal=True, the other causal=False"):
        goat(line, line, causal=True) + t5(line, line, causal=False)
    with pytest.raises(ValueError, match="one has offset=0, the other offset=4"):
        goat(line, line, causal=True) + goat(Positions.line(KEYS, offset=4), line, causal=True)


def test_tensors_without_data_are_checked_too() -> None:
    with FakeTensorMode():
        q = torch.empty(1, 2, 8, 16)
        assert prior_attention(q, q, q, PriorTerms(), causal=True, window=3).shape == q.shape
        with pytest.raises(ValueError, match="one dtype of"):
            prior_attention(q, q, q.half(), causal=True)
