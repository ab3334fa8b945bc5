"""Priors in the vision transformers of `timm`. A layer's prior is the module `position_bias` of its
attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import timm
from timm.layers import Attention
from timm.models import VisionTransformer, save_for_hf
from torch import Tensor, nn

from zoo.adapters.layer import (
    RECORD,
    Grid,
    LayerPrior,
    Request,
    create_layer,
    prior_parameters,
    zero,
)
from zoo.errors import Options
from zoo.files import read_object, read_tensors, write_json
from zoo.offload import execution_device


class PriorAttention(Attention):
    """`timm.layers.Attention` with a prior on its logits; made of one by `adapt`."""

    position_bias: LayerPrior
    patch_grid: Grid

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        if attn_mask is not None or is_causal:
            raise ValueError(
                "attention with a prior over patches takes neither attn_mask nor is_causal"
            )
        layer = self.position_bias
        positions = self.patch_grid.positions(x.shape[1])
        batch, length, _ = x.shape
        gate = None if self.gate is None else self.gate(x).sigmoid()
        qkv = self.qkv(x).reshape(batch, length, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q = self.q_norm(q)
        k = self.k_norm(k)
        dropout = self.attn_drop.p if self.training else 0.0

        def without_prior() -> Tensor:
            if self.fused_attn:
                return nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
            weights = ((q * self.scale) @ k.transpose(-2, -1)).softmax(dim=-1)
            return self.attn_drop(weights) @ v

        x = layer.attend(
            without_prior,
            q,
            k,
            v,
            (positions, positions),
            causal=False,
            dropout=dropout,
        )
        x = self.norm(x.transpose(1, 2).reshape(batch, length, self.attn_dim))
        if gate is not None:
            x = x * gate
        return self.proj_drop(self.proj(x))


class PriorVisionTransformer(VisionTransformer):
    """A `timm` vision transformer with priors; made of one by `adapt`."""

    priorzoo: Options

    def no_weight_decay(self) -> set[str]:
        """What timm's optimisers do not decay: as the model itself, and the parameters of priors
        and SSMax."""
        return {*super().no_weight_decay(), *prior_parameters(self)}


def adapt(model: VisionTransformer, request: Request) -> None:
    """As `zoo.adapt`; the context is the model's grid. The request's record is what `load` does
    again."""
    # timm's features_only
    if isinstance(getattr(model, "model", None), VisionTransformer):
        raise ValueError(
            f"{type(model).__name__} holds features of a model: give that, features.model, a prior"
        )
    layers: list[Any] = [
        block.attn for block in getattr(model, "blocks", ()) if hasattr(block, "attn")
    ]
    if type(model) is not VisionTransformer or {type(layer) for layer in layers} != {Attention}:
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers})) or "none"
        raise ValueError(
            f"{type(model).__name__} with attention {kinds}: expected a VisionTransformer with "
            "timm.layers.Attention, such as vit_small_patch16_224 or deit3_small_patch16_224"
        )
    if not isinstance(model.patch_drop, nn.Identity):
        raise ValueError("a prior needs all patches, also in training: expected patch_drop_rate=0")
    projection = getattr(model.patch_embed, "proj", None)
    train_grid = model.patch_embed.grid_size
    if not isinstance(projection, nn.Conv2d) or train_grid is None:
        raise ValueError("timm model without a patch grid: give img_size when it is made")
    grid = Grid(model.num_prefix_tokens)
    height, width = train_grid
    priors = [
        create_layer(
            request,
            dim=model.embed_dim,
            num_heads=layer.num_heads,
            train_context=height * width,
            causal=False,
            grid=grid,
            train_grid=(height, width),
        )
        for layer in layers
    ]
    if not request.keep_rope:
        if model.pos_embed is None:
            raise ValueError("keep_rope=False: the model has no positions of its own")
        zero(model, model.pos_embed)
    for layer, prior in zip(layers, priors, strict=True):
        layer.__class__ = PriorAttention
        layer.position_bias = prior.to(execution_device(layer))
        layer.patch_grid = grid
    model.__class__ = PriorVisionTransformer
    projection.register_forward_hook(grid.read)
    record = request.record
    del record["train_context"]
    model.__dict__[RECORD] = record


def save(model: PriorVisionTransformer, folder: Path) -> None:
    """Write weights and configuration in timm's layout, and what `load` needs."""
    patches = model.patch_embed
    heads = next(m.num_heads for m in model.modules() if isinstance(m, PriorAttention))
    norms = (model.norm, model.fc_norm)
    arguments = {
        "img_size": list(patches.img_size),
        "in_chans": patches.proj.in_channels,
        "num_heads": heads,
        "patch_size": patches.patch_size[0],
        "embed_dim": model.embed_dim,
        "depth": len(model.blocks),
        "dynamic_img_size": model.dynamic_img_size,
        "final_norm": not all(isinstance(norm, nn.Identity) for norm in norms),
    }
    save_for_hf(model, str(folder), model_args=arguments, safe_serialization=True)
    config = read_object(folder / "config.json")
    write_json(folder / "config.json", config | {RECORD: model.priorzoo})


def load(folder: Path, **kwargs: Any) -> VisionTransformer:
    """As `zoo.load_adapted`, for a folder that `save` wrote. Another num_classes, with global_pool
    if it has none, gives it a fresh classifier."""
    config = read_object(folder / "config.json")
    classes = kwargs.pop("num_classes", config["num_classes"])
    arguments = {
        "num_classes": config["num_classes"],
        # timm leaves an empty one out.
        "global_pool": config.get("global_pool", ""),
        **config["model_args"],
        **kwargs,
    }
    # With the preparation of images and the names of classes that the folder says.
    model: Any = timm.create_model(f"local-dir:{folder}", **arguments)
    adapt(model, Request(**config[RECORD]))
    model.load_state_dict(read_tensors(folder / "model.safetensors"))
    if classes != config["num_classes"]:
        model.reset_classifier(classes)
    return model
