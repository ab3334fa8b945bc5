"""The layers every modality is built from: MLP, SSMax, attention with a prior, and the pre-norm
block."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.attention.call import Kernel
from zoo.attention.dispatch import prior_attention
from zoo.decoding import LayerCache
from zoo.errors import Options, check_flags, check_number, check_whole, nearest
from zoo.positions import Positions
from zoo.priors.base import Prior
from zoo.rotary import Rotation

if TYPE_CHECKING:
    from zoo.sequence import SequenceGroup


LANES = ("inside", "beside")  # where a prior's lanes are: among a head's columns, or beside them


class SwiGLU(nn.Module):
    """down( silu(gate x) ⊙ up x ), no biases (Shazeer 2020)."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden_dim, bias=False)
        self.up = nn.Linear(dim, hidden_dim, bias=False)
        self.down = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class GeluMLP(nn.Module):
    """down( gelu(up x) ) with biases and GELU's tanh form, GPT-2's MLP."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden_dim)
        self.down = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class SSMax(nn.Module):
    """Scalable softmax (arXiv 2501.19399): logits of query i times s_h·ln n_i, n_i the keys visible
    to it in its document.

    Args:
        train_context: tokens (or patches) seen in training.
        causal: whether n counts i + 1 keys or all of them; a `window` bounds it.
        start: s at the start, 1 in BAM's code; None: 1 / mean(ln n) over the training context:
            plain attention on average.
        positive: s is softplus of the parameter `s`, so that no head turns its prior round.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        train_context: int,
        causal: bool = True,
        window: int | None = None,
        start: float | None = None,
        positive: bool = False,
    ) -> None:
        super().__init__()
        check_whole("num_heads", num_heads, 1)
        check_whole("train_context of SSMax", train_context, 2)
        check_flags(causal=causal, positive=positive)
        if window is not None:
            check_whole("window of SSMax", window, 2 if start is None else 1)
        if start is not None:
            check_number("start of SSMax", start, above=0)
        self.window = window
        self.positive = positive
        # By NumPy: on "meta", where models are counted, and in FakeTensorMode torch's tensors have
        # no values.
        seen = np.arange(1 if causal else train_context, train_context + 1)
        seen = seen if window is None else seen.clip(max=window if causal else 2 * window - 1)
        mean = float(np.log(seen.astype(np.float64)).mean())
        first = 1.0 / mean if start is None else float(start)
        self.s = nn.Parameter(
            torch.full((num_heads,), math.log(math.expm1(first)) if positive else first)
        )

    def scales(self) -> Tensor:
        """(H,) s, in float32 or wider."""
        s = self.s.to(torch.promote_types(self.s.dtype, torch.float32))
        return F.softplus(s) if self.positive else s

    def forward(self, positions: Positions, *, causal: bool) -> Tensor:
        """(1 or B, H, T) float32: s·ln n. Bidirectional: n is the window's keys; ValueError for
        packed documents."""
        if causal and positions.within is None and positions.length == 1:  # a token after a cache's
            keys = (
                positions.offset + 1
                if self.window is None
                else min(positions.offset + 1, self.window)
            )
            return self.scales()[None, :, None] * math.log(keys)
        if causal:
            seen = positions.index(self.s.device).double() + 1
            seen = seen if self.window is None else seen.clamp(max=self.window)
        elif positions.within is not None:
            raise ValueError(
                "SSMax cannot count visible keys in bidirectional attention over packed documents"
            )
        else:
            end = positions.offset + positions.length
            at = positions.index(self.s.device).double()
            reach = self.window or end
            seen = (at + reach).clamp(max=end) - (at - reach + 1).clamp(min=0)
        return self.of_counts(seen[:, None])

    def of_counts(self, seen: Tensor) -> Tensor:
        """(1 or B, H, T) float32: s·ln n of n (1 or B, 1 or H, T) float64, at least 1."""
        scales = self.scales()
        return scales[..., None] * seen.log().to(scales.dtype)


