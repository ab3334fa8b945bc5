"""The layers every modality is built from: MLP, SSMax, attention with a prior, and the pre-norm
block."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.attention.call import Kernel
from zoo.attention.dispatch import prior_attention
from zoo.attention.entmax import EntmaxKernel
from zoo.decoding import LayerCache
from zoo.errors import Options, check_flags, check_number, check_whole, nearest
from zoo.positions import Positions
from zoo.priors.base import Prior
from zoo.rotary import Rotation
from zoo.sequence import SequenceGroup

# Where a prior's lanes are: among a head's columns, or beside them.
LANES = ("inside", "beside")


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
        if start is None:
            start = 1.0 / _mean_log_keys(train_context, causal=causal, window=window)
        # softplus(ln(eˢ − 1)) = s
        value = math.log(math.expm1(start)) if positive else float(start)
        self.s = nn.Parameter(torch.full((num_heads,), value))

    def scales(self) -> Tensor:
        """(H,) s, in float32 or wider."""
        s = self.s.to(torch.promote_types(self.s.dtype, torch.float32))
        return F.softplus(s) if self.positive else s

    def forward(self, positions: Positions, *, causal: bool) -> Tensor:
        """(1 or B, H, T) float32: s·ln n. Bidirectional: n is the window's keys; ValueError for
        packed documents."""
        if causal and positions.within is None and positions.length == 1:
            # A token after those of a cache: its number of keys is known without a tensor.
            num_keys = positions.offset + 1
            if self.window is not None:
                num_keys = min(num_keys, self.window)
            return self.scales()[None, :, None] * math.log(num_keys)
        index = positions.index(self.s.device).double()
        if causal:
            num_visible = index + 1
            if self.window is not None:
                num_visible = num_visible.clamp(max=self.window)
        elif positions.within is not None:
            raise ValueError(
                "SSMax cannot count visible keys in bidirectional attention over packed documents"
            )
        else:
            end = positions.offset + positions.length
            reach = self.window or end
            first_visible = (index - reach + 1).clamp(min=0)
            num_visible = (index + reach).clamp(max=end) - first_visible
        return self.scale_rows(num_visible[:, None])

    def scale_rows(self, num_visible: Tensor) -> Tensor:
        """(1 or B, H, T) float32: s·ln n of n (1 or B, 1 or H, T) float64, at least 1."""
        scales = self.scales()
        return scales[..., None] * num_visible.log().to(scales.dtype)


class EntmaxScale(nn.Module):
    """Adaptive row scale of ASEntmax (arXiv 2506.16640): logits of query i times

        1 + β_i·(ln n_i)^γ_i,  β_i = softplus(w_β·x_i + b_β),  γ_i = 3·tanh(w_γ·x_i + b_γ)

    with weights of each head, x_i the layer's input and n_i ≥ 2 the keys visible to it. At the
    start γ is 0, and β is ln 2.

    Args:
        dim, num_heads: C and H.
        window: bounds n.
    """

    def __init__(self, dim: int, num_heads: int, *, window: int | None = None) -> None:
        super().__init__()
        check_whole("num_heads", num_heads, 1)
        self.window = window
        self.beta = nn.Linear(dim, num_heads)
        self.gamma = nn.Linear(dim, num_heads)

    def reset(self) -> None:
        """Start as above; `start_weights` draws linear layers anew."""
        for layer in (self.beta, self.gamma):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, positions: Positions, x: Tensor) -> Tensor:
        """(B, H, T) in float32 or wider, of x (B, T, C)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        num_visible = positions.index(x.device) + 1
        if self.window is not None:
            num_visible = num_visible.clamp(max=self.window)
        log_visible = num_visible.clamp(min=2).double().log().to(wide)
        # (T,) or, of packed documents, (B, T): one axis more for the heads.
        log_visible = log_visible[..., None]
        beta = F.softplus(self.beta(x).to(wide))
        gamma = 3.0 * self.gamma(x).to(wide).tanh()
        return (1.0 + beta * log_visible**gamma).transpose(1, 2)


