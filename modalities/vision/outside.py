"""Image classifiers of timm as models of vision: `timm:NAME`, untrained, or `timm:NAME@CHECKPOINT`,
a file of its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import timm
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from timm.models import load_checkpoint, load_state_dict
from torch import Tensor, nn

from modalities.contract import Outside
from modalities.encoder.config import Options
from modalities.vision.images import reduced, to_rgb
from modalities.vision.model import VisionTransformer
from zoo.errors import nearest


@dataclass(frozen=True)
class OutsideImageConfig:
    """What evaluators ask of a configuration.

    train_size: timm's (height, width).
    patch_size: what sides are multiples of.
    fixed: whether it takes images of the training size alone.
    """

    name: str
    position: str
    num_classes: int
    train_size: tuple[int, int]
    patch_size: int
    fixed: bool


class OutsideClassifier(nn.Module):
    """A classifier of timm with its own preparation of images. One without `dynamic_img_size` whose
    configuration has `fixed_input_size` takes images of the training size alone."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        classifier: Any = model.eval()
        self.model = classifier
        self.data = resolve_model_data_config(classifier)
        if not classifier.num_classes:
            raise ValueError(f"timm:{name} has no classifier")
        self.num_prefix_tokens = getattr(model, "num_prefix_tokens", 0)
        dynamic = getattr(model, "dynamic_img_size", False)
        fixed_input = bool(classifier.pretrained_cfg.get("fixed_input_size", False))
        self.config = OutsideImageConfig(
            name=name,
            position=name,
            num_classes=classifier.num_classes,
            train_size=tuple(self.data["input_size"][1:]),
            patch_size=classifier.feature_info[-1]["reduction"],
            fixed=not dynamic and fixed_input,
        )

    def pixels(
        self, image: Image.Image, height: int, width: int, *, enlarged: bool = False
    ) -> Tensor:
        """(3, H, W) by timm's evaluation transform, which resizes to 1 / crop_pct of the size and
        cuts out the centre. enlarged: after the shorter side is reduced to the training size."""
        image = to_rgb(image)
        if enlarged:
            image = reduced(image, min(self.config.train_size))
        names = ("interpolation", "mean", "std", "crop_pct", "crop_mode")
        options = {name: self.data[name] for name in names}
        transform = create_transform((3, height, width), **options)
        return transform(image)

    def forward(self, images: Tensor) -> Tensor:
        """(B, num_classes) logits of (B, 3, H, W). ValueError for a size that the model does not
        take."""
        config = self.config
        shape = tuple(images.shape[-2:])
        if config.fixed and shape != config.train_size:
            size = f"{shape[0]}×{shape[1]}"
            trained = f"{config.train_size[0]}×{config.train_size[1]}"
            way_out = f"--sizes {min(config.train_size)}"
            raise ValueError(
                f"timm:{config.name} takes images of {trained} alone, not {size}: {way_out}"
            )
        return self.model(images.to(next(self.model.parameters()).dtype))


def _load(word: str) -> tuple[nn.Module, bool]:
    """A registered model of ours is the zoo's, everything else an `OutsideClassifier`."""
    name, _, checkpoint = word.partition("@")
    architectures = timm.list_models()
    if name.partition(".")[0] not in architectures:
        hint = nearest(name, architectures)
        raise ValueError(f"timm:{name}: no such model in timm {timm.__version__}; {hint}")
    options: Options = {}
    try:
        if "@" in word:
            options["num_classes"] = _classes_of(checkpoint, name)
        try:
            # With it positions are resampled at every call.
            model = timm.create_model(name, dynamic_img_size=True, **options)
        except TypeError:
            # The architecture has no such option.
            model = timm.create_model(name, **options)
        if "@" in word:
            load_checkpoint(model, checkpoint)
    # torch and safetensors raise many things for a file that is none of theirs.
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(f"timm:{word} cannot be loaded: {reason}") from error
    if not isinstance(model, VisionTransformer):
        model = OutsideClassifier(model, name)
    return model, "@" in word


def _classes_of(checkpoint: str, name: str) -> int:
    """Classes of the classifier in a checkpoint of an architecture."""
    layer = getattr(timm.get_pretrained_cfg(name), "classifier", None)
    if isinstance(layer, tuple):
        layer = layer[0]
    return len(load_state_dict(checkpoint)[f"{layer}.weight"])


OUTSIDE = Outside(_load)
