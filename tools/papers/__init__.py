"""The papers' tables and figures, an `Item` each: what was published, how it is made here, and what the numbers say of it."""

from __future__ import annotations

import csv
import math
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modalities.files import file_safe
from zoo import create_model, list_models

__all__ = [
    "ITEMS",
    "ROOT",
    "Item",
    "Row",
    "Verdict",
    "at",
    "columns",
    "command",
    "evaluate",
    "item",
    "lengths",
    "needs_gpu",
    "shipped",
    "told",
    "train",
]

ROOT = Path(__file__).resolve().parent.parent.parent
Row = dict[str, Any]
# Whether the claim holds at this size (None: nothing here can say), and a sentence with the numbers.
Verdict = tuple[bool | None, str]


@dataclass(frozen=True)
class Item:
    """A table or figure of a paper.

    Attributes:
        key: "bam.figure5".
        title: what it shows.
        published: what the paper reports.
        paper: commands that make it at the paper's size.
        run: (folder for files) → rows, at tiny size; None where only the paper's size says anything.
        judge: rows → the verdict.
        exact: whether it is mathematics, which holds at any size.
    """

    key: str
    title: str
    published: str
    paper: tuple[str, ...]
    run: Callable[[Path], list[Row]] | None = None
    judge: Callable[[list[Row]], Verdict] = lambda rows: (None, "")
    exact: bool = False


ITEMS: dict[str, Item] = {}


def item(
    key: str, title: str, *, published: str, paper: Sequence[str], judge: Callable[[list[Row]], Verdict]
) -> Callable[[Callable[[Path], list[Row]]], Callable[[Path], list[Row]]]:
    """A decorator: the function is the item's `run`, its docstring says what is run."""

    def add(run: Callable[[Path], list[Row]]) -> Callable[[Path], list[Row]]:
        ITEMS[key] = Item(key, title, published, tuple(paper), run, judge)
        return run

    return add


def needs_gpu(key: str, title: str, *, published: str, paper: Sequence[str], why: str) -> None:
    """An item that nothing at tiny size stands for; `why` says so."""
    ITEMS[key] = Item(key, title, published, tuple(paper), None, lambda rows: (None, why))


# ------------------------------------------------------------------------------------------------ running


def command(*words: str) -> None:
    """Run a script of the project; what it prints is shown. Raises RuntimeError where it fails."""
    print(f"$ python {shlex.join(words)}", flush=True)
    if status := subprocess.run([sys.executable, *words], cwd=ROOT).returncode:
        raise RuntimeError(f"python {shlex.join(words)} ended with status {status}")


def evaluate(out: Path, models: Sequence[str], evaluator: str, *options: str) -> list[Row]:
    """The rows of EVAL.csv, or of the tables of a listing, with the model's name and method; numbers as such."""
    command("recipes/evaluate.py", *models, evaluator, *options, "--out", str(out))
    table = out / f"{evaluator}.csv"
    if table.is_file():
        found = csv.DictReader(table.read_text().splitlines())
        return [{name: _typed(value) for name, value in row.items()} for row in found]
    rows = []
    for path in sorted(out.glob(f"{evaluator}.*.tsv")):
        model = path.name.removeprefix(f"{evaluator}.").removesuffix(".tsv")
        found = csv.DictReader(path.read_text().splitlines(), delimiter="\t")
        rows += [{"model": model} | {name: _typed(value) for name, value in row.items()} for row in found]
    return rows


def _typed(value: str | None) -> Any:
    if not value:
        return None
    try:
        return float(value) if not value.lstrip("-").isdigit() else int(value)
    except ValueError:
        return value


def train(out: Path, recipe: str, *settings: str) -> Path:
    """A finished run of a recipe in `out`; one that is there is kept."""
    short = [setting.rpartition(".")[2].replace("=", "") for setting in settings]
    folder = out / recipe.replace(".", "_") if not settings else out / "-".join(map(file_safe, [recipe, *short]))
    if not (folder / "model").is_dir():
        words = [word for setting in settings for word in ("--set", setting)]
        command("recipes/train.py", recipe, "--run-dir", str(folder), "--resume", "auto", *words)
    return folder


def shipped(method: str, modality: str = "text") -> str:
    """The name of the tiny weights of a method."""
    size = "tiny_patch8" if modality == "vision" else "tiny"
    return list_models(f"{modality}_{method}_{size}.*", pretrained=True)[0]


def at(rows: Sequence[Row], method: str, score: str, **place: Any) -> float:
    """The score of the method at a place, such as length=128; NaN where it was not measured."""
    for row in rows:
        if row.get("method") == method and all(row.get(name) == value for name, value in place.items()):
            return math.nan if row.get(score) is None else float(row[score])
    return math.nan


def columns(rows: Sequence[Row], *names: str) -> list[Row]:
    """The rows with these columns alone."""
    return [{name: row[name] for name in names} for row in rows]


def lengths(method: str, *factors: int) -> str:
    """Multiples of the training length of a method's tiny text weights, as `--lengths` takes them."""
    trained = create_model(shipped(method), pretrained=True).config.train_context
    return ",".join(str(trained * factor) for factor in factors)


def told(rows: Sequence[Row], score: str, place: str = "length", digits: int = 2, unit: str = "") -> str:
    """The score of each method at each place, as "at 128, 512: goat 1.00 0.98; rope 1.00 0.00"."""
    points = sorted({row[place] for row in rows})
    models = dict.fromkeys(row["method"] for row in rows)
    values = (f"{m} {' '.join(f'{at(rows, m, score, **{place: p}):.{digits}f}' for p in points)}" for m in models)
    return f"at {', '.join(map(str, points))}{unit}: {'; '.join(values)}"
