"""Image classifiers of timm as models of vision: `timm:NAME`, untrained, `timm:NAME@CHECKPOINT`, a
file of its weights, or `timm:FOLDER`, what timm's `save_for_hf` or `zoo.save_adapted` wrote.

A checkpoint in the folder of a config.json of timm's has the preparation of images and the names of
classes that the file says: mean, std, crop, interpolation, input size, label_names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import timm
import torch
from PIL import Image
from timm.data import (
    ImageNetInfo,
    create_transform,
    infer_imagenet_subset,
    resolve_model_data_config,
)
from timm.models import load_checkpoint, load_state_dict
from torch import Tensor, nn

from modalities.contract import Outside
from modalities.encoder.config import Options, Shape, not_multiples
from modalities.encoder.model import rank_classes
from modalities.vision.classes import sort_classes
from modalities.vision.errors import BadImage
from modalities.vision.images import decode_image, reduced, to_rgb
from modalities.vision.model import VisionTransformer
from zoo.adapters import is_adapted, load_adapted
from zoo.errors import did_you_mean
from zoo.files import read_object


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
    configuration has `fixed_input_size` takes images of the training size alone.

    class_names: by number; () where they are unknown.
    """

    def __init__(self, model: nn.Module, name: str, class_names: Sequence[str] = ()) -> None:
        super().__init__()
        classifier: Any = model.eval()
        self.model = classifier
        self.data = resolve_model_data_config(classifier)
        if not classifier.num_classes:
            raise ValueError(f"timm:{name} has no classifier")
        channels, *train_size = self.data["input_size"]
        if channels != 3:
            raise ValueError(f"timm:{name} reads {channels} channels: pictures are read as RGB, 3")
        self.class_names = tuple(class_names)
        self.num_prefix_tokens = getattr(model, "num_prefix_tokens", 0)
        dynamic = getattr(model, "dynamic_img_size", False)
        fixed_input = bool(classifier.pretrained_cfg.get("fixed_input_size", False))
        self.config = OutsideImageConfig(
            name=name,
            position=name,
            num_classes=classifier.num_classes,
            train_size=tuple(train_size),
            patch_size=classifier.feature_info[-1]["reduction"],
            fixed=not dynamic and fixed_input,
        )

    def assume_names(self, classes: Sequence[str], order: str) -> tuple[str, ...]:
        """What the numbers of a model without names are, by timm's rules; () where a list decides.

        Of as many classes as a set of ImageNet has, and a source of its WordNet ids, these; of
        class folders their names in timm's order.
        """
        if order == "chosen":
            return ()
        synsets = _synsets(infer_imagenet_subset(self.model))
        if {*classes} <= {*synsets}:
            return synsets
        return sort_classes(classes, "timm") if order == "sorted" else ()

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
        self._check_size((images.shape[-2], images.shape[-1]), "--sizes")
        return self.model(images.to(next(self.model.parameters()).dtype))

    @torch.inference_mode()
    def classify(self, path: str, *, size: int | None = None) -> list[tuple[str, float]]:
        """Classes of an image file and their probabilities (`rank_classes`), read at the training
        size, or `size` pixels square. ValueError for a file or a size that cannot be read."""
        shape = self.config.train_size if size is None else (size, size)
        self._check_size(shape, "--size")
        wrong = not_multiples(shape, self.config.patch_size)
        if wrong and shape != self.config.train_size:
            raise ValueError(
                f"size {size} does not divide into patches of {self.config.patch_size}: {wrong}"
            )
        try:
            image = decode_image(Path(path).read_bytes())
        except BadImage as error:
            raise ValueError(f"{path}: {error}") from None
        pixels = self.pixels(image, *shape)[None]
        [logits] = self(pixels.to(next(self.parameters()).device))
        return rank_classes(logits, self.class_names)

    def _check_size(self, shape: Shape, option: str) -> None:
        config = self.config
        if not config.fixed or shape == config.train_size:
            return
        trained = f"{config.train_size[0]}×{config.train_size[1]}"
        way_out = f"{option} {min(config.train_size)}"
        raise ValueError(
            f"timm:{config.name} takes images of {trained} alone, not {shape[0]}×{shape[1]}: "
            f"{way_out}"
        )


@lru_cache(maxsize=1)
def _synsets(subset: str | None) -> tuple[str, ...]:
    """The WordNet ids of a set of ImageNet by number; () for none."""
    return tuple(ImageNetInfo(subset).label_names()) if subset else ()