class Attention(nn.Module):
    """Multi-head attention whose position method is a prior, a rotation of q and k, or nothing.

    The R lanes of the prior are "inside" the head width D = dim/num_heads: queries and keys project
    to `content_dim` d_c = D − R columns; or "beside" it: d_c = D, and attention runs with queries
    and keys of D + R columns. Values have D.

    Args:
        dim, num_heads, num_kv_heads: C, H dividing C, and G dividing H (None: H).
        rotary: turns q and k.
        ssmax: row scale of the logits.
        window: keys a query sees, itself included; None for all.
        sinks: tokens at the start of each document that are exempt from the prior and in every
            window.
        bias: whether the four projections have biases.
        scale_prior: whether `ssmax` scales the prior too (BAM) or the content alone.

    Attributes:
        scale_content: False leaves the content's logits without 1/√d_c, as CABLE's code does.
        q_norm, k_norm: RMSNorm over the columns of each head before it is turned, or None
            (`norm_heads`; Qwen 3, Gemma 3).
        gate: W of out ⊙ sigmoid(W x), before the last projection, or None (`gate_output`;
            Qwen3-Next, arXiv 2505.06708).
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        prior: Prior,
        num_kv_heads: int | None = None,
        rotary: Rotation | None = None,
        ssmax: SSMax | None = None,
        window: int | None = None,
        causal: bool = True,
        lanes: str = "inside",
        bias: bool = False,
        scale_prior: bool = True,
        sinks: int = 0,
    ) -> None:
        super().__init__()
        if lanes not in LANES:
            raise ValueError(f"lanes={lanes!r}: {nearest(lanes, LANES)}")
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_flags(causal=causal, bias=bias, scale_prior=scale_prior)
        for name, count in (("dim", dim), ("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
            check_whole(name, count, 1)
        if window is not None:
            check_whole("window", window, 1)
        check_whole("sinks", sinks, 0)
        if dim % num_heads or num_heads % num_kv_heads:
            raise ValueError(
                f"heads must divide: dim={dim}, num_heads={num_heads}, num_kv_heads={num_kv_heads}"
            )
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.lanes = lanes
        self.content_dim = self.head_dim - (prior.num_lanes if lanes == "inside" else 0)
        if self.content_dim < 1:
            raise ValueError(
                f"the prior takes {prior.num_lanes} of {self.head_dim} columns of a head and leaves none for content; "
                f"use at most {max(dim // (prior.num_lanes + 8), 1)} heads for dim={dim}, or lanes='beside'"
            )
        self.prior = prior
        self.rotary = rotary
        self.ssmax = ssmax
        self.window = window
        self.causal = causal
        self.sinks = sinks
        self.scale_prior = scale_prior
        self.scale_content = True
        self.query = nn.Linear(dim, num_heads * self.content_dim, bias=bias)
        self.key = nn.Linear(dim, num_kv_heads * self.content_dim, bias=bias)
        self.value = nn.Linear(dim, num_kv_heads * self.head_dim, bias=bias)
        self.out = nn.Linear(dim, dim, bias=bias)
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        self.gate: nn.Module | None = None

    def norm_heads(self, eps: float = 1e-6) -> None:
        """Give queries and keys their norms."""
        self.q_norm, self.k_norm = (nn.RMSNorm(self.content_dim, eps=eps) for _ in range(2))

    def gate_output(self) -> None:
        """Give the output its gate."""
        self.gate = nn.Linear(self.out.in_features, self.out.in_features, bias=False)

    def forward(
        self,
        x: Tensor,
        positions: Positions,
        *,
        segments: Tensor | None = None,
        cache: LayerCache | None = None,
        kernel: str | Kernel = "auto",
        last: int | None = None,
        sequence: SequenceGroup | None = None,
    ) -> Tensor:
        """x (B, T, C) at `positions` → (B, T, C), or of the `last` tokens alone (B, last, C),
        without work for the others.

        With a cache the T tokens follow those it holds; segments cover all. With a sequence group x
        and the result are this rank's part of the line, `positions` and `segments` of the whole
        line.
        """
        k_pos = positions if sequence is None else sequence.part_of(positions)
        x_q, q_pos = (x, k_pos) if last is None else (x[:, -last:], k_pos.tail(last))
        q = self.query(x_q).unflatten(2, (-1, self.content_dim)).transpose(1, 2)
        q = q if self.q_norm is None else self.q_norm(q)
        q = q if self.scale_content else q * math.sqrt(self.content_dim)
        k = self.key(x).unflatten(2, (-1, self.content_dim)).transpose(1, 2)
        k = k if self.k_norm is None else self.k_norm(k)
        v = self.value(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
        if self.rotary is not None:
            q, k = self.rotary.both(q, q_pos, k, k_pos)
        scale = None if self.ssmax is None else self.ssmax(q_pos, causal=self.causal)
        if scale is not None and not self.scale_prior:
            q = (q * scale[..., None]).to(q.dtype)
            scale = None
        options: Options = dict(
            query_scale=scale,
            segments=segments,
            window=self.window,
            sinks=self.sinks,
            kernel=kernel,
        )
        if cache is None and sequence is None:
            terms = self.prior(q_pos, positions, causal=self.causal, x=x)
            out = prior_attention(q, k, v, terms, causal=self.causal, **options)
        elif sequence is not None and (cache is not None or last is not None):
            raise ValueError("sequence groups serve no cache and no `last`")
        elif sequence is not None:
            out = sequence.attend(self.prior, x, q, k, v, positions, causal=self.causal, **options)
        elif cache is not None:
            if not self.causal:
                raise ValueError("a KV cache serves causal attention only")
            out = cache.attend(self.prior, x, q, k, v, positions, **options)
        out = out.transpose(1, 2).flatten(2)
        return self.out(out if self.gate is None else out * self.gate(x_q).sigmoid())


def share_prior(layers: Sequence[Attention], methods: Sequence[tuple[str, object]]) -> None:
    """Make the first layer's prior that of all: one copy in state dicts. ValueError where `methods`
    (name, options) differ."""
    if any(method != methods[0] for method in methods):
        raise ValueError(
            f"share_prior needs one position method for all layers, got {[name for name, _ in methods]}"
        )
    for attention in layers[1:]:
        del attention.prior
        attention.__dict__["prior"] = layers[0].prior


class Block(nn.Module):
    """Pre-norm: x + attention(norm x), then x + mlp(norm x)."""

    def __init__(
        self,
        dim: int,
        attention: Attention,
        mlp: nn.Module,
        *,
        norm: Callable[..., nn.Module] = nn.RMSNorm,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.attention_norm = norm(dim, eps=norm_eps)
        self.attention = attention
        self.mlp_norm = norm(dim, eps=norm_eps)
        self.mlp = mlp

    def forward(
        self, x: Tensor, positions: Positions, *, last: int | None = None, **options: Any
    ) -> Tensor:
        """(B, T, C), or of the `last` tokens (B, last, C); arguments as in `Attention`."""
        attended = self.attention(self.attention_norm(x), positions, last=last, **options)
        x = (x if last is None else x[:, -last:]) + attended
        return x + self.mlp(self.mlp_norm(x))
