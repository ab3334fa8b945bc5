"""Lets `import torchvision` succeed with a CPU build of torch.

torchvision's compiled part, `_C`, needs CUDA's libraries. Where it cannot be loaded, its operators stay undeclared, and
`import torchvision`, timm and parts of transformers fail. Nothing here calls those operators (box suppression), so declaring
their schemas is enough. Where `_C` loads nothing is changed.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType

import torch

__all__ = ["declare_before_import"]

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_declared: torch.library.Library | None = None  # the schemas live as long as this object


class _BeforeTorchvision(MetaPathFinder):
    """Declares the operators when torchvision is about to be imported, by whoever imports it."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            _declare_operators()


def declare_before_import() -> None:
    """Make a later `import torchvision` find its operators, as that of timm and of transformers' image models does."""
    if "torchvision" not in sys.modules and not any(isinstance(f, _BeforeTorchvision) for f in sys.meta_path):
        sys.meta_path.insert(0, _BeforeTorchvision())


def _declare_operators() -> None:
    """Load torchvision's operators or, where that fails, declare their schemas."""
    global _declared
    spec = importlib.util.find_spec("torchvision")
    if _declared is not None or spec is None or not spec.submodule_search_locations:
        return
    libraries = sorted(Path(spec.submodule_search_locations[0]).glob("_C*.so"))
    try:
        for library in libraries:
            torch.ops.load_library(str(library))
        if libraries:
            return
    except OSError:
        pass
    _declared = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        _declared.define(name + _SCHEMA)
