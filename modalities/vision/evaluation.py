"""What evaluators of images share: the held-out images that they read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modalities.evaluation import Evaluator
from modalities.heldout import Heldout
from modalities.vision.data import DEFAULT_SOURCE, HeldoutImages, heldout_by, heldout_name, open_heldout

__all__ = ["ImageEvaluator"]


class ImageEvaluator(Evaluator):
    """Base of the image evaluators: the source named, or what the models' own training held out."""

    def __init__(self, settings: Any = None, trained_on: Mapping[str, Any] | None = None) -> None:
        super().__init__(settings, trained_on)
        self.source = self.settings.source or (heldout_by(self.trained_on) if self.trained_on else DEFAULT_SOURCE)

    @property
    def heldout(self) -> Heldout[HeldoutImages]:
        return open_heldout(self.source)

    @property
    def source_name(self) -> str:
        return heldout_name(self.source)
