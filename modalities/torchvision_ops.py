"""Lets `import torchvision` succeed with a CPU build of torch.

torchvision's compiled part, `_C`, needs CUDA's libraries. Where it cannot be loaded, its operators stay undeclared, and
`import torchvision`, timm and parts of transformers fail. Nothing here calls those operators (box suppression), so declaring
their schemas is enough. Where `_C` loads nothing is changed.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

__all__ = ["declare_operators"]

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_declared: torch.library.Library | None = None  # the schemas live as long as this object


def declare_operators() -> None:
    """Load torchvision's operators or, where that fails, declare their schemas. Call before torchvision is imported."""
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
