"""Held-out images whose attention is looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from modalities.attention import AttentionEvaluator, Probe
from modalities.evaluation import Settings, option
from modalities.heldout import Heldout
from modalities.vision.data import DEFAULT_SOURCE, HeldoutImages, heldout_by, heldout_name, open_heldout
from modalities.vision.model import VisionTransformer
from modalities.vision.transforms import preprocess

__all__ = ["ImageProbes", "ProbeSettings"]


@dataclass(frozen=True)
class ProbeSettings(Settings):
    """`samples` counts images, the first of a fixed random order."""

    size: int | None = option(None, "side in pixels; default: as trained", parse=int)


class ImageProbes(AttentionEvaluator):
    """Base of the evaluators that look into attention. Images are reduced to the size, or enlarged where they are smaller."""

    settings_class = ProbeSettings

    def __init__(self, settings: Any = None, trained_on: Mapping[str, Any] | None = None) -> None:
        super().__init__(settings, trained_on)
        self.source = self.settings.source or (heldout_by(self.trained_on) if self.trained_on else DEFAULT_SOURCE)

    @property
    def heldout(self) -> Heldout[HeldoutImages]:
        return open_heldout(self.source)

    @property
    def source_name(self) -> str:
        return heldout_name(self.source)

    def probe(self, model: VisionTransformer, index: int) -> Probe:
        """An image; its patches have places, in patches, the class token and registers have none."""
        config, items = model.config, self.heldout.items
        height, width = (self.settings.size,) * 2 if self.settings.size else config.train_size
        image, _ = items[index % len(items)]
        pixels = preprocess(
            image,
            height,
            width,
            mode="upsampled",
            train_size=min(image.size),
            fit="crop",
            mean=config.mean,
            std=config.std,
        )
        places = torch.stack(model.positions(height, width).yx(), dim=-1).double()
        missing = torch.full((model.num_prefix_tokens, 2), torch.nan, dtype=torch.float64)
        like = next(model.parameters())
        return Probe((pixels[None].to(like),), torch.cat([missing, places]))
