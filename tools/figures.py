"""Draw the figures of the pages from the tables in benchmarks/, as `priorzoo evaluate` draws
them."""

from __future__ import annotations

import csv
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

from PIL import Image

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # so that a plain `python tools/…` finds the project

from modalities.contract import find_modality
from modalities.evaluation import Evaluator
from modalities.figures import overview_figure, scores_figure
from modalities.results import LENGTH, Axis, ModelResult, Score

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
MIXERS = ("goat", "ggd_goat", "rope", "markov-12", "mixer")
SEEDED = (
    "ggd_goat_ssmax",
    "goat_ssmax",
    "ggd2d_separable_ssmax",
    "lookhere_ssmax",
    "rope2d_axial_ssmax",
)
GLYPHS = ("goat", "ggd2d_separable", "alibi", "rope2d_axial", "rope2d_mixed", "learned")
# methods of each figure, of a table beside it; empty: all
FIGURES: dict[str, tuple[str, ...]] = {
    "text_tiny/overview.png": (),
    "text_tiny/variants/overview.png": (),
    "dna_tiny/bits.png": ("goat", "rope", "markov-9", "markov-12", "mixer"),
    "dna_copy_tiny/bits.png": MIXERS,
    "dna_human_tiny/bits.png": MIXERS,
    "vision_scenes/find.png": SEEDED,
    "vision_scenes/between/find.png": (),
    "vision_scenes/other/find.png": (),
    "vision_scenes/variants/find.png": (),
    "vision_tiny/resolution.png": tuple(f"{name}_ssmax" for name in GLYPHS),
    "vision_photos/resolution.png": (),
    "far/far.png": (),
    "released/lengths.png": (),
}
SCORES = {
    "far": (
        Score("exact_match", "facts recalled exactly", unit_interval=True),
        Score("seconds", "seconds to read the text"),
        Score("left_out", "share of keys left out", unit_interval=True),
    ),
    "lengths": (
        Score("bits_per_byte", "bits per byte of the last tokens"),
        Score("tokens_right", "tokens of answers right", unit_interval=True),
    ),
}


def main() -> None:
    for figure, methods in FIGURES.items():
        draw(BENCHMARKS / figure, methods)
        with Image.open(BENCHMARKS / figure) as picture:  # a third of the bytes
            picture.convert("RGB").quantize(128).save(BENCHMARKS / figure, optimize=True)
        print(f"written: benchmarks/{figure}")


def draw(path: Path, methods: tuple[str, ...]) -> None:
    modality = path.relative_to(BENCHMARKS).parts[0].partition("_")[0]
    if scores := SCORES.get(path.stem):
        return scores_figure(read_results(path.with_suffix(".csv"), LENGTH, methods), path, scores)
    evaluators = find_modality(modality).evaluators
    if path.stem != "overview":
        evaluator = evaluators[path.stem]()
        return evaluator.draw(read_results(path.with_suffix(".csv"), evaluator.axis, methods), path)
    measured = []
    for name in ("passkey", "perplexity", "niah"):
        one: Evaluator = evaluators[name]()
        score = one.overview
        assert score is not None
        results = read_results(path.with_name(f"{name}.csv"), one.axis, methods)
        last = [column for column in results[0].rows[0] if column.startswith(f"{score.column} (")][
            -1:
        ]
        measured.append(
            (one.title or name, replace(score, column=[score.column, *last][-1]), results)
        )
    overview_figure(measured, path)


def read_results(path: Path, axis: Axis, methods: tuple[str, ...]) -> list[ModelResult]:
    """The models of a table; those of one method are seeds."""
    rows: dict[tuple[str, str, int], list[dict[str, float]]] = {}
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            key = row.pop("model"), row.pop("method"), int(row.pop(axis.trained))
            if not methods or key[1] in methods:
                rows.setdefault(key, []).append(
                    {name: float(text) for name, text in row.items() if is_number(text)}
                )
    seeds = Counter(method for _, method, _ in rows)
    return [
        ModelResult(label, trained, part, method=method, group=method if seeds[method] > 1 else "")
        for (label, method, trained), part in rows.items()
    ]


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    main()
