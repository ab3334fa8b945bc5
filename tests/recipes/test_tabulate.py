"""Results of several folders as one table and figure."""

import csv
import dataclasses
import math

import pytest

from modalities.results import ModelResult
from modalities.text.evaluators.far import Far, FarSettings
from recipes.report import load_results, write_results
from recipes.tabulate import main


def stored(folder, label="text_ggd_tiny.facts", points=(256,), weights="w", **settings):
    """A folder with the results of one model at some lengths."""
    evaluator = Far(FarSettings(lengths=tuple(points), **settings))
    rows = [{"length": n, "exact_match": 0.5, "seconds": n / 1e3, "mib": math.nan, "left_out": 0.25} for n in points]
    write_results(evaluator, [ModelResult(label, 256, rows, method="ggd", weights=weights)], folder)
    return str(folder)


def test_rows_of_a_model_are_joined_and_other_models_stand_beside_it(tmp_path, capsys):
    near = stored(tmp_path / "near", points=(1024, 512), samples=3)
    stored(tmp_path / "near", label="text_alibi_tiny.facts", points=(1024, 512), samples=3)
    farther = stored(tmp_path / "far", points=(512, 4096), samples=1)
    assert main(["far", near, farther, "--out", str(tmp_path / "all")]) == 0
    printed = capsys.readouterr().out
    assert "text_alibi_tiny" in printed and "4k" in printed
    with open(tmp_path / "all" / "far.csv") as file:
        rows = [(row["model"], int(row["length"])) for row in csv.DictReader(file)]
    assert rows == [("text_alibi_tiny.facts", n) for n in (512, 1024)] + [
        ("text_ggd_tiny.facts", n) for n in (512, 1024, 4096)
    ]
    assert (tmp_path / "all" / "far.png").stat().st_size > 10_000
    assert len(load_results(Far, tmp_path / "near")) == 2  # as they were


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (dict(weights="others"), "other weights"),
        (dict(seed=7), "seed is 7, and 42"),
        (dict(template="train"), "template is 'train'"),
    ],
)
def test_what_was_measured_otherwise_is_not_joined(tmp_path, capsys, other, message):
    near, farther = stored(tmp_path / "near"), stored(tmp_path / "far", points=(512,), **other)
    assert main(["far", near, farther]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_two_values_of_one_place_are_an_error(tmp_path, capsys):
    near, again = stored(tmp_path / "near"), stored(tmp_path / "again")
    path = next((tmp_path / "again" / "far").glob("*.json"))
    path.write_text(path.read_text().replace("0.5", "0.75"))
    assert main(["far", near, near]) == 0
    assert main(["far", near, again]) == 2
    assert "measured before, at length 256, otherwise" in " ".join(capsys.readouterr().err.split())


def test_what_holds_no_results(tmp_path, capsys):
    assert main(["far", str(tmp_path)]) == 2
    assert "holds no results of far" in " ".join(capsys.readouterr().err.split())
    assert main(["fra", str(tmp_path)]) == 2
    assert "did you mean 'far'" in " ".join(capsys.readouterr().err.split())
    near = stored(tmp_path / "near")
    assert dataclasses.asdict(load_results(Far, tmp_path / "near")[0])["rows"][0]["length"] == 256
    assert main(["score", near]) == 2
