"""priorzoo's core: positions as priors on attention's logits, one attention call, and models by name."""

from zoo.adapters import adapt, load_adapted, save_adapted
from zoo.attention import prior_attention
from zoo.decoding import KVCache
from zoo.positions import Positions
from zoo.priors import Prior, PriorTerms, RelativeTable, compose, create_prior, list_priors, register_prior
from zoo.registry import create_model, list_models, load_model, register_model

__version__ = "0.6.0"

__all__ = [
    "KVCache",
    "Positions",
    "Prior",
    "PriorTerms",
    "RelativeTable",
    "adapt",
    "compose",
    "create_model",
    "create_prior",
    "list_models",
    "list_priors",
    "load_adapted",
    "load_model",
    "prior_attention",
    "register_model",
    "register_prior",
    "save_adapted",
]
