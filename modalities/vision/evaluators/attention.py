"""How far heads look in held-out images, and the attention sink."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch

from modalities.attention import AttentionEvaluator, Heads, Probe, Sinks
from modalities.evaluation import Settings, option
from modalities.vision.evaluation import ImageEvaluator
from modalities.vision.model import VisionTransformer
from zoo.analysis import analyse

__all__ = ["ImageHeads", "ImageProbes", "ImageSinks", "ProbeSettings"]


@dataclass(frozen=True)
class ProbeSettings(Settings):
    """`samples` counts images, the first of a fixed random order."""

    size: int | None = option(None, "side in pixels; default: as trained", parse=int)


class ImageProbes(ImageEvaluator, AttentionEvaluator):
    """Base of the evaluators that look into attention. Images are reduced to the size, or enlarged where they are smaller."""

    settings_class = ProbeSettings

    def probe(self, model: VisionTransformer, index: int) -> Probe:
        """An image; its patches have places, in patches, the class token and registers have none."""
        items, size = self.heldout.items, self.settings.size
        height, width = (size, size) if size else model.config.train_size
        pixels = model.pixels(items[index % len(items)][0], height, width)
        places = torch.stack(model.positions(height, width).yx(), dim=-1).double()
        missing = torch.full((model.num_prefix_tokens, 2), torch.nan, dtype=torch.float64)
        return Probe((pixels[None].to(next(model.parameters())),), torch.cat([missing, places]))


class ImageHeads(ImageProbes, Heads):
    __doc__ = Heads.__doc__


class ImageSinks(ImageProbes, Sinks):
    __doc__ = Sinks.__doc__

    _sinks: ClassVar[WeakKeyDictionary[VisionTransformer, int]] = WeakKeyDictionary()

    def sink(self, model: VisionTransformer) -> int:
        """The class token; without one the patch with the most weight, over all layers, in the first image."""
        if model.config.class_token:
            return 0
        if model not in self._sinks:
            layers = analyse(model, *self.probe(model, 0).inputs, full=True)
            weights = torch.stack([layer.weights for layer in layers if layer.weights is not None])
            self._sinks[model] = int(weights.mean(dim=(0, 1, 2, 3)).argmax())
        return self._sinks[model]
