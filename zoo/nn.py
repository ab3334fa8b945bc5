"""`torch.nn.MultiheadAttention` with a position method: for models that are built from torch's own modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.attention.base import AttentionCall, Kernel, has_values
from zoo.attention.dispatch import prior_attention
from zoo.attention.reference import attend
from zoo.decoding.cache import Cache, KVCache
from zoo.layers import LANES, SSMax
from zoo.methods import create_position
from zoo.naming import check_flags, check_whole, nearest
from zoo.positions import Positions
from zoo.priors.base import PriorTerms

__all__ = ["PriorMultiheadAttention"]


class PriorMultiheadAttention(nn.Module):
    """Multi-head attention with the interface of `torch.nn.MultiheadAttention` and a log-prior K on its logits.

        head_h[i] = Σ_j softmax_j( (⟨q_i, k_j⟩/√d_c + K[h,i,j] + mask[i,j]) · s_h[i] ) v_j,     output = W_o [heads] + b_o

    s_h[i] = 1 without SSMax. With a prior that starts uniform (`nope`; `ggd`, `spectral` and `key_bias` with init "uniform")
    it is torch's module, but that a row which sees no key has heads of 0 where torch has NaN.

    Parameters have torch's names: `in_proj_weight`, its rows those of q, k and v, or with `kdim` or `vdim` `q_proj_weight`,
    `k_proj_weight` and `v_proj_weight`; `in_proj_bias`; `out_proj`. The method's are under `prior`, `rotary` and `ssmax`. With
    lanes beside the head and as many key heads as heads all have torch's shapes, and torch's state dicts load
    (`strict=False`, unless the method has no parameters); see `from_torch`. They start with torch's distributions.

    Args:
        embed_dim: C, the width of queries and of the output.
        num_heads: H, dividing C; D = C/H.
        dropout: probability in [0, 1) with which a weight is dropped in training.
        bias: whether the four projections have biases.
        add_bias_kv, add_zero_attn: False; keys without a position are not served.
        kdim, vdim: widths of keys and values, default C.
        batch_first: whether inputs and output are (B, length, width) and not (length, B, width).
        device, dtype: of the parameters.
        position: a method of a line, or a sum, as in `zoo.methods.create_position`.
        position_options: its options.
        train_context: tokens seen in training, for methods and an SSMax that are relative to it, and the window of `local`.
        num_kv_heads: G, heads of keys and values, dividing H; None for H.
        ssmax: whether there is a row scale s_h·ln n, n the number of keys that the row sees. At the start it is 1 for rows that
            see `train_context` keys.
        lanes: "beside" a head's D columns, or "inside" them, as in `zoo.layers.Attention`.

    Attributes:
        content_dim: d_c; D with lanes beside the head.

    Raises:
        ValueError: for sizes that do not divide, lanes that leave no content columns, a dropout outside [0, 1), an unknown
            method, one that is added to the embedding (`sinusoidal`, `learned`), `add_bias_kv` and `add_zero_attn`.
    """

    # Whether torch.nn.TransformerEncoderLayer may compute this module by itself, from its projections, in evaluation; it would
    # leave out the prior. Nothing else reads it.
    _qkv_same_embed_dim = False
    in_proj_weight: Tensor | None
    q_proj_weight: Tensor | None
    k_proj_weight: Tensor | None
    v_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    ssmax: SSMax | None

    def __init__(  # noqa: PLR0913 - torch's arguments, in torch's order, and those of the position method
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        position: str = "ggd",
        position_options: Mapping[str, Any] | None = None,
        train_context: int = 2048,
        num_kv_heads: int | None = None,
        ssmax: bool = False,
        lanes: str = "beside",
    ) -> None:
        super().__init__()
        check_flags(
            bias=bias, add_bias_kv=add_bias_kv, add_zero_attn=add_zero_attn, batch_first=batch_first, ssmax=ssmax
        )
        if add_bias_kv or add_zero_attn:
            what = "add_bias_kv" if add_bias_kv else "add_zero_attn"
            raise ValueError(
                f"{what} adds a key without a position, for which no prior is defined; use position='key_bias'"
            )
        if lanes not in LANES:
            raise ValueError(f"lanes={lanes!r}: {nearest(lanes, LANES)}")
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        kdim, vdim = embed_dim if kdim is None else kdim, embed_dim if vdim is None else vdim
        sizes = dict(embed_dim=embed_dim, num_heads=num_heads, num_kv_heads=num_kv_heads, kdim=kdim, vdim=vdim)
        for name, size in sizes.items():
            check_whole(name, size, 1)
        if embed_dim % num_heads or num_heads % num_kv_heads:
            raise ValueError(f"heads must divide: {embed_dim=}, {num_heads=}, {num_kv_heads=}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be a probability below 1, got {dropout}")
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.kdim, self.vdim = kdim, vdim
        self.dropout, self.batch_first = dropout, batch_first
        self.head_dim, self.lanes = embed_dim // num_heads, lanes
        made = create_position(
            position,
            dim=embed_dim,
            num_heads=num_heads,
            train_context=train_context,
            options=dict(position_options or {}),
            lanes=lanes,
        )
        if made.embedding is not None:
            raise ValueError(
                f"position {position!r} is added to the embedding before a model's first layer and is no part of attention; "
                "add it there (zoo.encodings) and use position='nope' here"
            )
        self.content_dim = self.head_dim - (made.prior.num_lanes if lanes == "inside" else 0)
        if self.content_dim < 1:
            raise ValueError(
                f"the prior takes {made.prior.num_lanes} of {self.head_dim} columns of a head and leaves none for content; "
                "use fewer heads, or lanes='beside'"
            )
        self.position, self.window = position, made.window
        self._add_projections(bias, {"device": device, "dtype": dtype})
        self.prior, self.rotary, self.ssmax = made.prior, made.rotary, None
        if ssmax:
            self.ssmax = SSMax(num_heads, train_context=train_context, causal=False, window=made.window)
        for part in (self.prior, self.rotary, self.ssmax):
            if part is not None:
                part.to(device=device, dtype=dtype)

    def _add_projections(self, bias: bool, where: dict[str, Any]) -> None:
        """Parameters and their initial values, in the order in which torch draws them."""
        self._rows = [self.num_heads * self.content_dim, self.num_kv_heads * self.content_dim]
        self._rows.append(self.num_kv_heads * self.head_dim)
        packed = self.kdim == self.vdim == self.embed_dim
        shapes: dict[str, tuple[int, int] | None] = {
            "in_proj_weight": (sum(self._rows), self.embed_dim) if packed else None
        }
        for name, rows, width in zip("qkv", self._rows, (self.embed_dim, self.kdim, self.vdim), strict=True):
            shapes[f"{name}_proj_weight"] = None if packed else (rows, width)
        for name, shape in shapes.items():
            self.register_parameter(name, None if shape is None else nn.Parameter(torch.empty(shape, **where)))
        self.register_parameter("in_proj_bias", nn.Parameter(torch.empty(sum(self._rows), **where)) if bias else None)
        self.out_proj = nn.Linear(self.embed_dim, self.embed_dim, bias=bias, **where)
        for name, shape in shapes.items():
            if shape is not None:
                nn.init.xavier_uniform_(self.get_parameter(name))
        for constant in (self.in_proj_bias, self.out_proj.bias):
            if constant is not None:
                nn.init.zeros_(constant)

    @staticmethod
    def from_torch(
        mha: nn.MultiheadAttention,
        *,
        position: str = "ggd",
        position_options: Mapping[str, Any] | None = None,
        train_context: int = 2048,
        ssmax: bool = False,
    ) -> PriorMultiheadAttention:
        """A module with the weights, device, dtype and mode of torch's, and a position method.

        Raises:
            ValueError: for a module with `add_bias_kv` or `add_zero_attn`, and as the constructor.
        """
        made = PriorMultiheadAttention(
            mha.embed_dim,
            mha.num_heads,
            mha.dropout,
            mha.in_proj_bias is not None,
            mha.bias_k is not None,
            mha.add_zero_attn,
            mha.kdim,
            mha.vdim,
            mha.batch_first,
            mha.out_proj.weight.device,
            mha.out_proj.weight.dtype,
            position=position,
            position_options=position_options,
            train_context=train_context,
            ssmax=ssmax,
        )
        unknown = made.load_state_dict(mha.state_dict(), strict=False).unexpected_keys
        if unknown:
            raise ValueError(f"the module has parameters that torch.nn.MultiheadAttention does not have: {unknown}")
        return made.train(mha.training)

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
        cache: Cache | None = None,
        *,
        query_offset: int | None = None,
        kernel: str | Kernel = "auto",
    ) -> tuple[Tensor, Tensor | None]:
        """The output, and the weights or None.

        Key j is at position j and query i at position i + `query_offset`; causal attention is aligned to the end, the last
        query at the position of the last key, as in `zoo.prior_attention`.

        Masks are of T × S memory beside the logits' own. Float ones are added to the logits, before SSMax's scale, and a −∞ in
        them hides its key as True does in a bool one. `is_causal` alone costs no mask.

        Args:
            query: (T, B, C), (B, T, C) with `batch_first`, or (T, C).
            key: (S, B, kdim), (B, S, kdim) or (S, kdim).
            value: (S, B, vdim), (B, S, vdim) or (S, vdim).
            key_padding_mask: (B, S), or (S,) unbatched: bool, True where a key is hidden, or float.
            need_weights: whether weights are returned, which takes T × S memory; `kernel` is then not asked.
            attn_mask: (T, S) or (B·H, T, S): bool, True where a key is hidden, or float.
            average_attn_weights: whether they are the mean over heads.
            is_causal: keys after the query are hidden, beside those that masks hide; it needs no `attn_mask`, where torch's
                wants one. The methods that distinguish causal attention (`t5`, `cable`) go by this and not by `attn_mask`.
            cache: of one layer, `zoo.KVCache(1)`: key and value are of new tokens, queries of the last T of those, and S in
                masks counts all tokens so far. For causal attention outside training; each module needs its own.
            query_offset: position of the first query, default 0; of causal attention S − T, and no other.
            kernel: as in `zoo.prior_attention`.

        Returns:
            (T, B, C), (B, T, C) or (T, C) as the query; and (B, T, S), by head (B, H, T, S), unbatched without B, in the
            query's dtype and before dropout (in training torch's are those after it).

        Raises:
            ValueError: for shapes that do not fit, masks that are neither bool nor float, what a cache does not serve, and a
                method that reads the layer's input (`cable`) where keys are not the queries' own input, or not causal.
        """
        self._check(query, key, value)
        if self.prior.depends_on_content and query is not key:
            raise ValueError(f"{self.position!r} reads the layer's input: query and key must be the same tensor")
        batched = query.ndim == 3
        if not batched:
            query, key, value = (x[None] for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        past = 0 if cache is None else cache.length
        q_pos, k_pos = self._positions(query.shape[1], key.shape[1], past, is_causal, query_offset)
        shape = (len(query), query.shape[1], past + key.shape[1])
        shown, added = self._masks(key_padding_mask, attn_mask, shape)
        window = self.window
        if window is not None and not is_causal and q_pos.offset != shape[2] - shape[1]:
            # The call's own window has queries at the end of the keys.
            near = self._apart(q_pos, shape[2], query.device).abs() < window
            shown, window = near[None, None] if shown is None else shown & near, None
        q, k, v = self._project(query, key, value)
        if self.rotary is not None:
            q, k = self.rotary.both(q, q_pos, k, k_pos)
        options: dict[str, Any] = dict(query_scale=self._row_scale(q_pos, shape[2], is_causal, shown), window=window)
        options["mask"] = None if shown is None else shown.expand(-1, -1, *shape[1:])
        options["kernel"] = watched = _Watched() if need_weights else kernel
        if cache is None:
            terms = self.prior(q_pos, k_pos, causal=is_causal, x=key)
            if added is not None:
                bias = added.to(torch.promote_types(q.dtype, torch.float32))
                terms = terms + PriorTerms(bias=bias.expand(-1, self.num_heads, *shape[1:]))
            dropout = self.dropout if self.training else 0.0
            heads = prior_attention(q, k, v, terms, causal=is_causal, dropout=dropout, **options)
        else:
            self._check_cache(cache, is_causal, need_weights, added)
            cache.reserve(key.shape[1])
            heads = cache.layers[0].attend(self.prior, key, q, k, v, k_pos, **options)
            cache.advance(key.shape[1])
        out = self.out_proj(heads.transpose(1, 2).flatten(2))
        out = out if not batched or self.batch_first else out.transpose(0, 1)
        if not isinstance(watched, _Watched):
            return out if batched else out[0], None
        weights = watched.weights.to(q.dtype)
        weights = weights.mean(1) if average_attn_weights else weights
        return (out, weights) if batched else (out[0], weights[0])

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        if query.is_nested:
            raise ValueError(
                "nested tensors are not served; make torch.nn.TransformerEncoder with enable_nested_tensor=False"
            )
        if query.ndim not in (2, 3) or not query.ndim == key.ndim == value.ndim:
            raise ValueError(
                f"query, key and value must all have 3 axes, or 2 unbatched, got {query.ndim}, {key.ndim}, {value.ndim}"
            )
        widths, expected = [x.shape[-1] for x in (query, key, value)], [self.embed_dim, self.kdim, self.vdim]
        if widths != expected:
            raise ValueError(f"query, key and value must be {expected} wide, got {widths}")
        batch = 0 if self.batch_first else 1
        if key.shape[:-1] != value.shape[:-1] or (query.ndim == 3 and query.shape[batch] != key.shape[batch]):
            shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
            raise ValueError(f"query, key and value disagree: {shapes} with batch_first={self.batch_first}")

    def _check_cache(self, cache: Cache, is_causal: bool, need_weights: bool, added: Tensor | None) -> None:
        if len(cache.layers) != 1:
            raise ValueError(f"a module needs a cache of one layer, KVCache(1), got {len(cache.layers)} layers")
        if not is_causal:
            raise ValueError("a KV cache serves causal attention only: is_causal=True")
        if self.training and self.dropout:
            raise ValueError("a KV cache serves no dropout: call eval()")
        if added is not None:
            raise ValueError("a KV cache serves bool masks, and float ones of 0 and −∞ outside CUDA")
        if need_weights and not isinstance(cache, KVCache):
            raise ValueError(
                "a paged cache holds no keys to compute all weights from: need_weights=False, or a KVCache"
            )

    @staticmethod
    def _positions(
        queries: int, keys: int, past: int, causal: bool, query_offset: int | None
    ) -> tuple[Positions, Positions]:
        """Of the queries and of the new keys."""
        k_pos = Positions.line(keys, offset=past)
        if not causal:
            return Positions.line(queries, offset=query_offset or 0), k_pos
        if queries > keys:
            raise ValueError(f"causal attention of {queries} queries needs as many keys, got {keys}")
        q_pos = k_pos.tail(queries)
        if query_offset not in (None, q_pos.offset):
            raise ValueError(
                f"causal attention has its queries at the end: query_offset={q_pos.offset}, got {query_offset}"
            )
        return q_pos, k_pos

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, H, T, d_c), (B, G, S, d_c), (B, G, S, D) from inputs with the batch first."""
        weights: Any = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.split(self._rows)
        biases: Any = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.split(self._rows)
        widths = (self.content_dim, self.content_dim, self.head_dim)
        q, k, v = (
            F.linear(x, weight, bias).unflatten(-1, (-1, width)).transpose(1, 2)
            for x, weight, bias, width in zip((query, key, value), weights, biases, widths, strict=True)
        )
        return q, k, v

    def _masks(
        self, key_padding_mask: Tensor | None, attn_mask: Tensor | None, shape: tuple[int, int, int]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Keys shown (bool) and finite addends, both (1 or B, 1 or H, 1 or T, S) or None, of a call of `shape` (B, T, S)."""
        batch, queries, keys = shape
        shown = added = None
        for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
            if mask is None:
                continue
            if not (mask.dtype == torch.bool or mask.is_floating_point()):
                raise ValueError(f"{name} must be bool, True where a key is hidden, or float, got {mask.dtype}")
            if name == "key_padding_mask":
                allowed: list[tuple[int, ...]] = [(batch, keys)]
            else:
                allowed = [(queries, keys), (batch * self.num_heads, queries, keys)]
            if tuple(mask.shape) not in allowed:
                raise ValueError(f"{name} must be {' or '.join(map(str, allowed))}, got {tuple(mask.shape)}")
            if name == "key_padding_mask":
                mask = mask[:, None, None]
            else:
                mask = mask[None, None] if mask.ndim == 2 else mask.unflatten(0, (batch, self.num_heads))
            if mask.dtype == torch.bool:
                here = ~mask
            else:
                # −∞ as a bool, since a row scale of 0 would make it NaN.
                here = mask != -torch.inf
                finite = mask.masked_fill(~here, 0.0)
                added = finite if added is None else added + finite
            shown = here if shown is None else shown & here
        return _unless(shown, lambda x: x.all()), _unless(added, lambda x: ~x.any())

    @staticmethod
    def _apart(q_pos: Positions, keys: int, device: torch.device) -> Tensor:
        """(T, S) int64: distance i − j of each key."""
        return q_pos.row_index(device)[:, None] - torch.arange(keys, device=device)

    def _row_scale(self, q_pos: Positions, keys: int, causal: bool, shown: Tensor | None) -> Tensor | None:
        """(1 or B, H, T): SSMax's scale, by the number of keys that a row sees."""
        if self.ssmax is None:
            return None
        if shown is not None:
            apart = self._apart(q_pos, keys, shown.device)
            seen = shown & (apart >= 0) if causal else shown.expand(-1, -1, *apart.shape)
            seen = seen if self.window is None else seen & (apart.abs() < self.window)
            return self.ssmax.of_counts(seen.sum(-1).clamp(min=1).double())
        if causal:
            return self.ssmax(q_pos, causal=True)
        return self.ssmax(Positions.line(keys), causal=False)[..., :1].expand(-1, -1, q_pos.length)

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.num_heads}, position={self.position!r}, batch_first={self.batch_first}"


def _unless(x: Tensor | None, idle: Callable[[Tensor], Tensor]) -> Tensor | None:
    """None for a tensor on the CPU that changes nothing; on a device finding out takes a synchronisation."""
    if x is None or x.requires_grad or x.device.type != "cpu" or torch.compiler.is_compiling() or not has_values(x):
        return x
    return None if bool(idle(x)) else x


class _Watched:
    """The oracle as a kernel that keeps its weights, which are then those of the output."""

    weights: Tensor

    def refuses(self, call: AttentionCall) -> str | None:
        return None

    def run(self, call: AttentionCall) -> Tensor:
        out, self.weights = attend(call)
        return out
