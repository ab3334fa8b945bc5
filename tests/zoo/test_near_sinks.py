"""Sinks of adapted models with a rotation: further back than the model's window they are turned as
if at its end."""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.zoo.test_adapters import GREEDY, input_of, make, output, transformers
from zoo.adapters import limited_reach
from zoo.adapters.layer import LayerPrior, attending_by

SINKS = 3
SOFT = 40.0
LIMIT = 63
LENGTH = 150


def strong(name: str) -> Any:
    """A model of random weights whose attention is far from uniform, in float64."""
    model = make(name).double()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.ndim == 2 and any(
                part in path for part in ("q_proj", "k_proj", "query_key_value", "Wqkv")
            ):
                parameter.mul_(8)
    return model


def adapted(model: Any) -> Any:
    return zoo.adapt(copy.deepcopy(model), **limited_reach(soft=SOFT, sinks=SINKS)).double()


def dense(model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model by dense attention, queries rotated for sinks by the model's own function at min(i,
    limit)."""
    module = sys.modules[type(model).__module__]
    turned = []
    apply = module.apply_rotary_pos_emb

    def rotate(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **more: Any
    ) -> tuple[Tensor, Tensor]:
        at = torch.arange(q.shape[2]).clamp(max=LIMIT)
        turned.append(apply(q, k, cos[:, at], sin[:, at], **more)[0])
        return apply(q, k, cos, sin, **more)

    def attend(
        layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scale = options.get("scaling") or q.shape[-1] ** -0.5
        distance = torch.arange(LENGTH)
        distance = distance[:, None] - distance
        logits = scale * q @ k.mT - (distance.abs() / SOFT) ** 8
        logits[..., :SINKS] = scale * turned.pop() @ k[:, :, :SINKS].mT
        if layer.is_causal:
            logits = logits.masked_fill(distance < 0, -math.inf)
        if (window := options.get("sliding_window")) is not None:
            logits = logits.masked_fill(distance.abs() >= window, -math.inf)
        return (logits.softmax(-1) @ v).transpose(1, 2), None

    monkeypatch.setattr(module, "apply_rotary_pos_emb", rotate)
    transformers.AttentionInterface.register("dense", attend)
    model.set_attn_implementation("dense")
    return model


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma3", "gpt_neox"])
def test_equals_dense_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients of dense attention."""
    model = strong(name)
    given = input_of(name, length=LENGTH)
    near = adapted(model)
    far = adapted(model)
    for layer in far.modules():
        if isinstance(layer, LayerPrior):
            layer.rotation = None
    results = []
    parameters = [path for path, _ in model.named_parameters() if "norm" not in path]
    for m in (near, far, dense(model, monkeypatch)):
        out = output(m, given, use_cache=False)
        named = dict(m.named_parameters())
        results.append(
            [out, *torch.autograd.grad(out.sin().sum(), [named[path] for path in parameters])]
        )
    for got, other, expected in zip(*results, strict=True):
        assert (got - expected).abs().max() < 1e-3 * (other - expected).abs().max().clamp(min=1e-6)
    assert torch.equal(results[0][0][:, : LIMIT + 1], results[1][0][:, : LIMIT + 1])


@torch.no_grad()
def test_padding_packing_and_caches(tmp_path: Path) -> None:
    """And generation that goes on beyond the window, saved models, and prefixes that are those of
    shorter texts."""
    model = adapted(strong("llama"))
    given = input_of("llama", batch=1, length=LENGTH)
    whole = output(model, given)
    torch.testing.assert_close(output(model, given[:, : LIMIT + 1]), whole[:, : LIMIT + 1])
    for kernel in ("reference", "sdpa"):
        with attending_by(kernel):
            torch.testing.assert_close(output(model, given), whole)
    padded = nn.functional.pad(given, (9, 0))
    mask = nn.functional.pad(torch.ones_like(given), (9, 0))
    at = (mask.cumsum(-1) - 1).clamp(min=0)
    both = output(
        model,
        torch.cat([padded, padded.flip(1)]),
        attention_mask=torch.cat([mask, torch.ones_like(mask)]),
        position_ids=torch.cat([at, torch.arange(LENGTH + 9)[None]]),
    )
    torch.testing.assert_close(both[:1, 9:], whole, rtol=1e-5, atol=1e-5)
    at = torch.cat([torch.arange(80), torch.arange(LENGTH)])[None]
    twice = output(model, torch.cat([given[:, :80], given], 1), position_ids=at, use_cache=False)
    torch.testing.assert_close(twice[:, 80:], whole, rtol=1e-5, atol=1e-5)
    cache = transformers.DynamicCache()
    parts = [
        output(model, part, past_key_values=cache) for part in given.split([50, 60, 1, 39], dim=1)
    ]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-5, atol=1e-5)
    options = GREEDY | dict(max_new_tokens=8, attention_mask=mask[:, :69])
    fresh = model.generate(padded[:, :69], use_cache=False, **options)
    for kind in (None, "static"):
        assert torch.equal(
            model.generate(padded[:, :69], cache_implementation=kind, **options), fresh
        )
    model.config.max_position_embeddings *= 4  # priors and the limit stay
    zoo.save_adapted(model, tmp_path)
    assert torch.equal(output(zoo.load_adapted(tmp_path), given), whole)


def test_unknown_rotation() -> None:
    """A rotation that is not known."""
    model = make("modernbert")
    given = input_of("modernbert", length=LIMIT + 1)
    before = output(model, given)
    zoo.adapt(model, "ggd", options={"sinks": SINKS})
    assert torch.equal(output(model, given), before)
    with pytest.raises(ValueError, match="modernbert: sinks are seen from at most 63 tokens on"):
        output(model, input_of("modernbert", length=LIMIT + 2))