def _mean_log_keys(train_context: int, *, causal: bool, window: int | None) -> float:
    """Mean of ln n over the queries of a training context, which see n keys."""
    # By NumPy: torch's tensors have no values on "meta", where models are counted, nor in
    # FakeTensorMode.
    if causal:
        num_visible = np.arange(1, train_context + 1)
    else:
        num_visible = np.array([train_context])
    if window is not None:
        num_visible = num_visible.clip(max=window if causal else 2 * window - 1)
    return float(np.log(num_visible.astype(np.float64)).mean())


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
        entmax, entmax_scale: α-entmax in place of softmax and its row scale, or None
            (`normalise_by_entmax`).
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
        if num_kv_heads is None:
            num_kv_heads = num_heads
        check_flags(causal=causal, bias=bias, scale_prior=scale_prior)
        check_whole("dim", dim, 1)
        check_whole("num_heads", num_heads, 1)
        check_whole("num_kv_heads", num_kv_heads, 1)
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
        self.content_dim = self.head_dim
        if lanes == "inside":
            self.content_dim -= prior.num_lanes
        if self.content_dim < 1:
            most_heads = max(dim // (prior.num_lanes + 8), 1)
            raise ValueError(
                f"the prior takes {prior.num_lanes} of {self.head_dim} columns of a head and "
                f"leaves none for content; use at most {most_heads} heads for dim={dim}, "
                "or lanes='beside'"
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
        self.entmax: EntmaxKernel | None = None
        self.entmax_scale: EntmaxScale | None = None

    def normalise_by_entmax(self, alpha: float = 1.5) -> None:
        """Take α-entmax in place of softmax, with its adaptive row scale: ASEntmax. ValueError with
        SSMax, which is another row scale, or where attention is bidirectional."""
        if self.ssmax is not None:
            raise ValueError("entmax has a row scale of its own; leave out ssmax")
        if not self.causal:
            raise ValueError("entmax serves causal attention only")
        self.entmax = EntmaxKernel(alpha)
        self.entmax_scale = EntmaxScale(self.query.in_features, self.num_heads, window=self.window)

    def norm_heads(self, eps: float = 1e-6) -> None:
        """Give queries and keys their norms."""
        self.q_norm = nn.RMSNorm(self.content_dim, eps=eps)
        self.k_norm = nn.RMSNorm(self.content_dim, eps=eps)

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
        if sequence is not None and (cache is not None or last is not None):
            raise ValueError("sequence groups serve no cache and no `last`")
        if cache is not None and not self.causal:
            raise ValueError("a KV cache serves causal attention only")
        k_pos = positions if sequence is None else sequence.part_of(positions)
        if last is None:
            x_q = x
            q_pos = k_pos
        else:
            x_q = x[:, -last:]
            q_pos = k_pos.tail(last)
        q, k, v = self._project(x_q, x)
        if self.rotary is not None:
            q, k = self.rotary.both(q, q_pos, k, k_pos)
        scale = None
        if self.ssmax is not None:
            scale = self.ssmax(q_pos, causal=self.causal)
            if not self.scale_prior:
                q = (q * scale[..., None]).to(q.dtype)
                scale = None
        if self.entmax_scale is not None:
            scale = self.entmax_scale(q_pos, x_q)
            kernel = self._entmax_kernel(kernel)
        options: Options = {
            "query_scale": scale,
            "segments": segments,
            "window": self.window,
            "sinks": self.sinks,
            "kernel": kernel,
        }
        if cache is not None:
            out = cache.attend(self.prior, x, q, k, v, positions, **options)
        elif sequence is not None:
            out = sequence.attend(self.prior, x, q, k, v, positions, causal=self.causal, **options)
        else:
            terms = self.prior(q_pos, positions, causal=self.causal, x=x)
            out = prior_attention(q, k, v, terms, causal=self.causal, **options)
        out = out.transpose(1, 2).flatten(2)
        if self.gate is not None:
            out = out * self.gate(x_q).sigmoid()
        return self.out(out)

    def _entmax_kernel(self, kernel: str | Kernel) -> Kernel:
        """The entmax kernel in place of `kernel`; ValueError for one of softmax by name."""
        assert self.entmax is not None
        if kernel != "auto":
            raise ValueError(f"kernel {kernel!r} computes softmax; a layer with entmax has its own")
        return self.entmax

    def _project(self, x_q: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, H, Q, d_c) of x_q (B, Q, C), and k (B, G, T, d_c) and v (B, G, T, D) of
        x (B, T, C)."""
        q = _split_heads(self.query(x_q), self.content_dim)
        k = _split_heads(self.key(x), self.content_dim)
        v = _split_heads(self.value(x), self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q)
            k = self.k_norm(k)
        if not self.scale_content:
            # Undoes the 1/√d_c of attention.
            q = q * math.sqrt(self.content_dim)
        return q, k, v


def _split_heads(x: Tensor, width: int) -> Tensor:
    """(B, T, H·width) → (B, H, T, width)."""
    return x.unflatten(2, (-1, width)).transpose(1, 2)


def share_prior(layers: Sequence[Attention], methods: Sequence[tuple[str, object]]) -> None:
    """Make the first layer's prior that of all: one copy in state dicts. ValueError where `methods`
    (name, options) differ."""
    if any(method != methods[0] for method in methods):
        names = [name for name, _ in methods]
        raise ValueError(f"share_prior needs one position method for all layers, got {names}")
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
        if last is not None:
            x = x[:, -last:]
        x = x + attended
        return x + self.mlp(self.mlp_norm(x))