def _load(word: str) -> tuple[nn.Module, bool]:
    """A registered model of ours is the zoo's, everything else an `OutsideClassifier`."""
    name, separator, checkpoint = word.partition("@")
    if os.path.isdir(word):
        # The folder says which architecture it is of.
        name = ""
        separator = "@"
        checkpoint = word
    if separator and not checkpoint:
        raise ValueError(f"timm:{word}: expected a file or folder of weights behind '@'")
    path = Path(checkpoint) if separator else None
    if path is not None and not path.exists():
        raise ValueError(_missing(word, path))
    config = _config_beside(word, path)
    if config:
        name = _architecture(word, name, config)
    _check_name(name)
    try:
        if config and path:
            model = _load_described(name, path, config)
        else:
            model = _load_plain(name, path)
    # torch and safetensors raise many things for a file that is none of theirs.
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(f"timm:{word} cannot be loaded: {reason}") from error
    if not isinstance(model, VisionTransformer):
        label = name if os.path.isdir(word) else word.partition("@")[0]
        model = OutsideClassifier(model, label, _label_names(model) if config else ())
    elif path and not config:
        # The tag's own, which other weights need not have.
        model.class_names = ()
    return model, bool(separator)


def _missing(word: str, path: Path) -> str:
    """The message for a checkpoint that is not there."""
    others: list[str] = []
    if path.parent.is_dir():
        others = sorted(os.listdir(path.parent))
    hint = did_you_mean(path.name, others).strip()
    message = f"timm:{word} cannot be loaded: no file or folder '{path}'"
    return f"{message}; {hint}" if hint else message


def _check_name(name: str) -> None:
    """ValueError for what is no architecture of timm's."""
    architectures = timm.list_models()
    if name.partition(".")[0] not in architectures:
        hint = did_you_mean(name, architectures, cutoff=0.5) or "timm.list_models() lists them"
        raise ValueError(f"timm:{name}: no such model in timm {timm.__version__}; {hint.strip()}")


def _config_beside(word: str, path: Path | None) -> Options:
    """The config.json of timm's in a checkpoint's folder; {} where there is none. ValueError for
    one of the zoo's, which timm does not read."""
    if path is None:
        return {}
    folder = path if path.is_dir() else path.parent
    file = folder / "config.json"
    if not file.is_file():
        return {}
    config = read_object(file)
    if "modality" in config and "architecture" not in config:
        raise ValueError(
            f"timm:{word}: {file} is of a model of the zoo, not of timm; name its folder, {folder}"
        )
    return config if "architecture" in config else {}


def _architecture(word: str, name: str, config: Mapping[str, object]) -> str:
    """The name, or the architecture that a config.json has. ValueError where they differ."""
    architecture = str(config["architecture"])
    if name and name.partition(".")[0] != architecture:
        checkpoint = word.partition("@")[2]
        raise ValueError(
            f"timm:{word}: the config.json there is of {architecture}, not {name}: "
            f"timm:{architecture}@{checkpoint}"
        )
    return architecture


def _load_plain(name: str, path: Path | None) -> nn.Module:
    """A model by its name, with the weights of a file or folder that nothing describes."""
    if path is None:
        return _create(name)
    if path.is_dir():
        raise FileNotFoundError(f"{path} has no config.json of timm's; name a file in it")
    model = _create(name, num_classes=_classes_of(str(path), name))
    load_checkpoint(model, str(path))
    return model


def _load_described(name: str, path: Path, config: Mapping[str, object]) -> nn.Module:
    """A model as the config.json beside its weights describes it; `path` is the file or the
    folder."""
    folder = path if path.is_dir() else path.parent
    if is_adapted(folder):
        model = load_adapted(folder, dynamic_img_size=True)
    elif path.is_dir():
        model = _create(f"local-dir:{folder}", pretrained=True)
    else:
        num_classes = _classes_of(str(path), name)
        model = _create(f"local-dir:{folder}", num_classes=num_classes)
    if path.is_file():
        load_checkpoint(model, str(path))
    # Where the files are is nothing that a result depends on.
    facts = {key: value for key, value in model.pretrained_cfg.items() if key != "file"}
    model.pretrained_cfg = facts
    return model


def _create(name: str, **options: Any) -> Any:
    try:
        # With it positions are resampled at every call.
        return timm.create_model(name, dynamic_img_size=True, **options)
    except TypeError:
        # The architecture has no such option.
        return timm.create_model(name, **options)


def _label_names(model: Any) -> tuple[str, ...]:
    """The names of classes in timm's description of a model; () where it has none, or not as many
    as classes."""
    names = model.pretrained_cfg.get("label_names") or ()
    if isinstance(names, Mapping):
        names = [names.get(str(label)) for label in range(model.num_classes)]
    complete = all(isinstance(name, str) for name in names)
    return tuple(names) if complete and len(names) == model.num_classes else ()


def _classes_of(checkpoint: str, name: str) -> int:
    """Classes of the classifier in a checkpoint of an architecture."""
    layer = getattr(timm.get_pretrained_cfg(name), "classifier", None)
    if isinstance(layer, tuple):
        layer = layer[0]
    return len(load_state_dict(checkpoint)[f"{layer}.weight"])


OUTSIDE = Outside(_load)
