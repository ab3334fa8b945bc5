"""What makes a vision transformer, and every position method × SSMax on and off × size by name; all
of it without timm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from modalities.starts import check_start
from zoo.catalog import ModelFamily
from zoo.errors import LONGEST_CONTEXT, bounded, check_fields, check_parameters, did_you_mean
from zoo.methods import check_grid_position, list_grid_positions
from zoo.model import ZooModel
from zoo.plugins import load_modality

# Entries of a `VisionConfig`, or of a method.
Options = dict[str, Any]
MLPS = ("swiglu", "gelu")
POOLS = ("token", "avg", "")
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
class VisionConfig:
    """Everything that makes a vision transformer; JSON.

    img_size: side of the training images in pixels, or (height, width): what priors and SSMax are
        initialised for.
    patch_size: side of a patch in pixels.
    in_chans: colours.
    num_classes: 0 for no classifier.
    dim: C.
    num_layers, num_heads: H.
    hidden_dim: of the MLP.
    mlp: "swiglu" or "gelu".
    position: a name of `zoo.methods.list_grid_positions()` or a sum of them, with
        `position_options` for it; or a list of one per layer, or a shorter one that is repeated,
        with options by name. The default, with SSMax and {"train_mu": True}, is what reads pictures
        of 16 times the patches best (docs/RESULTS.md).
    ssmax: scale logits by s·ln n, n all tokens of the image, s at the start ssmax_start.
    scale_prior: SSMax scales the prior's logits too.
    share_prior: one prior for all layers instead of one each.
    attention_bias: biases of attention's projections.
    class_token: a learned token before the patches.
    reg_tokens: learned tokens after it that nothing reads.
    global_pool: "token" reads the class token, "avg" the mean of the patches, "" gives every token
        to the classifier.
    drop_path_rate: of the last block; it rises linearly from 0.
    init_values: layer scale's start, None for none.
    weight_init: how linear layers start, of `modalities.starts.STARTS`.
    mean, std: what pixels in 0…1 are normalised with.
    activation_checkpointing: recompute blocks in the backward pass.
    lanes: the prior's lanes "inside" the head width, at the cost of content columns, or "beside" it
        (see `Attention`).
    pad, logit_options: of version 0.5; false and empty.
    """

    img_size: int | tuple[int, int] = bounded(224, 1, 2**16)
    patch_size: int = bounded(16, 1, 2**12)
    in_chans: int = bounded(3, 1, 2**12)
    num_classes: int = bounded(1000, 0, 2**24)
    dim: int = bounded(384, 1, 2**17)
    num_layers: int = bounded(12, 1, 1024)
    num_heads: int = bounded(6, 1, 2**12)
    hidden_dim: int = bounded(1024, 1, 2**20)
    mlp: str = "swiglu"
    position: str | list[str] = "ggd2d_separable"
    position_options: Options = field(default_factory=dict)
    ssmax: bool = True
    scale_prior: bool = True
    ssmax_start: float | None = None
    share_prior: bool = False
    class_token: bool = True
    reg_tokens: int = bounded(0, 0, 2**12)
    global_pool: str = "token"
    drop_path_rate: float = bounded(0.0, 0, 1)
    init_values: float | None = None
    pad: bool = False
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    activation_checkpointing: bool = False
    lanes: str = "inside"
    attention_bias: bool = False
    weight_init: str = "small"
    logit_options: Options = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        check_start(self.weight_init)
        for name in ("pad", "logit_options"):
            value = getattr(self, name)
            if value:
                empty = type(value)()
                raise ValueError(f"{name}={value!r} went with version 0.6: expected {empty!r}")
        # JSON knows lists alone.
        for name in ("img_size", "mean", "std"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        for name, choices in (("mlp", MLPS), ("global_pool", POOLS)):
            value = getattr(self, name)
            if value not in choices:
                expected = "expected one of " + ", ".join(repr(choice) for choice in choices)
                raise ValueError(f"{name}={value!r}; {did_you_mean(value, choices)}{expected}")
        if self.global_pool == "token" and not self.class_token:
            way_out = "set class_token=True, or global_pool='avg'"
            raise ValueError(f"global_pool='token' reads the class token; {way_out}")
        self._check_size()

    def _check_size(self) -> None:
        patch = self.patch_size
        wrong = not_multiples(self.train_size, patch)
        if wrong:
            raise ValueError(
                f"img_size={self.img_size} does not divide into patches of {patch}: {wrong}"
            )
        patches = math.prod(self.train_grid)
        if patches > LONGEST_CONTEXT:
            size = f"{patches:,} patches of {patch}"
            raise ValueError(f"img_size={self.img_size} has {size}; at most {LONGEST_CONTEXT:,}")
        ends = self.in_chans * patch**2 + self.num_classes
        layer = 4 * self.dim + 3 * self.hidden_dim
        check_parameters(self.dim * (ends + self.num_layers * layer))

    @property
    def train_size(self) -> tuple[int, int]:
        """(height, width) of the training images in pixels."""
        if isinstance(self.img_size, int):
            return self.img_size, self.img_size
        return self.img_size

    @property
    def train_grid(self) -> tuple[int, int]:
        """(height, width) of the training images in patches."""
        return self.train_size[0] // self.patch_size, self.train_size[1] // self.patch_size


def not_multiples(sides: Sequence[int], patch: int) -> str:
    """For an error message: the sides that are no multiple of `patch`, and the nearest ones that
    are; "" where all are."""
    wrong = []
    # Symbols while torch.export traces, which have no hash.
    for side in sides:
        if side < 1 or side % patch:
            below = side // patch * patch
            nearest = [str(size) for size in (below, below + patch) if size > 0]
            wrong.append(f"{side} is no multiple; the nearest sizes are {' and '.join(nearest)}")
    return "; ".join(dict.fromkeys(wrong))


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
