"""Text: one causal language model for every position method, its data, its evaluators.

Importing it registers the models with the zoo. The rest is imported when it is asked for.
"""

from __future__ import annotations

from importlib import import_module

from modalities.text.model import CausalLM, TextConfig

_HOMES = {
    "MODALITY": "modalities.text.modality",
    "TextDataConfig": "modalities.text.config",
}
__all__ = ["CausalLM", "TextConfig", *_HOMES]

# As MODALITY has them; these need no data.
RECIPES_MODULE = "recipes.text"
OUTSIDE_PREFIXES = ("hf",)
BASELINES = ()
HEADLINE = ("free_generation", "bits_per_byte")


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
