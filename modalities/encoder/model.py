"""A transformer over a grid of patches, for every position method on a grid: pre-norm, with timm's
layers around our attention.

Positions are made from the samples of each call, so any size divisible by the patch works, square
or not, at every call; nothing is resized.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import cast

import torch
from timm.layers import (
    DropPath,
    LayerScale,
    Mlp,
    PatchEmbed,
    SwiGLU,
    global_pool_nlc,
    lecun_normal_,
    trunc_normal_,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from modalities.encoder.config import GridConfig, Options, not_multiples
from modalities.starts import start_weights
from zoo.attention.call import Kernel
from zoo.layers import Attention, SSMax, share_prior
from zoo.methods import (
    LayerPosition,
    create_grid_position,
    layer_methods,
    shared_embedding,
    stored_options,
)
from zoo.model import ZooModel
from zoo.offload import is_offloaded, loaded
from zoo.positions import Positions


class GridBlock(nn.Module):
    """Pre-norm: x + drop(scale(attention(norm x))), then x + drop(scale(mlp(norm x)))."""

    def __init__(self, config: GridConfig, position: LayerPosition, drop_path: float) -> None:
        super().__init__()
        dim = config.dim
        tokens = config.class_token + config.reg_tokens + math.prod(config.train_grid)
        ssmax = None
        if config.ssmax:
            ssmax = SSMax(
                config.num_heads,
                train_context=tokens,
                causal=False,
                start=config.ssmax_start,
            )
        self.attention_norm = nn.LayerNorm(dim, eps=1e-6)
        self.attention = Attention(
            dim,
            config.num_heads,
            prior=position.prior,
            rotary=position.rotary,
            ssmax=ssmax,
            lanes=config.lanes,
            causal=False,
            scale_prior=config.scale_prior,
            bias=config.attention_bias,
        )
        self.attention_scale = _layer_scale(config)
        self.mlp_norm = nn.LayerNorm(dim, eps=1e-6)
        mlp = SwiGLU if config.mlp == "swiglu" else Mlp
        self.mlp = mlp(dim, hidden_features=config.hidden_dim)
        self.mlp_scale = _layer_scale(config)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: Tensor, positions: Positions, *, kernel: str | Kernel = "auto") -> Tensor:
        attended = self.attention(self.attention_norm(x), positions, kernel=kernel)
        x = x + self.drop_path(self.attention_scale(attended))
        return x + self.drop_path(self.mlp_scale(self.mlp(self.mlp_norm(x))))


def _layer_scale(config: GridConfig) -> nn.Module:
    if config.init_values:
        return LayerScale(config.dim, config.init_values)
    return nn.Identity()


class GridTransformer(ZooModel):
    """A classifier of grids. A modality's model derives from it and sets `config_class` and
    `modality`.

    Tokens are the class token and registers, which have no place on the grid, then the patches row
    by row.
    """

    config: GridConfig

    def __init__(self, config: GridConfig) -> None:
        super().__init__()
        self.config = config
        self.num_classes = config.num_classes
        self.in_chans = config.in_chans
        # timm's three names of the width.
        self.num_features = config.dim
        self.embed_dim = config.dim
        self.head_hidden_size = config.dim
        self.num_prefix_tokens = config.class_token + config.reg_tokens
        self.global_pool = config.global_pool
        self.grad_checkpointing = config.activation_checkpointing
        self.patch_embed = PatchEmbed(
            None, config.patch_size, config.in_chans, config.dim, strict_img_size=False
        )
        prefix = torch.zeros(1, self.num_prefix_tokens, config.dim)
        self.prefix_tokens = nn.Parameter(prefix) if self.num_prefix_tokens else None
        methods = layer_methods(config.position, config.position_options, config.num_layers)
        rates = [0.0] * config.num_layers
        if config.drop_path_rate:
            rising = torch.linspace(0, config.drop_path_rate, config.num_layers, device="cpu")
            rates = rising.tolist()
        # Its place among the modules is before the layers; settled below, when all are made.
        positions = [_position(config, *methods[0], 0)]
        self.position_embedding = positions[0].embedding
        self.layers = nn.ModuleList([GridBlock(config, positions[0], rates[0])])
        for layer in range(1, config.num_layers):
            position = _position(config, *methods[layer], layer)
            positions.append(position)
            self.layers.append(GridBlock(config, position, rates[layer]))
        if config.share_prior:
            share_prior([cast(GridBlock, layer).attention for layer in self.layers], methods)
        self.position_embedding = shared_embedding(methods, positions)
        self.config = replace(config, position_options=stored_options(config.position, positions))
        self.norm: nn.Module = nn.LayerNorm(config.dim, eps=1e-6)
        self.head: nn.Module = nn.Identity()
        if config.num_classes:
            self.head = nn.Linear(config.dim, config.num_classes)
        self._init_weights()

    def _init_weights(self) -> None:
        # Of what enters the residual stream, this scales attention's output down with depth, not
        # timm's MLPs.
        start_weights(self, self.config.weight_init, depth=self.config.num_layers)
        # A view, so that fan-in counts the patch's pixels.
        lecun_normal_(self.patch_embed.proj.weight.flatten(1))
        nn.init.zeros_(cast(Tensor, self.patch_embed.proj.bias))
        if self.prefix_tokens is not None:
            nn.init.normal_(self.prefix_tokens, std=0.02)
        self._init_head()

    def _init_head(self) -> None:
        if self.num_classes:
            head = cast(nn.Linear, self.head)
            trunc_normal_(head.weight, std=0.02)
            nn.init.zeros_(head.bias)

    def train_positions(self) -> Positions:
        return self.positions(*self.config.train_size)

    def name_classes(self, logits: Tensor) -> list[tuple[str, float]]:
        """Every class, by its name or its number where names are unknown, and its probability,
        likeliest first, from the logits of one sample: (num_classes,), or (T, num_classes) where
        every token has an answer, of which the class token's counts."""
        if not self.num_classes:
            raise ValueError("the model has no classifier: num_classes is 0")
        if logits.ndim == 2:
            if not self.config.class_token:
                raise ValueError(
                    f"every patch has an answer, and {self.config.sample} as a whole has none: "
                    "the model has no class token"
                )
            logits = logits[0]
        return rank_classes(logits, self.class_names)

    def replaceable_parameters(self) -> set[str]:
        return {name for name, _ in self.named_parameters() if name.startswith("head.")}

    def positions(self, height: int, width: int) -> Positions:
        """Of a sample of `height` × `width` cells; ValueError where these are no multiples of the
        patch."""
        patch = self.config.patch_size
        wrong = not_multiples((height, width), patch)
        if wrong:
            raise ValueError(
                f"{self.config.sample} of {height} × {width} {self.config.cells} does not divide "
                f"into patches of {patch}: {wrong}"
            )
        rows = height // patch
        columns = width // patch
        return Positions.grid(rows, columns, num_prefix=self.num_prefix_tokens)

    def forward_features(self, samples: Tensor, *, kernel: str | Kernel = "auto") -> Tensor:
        """(B, T, C) after the last norm, from samples (B, in_chans, height, width)."""
        positions = self.positions(*samples.shape[-2:])
        # Loaders give float32 to models in bf16.
        x = self.patch_embed(samples.to(self.patch_embed.proj.weight.dtype))
        if self.prefix_tokens is not None:
            prefix = self.prefix_tokens.to(x.dtype).expand(x.shape[0], -1, -1)
            x = torch.cat([prefix, x], dim=1)
        if self.position_embedding is not None:
            x = x + self.position_embedding(positions, x)
        recompute = self.grad_checkpointing and torch.is_grad_enabled() and self.training
        with self._small_parts_loaded():
            for layer in self.layers:
                if recompute:
                    x = checkpoint(layer, x, positions, use_reentrant=False, kernel=kernel)
                else:
                    x = layer(x, positions, kernel=kernel)
        return self.norm(x)

    def _small_parts_loaded(self) -> AbstractContextManager[object]:
        """With offloaded parameters: the priors and SSMax of all layers are loaded at once."""
        if not is_offloaded(self.patch_embed):
            return nullcontext()
        parts: list[nn.Module] = []
        for layer in self.layers:
            attention = cast(GridBlock, layer).attention
            parts += [part for part in (attention.prior, attention.ssmax) if part is not None]
        return loaded(parts)

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        """(B, num_classes) logits from (B, T, C) features, or with `pre_logits` what is pooled, (B,
        C)."""
        pooled = global_pool_nlc(
            features, pool_type=self.global_pool, num_prefix_tokens=self.num_prefix_tokens
        )
        return pooled if pre_logits else self.head(pooled)

    def forward(self, samples: Tensor, *, kernel: str | Kernel = "auto") -> Tensor:
        """(B, num_classes) logits; any size that is a multiple of the patch."""
        return self.forward_head(self.forward_features(samples, kernel=kernel))

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A fresh classifier of `num_classes` (0: none), and another pooling if given ("token",
        "avg", or "" for none)."""
        if global_pool is not None:
            pools = ("", "avg", "token") if self.config.class_token else ("", "avg")
            if global_pool not in pools:
                expected = ", ".join(repr(pool) for pool in pools)
                raise ValueError(f"global_pool={global_pool!r}; this model has {expected}")
            self.global_pool = global_pool
        self.num_classes = num_classes
        self.class_names = ()
        self.config = replace(self.config, num_classes=num_classes, global_pool=self.global_pool)
        self.head = nn.Identity()
        if num_classes:
            self.head = nn.Linear(self.embed_dim, num_classes).to(self.patch_embed.proj.weight)
        self._init_head()

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable


def rank_classes(logits: Tensor, names: Sequence[str]) -> list[tuple[str, float]]:
    """Every class, by its name or its number where there are not as many names, and its
    probability, likeliest first, from (num_classes,) logits."""
    if len(names) != len(logits):
        names = [str(label) for label in range(len(logits))]
    shares = logits.double().softmax(-1)
    order = shares.argsort(descending=True, stable=True).tolist()
    return [(names[label], shares[label].item()) for label in order]


def _position(config: GridConfig, method: str, options: Options, layer: int) -> LayerPosition:
    depth = None if config.share_prior else (layer, config.num_layers)
    return create_grid_position(
        method,
        dim=config.dim,
        num_heads=config.num_heads,
        train_grid=config.train_grid,
        options=options,
        lanes=config.lanes,
        depth=depth,
    )
