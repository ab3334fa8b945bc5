"""What makes a vision transformer, and every position method × SSMax on and off × size by name; all
of it without timm."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from modalities.encoder.config import GridConfig, Options
from zoo.catalog import ModelFamily
from zoo.errors import bounded
from zoo.methods import check_grid_position, list_grid_positions
from zoo.model import ZooModel
from zoo.plugins import load_modality

# tiny reads the 26 capitals of the glyph data at 48 pixels, scene those of the scenes at 96; small
# and base are the usual ones, at 224.
SIZES: dict[str, Options] = {
    "tiny_patch8": dict(
        img_size=48,
        patch_size=8,
        num_classes=26,
        dim=96,
        num_layers=4,
        num_heads=3,
        hidden_dim=256,
        class_token=False,
        global_pool="avg",
    ),
    "scene_patch8": dict(
        img_size=96,
        patch_size=8,
        num_classes=27,
        dim=128,
        num_layers=4,
        num_heads=4,
        hidden_dim=256,
        global_pool="",
    ),
    "small_patch16": dict(
        dim=384,
        num_layers=12,
        num_heads=6,
        hidden_dim=1024,
    ),
    "base_patch16": dict(
        dim=768,
        num_layers=12,
        num_heads=12,
        hidden_dim=2048,
    ),
}
# Options of a method in a size ("*": every size). Heads of 32 columns have no room for 8 pairs an
# axis; a separable prior with a learned centre tells left from right, as GOAT's sines do.
OPTIONS: dict[tuple[str, str], Options] = {
    ("tiny_patch8", "goat"): {"rank": 2},
    ("tiny_patch8", "spectral2d"): {"rank": 2},
    ("scene_patch8", "goat"): {"rank": 2},
    ("scene_patch8", "spectral2d"): {"rank": 2},
    ("*", "ggd2d_separable"): {"train_mu": True},
}


@dataclass(frozen=True)
class VisionConfig(GridConfig):
    """Everything that makes a vision transformer; JSON. `GridConfig`, and what is of images:

    img_size: side of the training images in pixels, or (height, width): what priors and SSMax are
        initialised for.
    mean, std: what pixels in 0…1 are normalised with.
    pad, logit_options: of version 0.5; false and empty.
    """

    sample: ClassVar[str] = "an image"
    cells: ClassVar[str] = "pixels"
    size_field: ClassVar[str] = "img_size"

    in_chans: int = bounded(3, 1, 2**12)
    num_classes: int = bounded(1000, 0, 2**24)
    img_size: int | tuple[int, int] = bounded(224, 1, 2**16)
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    pad: bool = False
    logit_options: Options = field(default_factory=dict)

    def __post_init__(self) -> None:
        # JSON knows lists alone.
        for name in ("img_size", "mean", "std"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        super().__post_init__()
        for name in ("pad", "logit_options"):
            value = getattr(self, name)
            if value:
                empty = type(value)()
                raise ValueError(f"{name}={value!r} went with version 0.6: expected {empty!r}")

    @property
    def train_size(self) -> tuple[int, int]:
        """(height, width) of the training images in pixels."""
        if isinstance(self.img_size, int):
            return self.img_size, self.img_size
        return self.img_size


def _config(position: str, size: str, ssmax: bool) -> Options:
    options = OPTIONS.get((size, position)) or OPTIONS.get(("*", position), {})
    config = VisionConfig(
        **SIZES[size],
        position=position,
        position_options=options,
        ssmax=ssmax,
    )
    return asdict(config)


def _build(**config: Any) -> ZooModel:
    # ImportError names the extra where timm is missing.
    return load_modality("vision").model(VisionConfig(**config))


FAMILY = ModelFamily("vision", _build, SIZES, _config, list_grid_positions, check_grid_position)
