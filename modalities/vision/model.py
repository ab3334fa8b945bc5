"""The transformer over a grid of patches (`modalities.encoder.model`) as a model of images, and of
timm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn

from modalities.encoder.model import GridTransformer
from modalities.vision.architectures import VisionConfig
from modalities.vision.errors import BadImage
from modalities.vision.images import decode_image, preprocess

# timm's name of a model that has no other: its configuration is in its arguments.
ANY = "priorzoo_vision"
FIRST_CONV = "patch_embed.proj"


class VisionTransformer(GridTransformer):
    """An image classifier, and a timm model."""

    config_class = VisionConfig
    modality = "vision"
    config: VisionConfig

    def __init__(self, config: VisionConfig) -> None:
        super().__init__(config)
        self.pretrained_cfg = timm_cfg(config) | {"architecture": ANY}
        self.default_cfg = self.pretrained_cfg

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
        """Classes of an image file and their probabilities (`name_classes`). See `read`."""
        [logits] = self(self.read(path, size=size))
        return self.name_classes(logits)

    def get_classifier(self) -> nn.Module:
        return self.head

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
