"""What evaluators of images share: the held-out images that they read, and the table of their controls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from modalities.evaluation import Evaluator, ModelResult
from modalities.files import write_table
from modalities.heldout import Heldout
from modalities.vision.config import VisionDataConfig
from modalities.vision.data import DEFAULT_SOURCE, HeldoutImages, heldout_by, heldout_name, open_heldout
from modalities.vision.sources import HELD_OUT

__all__ = ["ImageEvaluator", "note_of", "sizes_of_training", "write_controls"]


class ImageEvaluator(Evaluator):
    """Base of the image evaluators: the source named, or what the models' own training held out."""

    def __init__(self, settings: Any = None, trained_on: Mapping[str, Any] | None = None) -> None:
        super().__init__(settings, trained_on)
        self.source = self.settings.source or (heldout_by(self.trained_on) if self.trained_on else DEFAULT_SOURCE)

    @property
    def trained_range(self) -> tuple[int, ...]:
        return sizes_of_training(self.trained_on)

    @property
    def heldout(self) -> Heldout[HeldoutImages]:
        return open_heldout(self.source)

    @property
    def source_name(self) -> str:
        return heldout_name(self.source)

    @property
    def note(self) -> str:
        return note_of(self.settings.source, self.heldout) if self.settings.source else ""


def note_of(source: str, heldout: Heldout[Any]) -> str:
    """That a source which was named is not read as a whole, and how it would be."""
    images = heldout.items.images
    if not images.among:
        return ""
    return (
        f"{len(images):,} of the {images.among:,} pictures of {source} are read, those that training on it holds out; "
        f"'{source}{'&' if '?' in source else '?'}{HELD_OUT}' is all of them"
    )


def sizes_of_training(trained_on: Mapping[str, Any]) -> tuple[int, ...]:
    """Least and greatest shorter side of `data.shapes`, in pixels; () where training was at one size."""
    sides = [min(shape) for shape in VisionDataConfig(shapes=tuple(trained_on.get("shapes", ()))).train_shapes]
    return (min(sides), max(sides)) if len(set(sides)) > 1 else ()


def write_controls(path: Path, results: Sequence[ModelResult], score: str) -> None:
    """The score less that of each control, a row for each model, size and control; nothing where no row has `controls`."""
    rows = [
        {"model": result.label, "size": row["size"], "score": score} | control | {"groups": row["groups"]}
        for result in results
        for row in result.rows
        for control in row.get("controls", ())  # earlier versions have none
    ]
    if rows:
        write_table(path, rows)
