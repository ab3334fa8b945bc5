"""`PriorMultiheadAttention`: its formula for every method with all gradients, and torch's module
where the prior is uniform."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.refusals import refuses
from zoo import Positions
from zoo.methods import ENCODINGS, list_positions
from zoo.nn import PriorMultiheadAttention
from zoo.priors.alibi import ScaleInvariant
from zoo.priors.base import Sink

WIDTH = 24
HEADS = 4
CONTEXT = 6
METHODS = [
    name
    for name in list_positions()
    if name not in ENCODINGS or ENCODINGS[name].part != "embedding"
]
DOUBLE = torch.float64


def create(position: str, **options: Any) -> PriorMultiheadAttention:
    """A float64 module whose parameters are off their inits."""
    torch.manual_seed(0)
    defaults: dict[str, Any] = {"train_context": CONTEXT, "batch_first": True, "dtype": DOUBLE}
    module = PriorMultiheadAttention(WIDTH, HEADS, position=position, **defaults | options)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return module


def inputs(module: PriorMultiheadAttention, queries: int, keys: int) -> list[Tensor]:
    """Query, key and value; the same tensor for a method that reads the layer's input."""
    generator = torch.Generator().manual_seed(1)
    widths = zip((queries, keys, keys), (module.embed_dim, module.kdim, module.vdim), strict=True)
    q, k, v = (
        torch.randn(2, n, width, dtype=DOUBLE, generator=generator).requires_grad_()
        for n, width in widths
    )
    return [k, k, k] if module.prior.depends_on_content else [q, k, v]


