"""Held-out images whose attention is looked at."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from modalities.attention import AttentionEvaluator, Probe
from modalities.evaluation import Settings, option
from modalities.vision.evaluation import ImageEvaluator
from modalities.vision.model import VisionTransformer

__all__ = ["ImageProbes", "ProbeSettings"]


@dataclass(frozen=True)
class ProbeSettings(Settings):
    """`samples` counts images, the first of a fixed random order."""

    size: int | None = option(None, "side in pixels; default: as trained", parse=int)


class ImageProbes(ImageEvaluator, AttentionEvaluator):
    """Base of the evaluators that look into attention. Images are reduced to the size, or enlarged where they are smaller."""

    settings_class = ProbeSettings

    def probe(self, model: VisionTransformer, index: int) -> Probe:
        """An image; its patches have places, in patches, the class token and registers have none."""
        config, items = model.config, self.heldout.items
        height, width = (self.settings.size,) * 2 if self.settings.size else config.train_size
        image, _ = items[index % len(items)]
        pixels = model.pixels(image, height, width)
        places = torch.stack(model.positions(height, width).yx(), dim=-1).double()
        missing = torch.full((model.num_prefix_tokens, 2), torch.nan, dtype=torch.float64)
        like = next(model.parameters())
        return Probe((pixels[None].to(like),), torch.cat([missing, places]))
