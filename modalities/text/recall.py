"""Cells whose samples are a prompt and the tokens that must follow it: passkey and needle grid alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from modalities.evaluation import Cell, CellValue, EvalSettings, batches
from modalities.text.scoring import answer_scores


def recall_cell(model: nn.Module, cell: Cell, settings: EvalSettings) -> CellValue:
    """Mean scores of a cell whose data are equally long prompts (N, P) and answers (N, A)."""
    prompts, answers = cell.data["prompts"], cell.data["answers"]
    parts = [
        answer_scores(model, prompts[part], answers[part])
        for part in batches(len(prompts), settings.batch_size(cell.data["length"]))
    ]
    means = {name: float(torch.cat([part[name] for part in parts]).mean()) for name in parts[0]}
    return {"length": cell.data["length"], "depth": cell.data["depth"], "samples": len(prompts), **means}


def recall_rows(cells: Mapping[str, CellValue]) -> list[dict[str, Any]]:
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
