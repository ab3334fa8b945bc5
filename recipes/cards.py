"""Model cards: Markdown with the YAML front matter that the Hugging Face hub reads."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modalities.contract import Modality
from modalities.evaluation import Evaluator, Listing
from recipes.report import load_results

__all__ = ["Table", "model_card", "stored_tables"]


@dataclass(frozen=True)
class Table:
    """What was measured: a row for each place on the axis, which is the first column.

    Attributes:
        title: the evaluator and its data; empty where the card has one table of several evaluators.
        settings: of the evaluator, as words.
    """

    title: str
    rows: Sequence[Mapping[str, Any]]
    settings: str = ""

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(column for row in self.rows for column in row))

    def markdown(self) -> list[str]:
        lines = ["| " + " | ".join(self.columns) + " |", "|" + "---:|" * len(self.columns)]
        lines += ["| " + " | ".join(str(row.get(column, "–")) for column in self.columns) + " |" for row in self.rows]
        return [
            *([f"### {self.title}", ""] if self.title else []),
            *lines,
            *(["", self.settings] if self.settings else []),
        ]

    def results(self, task: str) -> list[dict[str, Any]]:
        """Of a model-index: a result for each row."""
        axis, *scores = self.columns
        found = []
        for row in self.rows:
            metrics = [
                {"type": score, "value": row[score]}
                for score in scores
                if isinstance(row.get(score), int | float) and math.isfinite(row[score])
            ]
            dataset = {"type": self.title or "held-out", "name": f"{self.title or 'held-out data'}, {axis} {row[axis]}"}
            if metrics:
                found.append({"task": {"type": task}, "dataset": dataset, "metrics": metrics})
        return found


def stored_tables(modality: Modality, label: str, folders: Sequence[Path]) -> list[Table]:
    """What `priorzoo evaluate --out FOLDER` stored of the model that results call `label`; listings have no table.

    Raises:
        ValueError: where a folder has nothing of it.
    """
    tables: list[Table] = []
    for folder in folders:
        others: set[str] = set()
        before = len(tables)
        for name, kind in modality.evaluators.items():
            if issubclass(kind, Listing):
                continue
            for result in load_results(kind, folder):
                others.add(result.label)
                if result.label == label:
                    rows = [_scores(kind, row) for row in result.rows]
                    tables.append(Table(f"{name}{f' ({result.source})' if result.source else ''}", rows, kind.summary))
        if len(tables) == before:
            raise ValueError(f"{folder} has no results of {label!r}; it has: {', '.join(sorted(others)) or 'none'}")
    return tables


def _scores(kind: type[Evaluator], row: Mapping[str, Any]) -> dict[str, Any]:
    """The axis and the scores of a row; conditions of a score are in brackets behind its name."""
    names = [score.column for score in kind.scores]
    kept = {kind.axis.column: row[kind.axis.column]}
    for column, value in row.items():
        if column in names or column.rpartition(" (")[0] in names:
            kept[column] = round(value, 4) if isinstance(value, float) else value
    return kept


def dataset_name(source: str) -> str:
    """What the hub can call the data of a source: of `hf:NAME…` its NAME; empty for files."""
    name = re.split("[:?]", source.removeprefix("hf:"))[0]
    return name if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and (source.startswith("hf:") or "/" not in name) else ""


def model_card(
    name: str,
    modality: Modality,
    *,
    license: str,
    sources: Sequence[str],
    tags: Sequence[str],
    facts: Mapping[str, Any],
    tables: Sequence[Table],
    usage: str,
    notes: Sequence[str] = (),
) -> str:
    """A model card.

    Args:
        license: an SPDX name; empty where its author has not said.
        sources: of the data it was trained on, as recipes name them.
        facts: what else is known of it, a line each.
        usage: Python that loads it.
        notes: lines at the end, such as the commands that measured it.
    """
    index = [result for table in tables for result in table.results(modality.task)]
    front: dict[str, Any] = {
        "license": license.lower(),
        "library_name": "priorzoo",
        "pipeline_tag": modality.task,
        "tags": list(dict.fromkeys(["priorzoo", modality.name, *tags])),
        "datasets": list(filter(None, map(dataset_name, sources))),
        "metrics": list(dict.fromkeys(metric["type"] for result in index for metric in result["metrics"])),
        "model-index": [{"name": name, "results": index}] if index else [],
    }
    lines = [
        "---",
        *(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in front.items() if value),
        "---",
    ]
    lines += ["", f"# {name}", "", *(f"- **{key}**: {value}" for key, value in facts.items())]
    if not license:
        lines.append("- **license**: not stated")
    lines += ["", "## Use", "", "```python", usage, "```", ""]
    if tables:
        lines += ["## Measured", ""]
        for table in tables:
            lines += [*table.markdown(), ""]
    return "\n".join([*lines, *notes, *([""] if notes else [])])
