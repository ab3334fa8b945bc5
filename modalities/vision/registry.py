"""Every position method × SSMax on and off × size, in the zoo's registry and in timm's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._builder import resolve_pretrained_cfg

from modalities.vision.model import VisionConfig, VisionTransformer, build
from zoo import pretrained as weights
from zoo.methods import check_grid_position, list_grid_positions
from zoo.registry import ModelFamily, register_family

# tiny reads the 26 capitals of the glyph data at 48 pixels; small and base are the usual ones, at 224.
SIZES: dict[str, dict[str, Any]] = {
    "tiny_patch8": dict(
        img_size=48, patch_size=8, num_classes=26, dim=96, num_layers=4, num_heads=3, hidden_dim=256, class_token=False,
        global_pool="avg",
    ),
    "small_patch16": dict(dim=384, num_layers=12, num_heads=6, hidden_dim=1024),
    "base_patch16": dict(dim=768, num_layers=12, num_heads=12, hidden_dim=2048),
}  # fmt: skip
# Options of a method in a size ("*": every size). Heads of 32 columns have no room for 8 pairs an axis; a separable prior
# with a learned centre tells left from right, as GOAT's sines do.
OPTIONS: dict[tuple[str, str], dict[str, Any]] = {
    ("tiny_patch8", "goat"): {"rank": 2},
    ("tiny_patch8", "spectral2d"): {"rank": 2},
    ("*", "ggd2d_separable"): {"train_mu": True},
}

# timm's scripts pass these to every model.
DROPOUTS = ("drop_rate", "proj_drop_rate", "attn_drop_rate", "pos_drop_rate", "patch_drop_rate", "drop_block_rate")

default_cfgs: dict[str, Any] = {}  # timm looks for this name


def vision_config(position: str, size: str, ssmax: bool) -> VisionConfig:
    """The configuration of a registered architecture."""
    options = OPTIONS.get((size, position)) or OPTIONS.get(("*", position), {})
    return VisionConfig(**SIZES[size], position=position, position_options=options, ssmax=ssmax)


def register_vision_models() -> None:
    """Register all of them; in timm's registry those that are listed now."""

    def made(position: str, size: str, ssmax: bool) -> dict[str, Any]:
        return asdict(vision_config(position, size, ssmax))

    family = ModelFamily("vision", build, SIZES, made, list_grid_positions, check_grid_position)
    register_family(family)
    cfgs: dict[str, Any] = {}
    for name in family.names():
        entry = family.find(name)
        assert entry is not None
        cfgs |= _timm_cfgs(name, VisionConfig(**entry.config))
    default_cfgs.update(generate_default_cfgs(cfgs))
    for name in dict.fromkeys(key.partition(".")[0] for key in cfgs):
        register_model(_entry_point(name))


def _timm_cfgs(name: str, config: VisionConfig) -> dict[str, dict[str, Any]]:
    """timm's description of an architecture, and of each set of weights that ships for it."""
    cfg = {
        "input_size": (config.in_chans, *config.train_size),
        "num_classes": config.num_classes,
        "mean": config.mean,
        "std": config.std,
        "crop_pct": 1.0,
        "interpolation": "bicubic",
        "fixed_input_size": False,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
    }
    tagged = [full for full in weights.list_weights() if full.partition(".")[0] == name]
    found = {full: cfg | {"file": str(weights.WEIGHTS / weights.manifest()[full]["file"])} for full in tagged}
    return found or {name: cfg}


def _known(name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keywords without those that are not set: None, and rates of dropout that these models do not have, at 0."""
    given = {key: value for key, value in kwargs.items() if value is not None}
    for key in [key for key in given if key in DROPOUTS]:
        if given.pop(key):
            raise ValueError(f"{name} has no {key}: of timm's dropouts it has drop_path_rate")
    return given


def _entry_point(name: str) -> Callable[..., VisionTransformer]:
    """The function that `timm.create_model(name, …)` calls; keywords are entries of `VisionConfig`."""

    def create(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
        from zoo.registry import model_entry

        if pretrained:
            file = resolve_pretrained_cfg(name, pretrained_cfg=kwargs.get("pretrained_cfg")).file
            for full, entry in weights.manifest().items():
                if file and Path(file) == weights.WEIGHTS / entry["file"]:
                    weights.verified_file(full)  # timm reads the file itself, and compares no digest
        config = model_entry(name).config
        given = {**config, **_known(name, kwargs)}
        sizes = [VisionConfig(**{**config, "img_size": side["img_size"]}).train_size for side in (given, config)]
        if pretrained and sizes[0] != sizes[1]:
            raise ValueError(
                f"img_size={given['img_size']}, but the weights were trained at {config['img_size']}: omit img_size, the model "
                "takes images of any size at every call"
            )
        feature_cfg = {"feature_cls": "getter", "out_indices": given.pop("out_indices", 3)}
        return build_model_with_cfg(build, name, pretrained, feature_cfg=feature_cfg, **given)

    create.__name__ = create.__qualname__ = name
    create.__module__ = __name__  # timm finds default_cfgs through it
    create.__doc__ = f"{name}, as `python -m zoo show {name}` describes it."
    return create
