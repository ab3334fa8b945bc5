"""What text evaluators share: the held-out documents they read, and retrieval scored on a grid of
length × depth."""

from __future__ import annotations

import math
from abc import abstractmethod
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
from modalities.evaluation import Cell, Evaluator, S
from modalities.loading import Heldout
from modalities.paired import Observed
from modalities.results import CellValue, ModelResult, Score
from modalities.settings import CutSettings, LengthSettings, check_choice, counts, option
from modalities.statistics import clustered_error
from modalities.tables import write_table
from modalities.text.data import DEFAULT_SOURCE, MOST_DOCUMENTS, EncodedDocument, open_heldout
from modalities.text.prompts import (
    TEMPLATES,
    Haystack,
    Prompt,
    Template,
    default_haystack,
    open_haystack,
)
from modalities.text.tokenizers import load_tokenizer
from zoo.positions import slices

WORDS = ("wording", "value_kind")  # fields of `Prompt` that scores are grouped by
FILLERS = "own, grass or text (held-out documents)"


class TextEvaluator(Evaluator[S, Decoder]):
    """An evaluator that reads held-out documents: those of `settings.source`, else those that
    training held out."""

    @property
    def text_name(self) -> str:
        """The source of the held-out documents."""
        trained_on = self.trained_on.get("heldout_source") or self.trained_on.get(
            "source", DEFAULT_SOURCE
        )
        return self.settings.source or trained_on

    @property
    def source_name(self) -> str | None:
        return self.text_name

    def heldout_for(self, model: Decoder) -> Heldout[tuple[EncodedDocument, ...]]:
        """The documents in the model's tokens."""
        whole = self.settings.source is None and self.trained_on.get("heldout_source") is not None
        return open_heldout(self.text_name, model.config.tokenizer, "all" if whole else "heldout")

    data_line = ""  # what `cells` has to say of the held-out documents that it reads and leaves out

    def describe(self, documents: Sequence[EncodedDocument], length: int) -> int:
        """Sets `data_line`: how many documents have `length` tokens, which it returns."""
        enough = sum(len(one.tokens) >= length for one in documents)
        count = len(documents)
        counted = f"first {count:,}" if count == MOST_DOCUMENTS else f"{count:,}"
        self.data_line = f"{enough:,} of the {counted} held-out documents of {self.text_name} have {length:,} tokens"
        if enough < count:
            self.data_line += f"; left out: {count - enough:,} with fewer"
        return enough

    def samples_line(self, results: list[ModelResult]) -> str:
        """What was measured, counted."""
        return f"{len(results[0].cells):,} samples"

    def measured(self, results: list[ModelResult]) -> str:
        line = f"{self.name}: {self.samples_line(results)} measured" + f"; {self.data_line}" * bool(
            self.data_line
        )
        if isinstance(self.settings, LengthSettings):
            wanted = {n for r in results for n in self.settings.resolved_lengths(r.trained_at)}
            if missing := wanted - {row["length"] for r in results for row in r.rows}:
                lengths = ", ".join(f"{length:,}" for length in sorted(missing))
                line += f"; left out: lengths {lengths}, for which the model has no positions"
        return line


