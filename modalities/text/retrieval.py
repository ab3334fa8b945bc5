"""Retrieval of a stated value, scored on a grid of length × depth."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from modalities.decoder.model import Decoder
from modalities.decoder.scoring import answer_scores
from modalities.evaluation import Cell
from modalities.paired import Observed
from modalities.results import CellValue, ModelResult, Score
from modalities.settings import CutSettings, check_choice, counts, option
from modalities.statistics import clustered_error
from modalities.tables import write_table
from modalities.text.evaluation import HaystackEvaluator
from modalities.text.prompts import (
    TEMPLATES,
    Haystack,
    Prompt,
    Template,
    default_haystack,
)
from modalities.text.tokenizers import load_tokenizer
from zoo.positions import slices

# Fields of `Prompt` that scores are grouped by.
WORDS = ("wording", "value_kind")
FILLERS = "own, grass or text (held-out documents)"


@dataclass(frozen=True)
class RetrievalSettings(CutSettings):
    """What is hidden in what; see `modalities.text.prompts`.

    The control cuts prompts by `Prompt.passage`.
    """

    template: str | None = option(None, f"{', '.join(TEMPLATES)}; default: own")
    filler: str | None = option(None, f"{FILLERS}; default: what belongs to the template")
    facts: tuple[int, ...] = option(
        (1,), "facts in the text, as 1,2,5; one is asked for", parse=counts
    )
    depths: int | None = option(
        None, "places of the fact between the text's start and end; default: the evaluator's"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("template", self.template, TEMPLATES)
        if self.depths is not None and self.depths < 2:
            raise ValueError(f"depths must be at least 2, got {self.depths}")
        if not self.facts or len(set(self.facts)) < len(self.facts):
            raise ValueError(f"facts must be different numbers, got {list(self.facts)}")


class Retrieval(HaystackEvaluator[RetrievalSettings]):
    """A value stated somewhere in a text and asked for at its end: a grid of length × depth, scored
    by `answer_scores`.

    With several numbers of facts each has columns of its own, such as `free_generation (facts=5)`.
    """

    overview: Score = Score("free_generation", "answers generated exactly", unit_interval=True)
    scores: tuple[Score, ...] = (Score("teacher_forced", drawn=False), overview)
    paired_over = "prompts"
    default_samples = 5
    default_depths: ClassVar[int]
    # None: what belongs to the template.
    default_filler: ClassVar[str | None] = None

    def __init__(
        self, settings: RetrievalSettings | None = None, trained_on: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(settings, trained_on)
        numbers = self.settings.facts
        self.templates = [Template(self.settings.template or "own", facts) for facts in numbers]
        # What each number of facts adds to the names of its columns.
        self.conditions = {numbers[0]: ""}
        if len(numbers) > 1:
            self.conditions = {facts: f" (facts={facts})" for facts in numbers}
            forced = []
            generated = []
            for condition in self.conditions.values():
                label = self.overview.label + condition
                forced.append(Score(f"teacher_forced{condition}", drawn=False))
                generated.append(Score(f"free_generation{condition}", label, unit_interval=True))
            self.scores = (*forced, *generated)
            self.overview = generated[-1]

    @property
    def samples(self) -> int:
        return self.settings.samples or self.default_samples

    @property
    def depths(self) -> int:
        return self.settings.depths or self.default_depths

    @property
    def filler(self) -> str:
        of_template = default_haystack(self.settings.template or "own")
        return self.settings.filler or self.default_filler or of_template

    def identity(self, model: Decoder) -> dict[str, object]:
        template = self.templates[0]
        identity: dict[str, object] = {
            "seed": self.settings.seed,
            "samples": self.samples,
            "depths": self.depths,
            # With the number of digits of the key that the prompt gives away.
            "template": [template.name, int(template.name == "bam")],
            "hay": self.haystack(model).fingerprint,
        }
        if self.settings.control:
            identity["control"] = self.settings.control
        if template.grammar:
            identity["grammar"] = template.grammar.fingerprint
        return identity

    def points(self, model: Decoder) -> tuple[int, ...]:
        return self.lengths_for(model)

    def samples_line(self, results: list[ModelResult]) -> str:
        line = f"{self.samples} prompts at each of {self.depths} depths"
        if len(self.conditions) > 1:
            line += f", {len(self.conditions)} numbers of facts"
        return f"{line} and {len(results[0].rows)} lengths"

    def cells(self, model: Decoder) -> list[Cell]:
        haystack = self.haystack(model)
        lengths = self.points(model)
        self.describe_hay(model, max(lengths))
        cells = []
        for length, template, k in product(lengths, self.templates, range(self.depths)):
            depth = k / (self.depths - 1)
            prompts = _prompts(
                template,
                model.config.tokenizer,
                haystack,
                length,
                depth,
                self.samples,
                self.settings.seed,
            )
            size = self.at_once(model, length)
            if self.settings.control:
                prompts = [prompt.passage(size) for prompt in prompts]
            name = f"length={length}/facts={template.facts}/depth={depth:.3f}"
            data = {"length": length, "depth": depth, "facts": template.facts, "prompts": prompts}
            cells.append(Cell(name, cost=len(prompts) * size, data=data))
        return cells

    def measure(self, model: Decoder, cell: Cell) -> CellValue:
        """Mean scores of the cell's samples; of each whether it was answered, 0 or 1, and its
        words."""
        prompts: list[Prompt] = cell.data["prompts"]
        scores = self._scores_of(model, prompts, self.at_once(model, cell.data["length"]))
        value: CellValue = {
            "length": cell.data["length"],
            "depth": cell.data["depth"],
            "facts": cell.data["facts"],
            "samples": len(prompts),
        }
        value |= {name: float(values.mean()) for name, values in scores.items()}
        value["outcomes"] = {
            name: scores[name].int().tolist() for name in ("teacher_forced", "free_generation")
        }
        if prompts[0].wording:
            for kind in WORDS:
                value[kind] = [getattr(prompt, kind) for prompt in prompts]
        return value

    def _scores_of(
        self, model: Decoder, prompts: Sequence[Prompt], size: int
    ) -> dict[str, torch.Tensor]:
        """`answer_scores` of prompts of up to `size` tokens, (N,) each."""
        # Prompts differ in length where their words or keys do; a batch has one shape.
        by_shape: dict[tuple[int, int], list[int]] = {}
        for n, prompt in enumerate(prompts):
            by_shape.setdefault((len(prompt.tokens), len(prompt.answer)), []).append(n)
        scores: dict[str, torch.Tensor] = {}
        for numbers in by_shape.values():
            for part in slices(len(numbers), self.settings.batch_size(size)):
                batch = numbers[part]
                tokens = np.stack([prompts[n].tokens for n in batch])
                answers = np.stack([prompts[n].answer for n in batch])
                for name, values in answer_scores(model, tokens, answers).items():
                    if name not in scores:
                        scores[name] = torch.zeros(len(prompts), dtype=torch.float64)
                    scores[name][batch] = values
                self.advance(len(batch) * size)
        return scores

    def observed(self, name: str, cell: CellValue) -> Iterator[Observed]:
        """Every prompt: the k-th at a depth."""
        condition = self.conditions[cell["facts"]]
        for column, outcomes in cell["outcomes"].items():
            for k, outcome in enumerate(outcomes):
                unit = f"{cell['depth']}/{k}"
                yield Observed(cell["length"], unit, column + condition, outcome)

    def rows(self, cells: Mapping[str, CellValue]) -> list[dict[str, Any]]:
        """A row per length: of each condition means over depths, and the generated score's depths
        and standard error: over wordings, where prompts have several (few make it uncertain), else
        over prompts."""
        by_row: dict[tuple[int, int], list[CellValue]] = {}
        for cell in cells.values():
            by_row.setdefault((cell["length"], cell["facts"]), []).append(cell)
        rows = []
        for length in sorted({cell["length"] for cell in cells.values()}):
            row: dict[str, Any] = {"length": length}
            for facts, condition in self.conditions.items():
                depths = sorted(by_row[length, facts], key=lambda cell: cell["depth"])
                row["samples"] = sum(cell["samples"] for cell in depths)
                row |= _columns(depths, condition)
            rows.append(row)
        return rows

    def write(self, results: list[ModelResult], out: Path) -> None:
        """EVAL.words.csv: the share of answers generated exactly by wording, and by kind of
        value."""
        groups: dict[tuple[str, int, int, str, str], list[int]] = {}
        for result in results:
            for cell in result.cells.values():
                outcomes = cell["outcomes"]["free_generation"]
                for kind in WORDS:
                    for word, outcome in zip(cell.get(kind, ()), outcomes, strict=False):
                        group = (result.label, cell["length"], cell["facts"], kind, word)
                        groups.setdefault(group, []).append(outcome)
        rows = []
        for (model, length, facts, kind, words), outcomes in sorted(groups.items()):
            row = {
                "model": model,
                "length": length,
                "facts": facts,
                "kind": kind,
                "words": words,
                "samples": len(outcomes),
                "free_generation": sum(outcomes) / len(outcomes),
            }
            rows.append(row)
        if rows:
            write_table(out / f"{self.name}.words.csv", rows)


def _columns(depths: list[CellValue], condition: str) -> dict[str, Any]:
    """The columns of one length and condition, of its cells in the order of depth."""
    columns: dict[str, Any] = {}
    samples = sum(cell["samples"] for cell in depths)
    for score in ("teacher_forced", "free_generation", "tokens_right", "nll"):
        total = sum(cell[score] * cell["samples"] for cell in depths)
        columns[score + condition] = total / samples
    wordings: list[str] = []
    outcomes: list[int] = []
    for cell in depths:
        wordings += cell.get("wording", ())
        outcomes += cell["outcomes"]["free_generation"]
    if len(set(wordings)) > 1:
        error = clustered_error(np.array(outcomes), wordings)
    else:
        share = columns["free_generation" + condition]
        error = math.sqrt(share * (1 - share) / samples)
    columns["free_generation_standard_error" + condition] = error
    columns["depths"] = [cell["depth"] for cell in depths]
    columns["free_generation_by_depth" + condition] = [cell["free_generation"] for cell in depths]
    return columns


# Models are measured one after the other, on the same prompts.
@lru_cache(maxsize=256)
def _prompts(
    template: Template,
    tokenizer: str,
    haystack: Haystack,
    length: int,
    depth: float,
    samples: int,
    seed: int,
) -> list[Prompt]:
    """A cell's samples; its place decides them, so that no cell depends on another being drawn."""
    rng = np.random.default_rng([seed, length, round(depth * 1e6), template.facts, 0])
    encoder = load_tokenizer(tokenizer)
    return [template.draw(length, depth, rng, encoder, haystack) for _ in range(samples)]
