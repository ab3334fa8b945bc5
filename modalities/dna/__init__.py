"""DNA: the causal decoder on single bases, k-mers or BPE; its data, baselines and evaluators.

Importing it registers the models with the zoo. The rest is imported when it is asked for.
"""

from __future__ import annotations

from importlib import import_module

from modalities.dna.model import DnaConfig, DnaDecoder

_HOMES = {
    "MODALITY": "modalities.dna.modality",
    "DnaDataConfig": "modalities.dna.config",
}
__all__ = ["DnaConfig", "DnaDecoder", *_HOMES]

# As MODALITY has them; these need neither data nor baselines.
RECIPES_MODULE = "recipes.dna"
OUTSIDE_PREFIXES = ("hf",)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
