"""priorzoo's core: positions as priors on attention's logits, one attention call, and models by
name."""

import importlib
import importlib.util
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from zoo.attention import prior_attention
from zoo.catalog import create_model, list_models, load_model, register_model
from zoo.decoding import KVCache
from zoo.methods import register_prior
from zoo.positions import Positions
from zoo.priors import Prior, PriorTerms, RelativeTable, create_prior, list_priors

if TYPE_CHECKING:
    from zoo.adapters import adapt, load_adapted, save_adapted
    from zoo.priors.compose import compose

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

# Imported at the first use: training does not need them.
_ELSEWHERE = {
    "adapt": "zoo.adapters",
    "load_adapted": "zoo.adapters",
    "save_adapted": "zoo.adapters",
    "compose": "zoo.priors.compose",
}


def __getattr__(name: str) -> object:
    if name in _ELSEWHERE:
        return getattr(importlib.import_module(_ELSEWHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _TorchvisionOperators(MetaPathFinder):
    """Lets torchvision, and so timm and parts of transformers, be imported with a CPU build of
    torch.

    Its compiled part needs CUDA's libraries. Where it does not load, operators that the import
    looks for are declared, which nothing here calls.
    """

    # The declarations live as long as it.
    library: ClassVar[torch.library.Library]

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        folders = spec.submodule_search_locations if spec is not None else None
        try:
            for folder in folders or ():
                for file in Path(folder).glob("_C*.so"):
                    torch.ops.load_library(str(file))
        except OSError:
            type(self).library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                self.library.define(
                    f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )


if "torchvision" not in sys.modules:
    sys.meta_path.insert(0, _TorchvisionOperators())
