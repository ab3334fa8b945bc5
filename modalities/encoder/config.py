"""What makes a transformer over a grid of patches, whatever the grid shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from modalities.starts import check_start
from zoo.errors import (
    LARGEST_SEED,
    LONGEST_CONTEXT,
    bounded,
    check_fields,
    check_parameters,
    did_you_mean,
)

# Entries of a configuration, or of a method.
Options = dict[str, Any]
# (height, width) in cells.
Shape = tuple[int, int]
MLPS = ("swiglu", "gelu")
POOLS = ("token", "avg", "")


@dataclass(frozen=True)
class GridConfig:
    """Everything that makes a `GridTransformer` but the size of its training samples; JSON.

    A modality's own configuration is a frozen dataclass derived from it. It adds fields for that
    size, gives them as `train_size`, and may give other defaults.

    patch_size: side of a patch in cells (pixels of an image, bins of a spectrogram).
    in_chans: numbers of a cell.
    num_classes: 0 for no classifier.
    dim: C.
    num_layers, num_heads: H.
    hidden_dim: of the MLP.
    mlp: "swiglu" or "gelu".
    position: a name of `zoo.methods.list_grid_positions()` or a sum of them, with
        `position_options` for it; or a list of one per layer, or a shorter one that is repeated,
        with options by name. The default, with SSMax and {"train_mu": True}, is what reads pictures
        of 16 times the patches best (docs/RESULTS.md).
    ssmax: scale logits by s·ln n, n all tokens of the sample, s at the start ssmax_start.
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
    activation_checkpointing: recompute blocks in the backward pass.
    lanes: the prior's lanes "inside" the head width, at the cost of content columns, or "beside" it
        (see `Attention`).
    """

    # Words of error messages: what a sample is, what its sides count, and the field that sets
    # `train_size`.
    sample: ClassVar[str] = "a sample"
    cells: ClassVar[str] = "cells"
    size_field: ClassVar[str] = "train_size"

    patch_size: int = bounded(16, 1, 2**12)
    in_chans: int = bounded(1, 1, 2**12)
    num_classes: int = bounded(0, 0, 2**24)
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
    activation_checkpointing: bool = False
    lanes: str = "inside"
    attention_bias: bool = False
    weight_init: str = "small"

    def __post_init__(self) -> None:
        check_fields(self)
        check_start(self.weight_init)
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
        setting = f"{self.size_field}={getattr(self, self.size_field)}"
        wrong = not_multiples(self.train_size, patch)
        if wrong:
            raise ValueError(f"{setting} does not divide into patches of {patch}: {wrong}")
        patches = math.prod(self.train_grid)
        if patches > LONGEST_CONTEXT:
            size = f"{patches:,} patches of {patch}"
            raise ValueError(f"{setting} has {size}; at most {LONGEST_CONTEXT:,}")
        ends = self.in_chans * patch**2 + self.num_classes
        layer = 4 * self.dim + 3 * self.hidden_dim
        check_parameters(self.dim * (ends + self.num_layers * layer))

    @property
    def train_size(self) -> Shape:
        """(height, width) of the training samples in cells: what priors and SSMax are initialised
        for."""
        raise NotImplementedError

    @property
    def train_grid(self) -> Shape:
        """(height, width) of the training samples in patches."""
        return self.train_size[0] // self.patch_size, self.train_size[1] // self.patch_size


@dataclass(frozen=True)
class GridData:
    """A recipe's data section: what `batches.BatchSettings` asks for. A modality's own is a frozen
    dataclass derived from it, which adds `train_shapes`."""

    num_classes: int = bounded(0, 0, 2**24)
    seed: int = bounded(0, -LARGEST_SEED, LARGEST_SEED)
    random_erasing: float = bounded(0.0, 0, 1)
    mixup: float = bounded(0.0, 0, math.inf)
    cutmix: float = bounded(0.0, 0, math.inf)
    label_smoothing: float = bounded(0.0, 0, 1)

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def train_shapes(self) -> tuple[Shape, ...]:
        """(height, width) of the training batches, among which each draws one."""
        raise NotImplementedError


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
