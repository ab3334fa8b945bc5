"""The held-out images of a source, opened once per process and shared by all evaluators, sizes and models."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from PIL import Image

from modalities.vision.data import held_out_images
from modalities.vision.images import BadImage

DEFAULT_SOURCE = "glyphs"
PROBED = 256  # images whose own size is looked at before anything is measured
KEPT_BYTES = 512 * 2**20  # of decoded images


class HeldOutImages:
    """Images in one random order that is always the same, whatever order they are stored in: `[place]` is (RGB, label).

    The first that fit into KEPT_BYTES stay decoded: every size and every model asks for the same ones again.
    """

    def __init__(self, source: str) -> None:
        self.source, self.images = source, held_out_images(source)
        self.classes, self.fingerprint = self.images.classes, self.images.fingerprint
        self.order = np.random.default_rng(0).permutation(len(self.images))
        self.kept: dict[int, tuple[Image.Image, int]] = {}
        self.room = KEPT_BYTES
        self.sizes: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, place: int) -> tuple[Image.Image, int]:
        """Errors: BadImage for an image that cannot be decoded."""
        if place in self.kept:
            return self.kept[place]
        image, label = self.images[int(self.order[place])]
        size = 3 * image.width * image.height
        if size <= self.room:
            self.kept[place] = image, label
            self.room -= size
        return image, label

    def smallest_side(self, aspect: tuple[int, int], fit: str) -> int:
        """The shorter side of the smallest of the first PROBED images, brought to (width, height) as `preprocess` does."""
        if not self.sizes:
            self.sizes = [size for place in range(min(PROBED, len(self))) if (size := self._size(place))]
            if not self.sizes:
                raise ValueError(f"source {self.source!r}: none of its first held-out images can be decoded")
        ratio, choose = aspect[1] / aspect[0], max if fit == "extend" else min
        return min(min(choose(h, round(w * ratio)), choose(w, round(h / ratio))) for w, h in self.sizes)

    def _size(self, place: int) -> tuple[int, int] | None:
        """(width, height), or None for an image that cannot be decoded."""
        try:
            return self[place][0].size
        except BadImage:
            return None


@lru_cache(maxsize=2)
def held_out(source: str | None) -> HeldOutImages:
    """The held-out images of a spec string; None is DEFAULT_SOURCE. Errors: those of `held_out_images`."""
    return HeldOutImages(source or DEFAULT_SOURCE)