class HaystackEvaluator(TextEvaluator[S]):
    """An evaluator that hides statements in a haystack. ValueError for a source of held-out text
    and another filler."""

    def __init__(
        self, settings: S | None = None, trained_on: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(settings, trained_on)
        source = self.settings.source
        if source and self.filler != "text":
            raise ValueError(
                f"source {source!r} is of held-out text, the filler is {self.filler!r}; add filler text"
            )

    @property
    @abstractmethod
    def filler(self) -> str:
        """The name of the haystack."""

    @property
    def source_name(self) -> str | None:
        return self.text_name if self.filler == "text" else self.filler

    def haystack(self, model: Decoder) -> Haystack:
        documents = self.heldout_for(model).items if self.filler == "text" else ()
        return _haystack(self.filler, model.config.tokenizer, documents)

    def describe_hay(self, model: Decoder, length: int) -> None:
        """Sets `data_line` for texts of up to `length` tokens."""
        self.data_line = f"hay: {self.filler}"
        if self.filler == "text" and not self.describe(self.heldout_for(model).items, length):
            self.data_line = (
                f"hay: documents of {self.text_name} in a row, none of which has {length:,} tokens"
            )


@dataclass(frozen=True)
class RetrievalSettings(CutSettings):
    """What is hidden in what; see `modalities.text.prompts`. The control cuts prompts by
    `Prompt.passage`."""

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
    default_filler: ClassVar[str | None] = None  # None: what belongs to the template

    def __init__(
        self, settings: RetrievalSettings | None = None, trained_on: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(settings, trained_on)
        numbers = self.settings.facts
        # Each number of facts adds this to the names of its columns.
        self.conditions = {facts: f" (facts={facts})" * (len(numbers) > 1) for facts in numbers}
        self.templates = [Template(self.settings.template or "own", facts) for facts in numbers]
        if len(self.conditions) > 1:
            label = self.overview.label
            conditions = self.conditions.values()
            drawn = tuple(
                Score(f"free_generation{c}", label + c, unit_interval=True) for c in conditions
            )
            self.scores = (*(Score(f"teacher_forced{c}", drawn=False) for c in conditions), *drawn)
            self.overview = drawn[-1]

    @property
    def samples(self) -> int:
        return self.settings.samples or self.default_samples

    @property
    def depths(self) -> int:
        return self.settings.depths or self.default_depths

    @property
    def filler(self) -> str:
        return (
            self.settings.filler
            or self.default_filler
            or default_haystack(self.settings.template or "own")
        )

    def identity(self, model: Decoder) -> dict[str, object]:
        template = self.templates[0]
        return {
            "seed": self.settings.seed,
            "samples": self.samples,
            "depths": self.depths,
            "template": [
                template.name,
                int(template.name == "bam"),
            ],  # digits of the key that the prompt gives away
            "hay": self.haystack(model).fingerprint,
            **({"control": self.settings.control} if self.settings.control else {}),
        } | ({"grammar": template.grammar.fingerprint} if template.grammar else {})

    def points(self, model: Decoder) -> tuple[int, ...]:
        return self.lengths_for(model)

    def samples_line(self, results: list[ModelResult]) -> str:
        numbers = f", {len(self.conditions)} numbers of facts" * (len(self.conditions) > 1)
        return f"{self.samples} prompts at each of {self.depths} depths{numbers} and {len(results[0].rows)} lengths"

    def cells(self, model: Decoder) -> list[Cell]:
        tokenizer = model.config.tokenizer
        haystack = self.haystack(model)
        cells = []
        self.describe_hay(model, max(self.points(model)))
        for length, template, k in product(self.points(model), self.templates, range(self.depths)):
            depth = k / (self.depths - 1)
            prompts = _prompts(
                template, tokenizer, haystack, length, depth, self.samples, self.settings.seed
            )
            if self.settings.control:
                prompts = [prompt.passage(self.at_once(model, length)) for prompt in prompts]
            name = f"length={length}/facts={template.facts}/depth={depth:.3f}"
            data = {"length": length, "depth": depth, "facts": template.facts, "prompts": prompts}
            cells.append(Cell(name, cost=len(prompts) * self.at_once(model, length), data=data))
        return cells

    def measure(self, model: Decoder, cell: Cell) -> CellValue:
        """Mean scores of the cell's samples; of each whether it was answered, 0 or 1, and its
        words."""
        prompts = cell.data["prompts"]
        size = self.at_once(model, cell.data["length"])
        by_shape: dict[
            tuple[int, int], list[int]
        ] = {}  # prompts differ in length where words or keys do
        for n, prompt in enumerate(prompts):
            by_shape.setdefault((len(prompt.tokens), len(prompt.answer)), []).append(n)
        scores: dict[str, torch.Tensor] = {}
        for alike in by_shape.values():
            for part in slices(len(alike), self.settings.batch_size(size)):
                batch = alike[part]
                sides = (
                    np.stack(side) for side in zip(*(prompts[n][:2] for n in batch), strict=True)
                )
                for name, values in answer_scores(model, *sides).items():
                    scores.setdefault(name, torch.zeros(len(prompts), dtype=torch.float64))[
                        batch
                    ] = values
                self.advance(len(batch) * size)
        facts = {key: cell.data[key] for key in ("length", "depth", "facts")} | {
            "samples": len(prompts)
        }
        means = {name: float(values.mean()) for name, values in scores.items()}
        outcomes = {
            name: scores[name].int().tolist() for name in ("teacher_forced", "free_generation")
        }
        words = {kind: [getattr(prompt, kind) for prompt in prompts] for kind in WORDS}
        return facts | means | {"outcomes": outcomes} | (words if prompts[0].wording else {})

    def observed(self, name: str, cell: CellValue) -> Iterator[Observed]:
        """Every prompt: the k-th at a depth."""
        for column, outcomes in cell["outcomes"].items():
            for k, right in enumerate(outcomes):
                yield Observed(
                    cell["length"], f"{cell['depth']}/{k}", column + self._condition(cell), right
                )

    def _condition(self, cell: CellValue) -> str:
        return self.conditions[cell["facts"]]

    def rows(self, cells: Mapping[str, CellValue]) -> list[dict[str, Any]]:
        """A row per length: of each condition means over depths, and the generated score's depths
        and standard error: over wordings, where prompts have several (few make it uncertain), else
            over prompts."""
        rows = []
        for length in sorted({c["length"] for c in cells.values()}):
            row: dict[str, Any] = {"length": length}
            for condition in self.conditions.values():
                column = [
                    c
                    for c in cells.values()
                    if (c["length"], self._condition(c)) == (length, condition)
                ]
                column.sort(key=lambda c: c["depth"])
                samples = row["samples"] = sum(c["samples"] for c in column)
                for score in ("teacher_forced", "free_generation", "tokens_right", "nll"):
                    row[score + condition] = sum(c[score] * c["samples"] for c in column) / samples
                share = row["free_generation" + condition]
                wordings = [wording for c in column for wording in c.get("wording", ())]
                right = np.array(
                    [each for c in column for each in c["outcomes"]["free_generation"]]
                )
                several = len({*wordings}) > 1
                error = (
                    clustered_error(right, wordings)
                    if several
                    else math.sqrt(share * (1 - share) / samples)
                )
                row["free_generation_standard_error" + condition] = error
                row["depths"] = [c["depth"] for c in column]
                row["free_generation_by_depth" + condition] = [c["free_generation"] for c in column]
            rows.append(row)
        return rows

    def write(self, results: list[ModelResult], out: Path) -> None:
        """EVAL.words.csv: the share of answers generated exactly by wording, and by kind of
        value."""
        groups: dict[tuple[str | int, ...], list[int]] = {}
        for result in results:
            for cell in result.cells.values():
                place = result.label, cell["length"], cell["facts"]
                for kind in WORDS:
                    for word, right in zip(
                        cell.get(kind, ()), cell["outcomes"]["free_generation"], strict=False
                    ):
                        groups.setdefault((*place, kind, word), []).append(right)
        names = ("model", "length", "facts", "kind", "words", "samples", "free_generation")
        rows = [
            (*group, len(outcomes), sum(outcomes) / len(outcomes))
            for group, outcomes in sorted(groups.items())
        ]
        if rows:
            write_table(
                out / f"{self.name}.words.csv", [dict(zip(names, row, strict=True)) for row in rows]
            )


@lru_cache(maxsize=4)
def _haystack(filler: str, tokenizer: str, documents: tuple[EncodedDocument, ...]) -> Haystack:
    return open_haystack(
        filler, load_tokenizer(tokenizer), [document.tokens for document in documents]
    )


@lru_cache(maxsize=256)  # models are measured one after the other, on the same prompts
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
    return [
        template.draw(length, depth, rng, load_tokenizer(tokenizer), haystack)
        for _ in range(samples)
    ]
