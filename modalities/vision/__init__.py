"""Vision: one transformer for every position method on a grid, its data, its evaluators.

Importing it registers the models with the zoo and with timm.
"""

from modalities.vision.model import VisionConfig, VisionTransformer
from modalities.vision.registry import register_vision_models

__all__ = ["VisionConfig", "VisionTransformer"]

register_vision_models()
