"""`torch.nn.MultiheadAttention` with a position method: for models that are built from torch's own modules."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.attention.base import AttentionCall, Kernel
from zoo.attention.dispatch import prior_attention
from zoo.attention.reference import attend
from zoo.layers import SSMax
from zoo.methods import create_position
from zoo.naming import Options, check_flags, check_whole
from zoo.positions import Positions
from zoo.priors.base import PriorTerms

__all__ = ["PriorMultiheadAttention"]


class PriorMultiheadAttention(nn.MultiheadAttention):
    """Torch's multi-head attention with a log-prior K on its logits.

        head_h[i] = Σ_j softmax_j( (⟨q_i, k_j⟩/√D + K[h,i,j] + mask[i,j]) · s_h[i] ) v_j,     output = W_o [heads] + b_o

    s_h[i] = 1 without SSMax. With a prior that starts uniform (`nope`; `ggd`, `spectral` and `key_bias` with init "uniform")
    it is torch's module, except that a row that sees no key has heads of 0 where torch has NaN.

    Parameters are torch's, and those of the method under `prior`, `rotary` and `ssmax`: torch's state dicts load
    (`strict=False`, unless the method has no parameters). Grouped key heads and KV caches are in `zoo.layers.Attention`.

    Args:
        embed_dim, num_heads, args, kwargs: as in torch, without `add_bias_kv` and `add_zero_attn`.
        position: a method of a line, or a sum, as in `zoo.methods.create_position`, with `position_options`.
        train_context: tokens seen in training, for methods and an SSMax that are relative to it, and the window of `local`.
        ssmax: whether there is a row scale s_h·ln n, n the number of keys that the row sees; 1 at the start for rows that
            see `train_context` keys.

    Raises:
        ValueError: for sizes that do not divide, a dropout outside [0, 1), an unknown method, one that is added to the
            embedding (`sinusoidal`, `learned`), `add_bias_kv` and `add_zero_attn`.
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
        check_whole("embed_dim", embed_dim, 1)
        check_whole("num_heads", num_heads, 1)
        check_flags(ssmax=ssmax)
        if embed_dim % num_heads:
            raise ValueError(f"heads must divide: {embed_dim=}, {num_heads=}")
        super().__init__(embed_dim, num_heads, *args, **kwargs)
        if self.bias_k is not None or self.add_zero_attn:
            what = "add_zero_attn" if self.add_zero_attn else "add_bias_kv"
            raise ValueError(f"{what} adds a key without a position, which has no prior; use position='key_bias'")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be a probability below 1, got {self.dropout}")
        # Or torch.nn.TransformerEncoderLayer computes this module by itself in evaluation, without the prior.
        self._qkv_same_embed_dim = False
        parts = create_position(
            position,
            dim=embed_dim,
            num_heads=num_heads,
            train_context=train_context,
            options=dict(position_options or {}),
            lanes="beside",
        )
        if parts.embedding is not None:
            raise ValueError(
                f"position {position!r} is added to the embedding before a model's first layer: "
                "add it there (zoo.encodings) and use position='nope' here"
            )
        self.position, self.prior, self.rotary, self.window = position, parts.prior, parts.rotary, parts.window
        self.ssmax = SSMax(num_heads, train_context=train_context, causal=False, window=parts.window) if ssmax else None
        for part in (self.prior, self.rotary, self.ssmax):
            if part is not None:
                part.to(self.out_proj.weight)

    @staticmethod
    def from_torch(mha: nn.MultiheadAttention, **options: Any) -> PriorMultiheadAttention:
        """A module with the weights, device, dtype and mode of torch's, and a position method by the constructor's options."""
        torch_options = dict(
            dropout=mha.dropout,
            bias=mha.in_proj_bias is not None,
            add_bias_kv=mha.bias_k is not None,
            add_zero_attn=mha.add_zero_attn,
            kdim=mha.kdim,
            vdim=mha.vdim,
            batch_first=mha.batch_first,
            device=mha.out_proj.weight.device,
            dtype=mha.out_proj.weight.dtype,
        )
        module = PriorMultiheadAttention(mha.embed_dim, mha.num_heads, **torch_options, **options)
        module.load_state_dict(mha.state_dict(), strict=False)
        return module.train(mha.training)

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
        """The output, and the weights or None; arguments, shapes and results as in torch.

        Key j is at position j and query i at position i; causal attention is aligned to the end. `is_causal` needs no
        `attn_mask`, where torch's wants one. Float masks are added to the logits before SSMax's scale; a −∞ in them hides its
        key. Weights take T × S memory, do not use `kernel`, and are those before dropout.

        Raises:
            ValueError: for shapes that do not fit, masks that are neither bool nor float, and a method that reads the layer's
                input (`cable`) where keys are not the queries' own input, or not causal.
        """
        self._check(query, key, value)
        batched = query.ndim == 3
        if self.prior.depends_on_content and query is not key:
            raise ValueError(f"{self.position!r} reads the layer's input: query and key must be the same tensor")
        if not batched:
            query, key, value = (x[None] for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        queries, keys = query.shape[1], key.shape[1]
        if is_causal and queries > keys:
            raise ValueError(f"causal attention of {queries} queries needs as many keys, got {keys}")
        k_pos = Positions.line(keys)
        q_pos = k_pos.tail(queries) if is_causal else Positions.line(queries)
        terms = self.prior(q_pos, k_pos, causal=is_causal, x=key)
        shape = (len(query), self.num_heads, queries, keys)
        masks = _masks("key_padding_mask", key_padding_mask, [(len(query), keys)], shape)
        masks += _masks("attn_mask", attn_mask, [(queries, keys), (shape[0] * shape[1], queries, keys)], shape)
        shown: Tensor | None = None
        for visible, addend in masks:
            shown = visible if shown is None else shown & visible
            if addend is not None:
                bias = addend.to(torch.promote_types(addend.dtype, torch.float32)).expand(-1, *shape[1:])
                terms = terms + PriorTerms(bias=bias)
        window = self.window
        if window is not None and not is_causal and queries != keys:
            # The call's own window has queries at the end of the keys.
            near = self._near(q_pos, keys, False, query.device)[None, None]
            shown, window = near if shown is None else shown & near, None
        q, k, v = self._project(query, key, value)
        if self.rotary is not None:
            q, k = self.rotary.both(q, q_pos, k, k_pos)
        oracle = _Oracle()
        heads = prior_attention(
            q,
            k,
            v,
            terms,
            causal=is_causal,
            query_scale=self._row_scale(q_pos, keys, is_causal, shown),
            window=window,
            mask=None if shown is None else shown.expand(-1, -1, queries, keys),
            dropout=self.dropout if self.training else 0.0,
            kernel=oracle if need_weights else kernel,
        )
        out = self.out_proj(heads.transpose(1, 2).flatten(2))
        out = out[0] if not batched else out if self.batch_first else out.transpose(0, 1)
        if not need_weights:
            return out, None
        weights = oracle.weights.to(q.dtype)
        weights = weights.mean(1) if average_attn_weights else weights
        return out, weights if batched else weights[0]

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        if query.is_nested:
            raise ValueError("nested tensors are not served; make TransformerEncoder with enable_nested_tensor=False")
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        if query.ndim not in (2, 3) or not query.ndim == key.ndim == value.ndim:
            raise ValueError(f"query, key and value must all have 3 axes, or 2 unbatched, got {shapes}")
        expected = [self.embed_dim, self.kdim, self.vdim]
        if [x.shape[-1] for x in (query, key, value)] != expected:
            raise ValueError(f"query, key and value must be {expected} wide, got {shapes}")
        batch = 0 if self.batch_first else 1
        if key.shape[:-1] != value.shape[:-1] or (query.ndim == 3 and query.shape[batch] != key.shape[batch]):
            raise ValueError(f"query, key and value disagree: {shapes} with batch_first={self.batch_first}")

    def _project(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """(B, H, T, D) of queries, keys and values from inputs with the batch first."""
        separate = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        weights = separate if self.in_proj_weight is None else self.in_proj_weight.chunk(3)
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        projected = map(F.linear, inputs, weights, biases)
        return tuple(x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in projected)

    def _near(self, q_pos: Positions, keys: int, causal: bool, device: torch.device) -> Tensor:
        """(T, S) bool: keys inside the window, and not after the query of a causal call."""
        distance = q_pos.row_index(device)[:, None] - torch.arange(keys, device=device)
        near = (distance >= 0) | (not causal)
        return near if self.window is None else near & (distance.abs() < self.window)

    def _row_scale(self, q_pos: Positions, keys: int, causal: bool, shown: Tensor | None) -> Tensor | None:
        """(1 or B, H, T): SSMax's scale, by the number of keys that a row sees."""
        if self.ssmax is None:
            return None
        if shown is None and causal:
            return self.ssmax(q_pos, causal=True)
        if shown is None:
            return self.ssmax(Positions.line(keys), causal=False)[..., :1].expand(-1, -1, q_pos.length)
        visible = shown & self._near(q_pos, keys, causal, shown.device)
        return self.ssmax.of_counts(visible.sum(-1).clamp(min=1).double())


def _masks(
    name: str, mask: Tensor | None, shapes: list[tuple[int, ...]], call: tuple[int, int, int, int]
) -> list[tuple[Tensor, Tensor | None]]:
    """Keys shown (bool) and finite addends, (1 or B, 1 or H, 1 or T, S), of a mask of torch in a `call` (B, H, T, S)."""
    if mask is None:
        return []
    if not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise ValueError(f"{name} must be bool, True where a key is hidden, or float, got {mask.dtype}")
    if tuple(mask.shape) not in shapes:
        raise ValueError(f"{name} must be {' or '.join(map(str, shapes))}, got {tuple(mask.shape)}")
    if name == "key_padding_mask":
        mask = mask[:, None, None]
    else:
        mask = mask[None, None] if mask.ndim == 2 else mask.unflatten(0, call[:2])
    if mask.dtype == torch.bool:
        return [(~mask, None)]
    # −∞ as a bool, since a row scale of 0 would make it NaN.
    shown = mask != -torch.inf
    return [(shown, mask.masked_fill(~shown, 0.0))]


class _Oracle:
    """The reference as a kernel that remembers its weights, which are then those of the output."""

    weights: Tensor

    def refuses(self, call: AttentionCall) -> str | None:
        return None

    def run(self, call: AttentionCall) -> Tensor:
        out, self.weights = attend(call)
        return out
