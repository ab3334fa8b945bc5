"""The KV cache: memory in blocks, positions with documents and padding, and precision a million
tokens in."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.zoo.priors_table import LINE, WIDTH, make
from tests.zoo.test_reach import decaying
from zoo import KVCache, Positions, create_model, create_prior, prior_attention
from zoo.attention import skipping
from zoo.decoding import LayerCache
from zoo.priors import Prior


def test_positions_go_on_across_calls() -> None:
    """Positions with padding and documents go on across calls."""
    segments = torch.tensor([[-1, -1, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1, 2]])
    cache = KVCache(1)
    found = []
    for part in segments.split([3, 1, 2, 1], dim=1):
        positions, held = cache.positions(part.shape[1], part)
        assert positions.offset == cache.length
        cache.advance(part.shape[1])
        assert torch.equal(held, segments[:, : cache.length])
        found.append(positions.index())
    assert torch.equal(torch.cat(found, dim=1), Positions.documents(segments).index())


@pytest.mark.parametrize("name", ["goat", "cable", "ggd"])
@torch.no_grad()
def test_cropped_and_with_other_rows(name: str) -> None:
    """After tokens that no mark preceded are dropped and rows are chosen, what follows reads what
    is left, and nothing else."""
    torch.manual_seed(0)
    model = create_model(
        f"text_{name}_ssmax_tiny", num_layers=2, dim=64, num_heads=2, hidden_dim=64
    ).eval()
    ids = torch.randint(0, 256, (3, 90))
    rows = torch.tensor([2, 0, 0, 1])
    segments = torch.zeros_like(ids)
    segments[1, :7] = -1
    cache = model.new_cache(100)
    for part in (slice(70), *(slice(n, n + 1) for n in range(70, 80))):
        model(ids[:, part], segments=segments[:, part], cache=cache)
    cache.crop(75)
    cache.select(rows)
    out = model(ids[rows, 75:], segments=segments[rows, 75:], cache=cache)
    torch.testing.assert_close(
        out, model(ids[rows], segments=segments[rows])[:, 75:], atol=1e-4, rtol=1e-4
    )
    for wrong in (-1, cache.length + 1):
        with pytest.raises(ValueError, match="cannot be cropped"):
            cache.crop(wrong)
    cache.crop(0)
    torch.testing.assert_close(
        model(ids[rows], cache=cache), model(ids[rows]), atol=1e-4, rtol=1e-4
    )


def next_tokens(prior: Prior, length: int, *, groups: int = 2, scaled: bool = False, **more: Any):
    """A cache's outputs for the three tokens after `length`, those of the oracle, and the logits
    that were left out."""
    torch.manual_seed(0)
    heads = prior.num_heads
    total = length + 3
    q, k, v = (
        0.3 * torch.randn(2, n, total, 16, dtype=torch.float64) for n in (heads, groups, groups)
    )
    x = torch.randn(2, total, WIDTH, dtype=torch.float64)
    line = Positions.line(total)
    scale = (
        torch.linspace(0.5, 2, total, dtype=torch.float64).repeat(1, heads, 1) if scaled else None
    )
    cache = KVCache(1)
    got = []
    with skipping(True) as tally:
        for part in (slice(0, length), *(slice(n, n + 1) for n in range(length, total))):
            cache.reserve(part.stop - part.start)
            positions = cache.positions(part.stop - part.start, None)[0]
            last = slice(part.stop - 1, part.stop)
            options = dict(query_scale=None if scale is None else scale[..., last], **more)
            inputs = x[:, part], q[:, :, last], k[:, :, part], v[:, :, part]
            got.append(cache.layers[0].attend(prior, *inputs, positions, **options))
            cache.advance(part.stop - part.start)
    terms = prior(line.tail(4), line, causal=True, x=x)
    options = dict(
        causal=True,
        query_scale=None if scale is None else scale[..., -4:],
        kernel="reference",
        **more,
    )
    return (
        torch.cat(got, dim=2),
        prior_attention(q[:, :, -4:], k, v, terms, **options),
        tally.left_out,
    )


@pytest.mark.parametrize("name", LINE)
@torch.no_grad()
def test_kept_row_equals_prior(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is kept is the priors own."""
    prior = make(name, num_heads=4)
    prior.add_module(
        "inner", make("ggd", num_heads=4) if name == "t5" else None
    )  # no summand, whatever it is
    calls: list[bool] = []
    attend = LayerCache._attend_next
    monkeypatch.setattr(
        LayerCache,
        "_attend_next",
        lambda *a, **b: calls.append((out := attend(*a, **b)) is not None) or out,
    )
    for options in ({"sinks": 3}, {"scaled": True, "sinks": 50}, {"window": 7, "groups": 4}):
        got, expected, _ = next_tokens(prior, 40, **options)
        torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-7)
    assert calls == [name not in ("cable", "fox", "fire", "scale_invariant")] * 9


@pytest.mark.parametrize(("name", "scaled"), [("ggd", True), ("alibi", False), ("goat", False)])
@torch.no_grad()
def test_far_keys_are_not_read(name: str, scaled: bool) -> None:
    """Keys beyond the reach are not read."""
    got, expected, left_out = next_tokens(
        decaying(name), 5000, scaled=scaled, sinks=0 if scaled else 4
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert left_out > 0.3 * 3 * 2 * 2 * 5000
    assert next_tokens(create_prior("ggd", num_heads=2, init="uniform"), 5000)[2] == 0


@torch.no_grad()
def test_replaced_key_is_read() -> None:
    """One huge key, at the place of one that the bound on norms had counted."""
    torch.manual_seed(0)
    prior = decaying("alibi")
    cache = KVCache(1)
    q, k, v = (0.1 * torch.randn(1, 2, 5002, 16) for _ in range(3))

    def attend(part: slice) -> torch.Tensor:
        cache.reserve(part.stop - part.start)
        positions = Positions.line(part.stop - part.start, offset=part.start)
        inputs = (
            torch.zeros(1, 1, 1),
            q[:, :, part.stop - 1 : part.stop],
            k[:, :, part],
            v[:, :, part],
        )
        out = cache.layers[0].attend(prior.float(), *inputs, positions)
        cache.advance(part.stop - part.start)
        return out

    attend(slice(0, 5000)), attend(slice(5000, 5001)), cache.crop(0)
    k[:, :, 5] = 4000.0 * q[:, :, 5001]
    attend(slice(0, 5001))
    line = Positions.line(5002)
    expected = prior_attention(
        q[:, :, 5001:],
        k,
        v,
        prior(line.tail(1), line, causal=True),
        causal=True,
        kernel="reference",
    )
    torch.testing.assert_close(attend(slice(5001, 5002)), expected, rtol=1e-4, atol=1e-5)
