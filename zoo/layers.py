"""The layers every modality is built from: MLP, SSMax, attention with a prior, and the pre-norm block."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.attention.base import Kernel
from zoo.attention.dispatch import prior_attention
from zoo.naming import nearest
from zoo.positions import Positions
from zoo.priors.base import Prior

__all__ = ["LANES", "Attention", "AttentionCache", "Block", "SSMax", "SwiGLU", "init_linear"]

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


class SSMax(nn.Module):
    """Scalable softmax (arXiv 2501.19399): logits of query i times s_h·ln n_i, n_i the keys visible to it in its document.

    s starts at 1 / mean(ln n) over the training context, so that training starts at plain attention on average.

    Args:
        num_heads: H.
        train_context: tokens (or patches) seen in training.
        causal: whether n counts i + 1 keys or all of them.
        window: the sliding window, if any; it bounds n.
    """

    def __init__(self, num_heads: int, *, train_context: int, causal: bool = True, window: int | None = None) -> None:
        super().__init__()
        if train_context < 2:
            raise ValueError(f"SSMax needs a training context of at least 2 tokens, got {train_context}")
        self.window = window
        # On the CPU whatever the default device: on "meta", where models are counted, tensors have no values.
        seen = torch.arange(1 if causal else train_context, train_context + 1, device="cpu")
        seen = seen.clamp(max=self._reach(causal)) if window else seen
        self.s = nn.Parameter(torch.full((num_heads,), 1.0 / float(seen.double().log().mean())))

    def _reach(self, causal: bool) -> int:
        """Keys inside the window: to the left and itself, or on both sides."""
        window = self.window or 1
        return window if causal else 2 * window - 1

    def forward(self, positions: Positions, *, causal: bool) -> Tensor:
        """(1 or B, H, T) float32: s·ln n. Bidirectional: n is the length; raises ValueError for packed documents."""
        if causal:
            seen = positions.index(self.s.device).double() + 1
        elif positions.within is not None:
            raise ValueError("SSMax cannot count visible keys in bidirectional attention over packed documents")
        else:
            seen = torch.full((1, positions.length), float(positions.length), dtype=torch.float64, device=self.s.device)
        if self.window is not None:
            seen = seen.clamp(max=self._reach(causal))
        wide = torch.promote_types(self.s.dtype, torch.float32)
        return self.s.to(wide)[:, None] * seen.log().to(wide)[:, None]


class AttentionCache(Protocol):
    """What `Attention` needs of its layer's KV cache. `zoo.decoding` has two."""

    def attend(
        self,
        prior: Prior,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Positions,
        *,
        query_scale: Tensor | None = None,
        segments: Tensor | None = None,
        window: int | None = None,
        kernel: str | Kernel = "auto",
    ) -> Tensor:
        """Store k and v of the new tokens and attend to all tokens so far: (B, H, Q, D). Options as in `prior_attention`.

        Args:
            prior: of this layer.
            x: (B, T, C) the layer's input at the new tokens.
            q, k, v: (B, H, Q, d_c), (B, G, T, d_c), (B, G, T, D): queries of the last Q of the T new tokens.
            positions: of the new tokens.
            segments: (B, S) document ids of all tokens, or None.
        """


