"""`torch.nn.MultiheadAttention` with a position method: for models that are built from torch's own
modules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.attention.base import AttentionCall, Kernel, spread_gain, visible
from zoo.attention.dispatch import prior_attention
from zoo.attention.reference import attend
from zoo.errors import Options, check_flags, check_whole
from zoo.layers import SSMax
from zoo.methods import create_position
from zoo.positions import Positions
from zoo.priors.base import PriorTerms


class PriorMultiheadAttention(nn.MultiheadAttention):
    """Torch's multi-head attention with a log-prior K on its logits.

        head_h[i] = Σ_j softmax_j( (⟨q_i, k_j⟩/√D + K[h,i,j] + mask[i,j]) · s_h[i] ) v_j,     output
        = W_o [heads] + b_o

    s_h[i] = 1 without SSMax. With a prior that starts uniform (`nope`; `ggd`, `spectral` and
    `key_bias` with init "uniform") it is torch's module, except that a row that sees no key has
    heads of 0 where torch has NaN.

    Parameters are torch's, and those of the method under `prior`, `rotary` and `ssmax`: torch's
    state dicts load (`strict=False`, unless the method has no parameters). Grouped key heads and KV
    caches are in `zoo.layers.Attention`.

    Args:
        embed_dim, num_heads, args, kwargs: as in torch, without `add_bias_kv` and `add_zero_attn`.
        position: a method of a line, or a sum, as in `zoo.methods.create_position`, with
            `position_options`.
        train_context: tokens seen in training, for methods and an SSMax that are relative to it,
            and the window of `local`.
        ssmax: whether there is a row scale s_h·ln n, n the number of keys that the row sees; 1 at
            the start for rows that see `train_context` keys.

    Raises:
        ValueError: for an unknown method, one that is added to the embedding (`sinusoidal`,
        `learned`), `add_bias_kv` and
            `add_zero_attn`.
    """

    ssmax: SSMax | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *args: Any,
        position: str = "ggd",
        position_options: Options | None = None,
        train_context: int = 2048,
        ssmax: bool = False,
        **kwargs: Any,
    ) -> None:
        check_flags(ssmax=ssmax)
        check_whole("embed_dim", embed_dim, 1)
        check_whole("num_heads", num_heads, 1)
        if embed_dim % num_heads:
            raise ValueError(f"heads must divide: {embed_dim=}, {num_heads=}")
        super().__init__(embed_dim, num_heads, *args, **kwargs)
        if self.bias_k is not None or self.add_zero_attn:
            what = "add_zero_attn" if self.add_zero_attn else "add_bias_kv"
            raise ValueError(
                f"{what} adds a key without a position, which has no prior; use position='key_bias'"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be a probability below 1, got {self.dropout}")
        # Or torch.nn.TransformerEncoderLayer computes this module by itself in evaluation, without
        # the prior.
        self._qkv_same_embed_dim = False
        sizes: Options = dict(dim=embed_dim, num_heads=num_heads, train_context=train_context)
        parts = create_position(
            position, **sizes, options=dict(position_options or {}), lanes="beside"
        )
        if parts.embedding is not None:
            raise ValueError(
                f"position {position!r} is added to the embedding: add it there, and give 'nope' here"
            )
        self.position = position
        self.prior = parts.prior
        self.rotary = parts.rotary
        self.window = parts.window
        self.sinks = parts.sinks
        self.ssmax = (
            SSMax(num_heads, train_context=train_context, causal=False, window=parts.reach)
            if ssmax
            else None
        )
        for part in (self.prior, self.rotary, self.ssmax):
            if part is not None:
                part.to(self.out_proj.weight)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        kernel: str | Kernel = "auto",
    ) -> tuple[Tensor, Tensor | None]:
        """The output, and the weights or None; arguments, shapes and results as in torch, with a
        batch.

        Key j is at position j and query i at position i; causal attention is aligned to the end.
        `is_causal` needs no `attn_mask`, where torch's wants one. Float masks are added to the
        logits before SSMax's scale; a −∞ in them hides its key. Weights take T × S memory, do not
        use `kernel`, and are those before dropout. A method that reads the layer's input (`cable`)
        needs query and key to be the same tensor.
        """
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        if query.is_nested or not query.ndim == key.ndim == value.ndim == 3:
            raise ValueError(f"query, key and value must be dense and have 3 axes, got {shapes}")
        if self.prior.depends_on_content and query is not key:
            raise ValueError(
                f"{self.position!r} reads the layer's input: query and key must be the same tensor"
            )
        if not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        widths = [self.embed_dim, self.kdim, self.vdim]
        if [x.shape[-1] for x in (query, key, value)] != widths:
            raise ValueError(f"query, key and value must be {widths} wide, got {shapes}")
        if key.shape[:-1] != value.shape[:-1] or len(query) != len(key):
            raise ValueError(
                f"query, key and value disagree: {shapes} with batch_first={self.batch_first}"
            )
        batch = len(query)
        queries = query.shape[1]
        keys = key.shape[1]
        if queries != keys and (
            (is_causal and queries > keys) or (self.window is not None and not is_causal)
        ):
            raise ValueError(f"attention of {queries} queries needs as many keys, got {keys}")
        k_pos = Positions.line(keys)
        q_pos = k_pos.tail(queries) if is_causal else Positions.line(queries)
        terms = self.prior(q_pos, k_pos, causal=is_causal, x=key)
        shown: Tensor | None = None
        for name, mask, sizes in (
            ("key_padding_mask", key_padding_mask, [(batch, keys)]),
            ("attn_mask", attn_mask, [(queries, keys), (batch * self.num_heads, queries, keys)]),
        ):
            if mask is None:
                continue
            if not (mask.dtype == torch.bool or mask.is_floating_point()):
                raise ValueError(
                    f"{name} must be bool, True where a key is hidden, or float, got {mask.dtype}"
                )
            if tuple(mask.shape) not in sizes:
                raise ValueError(
                    f"{name} must be {' or '.join(map(str, sizes))}, got {tuple(mask.shape)}"
                )
            mask = (
                mask.view(batch, 1, 1, keys)
                if mask is key_padding_mask
                else mask.view(-1, queries, keys)
            )
            mask = (
                mask[None]
                if len(mask) == 1 and mask.ndim == 3
                else mask.reshape(batch, -1, *mask.shape[-2:])
            )
            # −∞ as a bool, since a row scale of 0 would make it NaN.
            visible_keys = ~mask if mask.dtype == torch.bool else mask != -torch.inf
            shown = visible_keys if shown is None else shown & visible_keys
            if mask.is_floating_point():
                bias = mask.masked_fill(~visible_keys, 0.0).to(
                    torch.promote_types(mask.dtype, torch.float32)
                )
                terms = terms + PriorTerms(bias=bias.expand(-1, self.num_heads, queries, keys))
        shown = None if shown is None else shown.expand(-1, -1, queries, keys)
        separate = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        matrices = separate if self.in_proj_weight is None else self.in_proj_weight.chunk(3)
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        projected = map(F.linear, (query, key, value), matrices, biases)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in projected)
        if self.rotary is not None:
            q, k = self.rotary.both(q, q_pos, k, k_pos)
        call = AttentionCall(
            q, k, v, terms, is_causal, window=self.window, mask=shown, sinks=self.sinks
        )
        call = spread_gain(call)
        scale = None
        if self.ssmax is not None:  # by the number of keys that a row sees
            windowed = self.window is not None and not is_causal
            seen = visible(call) if windowed or shown is not None else None
            if seen is not None:
                scale = self.ssmax.of_counts(seen.sum(-1).clamp(min=1).double())
            elif is_causal:
                scale = self.ssmax(q_pos, causal=True)
            else:
                scale = self.ssmax(k_pos, causal=False)[..., :1].expand(-1, -1, queries)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            heads, weights = attend(replace(call, query_scale=scale, dropout=dropout))
            weights = weights.to(q.dtype).mean(1) if average_attn_weights else weights.to(q.dtype)
        else:
            options: Options = dict(
                causal=is_causal, window=self.window, mask=shown, sinks=self.sinks, kernel=kernel
            )
            heads = prior_attention(
                q, k, v, call.terms, query_scale=scale, dropout=dropout, **options
            )
        out = self.out_proj(heads.transpose(1, 2).flatten(2))
        return out if self.batch_first else out.transpose(0, 1), weights
