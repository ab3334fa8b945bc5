"""How far heads look in held-out images."""

from __future__ import annotations

from modalities.attention import Heads
from modalities.vision.probes import ImageProbes

__all__ = ["ImageHeads"]


class ImageHeads(ImageProbes, Heads):
    __doc__ = Heads.__doc__
