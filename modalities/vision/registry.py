"""The architectures in timm's registry, which importing this adds them to: their settings, papers
and weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._builder import resolve_pretrained_cfg
from torch import nn

from modalities.encoder.config import Options
from modalities.vision.architectures import FAMILY, VisionConfig
from modalities.vision.model import ANY, VisionTransformer, timm_cfg
from zoo import pretrained as weights
from zoo.catalog import model_entry

# What timm's scripts pass to every model, and what it is here.
_DROPOUTS = (
    "drop_rate",
    "proj_drop_rate",
    "attn_drop_rate",
    "pos_drop_rate",
    "patch_drop_rate",
    "drop_block_rate",
)
FIXED = dict.fromkeys(_DROPOUTS, 0.0) | {
    "dynamic_img_size": True,
    "strict_img_size": False,
    "features_only": False,
}
# timm looks for this name.
default_cfgs: dict[str, object] = {}


def _register_with_timm() -> None:
    """Register the architectures that are listed now with timm, and each set of weights that ships
    for them."""
    cfgs: Options = {ANY: timm_cfg(VisionConfig())}
    for name in FAMILY.names():
        cfgs |= _cfgs(name)
    default_cfgs.update(generate_default_cfgs(cfgs))
    for name in dict.fromkeys(key.partition(".")[0] for key in cfgs):
        register_model(_entry_point(name))


def _cfgs(name: str) -> Options:
    """timm's descriptions of an architecture by name: one for each set of weights, or one without
    weights."""
    cfg = timm_cfg(VisionConfig(**model_entry(name).config)) | {"license": "apache-2.0"}
    cfgs: Options = {}
    for full, entry in weights.manifest().items():
        if full.partition(".")[0] != name:
            continue
        file = str(weights.WEIGHTS / entry["file"])
        cfgs[full] = cfg | {"file": file, "license": entry["license"].lower()}
        class_names = entry.get("class_names")
        if class_names:
            cfgs[full]["label_names"] = tuple(class_names)
    return cfgs or {name: cfg}


def _entry_point(name: str) -> Callable[..., nn.Module]:
    """The function that `timm.create_model(name, …)` calls; keywords are entries of `VisionConfig`.

    `img_size` is the size that priors are initialised for; with weights it is theirs.
    """

    def create(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        if pretrained:
            _verify_weights(name, kwargs)
        config = asdict(VisionConfig()) if name == ANY else model_entry(name).config
        keywords = {key: value for key, value in kwargs.items() if value is not None}
        options: Options = config | keywords
        for key in FIXED.keys() & options.keys():
            if options.pop(key) != FIXED[key]:
                raise ValueError(
                    f"{name} has {key}={FIXED[key]}; it reads any size, "
                    "and its dropout is drop_path_rate"
                )
        # Of a model that timm saved, the size that its weights are of.
        saved_size = options.pop("train_size", None)
        names = options.pop("class_names", ())
        if pretrained or saved_size:
            options["img_size"] = saved_size or config["img_size"]
        model = build_model_with_cfg(
            lambda **kw: VisionTransformer(VisionConfig(**kw)), name, pretrained, **options
        )
        names = tuple(names or cast(Sequence[str], model.pretrained_cfg.get("label_names") or ()))
        model.class_names = names if len(names) == model.num_classes else ()
        input_size = (model.in_chans, *model.config.train_size)
        model.pretrained_cfg = model.pretrained_cfg | {"input_size": input_size}
        model.default_cfg = model.pretrained_cfg
        return model

    create.__name__ = name
    create.__qualname__ = name
    # timm finds default_cfgs through it.
    create.__module__ = __name__
    create.__doc__ = f"{name}, as `priorzoo show {name}` describes it."
    return create


def _verify_weights(name: str, kwargs: dict[str, Any]) -> None:
    """Check the digest of weights that ship: timm reads their file itself, and compares none."""
    file = resolve_pretrained_cfg(name, pretrained_cfg=kwargs.get("pretrained_cfg")).file
    for full, entry in weights.manifest().items():
        if file and Path(file) == weights.WEIGHTS / entry["file"]:
            overlay = kwargs.get("pretrained_cfg_overlay") or {}
            verified = str(weights.verified_file(full))
            kwargs["pretrained_cfg_overlay"] = {**overlay, "file": verified}


_register_with_timm()
