"""Evaluators whose samples are a prompt and the tokens that must follow it, at every length and depth."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from modalities.evaluation import Cell, CellValue, EvalSettings, Evaluator, batches
from modalities.text.scoring import answer_scores


class Recall(Evaluator):
    """A length × depth grid of prompts and answers, scored teacher-forced and by free generation."""

    headline = ("teacher_forced", "free_generation")
    default_samples = 5
    depths: ClassVar[int]
    depth_decimals: ClassVar[int]  # in a cell's name

    @abstractmethod
    def draw_samples(
        self, model: nn.Module, settings: EvalSettings, length: int, depth: float, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """``count`` equally long prompts (N, P) and answers (N, A), together ``length`` tokens."""

    def cells(self, model: nn.Module, settings: EvalSettings) -> list[Cell]:
        count = settings.samples or self.default_samples
        cells = []
        for length in settings.resolved_lengths(model.config.train_context):
            for k in range(self.depths):
                depth = k / (self.depths - 1)
                prompts, answers = self.draw_samples(model, settings, length, depth, count)
                data = {"length": length, "depth": depth, "prompts": prompts, "answers": answers}
                name = f"length={length}/depth={depth:.{self.depth_decimals}f}"
                cells.append(Cell(name, cost=count * length, data=data))
        return cells

    def measure(self, model: nn.Module, cell: Cell, settings: EvalSettings) -> CellValue:
        """Mean scores of the cell's samples."""
        prompts, answers = cell.data["prompts"], cell.data["answers"]
        parts = [
            answer_scores(model, prompts[part], answers[part])
            for part in batches(len(prompts), settings.batch_size(cell.data["length"]))
        ]
        means = {name: float(torch.cat([part[name] for part in parts]).mean()) for name in parts[0]}
        return {"length": cell.data["length"], "depth": cell.data["depth"], "samples": len(prompts), **means}

    def rows(self, cells: Mapping[str, CellValue]) -> list[dict[str, Any]]:
        """One row per length, the mean over depths, with the binomial standard error of the generated score."""
        rows = []
        for length in sorted({c["length"] for c in cells.values()}):
            mine = [c for c in cells.values() if c["length"] == length]
            samples = sum(c["samples"] for c in mine)
            row = {"length": length, "samples": samples}
            for score in ("teacher_forced", "free_generation", "digits", "nll"):
                row[score] = sum(c[score] * c["samples"] for c in mine) / samples
            row["standard_error"] = math.sqrt(row["free_generation"] * (1 - row["free_generation"]) / samples)
            rows.append(row)
        return rows
