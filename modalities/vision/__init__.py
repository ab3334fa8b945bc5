"""Vision: one transformer for every position method on a grid, its data, its evaluators.

Importing it registers the models with the zoo, which needs no timm. What needs it is imported when
it is asked for, any name below or a model, and registers them with timm; so does
`import modalities.vision.registry`.
"""

from __future__ import annotations

from importlib import import_module

from modalities.vision.architectures import FAMILY, VisionConfig
from zoo.catalog import register_family

_HOMES = {
    "MODALITY": "modalities.vision.modality",
    "VisionDataConfig": "modalities.vision.config",
    "VisionTransformer": "modalities.vision.model",
}
__all__ = ["VisionConfig", *_HOMES]

# As MODALITY has them; these need no timm.
RECIPES_MODULE = "recipes.vision"
HEADLINE = ("top1",)
OUTSIDE_PREFIXES = ("timm",)
BASELINES = ()
register_family(FAMILY)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module("modalities.vision.modality")
    return getattr(import_module(_HOMES[name]), name)
