"""One vision transformer for every position method on a grid: pre-norm, timm's layers around our
attention.

Positions are made from the images of each call, so any size divisible by the patch works, square or
not, at every call; nothing is resized.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

import torch
from PIL import Image
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

from modalities.starts import start_weights
from modalities.vision.architectures import Options, VisionConfig, not_multiples
from modalities.vision.errors import BadImage
from modalities.vision.images import decode_image, preprocess
from zoo.attention.call import Kernel
from zoo.layers import Attention, SSMax, is_offloaded, loaded, share_prior
from zoo.methods import (
    LayerPosition,
    create_grid_position,
    layer_methods,
    shared_embedding,
    stored_options,
)
from zoo.model import ZooModel
from zoo.positions import Positions

# timm's name of a model that has no other: its configuration is in its arguments.
ANY = "priorzoo_vision"
FIRST_CONV = "patch_embed.proj"


class VisionBlock(nn.Module):
    """Pre-norm: x + drop(scale(attention(norm x))), then x + drop(scale(mlp(norm x)))."""

    def __init__(self, config: VisionConfig, position: LayerPosition, drop_path: float) -> None:
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


def _layer_scale(config: VisionConfig) -> nn.Module:
    if config.init_values:
        return LayerScale(config.dim, config.init_values)
    return nn.Identity()


class VisionTransformer(ZooModel):
    """An image classifier, and a timm model.

    Tokens are the class token and registers, which have no place on the grid, then the patches row
    by row.
    """

    config_class = VisionConfig
    modality = "vision"

    def __init__(self, config: VisionConfig) -> None:
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
        self.layers = nn.ModuleList([VisionBlock(config, positions[0], rates[0])])
        for layer in range(1, config.num_layers):
            position = _position(config, *methods[layer], layer)
            positions.append(position)
            self.layers.append(VisionBlock(config, position, rates[layer]))
        if config.share_prior:
            share_prior([cast(VisionBlock, layer).attention for layer in self.layers], methods)
        self.position_embedding = shared_embedding(methods, positions)
        self.config = replace(config, position_options=stored_options(config.position, positions))
        self.norm: nn.Module = nn.LayerNorm(config.dim, eps=1e-6)
        self.pretrained_cfg = timm_cfg(config) | {"architecture": ANY}
        self.default_cfg = self.pretrained_cfg
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

    def pixels(
        self, image: Image.Image, height: int, width: int, *, enlarged: bool = False
    ) -> Tensor:
        """(3, H, W): the image at this shape, normalised as in training. enlarged: from the
        training size."""
        via = min(self.config.train_size) if enlarged else 0
        return preprocess(image, height, width, via=via, mean=self.config.mean, std=self.config.std)

    def read(self, path: str, *, size: int | None = None) -> Tensor:
        """(1, 3, H, W) pixels of an image file: its largest central window, at the training size or
        `size` pixels square."""
        shape = self.config.train_size if size is None else (size, size)
        self.positions(*shape)
        try:
            # As in training.
            image = decode_image(Path(path).read_bytes())
        except BadImage as error:
            raise ValueError(f"{path}: {error}") from None
        return self.pixels(image, *shape)[None].to(next(self.parameters()))

    @torch.inference_mode()
    def classify(self, path: str, *, size: int | None = None) -> list[tuple[str, float]]:
        """Every class, by its name or its number where names are unknown, and its probability,
        likeliest first; of the class token where every token has an answer. See `read`."""
        if not self.num_classes:
            raise ValueError("the model has no classifier: num_classes is 0")
        logits = self(self.read(path, size=size))[0]
        if logits.ndim == 2:
            if not self.config.class_token:
                raise ValueError(
                    "every patch has an answer, and the picture has none: "
                    "the model has no class token"
                )
            logits = logits[0]
        names = self.class_names
        if len(names) != self.num_classes:
            names = tuple(str(label) for label in range(self.num_classes))
        shares = logits.double().softmax(-1)
        order = shares.argsort(descending=True, stable=True).tolist()
        return [(names[label], shares[label].item()) for label in order]

    def replaceable_parameters(self) -> set[str]:
        return {name for name, _ in self.named_parameters() if name.startswith("head.")}

    def positions(self, height: int, width: int) -> Positions:
        """Of an image of `height` × `width` pixels; ValueError where these are no multiples of the
        patch."""
        patch = self.config.patch_size
        wrong = not_multiples((height, width), patch)
        if wrong:
            raise ValueError(
                f"an image of {height} × {width} pixels does not divide into patches of {patch}: "
                f"{wrong}"
            )
        rows = height // patch
        columns = width // patch
        return Positions.grid(rows, columns, num_prefix=self.num_prefix_tokens)

    def forward_features(self, images: Tensor, *, kernel: str | Kernel = "auto") -> Tensor:
        """(B, T, C) after the last norm, from normalised images (B, in_chans, height, width)."""
        positions = self.positions(*images.shape[-2:])
        # Loaders give float32 to models in bf16.
        x = self.patch_embed(images.to(self.patch_embed.proj.weight.dtype))
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
            attention = cast(VisionBlock, layer).attention
            parts += [part for part in (attention.prior, attention.ssmax) if part is not None]
        return loaded(parts)

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        """(B, num_classes) logits from (B, T, C) features, or with `pre_logits` what is pooled, (B,
        C)."""
        pooled = global_pool_nlc(
            features, pool_type=self.global_pool, num_prefix_tokens=self.num_prefix_tokens
        )
        return pooled if pre_logits else self.head(pooled)

    def forward(self, images: Tensor, *, kernel: str | Kernel = "auto") -> Tensor:
        """(B, num_classes) logits; any size that is a multiple of the patch."""
        return self.forward_head(self.forward_features(images, kernel=kernel))

    def get_classifier(self) -> nn.Module:
        return self.head

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

    @property
    def _model_args(self) -> dict[str, object]:
        """What timm saves to make this model again. train_size: timm overwrites img_size by its
        data configuration's."""
        return asdict(self.config) | {
            "train_size": self.config.img_size,
            "class_names": self.class_names,
        }

    @_model_args.setter
    def _model_args(self, args: Mapping[str, object]) -> None:
        """timm sets the arguments that it was called with, which are in the configuration."""

    def group_matcher(self, coarse: bool = False) -> dict[str, object]:
        """Patterns that sort parameters by depth, for layer-wise learning rates."""
        blocks = [(r"^layers\.(\d+)", None), (r"^norm", (99999,))]
        return {"stem": r"^prefix_tokens|^position_embedding|^patch_embed", "blocks": blocks}


def timm_cfg(config: VisionConfig) -> dict[str, object]:
    """timm's description of a model's images, classes and layers."""
    return {
        "input_size": (config.in_chans, *config.train_size),
        "num_classes": config.num_classes,
        "mean": config.mean,
        "std": config.std,
        "crop_pct": 1.0,
        "crop_mode": "center",
        "interpolation": "bicubic",
        "fixed_input_size": False,
        "first_conv": FIRST_CONV,
        "classifier": "head",
    }


def _position(config: VisionConfig, method: str, options: Options, layer: int) -> LayerPosition:
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
