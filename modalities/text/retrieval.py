"""What text evaluators share: the held-out documents they read, and scoring a grid of prompts and answers."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from modalities.decoder.model import Decoder
from modalities.decoder.scoring import answer_scores
from modalities.evaluation import Cell, CellValue, Evaluator, Observed, Score
from modalities.heldout import Heldout
from modalities.text.data import DEFAULT_SOURCE, EncodedDocument, open_heldout
from zoo.slices import slices

__all__ = ["Retrieval", "TextEvaluator"]


class TextEvaluator(Evaluator):
    """An evaluator that reads held-out documents: those of `settings.source`, else those that training held out."""

    @property
    def source_name(self) -> str:
        return (
            self.settings.source
            or self.trained_on.get("heldout_source")
            or self.trained_on.get("source", DEFAULT_SOURCE)
        )

    def heldout_for(self, model: Decoder) -> Heldout[tuple[EncodedDocument, ...]]:
        """The documents in the model's tokens. Raises ValueError where training read tokens and kept no text."""
        if self.source_name.startswith("tokens:"):
            raise ValueError(
                f"training read {self.source_name!r}, which holds no text: name held-out text with --source"
            )
        whole = self.settings.source is None and self.trained_on.get("heldout_source") is not None
        return open_heldout(self.source_name, model.config.tokenizer, "all" if whole else "heldout")


class Retrieval(Evaluator):
    """A length × depth grid of prompts and answers, scored teacher-forced and by free generation."""

    overview = Score("free_generation", "keys generated exactly", unit_interval=True)
    scores = (Score("teacher_forced", drawn=False), overview)
    paired_over = "prompts"
    default_samples = 5
    depths: ClassVar[int]
    depth_decimals: ClassVar[int]  # in a cell's name

    @property
    def samples(self) -> int:
        return self.settings.samples or self.default_samples

    def identity(self, model: Decoder) -> dict[str, Any]:
        cells = {"seed": self.settings.seed, "samples": self.samples, "depths": self.depths}
        return cells | {"outcomes": "by prompt"}  # which cells of before did not hold

    def points(self, model: Decoder) -> tuple[int, ...]:
        return self.settings.resolved_lengths(self.trained_at(model))

    @abstractmethod
    def draw_samples(self, model: Decoder, length: int, depth: float) -> tuple[np.ndarray, np.ndarray]:
        """`samples` equally long prompts (N, P) and answers (N, A), together `length` tokens."""

    def cells(self, model: Decoder) -> list[Cell]:
        cells = []
        for length in self.points(model):
            for k in range(self.depths):
                depth = k / (self.depths - 1)
                prompts, answers = self.draw_samples(model, length, depth)
                data = {"length": length, "depth": depth, "prompts": prompts, "answers": answers}
                name = f"length={length}/depth={depth:.{self.depth_decimals}f}"
                cells.append(Cell(name, cost=len(prompts) * length, data=data))
        return cells

    def measure(self, model: Decoder, cell: Cell) -> CellValue:
        """Mean scores of the cell's samples, and whether each was answered: `outcomes`, lists of 0 and 1."""
        prompts, answers = cell.data["prompts"], cell.data["answers"]
        parts = [
            answer_scores(model, prompts[part], answers[part])
            for part in slices(len(prompts), self.settings.batch_size(cell.data["length"]))
        ]
        scores = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        means = {name: float(values.mean()) for name, values in scores.items()}
        outcomes = {name: scores[name].int().tolist() for name in ("teacher_forced", "free_generation")}
        facts = {"length": cell.data["length"], "depth": cell.data["depth"], "samples": len(prompts)}
        return facts | means | {"outcomes": outcomes}

    def observed(self, name: str, cell: CellValue) -> Iterator[Observed]:
        """Every prompt: the k-th at a depth."""
        for column, found in cell["outcomes"].items():
            for k, right in enumerate(found):
                yield Observed(cell["length"], f"{cell['depth']}/{k}", column, right)

    def rows(self, cells: Mapping[str, CellValue]) -> list[dict[str, Any]]:
        """One row per length: means over depths, the binomial standard error of the generated score, and it by depth."""
        rows = []
        for length in sorted({c["length"] for c in cells.values()}):
            mine = sorted((c for c in cells.values() if c["length"] == length), key=lambda c: c["depth"])
            samples = sum(c["samples"] for c in mine)
            row = {"length": length, "samples": samples}
            for score in ("teacher_forced", "free_generation", "digits", "nll"):
                row[score] = sum(c[score] * c["samples"] for c in mine) / samples
            found = row["free_generation"]
            row["free_generation_standard_error"] = math.sqrt(found * (1 - found) / samples)
            row["depths"] = [c["depth"] for c in mine]
            row["free_generation_by_depth"] = [c["free_generation"] for c in mine]
            rows.append(row)
        return rows
