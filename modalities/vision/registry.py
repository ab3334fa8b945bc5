"""The architectures in timm's registry, which importing this adds them to: their settings, papers and weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._builder import resolve_pretrained_cfg
from torch import nn

from modalities.vision.architectures import FAMILY, VisionConfig
from modalities.vision.model import ANY, VisionTransformer, timm_cfg
from zoo import catalog as weights
from zoo.catalog import model_entry

# timm's scripts pass these to every model.
DROPOUTS = ("drop_rate", "proj_drop_rate", "attn_drop_rate", "pos_drop_rate", "patch_drop_rate", "drop_block_rate")
ALWAYS = {"dynamic_img_size": True, "strict_img_size": False}  # what timm calls that models of any size have
default_cfgs: dict[str, object] = {}  # timm looks for this name


def _register_with_timm() -> None:
    """Register the architectures that are listed now with timm."""
    cfgs: dict[str, Any] = {}
    for name in FAMILY.names():
        cfgs |= _timm_cfgs(name, VisionConfig(**model_entry(name).config))
    cfgs[ANY] = timm_cfg(VisionConfig())
    default_cfgs.update(generate_default_cfgs(cfgs))
    for name in dict.fromkeys(key.partition(".")[0] for key in cfgs):
        register_model(_entry_point(name))


def _timm_cfgs(name: str, config: VisionConfig) -> dict[str, Any]:
    """timm's description of an architecture, and of each set of weights that ships for it."""
    cfg, by_weights = timm_cfg(config) | {"license": "apache-2.0"}, {}
    for full, entry in weights.manifest().items():
        if full.partition(".")[0] == name:
            by_weights[full] = cfg | {"file": str(weights.WEIGHTS / entry["file"]), "license": entry["license"].lower()}
            if names := entry.get("class_names"):
                by_weights[full]["label_names"] = tuple(names)
    return by_weights or {name: cfg}


def _known(name: str, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords without those that are not set, and without those of timm's scripts that change nothing here.

    Raises ValueError for those that would.
    """
    options = {key: value for key, value in keywords.items() if value is not None}
    if options.pop("features_only", False):
        raise ValueError(f"{name} has no features_only: forward_features gives (B, T, C)")
    for key in list(options):
        if key in DROPOUTS and options.pop(key):
            raise ValueError(f"{name} has no {key}: of timm's dropouts it has drop_path_rate")
        if key in ALWAYS and bool(options.pop(key)) != ALWAYS[key]:
            raise ValueError(f"{key}={not ALWAYS[key]}: {name} takes images of any size at every call")
    return options


def _build(**config: Any) -> VisionTransformer:
    return VisionTransformer(VisionConfig(**config))


def _entry_point(name: str) -> Callable[..., nn.Module]:
    """The function that `timm.create_model(name, …)` calls; keywords are entries of `VisionConfig`.

    `img_size` is the size that priors are initialised for; with weights it is theirs.
    """

    def create(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        if pretrained:
            file = resolve_pretrained_cfg(name, pretrained_cfg=kwargs.get("pretrained_cfg")).file
            for full, entry in weights.manifest().items():
                # timm reads it itself, and compares no digest.
                if file and Path(file) == weights.WEIGHTS / entry["file"]:
                    overlay = kwargs.get("pretrained_cfg_overlay") or {}
                    kwargs["pretrained_cfg_overlay"] = {**overlay, "file": str(weights.verified_file(full))}
        config = asdict(VisionConfig()) if name == ANY else model_entry(name).config
        options = {**config, **_known(name, kwargs)}
        saved = options.pop("train_size", None)  # of a model that timm saved, and the size that its weights are of
        names = options.pop("class_names", ())
        if pretrained or saved:
            options["img_size"] = saved or config["img_size"]
        model = build_model_with_cfg(_build, name, pretrained, **options)
        names = names or model.pretrained_cfg.get("label_names") or ()
        model.class_names = tuple(names) if len(names) == model.num_classes else ()
        shown = {"input_size": (model.in_chans, *model.config.train_size)}
        model.pretrained_cfg = model.default_cfg = model.pretrained_cfg | shown
        return model

    create.__name__ = create.__qualname__ = name
    create.__module__ = __name__  # timm finds default_cfgs through it
    create.__doc__ = f"{name}, as `priorzoo show {name}` describes it."
    return create


_register_with_timm()
