"""RULER's eleven synthetic tasks (arXiv 2404.06654): retrieval, variable tracking and counting against length, offline."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from modalities.decoder.model import Decoder
from modalities.decoder.scoring import continue_texts
from modalities.evaluation import (
    Cell,
    CellValue,
    LengthSettings,
    Observed,
    Score,
    check_choice,
    option,
    standard_error,
)
from modalities.text.data import EncodedDocument
from modalities.text.retrieval import TextEvaluator
from modalities.text.ruler import BUDGETS, RULER_TASKS, WORD_LISTS, Material, least_length, load_words, make_sample
from modalities.text.tokenizers import load_tokenizer
from zoo.slices import slices

__all__ = ["Ruler", "RulerSettings", "fraction_found"]


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in text.split(","))))


@dataclass(frozen=True)
class RulerSettings(LengthSettings):
    """`samples` counts prompts per task and length (default 20; RULER has 500).

    Attributes:
        tasks: those measured and averaged, in RULER's order.
        budget: what is at most L tokens: "ruler" takes the prompt without BOS and the tokens that the task generates, as RULER
            does; "prompt" takes the prompt with BOS.
        keys: words of keys and lists: "wonderwords", RULER's own (6.17 million adjective-noun pairs), from the package of that
            name; "own", 12,876 pairs of short common words, with which multikey_2 has near-duplicates of the asked key and
            scores do not compare with RULER's.
    """

    tasks: tuple[str, ...] | None = option(None, "as vt,cwe; default: all of " + ",".join(RULER_TASKS), parse=_names)
    budget: str = option(
        "ruler", "what is at most L: ruler (prompt and generated tokens, without BOS) or prompt (with BOS)"
    )
    keys: str = option("wonderwords", "words: wonderwords (RULER's; needs that package) or own (not comparable)")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("budget", self.budget, BUDGETS)
        check_choice("keys", self.keys, WORD_LISTS)
        if self.tasks is not None:
            if not self.tasks:
                raise ValueError(f"tasks names none; expected some of {', '.join(RULER_TASKS)}")
            for task in self.tasks:
                check_choice("tasks", task, list(RULER_TASKS))
            object.__setattr__(self, "tasks", tuple(task for task in RULER_TASKS if task in self.tasks))


class Ruler(TextEvaluator):
    """RULER's tasks: mean share of references found in the tokens that a task generates (30 to 128), 0 to 1.

    | task | what is asked | generated |
    |---|---|---|
    | single_1–3, multikey_1–3, multivalue, multiquery | values by key | 128 |
    | vt | the variables along a chain of four assignments; a solved example before | 30 |
    | cwe | the ten words that occur most often in a list; a solved example before | 120 |
    | fwe | the three coded words that occur most often; frequencies ∝ k⁻² | 50 |

    qa_1 and qa_2 are left out: their data is in no package. A sample ends early once every reference was found, which cannot
    change its score. A standard error is over samples, that of the average √(Σ s²) / T over its T tasks. Haystacks are as long
    as fits, sample by sample; in RULER all samples of a length have one size. Without `lengths`, those of the default lengths
    are measured that have room for every task. In bytes cwe needs 2,100, and from L = 4,096 on, where RULER repeats words
    more often, 8,000; vt 1,850, the others 500 to 900.
    """

    name = "ruler"
    version = 2
    summary = "RULER's eleven synthetic tasks: share of references found in what is generated, against length"
    scores = (
        Score("average", "references found, average of tasks", unit_interval=True),
        *(Score(task, f"{task}: references found", unit_interval=True, tabled=False) for task in RULER_TASKS),
    )
    settings_class = RulerSettings
    paired_over = "prompts"
    default_samples = 20

    @property
    def samples(self) -> int:
        return self.settings.samples or self.default_samples

    @property
    def tasks(self) -> tuple[str, ...]:
        return self.settings.tasks or tuple(RULER_TASKS)

    def identity(self, model: Decoder) -> dict[str, Any]:
        return {
            "text": self.heldout_for(model).fingerprint,
            "seed": self.settings.seed,
            "samples": self.samples,
            "budget": self.settings.budget,
            "words": f"{self.settings.keys} {load_words(self.settings.keys).fingerprint}",
        }

    def points(self, model: Decoder) -> tuple[int, ...]:
        lengths = self.lengths_for(model)
        if self.settings.lengths:
            return lengths  # given explicitly: measured, or an error
        documents = self.heldout_for(model).items
        room = partial(_has_room, model.config.tokenizer, documents, self.settings.keys, self.settings.budget)
        fitting = {length: [task for task in self.tasks if room(task, length)] for length in lengths}
        found = tuple(length for length, tasks in fitting.items() if len(tasks) == len(self.tasks))
        if not found:
            most = max(lengths, key=lambda length: len(fitting[length]))
            raise ValueError(
                f"no default length has room for all of {', '.join(self.tasks)}: name longer ones than {lengths[-1]} with "
                f"--lengths, or --tasks {','.join(fitting[most])}, which fit in {most}"
            )
        return found

    def cells(self, model: Decoder) -> list[Cell]:
        documents, settings = self.heldout_for(model).items, self.settings
        drawn = partial(_samples, model.config.tokenizer, documents, settings.keys, settings.budget)
        return [
            Cell(
                f"length={length}/task={task}",
                cost=self.samples * (length + (settings.budget == "prompt") * RULER_TASKS[task].new_tokens),
                data={"length": length, "task": task, "samples": drawn(task, length, self.samples, settings.seed)},
            )
            for length in self.points(model)
            for task in self.tasks
        ]

    def measure(self, model: Decoder, cell: Cell) -> CellValue:
        """The score of every sample."""
        tokenizer, new_tokens = load_tokenizer(model.config.tokenizer), RULER_TASKS[cell.data["task"]].new_tokens
        samples, length = cell.data["samples"], cell.data["length"]
        scores: list[float] = []
        for part in slices(len(samples), self.settings.batch_size(length + new_tokens)):
            wanted = [answers for _, answers in samples[part]]
            texts = continue_texts(
                model,
                tokenizer,
                [prompt for prompt, _ in samples[part]],
                max_new_tokens=new_tokens,
                finished=[partial(_all_found, references=answers) for answers in wanted],
            )
            scores += [fraction_found(text, answers) for text, answers in zip(texts, wanted, strict=True)]
            self.advance(cell.cost * len(wanted) // len(samples))
        return {"length": length, "task": cell.data["task"], "scores": scores}

    def observed(self, name: str, cell: CellValue) -> Iterator[Observed]:
        """Every prompt, in its task and in the average."""
        for k, score in enumerate(cell["scores"]):
            for column in (cell["task"], "average"):
                yield Observed(cell["length"], f"{cell['task']}/{k}", column, score)

    def rows(self, cells: Mapping[str, CellValue]) -> list[dict[str, Any]]:
        rows = []
        for length in sorted({c["length"] for c in cells.values()}):
            scores = {c["task"]: np.array(c["scores"]) for c in cells.values() if c["length"] == length}
            errors = {task: standard_error(values) for task, values in scores.items()}
            row = {
                "length": length,
                "average": float(np.mean([values.mean() for values in scores.values()])),
                "average_standard_error": math.hypot(*errors.values()) / len(errors),
            }
            for task, values in scores.items():
                row |= {task: float(values.mean()), f"{task}_standard_error": errors[task]}
            rows.append(row | {"samples": sum(map(len, scores.values()))})
        return rows


def fraction_found(text: str, references: tuple[str, ...]) -> float:
    """Share of references that occur in `text`, case aside: RULER's score of one sample."""
    lowered = text.lower()
    return sum(reference.lower() in lowered for reference in references) / len(references)


