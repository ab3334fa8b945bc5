"""The KV cache: memory in blocks, positions with documents and padding, and precision a million tokens in."""

from __future__ import annotations

import copy
import gc
import math
import weakref

import pytest
import torch

from zoo import KVCache, Positions, create_model, create_prior
from zoo.attention.base import fold_lanes
from zoo.layers import Attention


def test_positions_with_padding_and_documents_go_on_across_calls() -> None:
    segments = torch.tensor([[-1, -1, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1, 2]])
    expected = Positions.documents(segments).index()
    cache, found = KVCache(1), []
    for part in segments.split([3, 1, 2, 1], dim=1):
        positions, held = cache.positions(part.shape[1], part)
        assert positions.offset == cache.length
        cache.advance(part.shape[1])
        assert torch.equal(held, segments[:, : cache.length])
        found.append(positions.index())
    assert torch.equal(torch.cat(found, dim=1), expected)


@pytest.mark.parametrize("name", ["goat", "cable", "ggd"])
@torch.no_grad()
def test_cropped_and_with_other_rows(name: str) -> None:
    """After tokens that no mark preceded are dropped and rows are chosen, what follows reads what is left, and nothing else."""
    torch.manual_seed(0)
    model = create_model(f"text_{name}_ssmax_tiny", num_layers=2, dim=64, num_heads=2, hidden_dim=64).eval()
    ids, rows = torch.randint(0, 256, (3, 90)), torch.tensor([2, 0, 0, 1])
    segments = torch.zeros_like(ids)
    segments[1, :7] = -1
    cache = model.new_cache(100)
    for part in (slice(70), *(slice(n, n + 1) for n in range(70, 80))):
        model(ids[:, part], segments=segments[:, part], cache=cache)
    cache.crop(75)
    cache.select(rows)
    out = model(ids[rows, 75:], segments=segments[rows, 75:], cache=cache)
    expected = model(ids[rows], segments=segments[rows])[:, 75:]
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    for wrong in (-1, cache.length + 1):
        with pytest.raises(ValueError, match="cannot be cropped"):
            cache.crop(wrong)
    cache.crop(0)
    torch.testing.assert_close(model(ids[rows], cache=cache), model(ids[rows]), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_cache_is_copied_whole_and_freed_at_once() -> None:
    """No cycle keeps keys and values until the garbage collector comes by."""
    model, tokens = create_model("text_cable_tiny", num_layers=2).eval(), torch.arange(100)[None]
    cache = model.new_cache(200)
    model(tokens, cache=cache)
    copied = copy.deepcopy(cache)
    expected = model(tokens[:, :9], cache=cache)
    assert (cache.length, copied.length) == (109, 100)
    assert torch.equal(model(tokens[:, :9], cache=copied), expected)
    freed = weakref.ref(cache)
    gc.disable()
    try:
        del cache
        assert freed() is None
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [("goat", torch.float32), ("cable", torch.bfloat16)])
@torch.no_grad()
def test_decoding_a_million_tokens_in_is_precise(name: str, dtype: torch.dtype) -> None:
    """One decoded token at position 2^20 − 2 against a float64 oracle over the same stored keys and values; products of lanes,
    summed exactly, are the log-prior of every key that counts, up to 2^−13."""
    torch.manual_seed(0)
    length, dim, heads = 2**20 - 2, 32, 2
    prior = create_prior(name, num_heads=heads, **{"goat": {"train_context": 128}, "cable": {"d_model": dim}}[name])
    attention = Attention(dim, heads, prior=prior).to(dtype)
    keys, values = torch.randn(1, heads, length, attention.content_dim), torch.randn(1, heads, length, 16)
    x, past = (
        torch.randn(1, 1, dim, dtype=dtype),
        torch.zeros(1, length, dim, dtype=dtype),
    )  # what CABLE would have read

    cache, before = KVCache(1, capacity=length + 1), Positions.line(length)
    terms = prior(before, before, causal=True, x=past)
    cache.layers[0].append(fold_lanes(keys.to(dtype), terms.k_lanes), values.to(dtype))
    cache.layers[0].carries = None if terms.carry is None else terms.carry[..., None]
    cache.advance(length)
    cache.reserve(1)
    here, line = Positions.line(1, offset=length), Positions.line(length + 1)
    out = attention(x, here, cache=cache.layers[0]).double()

    linears = (attention.query, attention.key, attention.value)
    q, k, v = (linear(x).unflatten(2, (heads, -1)).transpose(1, 2).double() for linear in linears)
    k, v = torch.cat([keys.to(dtype), k], dim=2), torch.cat([values.to(dtype), v], dim=2)
    everything = torch.cat([past, x], dim=1)
    bias = prior.log_prior(here, line, causal=True, x=everything.float())
    weights = (q @ k.mT / math.sqrt(attention.content_dim) + bias).softmax(-1)
    expected = (weights @ v).transpose(1, 2).flatten(2) @ attention.out.weight.double().T
    # What float32 sums of large lanes lose, and in bfloat16 one more rounding of q.
    assert (out - expected).abs().max() < (4e-3 if dtype == torch.float32 else 6e-2) * expected.abs().max()
    terms, near = prior(here, line, causal=True, x=everything), slice(-(2**16), None)
    error = terms.q_lanes.double() @ terms.k_lanes[:, :, near].double().mT - bias[..., near]
    counts = (weights[..., near] > 2**-40).expand_as(error)
    assert (error - error[..., -1:])[counts].abs().max() < 2**-13
