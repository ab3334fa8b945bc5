"""The attention sink on held-out images."""

from __future__ import annotations

from typing import ClassVar
from weakref import WeakKeyDictionary

import torch

from modalities.attention import Sinks
from modalities.vision.model import VisionTransformer
from modalities.vision.probes import ImageProbes
from zoo.analysis import analyse

__all__ = ["ImageSinks"]


class ImageSinks(ImageProbes, Sinks):
    __doc__ = Sinks.__doc__

    _found: ClassVar[WeakKeyDictionary[VisionTransformer, int]] = WeakKeyDictionary()

    def sink(self, model: VisionTransformer) -> int:
        """The class token; without one the patch with the most weight, over all layers, in the first image."""
        if model.config.class_token:
            return 0
        if model not in self._found:
            layers = analyse(model, *self.probe(model, 0).inputs, full=True)
            weights = torch.stack([layer.weights for layer in layers if layer.weights is not None])
            self._found[model] = int(weights.mean(dim=(0, 1, 2, 3)).argmax())
        return self._found[model]
