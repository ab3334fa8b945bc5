"""priorzoo's core: positions as priors on attention's logits, one attention call, and models by name."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zoo.attention import prior_attention
from zoo.catalog import create_model, list_models, load_model, register_model
from zoo.decoding import KVCache
from zoo.positions import Positions
from zoo.priors import Prior, PriorTerms, RelativeTable, create_prior, list_priors, register_prior
from zoo.torchvision_ops import declare_before_import

if TYPE_CHECKING:
    from zoo.adapters import adapt, load_adapted, save_adapted
    from zoo.priors.sums import compose

__version__ = "0.6.0"

declare_before_import()

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

# Imported when somebody asks for them: training does not.
_ELSEWHERE = {
    "adapt": "zoo.adapters",
    "load_adapted": "zoo.adapters",
    "save_adapted": "zoo.adapters",
    "compose": "zoo.priors.sums",
}


def __getattr__(name: str) -> Any:
    if name in _ELSEWHERE:
        return getattr(import_module(_ELSEWHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