def _all_found(text: str, references: tuple[str, ...]) -> bool:
    return fraction_found(text, references) == 1.0


@lru_cache(maxsize=4)
def _material(tokenizer: str, documents: tuple[EncodedDocument, ...], keys: str) -> Material:
    """The essay is the words of all held-out documents, one after the other."""
    essay = tuple(word for document in documents for word in document.text.split())
    return Material(load_tokenizer(tokenizer), essay, load_words(keys))


@lru_cache(maxsize=256)
def _has_room(
    tokenizer: str, documents: tuple[EncodedDocument, ...], keys: str, budget: str, task: str, length: int
) -> bool:
    return least_length(RULER_TASKS[task], length, _material(tokenizer, documents, keys), budget) <= length


@lru_cache(maxsize=256)
def _samples(  # keyed by its arguments alone, so no cell depends on another being drawn
    tokenizer: str,
    documents: tuple[EncodedDocument, ...],
    keys: str,
    budget: str,
    task: str,
    length: int,
    count: int,
    seed: int,
) -> tuple[tuple[np.ndarray, tuple[str, ...]], ...]:
    material = _material(tokenizer, documents, keys)
    rng = np.random.default_rng([seed, length, list(RULER_TASKS).index(task)])
    try:
        return tuple(make_sample(RULER_TASKS[task], length, material, rng, budget=budget) for _ in range(count))
    except ValueError as error:
        raise ValueError(f"ruler {task}: {error}") from error