class Attention(nn.Module):
    """Multi-head attention whose position method is a prior, a rotation of q and k, or nothing.

    The R lanes of the prior are "inside" the head width D = dim/num_heads: queries and keys project to d_c = D − R content
    columns; or "beside" it: d_c = D, and attention runs with queries and keys of D + R columns. Values have D.

    Args:
        dim: C.
        num_heads: H, dividing C.
        prior: the log-prior.
        num_kv_heads: G, dividing H; None for H.
        rotary: turns q and k, called as rotary(x, positions).
        ssmax: row scale of the logits.
        scale_prior: whether SSMax scales the prior too (BAM) or the content alone.
        window: keys a query sees, itself included; None for all.
        causal: whether keys after the query are hidden.
        lanes: "inside" or "beside".

    Attributes:
        content_dim: d_c.

    Raises:
        ValueError: if the sizes do not divide, the lanes leave no content columns, or `lanes` is neither.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        prior: Prior,
        num_kv_heads: int | None = None,
        rotary: nn.Module | None = None,
        ssmax: SSMax | None = None,
        scale_prior: bool = True,
        window: int | None = None,
        causal: bool = True,
        lanes: str = "inside",
    ) -> None:
        super().__init__()
        if lanes not in LANES:
            raise ValueError(f"lanes={lanes!r}: {nearest(lanes, LANES)}")
        num_kv_heads = num_kv_heads or num_heads
        if dim % num_heads or num_heads % num_kv_heads:
            raise ValueError(f"heads must divide: dim={dim}, num_heads={num_heads}, num_kv_heads={num_kv_heads}")
        self.head_dim = dim // num_heads
        self.lanes = lanes
        self.content_dim = self.head_dim - (prior.num_lanes if lanes == "inside" else 0)
        if self.content_dim < 1:
            raise ValueError(
                f"the prior takes {prior.num_lanes} of {self.head_dim} columns of a head and leaves none for content; "
                f"use at most {max(dim // (prior.num_lanes + 8), 1)} heads for dim={dim}, or lanes='beside'"
            )
        self.prior, self.rotary, self.ssmax = prior, rotary, ssmax
        self.scale_prior, self.window, self.causal = scale_prior, window, causal
        self.query = nn.Linear(dim, num_heads * self.content_dim, bias=False)
        self.key = nn.Linear(dim, num_kv_heads * self.content_dim, bias=False)
        self.value = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(
        self,
        x: Tensor,
        positions: Positions,
        *,
        segments: Tensor | None = None,
        cache: AttentionCache | None = None,
        kernel: str | Kernel = "auto",
        logit_scale: float = 1.0,
        last: int | None = None,
    ) -> Tensor:
        """x (B, T, C) at `positions` → (B, T, C), or of the `last` tokens alone (B, last, C), without work for the others.

        With a cache the T tokens follow those it holds; segments cover all. logit_scale multiplies every logit, the prior's
        too: an inverse temperature for measurements, 1 in the model itself.
        """
        asked, of = (x, positions) if last is None else (x[:, -last:], positions.tail(last))
        q = self.query(asked).unflatten(2, (-1, self.content_dim)).transpose(1, 2)
        k = self.key(x).unflatten(2, (-1, self.content_dim)).transpose(1, 2)
        v = self.value(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
        if self.rotary is not None:
            q, k = self.rotary(q, of), self.rotary(k, positions)
        scale = None if self.ssmax is None else self.ssmax(of, causal=self.causal)
        if scale is not None and not self.scale_prior:
            q, scale = (q * scale[..., None]).to(q.dtype), None
        if logit_scale != 1.0:
            scale = logit_scale * (q.new_ones(q.shape[1:3], dtype=torch.float32) if scale is None else scale)
        options: dict[str, Any] = dict(query_scale=scale, segments=segments, window=self.window, kernel=kernel)
        if cache is None:
            terms = self.prior(of, positions, causal=self.causal, x=x)
            out = prior_attention(q, k, v, terms, causal=self.causal, **options)
        else:
            if not self.causal or logit_scale != 1.0:
                raise ValueError("a KV cache serves causal attention only, at logit_scale 1")
            out = cache.attend(self.prior, x, q, k, v, positions, **options)
        return self.out(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm: x + attention(norm x), then x + mlp(norm x)."""

    def __init__(self, dim: int, attention: Attention, mlp: nn.Module, *, norm_eps: float = 1e-5) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.attention = attention
        self.mlp_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.mlp = mlp

    def forward(
        self,
        x: Tensor,
        positions: Positions,
        *,
        segments: Tensor | None = None,
        cache: AttentionCache | None = None,
        kernel: str | Kernel = "auto",
        last: int | None = None,
    ) -> Tensor:
        """(B, T, C), or of the `last` tokens (B, last, C); arguments as in `Attention`."""
        options: dict[str, Any] = dict(segments=segments, cache=cache, kernel=kernel, last=last)
        attended = self.attention(self.attention_norm(x), positions, **options)
        x = (x if last is None else x[:, -last:]) + attended
        return x + self.mlp(self.mlp_norm(x))


def init_linear(model: nn.Module, *, depth: int) -> None:
    """Normal weights of variance 2/(5·fan_in), those of `out` and `down` divided by sqrt(2·depth); zero biases.

    Priors keep the inits of their papers.
    """
    own = {id(layer) for prior in model.modules() if isinstance(prior, Prior) for layer in prior.modules()}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and id(layer) not in own:
            std = math.sqrt(2 / (5 * layer.in_features))
            if name.endswith((".out", ".down")):
                std /= math.sqrt(2 * depth)
            nn.init.normal_(layer.weight, std=std)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
