"""Lanes inside the head width and beside it: the same function, more content columns."""

from __future__ import annotations

import math

import pytest
import torch

from tests.pairs import pairs
from tests.zoo.priors_table import WIDTH, make
from zoo import Positions, create_model, load_model
from zoo.attention import KERNELS
from zoo.layers import Attention

HEADS, LENGTH = 3, 23
# Priors of 1 to 12 lanes, one with a table beside them, and one without any.
NAMES = ["alibi", "spectral", "goat", "cable", "matrix", "ggd"]


def attention(name: str, **options) -> Attention:
    torch.manual_seed(1)
    return Attention(WIDTH, HEADS, prior=make(name, num_heads=HEADS), lanes="beside", **options).double()


def by_the_formula(layer: Attention, x: torch.Tensor) -> torch.Tensor:
    """softmax(q·k/√D + K) v with q and k of the whole head width, every entry written out."""
    width, pos = WIDTH // HEADS, Positions.line(x.shape[1])
    q, k, v = (part(x).unflatten(2, (-1, width)).transpose(1, 2) for part in (layer.query, layer.key, layer.value))
    k, v = (heads.repeat_interleave(HEADS // heads.shape[1], dim=1) for heads in (k, v))
    logits = q @ k.mT / math.sqrt(width) + layer.prior.log_prior(pos, pos, causal=True, x=x)
    hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    out = logits.masked_fill(hidden, -math.inf).softmax(-1) @ v
    return layer.out(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("name", "kernel", "groups"), pairs(NAMES[::2], ["auto", *KERNELS], [HEADS, 1]))
def test_beside_is_the_formula_with_every_gradient(name: str, kernel: str, groups: int) -> None:
    layer = attention(name, num_kv_heads=groups)
    assert layer.content_dim == layer.head_dim == WIDTH // HEADS
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    pos = Positions.line(LENGTH)
    if kernel in (
        "triton",
        "flash",
    ):  # they compute below float64: tests/zoo/test_triton_attention.py, test_dispatch.py
        with pytest.raises(ValueError, match=f"'{kernel}' cannot serve this call: it"):
            layer(x, pos, kernel=kernel)
        return
    leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
    results = []
    for out in (layer(x, pos, kernel=kernel), by_the_formula(layer, x)):
        grads = torch.autograd.grad(out.sin().sum(), leaves, allow_unused=True)
        results.append([out, *(torch.zeros(()) if g is None else g for g in grads)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-8, check_dtype=False)


@pytest.mark.parametrize("name", ["text_ggd_goat_tiny", "text_alibi_ssmax_tiny", "text_cable_tiny"])
@torch.no_grad()
def test_a_decoder_with_lanes_beside_decodes_as_it_reads(name: str, tmp_path) -> None:
    torch.manual_seed(0)
    shape = dict(num_layers=2, dim=64, num_heads=4, num_kv_heads=2, hidden_dim=32, train_context=40)
    model = create_model(name, lanes="beside", **shape).eval()
    assert all(layer.attention.content_dim == 16 for layer in model.layers)
    tokens = torch.randint(0, 256, (2, 33))
    full, cache = model(tokens), model.new_cache(40)
    found = torch.cat([model(part, cache=cache) for part in (tokens[:, :20], *tokens[:, 20:].split(1, 1))], dim=1)
    torch.testing.assert_close(found, full, atol=1e-4, rtol=1e-4)
    model.save_pretrained(tmp_path)
    again = load_model(tmp_path).eval()
    assert again.config.lanes == "beside" and torch.equal(again(tokens), full)