def oracle(
    module: PriorMultiheadAttention, query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False,
    hidden: Tensor | None = None, added: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and weights from dense logits. hidden, added: (2, H, T, S)."""
    queries = query.shape[1]
    keys = key.shape[1]
    first = keys - queries if causal else 0
    q_pos = Positions.line(queries, offset=first)
    k_pos = Positions.line(keys)
    weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    weights = weights if module.in_proj_weight is None else module.in_proj_weight.chunk(3)
    biases = [0, 0, 0] if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    q, k, v = (
        (x @ w.T + b).unflatten(2, (HEADS, -1)).transpose(1, 2)
        for x, w, b in zip((query, key, value), weights, biases, strict=True)
    )
    if module.rotary is not None:
        q = module.rotary(q, q_pos)
        k = module.rotary(k, k_pos)
    logits = q @ k.transpose(-1, -2) / math.sqrt(module.head_dim)
    if isinstance(module.prior, ScaleInvariant):
        apart = (q_pos.row_index()[:, None] - k_pos.row_index()).abs()
        logits = logits * (1 + 2 * (1 + apart.double() / 10).log()).sqrt()
    logits = logits + module.prior.log_prior(q_pos, k_pos, causal=causal, x=key)
    logits = logits if added is None else logits + added
    distance = torch.arange(first, first + queries)[:, None] - torch.arange(keys)
    shown = (distance >= 0) | (not causal)
    if module.window is not None:
        shown = shown & (distance.abs() < module.window)
    shown = shown.expand_as(logits) if hidden is None else shown & ~hidden
    if module.ssmax is not None:
        logits = (
            logits
            * module.ssmax.s[:, None, None]
            * shown.sum(-1, keepdim=True).clamp(min=1).double().log()
        )
    logits = logits.masked_fill(~shown, -1e300)
    if isinstance(module.prior, Sink):
        sink = module.prior.logit[:, None, None].expand(*logits.shape[:3], 1)
        p = torch.cat([sink, logits], dim=-1).softmax(-1)[..., 1:] * shown
    else:
        p = logits.softmax(-1) * shown
    return module.out_proj((p @ v).transpose(1, 2).flatten(2)), p


def compare(
    module: PriorMultiheadAttention,
    tensors: list[Tensor],
    expected: tuple[Tensor, Tensor],
    **options: Any,
) -> None:
    """Without and with weights: output, weights, and gradients of inputs, parameters and float
    masks."""
    leaves = [
        *{id(x): x for x in tensors}.values(),
        *(p for p in module.parameters() if p.requires_grad),
    ]
    leaves += [x for x in options.values() if isinstance(x, Tensor) and x.requires_grad]
    for need_weights in (False, True):
        results = module(*tensors, need_weights=need_weights, average_attn_weights=False, **options)
        assert (results[1] is not None) == need_weights
        for result, wanted in zip(results, expected, strict=True):
            if result is not None:
                torch.testing.assert_close(result, wanted, rtol=1e-7, atol=1e-9)
                unused: dict[str, Any] = dict(
                    allow_unused=True, materialize_grads=True, retain_graph=True
                )
                grads = (
                    torch.autograd.grad(out.sin().sum(), leaves, **unused)
                    for out in (result, wanted)
                )
                torch.testing.assert_close(*grads, rtol=1e-7, atol=1e-9)


# Causal or not, SSMax or not, biases or not, widths as the query's or others: they go round the
# methods.
FORMS: list[dict[str, Any]] = [
    {},
    {"ssmax": True},
    {"ssmax": True, "kdim": 10, "vdim": 7},
    {"bias": False},
]


@pytest.mark.parametrize(("name", "form"), [(name, n % 4) for n, name in enumerate(METHODS)])
def test_every_method_by_definition(name: str, form: int) -> None:
    causal = form % 2 == 0 or name in ("cable", "fox")
    module = create(name, **{} if name in ("cable", "fox") else FORMS[form])
    tensors = inputs(module, 7 if causal or name != "local" else 11, 11)
    compare(module, tensors, oracle(module, *tensors, causal=causal), is_causal=causal)


@pytest.mark.parametrize(
    ("name", "causal"),
    [("ggd", True), ("goat", False), ("fire", True), ("rope", False), ("local", False)],
)
def test_masks_of_both_kinds_by_definition(name: str, causal: bool) -> None:
    """Every mask with a position method and SSMax: bool and float with −∞, by head, some rows
    seeing nothing."""
    module = create(name, ssmax=True)
    queries = 8 if name == "local" else 5
    tensors = inputs(module, queries, 8)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.rand(2 * HEADS, queries, 8, generator=generator) < 0.3
    hidden[1, 2] = True
    padding = torch.zeros(2, 8, dtype=torch.bool)
    padding[0, :3] = True
    both = hidden.unflatten(0, (2, HEADS)) | padding[:, None, None]
    compare(module, tensors, oracle(module, *tensors, causal=causal, hidden=both), is_causal=causal,
            attn_mask=hidden, key_padding_mask=padding)  # fmt: skip
    as_float = torch.randn(2 * HEADS, queries, 8, dtype=DOUBLE, generator=generator).masked_fill(
        hidden, -math.inf
    )
    as_float.requires_grad_()
    of_keys = torch.randn(2, 8, dtype=DOUBLE, generator=generator).masked_fill(padding, -math.inf)
    addend = (
        as_float.masked_fill(hidden, 0).unflatten(0, (2, HEADS))
        + of_keys.masked_fill(padding, 0)[:, None, None]
    )
    expected = oracle(module, *tensors, causal=causal, hidden=both, added=addend)
    compare(
        module, tensors, expected, is_causal=causal, attn_mask=as_float, key_padding_mask=of_keys
    )


def test_a_uniform_prior_is_torchs_module() -> None:
    """Outputs and weights, without and with masks."""
    torch.manual_seed(0)
    options: dict[str, Any] = dict(kdim=10, vdim=7, batch_first=True, dtype=DOUBLE)
    theirs = nn.MultiheadAttention(WIDTH, HEADS, **options).eval()
    ours = PriorMultiheadAttention(
        WIDTH, HEADS, position="ggd", position_options={"init": "uniform"}, **options
    ).eval()
    ours.load_state_dict(theirs.state_dict(), strict=False)
    tensors = [
        torch.randn(3, length, width, dtype=DOUBLE)
        for length, width in ((5, WIDTH), (9, 10), (9, 7))
    ]
    hidden = torch.arange(9).expand(5, 9) > 3
    for masks in ({}, {"key_padding_mask": hidden[:3]}, {"attn_mask": hidden}):
        torch.testing.assert_close(
            ours(*tensors, **masks), theirs(*tensors, **masks), rtol=0, atol=1e-12
        )


def test_torchs_encoder_layer_with_the_module_in_its_place() -> None:
    """In evaluation torch computes a whole layer from its weights, and would leave out the prior:
    it must not here."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True, dtype=DOUBLE).eval()
    x = torch.randn(2, 7, WIDTH, dtype=DOUBLE)
    padding = torch.arange(7).expand(2, 7) > 4
    attention = layer.self_attn
    plain = layer(x, src_key_padding_mask=padding)
    for position in ("nope", "alibi"):
        layer.self_attn = PriorMultiheadAttention(
            WIDTH, HEADS, position=position, batch_first=True, dtype=DOUBLE
        ).eval()
        layer.self_attn.load_state_dict(attention.state_dict(), strict=False)
        tracked = layer(x, src_key_padding_mask=padding)
        with torch.no_grad():
            torch.testing.assert_close(layer(x, src_key_padding_mask=padding), tracked)
        assert (position == "nope") == torch.allclose(tracked, plain, atol=1e-10)


def test_what_cannot_be_made_or_called() -> None:
    for options, message in [
        ({"add_bias_kv": True}, "add_bias_kv adds a key without a position"),
        ({"position": "learned"}, "added to the embedding"),
    ]:
        refuses(message, PriorMultiheadAttention, WIDTH, HEADS, **options)
    module = create("ggd")
    x = torch.randn(2, 5, WIDTH, dtype=DOUBLE)
    bad: list[tuple[tuple[Tensor, ...], dict[str, Any], str]] = [
        ((x, x[0], x[0]), {}, "must be dense and have 3 axes"),
        ((x, x[..., 1:], x), {}, "must be .* wide"),
        ((x, x, x[:, 1:]), {}, "disagree"),
        (
            (x, x, x),
            {"key_padding_mask": torch.zeros(2, 4) > 0},
            r"key_padding_mask must be \(2, 5\)",
        ),
        (
            (x, x, x),
            {"attn_mask": torch.zeros(2, 5, 5)},
            r"attn_mask must be \(5, 5\) or \(8, 5, 5\)",
        ),
        ((x, x, x), {"attn_mask": torch.zeros(5, 5).long()}, "must be bool"),
        ((x, x[:, :3], x[:, :3]), {"is_causal": True}, "attention of 5 queries needs as many"),
    ]
    for tensors, options, message in bad:
        refuses(message, module, *tensors, **options)
    refuses("the same tensor", create("cable"), x, x.clone(), x, is_causal=True)
