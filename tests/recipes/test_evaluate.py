"""recipes/evaluate.py from the command line down to its files: resuming, several models, run folders, wrong requests."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from modalities.text.evaluators import EVALUATORS
from modalities.text.evaluators.passkey import Passkey
from modalities.text.model import CausalLM, TextConfig
from modalities.vision import VisionConfig, VisionTransformer
from modalities.vision.data import heldout_by, open_heldout
from modalities.vision.evaluators.resolution import Resolution
from modalities.vision.transforms import preprocess
from recipes import evaluate as command
from recipes import find_recipe
from recipes.report import load_results, result_path
from recipes.targets import find_targets, modality_of, override, parse_overrides, seed_groups
from tests import launching
from zoo import create_model
from zoo.pretrained import manifest

SMALL = dict(dim=32, num_layers=1, num_heads=2, hidden_dim=32, train_context=96)


def saved_run(folder, **config):
    """A run folder as training leaves it: recipe.json and model/."""
    torch.manual_seed(0)
    CausalLM(TextConfig(**(SMALL | config))).save_pretrained(folder / "model")
    (folder / "recipe.json").write_text(json.dumps({"name": "text.test", "modality": "text"}))
    return str(folder)


def invoke(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = command.main([str(a) for a in arguments])
    return SimpleNamespace(exit_code=code, output=out.getvalue(), stderr=err.getvalue())


def contents(out, evaluator):
    """The JSON of each model, by its label."""
    found = [json.loads(path.read_text()) for path in sorted((out / evaluator).glob("*.json"))]
    return {content["label"]: content for content in found}


def table(path):
    with open(path) as file:
        return list(csv.DictReader(file))


@pytest.fixture
def runs(tmp_path):
    return [saved_run(tmp_path / "run_a"), saved_run(tmp_path / "run_b", position="rope", ssmax=True)]


@pytest.mark.slow
def test_two_models_give_one_set_of_files(tmp_path, runs):
    out = tmp_path / "out"
    done = invoke(*runs, "passkey,perplexity", "--lengths", "96,192", "--samples", 1, "--out", out)
    assert done.exit_code == 0, done.stderr
    for name in ("passkey", "perplexity"):
        found = contents(out, name)
        assert {label: model["method"] for label, model in found.items()} == {
            "text.test (run_a)": "ggd",
            "text.test (run_b)": "rope_ssmax",
        }
        for label, model in found.items():
            assert result_path(out, name, label).is_file() and "cells" not in model
            assert (model["evaluator"], model["version"], model["train_context"]) == (
                name,
                EVALUATORS[name].version,
                96,
            )
            assert (model["settings"]["lengths"], model["settings"]["samples"]) == ([96, 192], 1)
            assert model["source"] == ("own" if name == "passkey" else "sotu-excerpt")
            assert [row["length"] for row in model["rows"]] == [96, 192]
        rows = table(out / f"{name}.csv")
        assert [(r["model"], r["length"]) for r in rows] == [
            (f"text.test (run_{m})", n) for m in "ab" for n in ("96", "192")
        ]
        score = EVALUATORS[name].overview.column
        assert [float(row[score]) for row in rows[:2]] == [row[score] for row in found["text.test (run_a)"]["rows"]]
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        read = load_results(EVALUATORS[name], out)
        assert [(r.label, r.rows) for r in read] == [(label, model["rows"]) for label, model in found.items()]
    assert (out / "overview.png").exists() and (out / "passkey_depth.png").exists()
    assert "free_generation" in done.output and "bits_per_byte" in done.output
    assert not [p for p in out.rglob("*") if "partial" in p.name or p.suffix == ".tmp" or p.name.startswith(".")]
    again = invoke(runs[0], "perplexity", "--lengths", "96", "--samples", 1, "--out", out)
    assert again.exit_code == 0
    with pytest.raises(ValueError, match=r"run_[ab]"):  # the other model's were measured with other settings
        load_results(EVALUATORS["perplexity"], out)


@pytest.mark.slow
def test_a_stopped_run_goes_on_where_it_was(tmp_path, runs, monkeypatch):
    request = (runs[0], "passkey", "--lengths", 96, "--samples", 1, "--out")
    assert invoke(*request, tmp_path / "whole").exit_code == 0
    measured, measure = [], Passkey.measure

    def recording(self, model, cell, *, stop=None):
        if len(measured) == stop:
            raise KeyboardInterrupt
        measured.append(cell.name)
        return measure(self, model, cell)

    monkeypatch.setattr(Passkey, "measure", lambda *rest: recording(*rest, stop=7))
    assert invoke(*request, tmp_path / "parts").exit_code == 130
    assert not (tmp_path / "parts" / "passkey").exists() and len(measured) == 7
    plan = invoke(*request, tmp_path / "parts", "--dry-run").output
    assert re.search(r"\b20\b.*\b7\b.*\b1,248\b", plan)  # cells, finished, tokens to read

    monkeypatch.setattr(Passkey, "measure", recording)
    assert invoke(*request, tmp_path / "parts").exit_code == 0
    assert len(measured) == len(set(measured)) == 20
    whole, parts = (contents(tmp_path / folder, "passkey")["text.test (run_a)"] for folder in ("whole", "parts"))
    assert whole["rows"] == parts["rows"]
    stored = [sorted(path.read_text() for path in (tmp_path / f / "cells").iterdir()) for f in ("whole", "parts")]
    assert stored[0] == stored[1]
    # another seed is another measurement
    measured.clear()
    assert invoke(*request, tmp_path / "parts", "--seed", 7).exit_code == 0
    assert len(measured) == 20


def test_a_cell_that_another_run_finishes_meanwhile_is_not_measured(tmp_path, runs, monkeypatch):
    out, measured, measure = tmp_path / "out", [], Passkey.measure

    def beside_another(self, model, cell):
        if len(measured) == 1:
            (path,) = (out / "cells").iterdir()
            with path.open("a") as file:
                for other in self.cells(model)[2:12]:
                    value = measure(self, model, other) | {"free_generation": 0.5}
                    file.write(json.dumps({"cell": other.name, "value": value}) + "\n")
        measured.append(cell.name)
        return measure(self, model, cell)

    request = (runs[0], "passkey", "--lengths", 96, "--samples", 1, "--out", out)
    monkeypatch.setattr(Passkey, "measure", beside_another)
    assert invoke(*request).exit_code == 0
    (path,) = (out / "cells").iterdir()
    lines = path.read_text().splitlines()
    names = [json.loads(line)["cell"] for line in lines[1:]]
    assert len(names) == len(set(names)) == 20
    assert measured == [names[0], names[11], *names[12:]]
    (row,) = contents(out, "passkey")["text.test (run_a)"]["rows"]
    assert row["free_generation"] == 10 * 0.5 / 20  # of the others; the model knows none
    path.write_text("\n".join([*lines[:5], lines[5][:30], *lines[6:]]) + "\n")
    again = invoke(*request)
    assert again.exit_code == 0 and "no cell in line 6: measured again" in again.output
    assert measured[10:] == [names[4]]


SHARED = """
import json, os, signal, sys, time
from pathlib import Path
from recipes.evaluate import main

alone, out, *words = sys.argv[1:]
assert main([*words, "--out", alone]) == 0
children = []
for _ in range(3):
    if not (child := os.fork()):
        os._exit(main([*words, "--out", out]))
    children.append(child)
while sum(path.read_bytes().count(b"\\n") for path in Path(out).glob("cells/*")) < 5:
    time.sleep(0.001)
os.kill(children[0], signal.SIGKILL)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
Path(out, "codes").write_text(json.dumps(codes))
"""


@pytest.mark.slow
def test_evaluations_at_once_share_a_folder(tmp_path, runs):
    """Three, one of which is killed midway: two succeed with what one alone finds; nothing is stored twice or left behind."""
    words = ["passkey", "--lengths", "96,192", "--samples", "1"]
    alone, out = tmp_path / "alone", tmp_path / "out"
    done = launching.command([sys.executable, "-c", SHARED, str(alone), str(out), runs[0], *words])
    assert done.returncode == 0, done.stderr
    assert json.loads((out / "codes").read_text())[1:] == [0] * 2
    found = {path.relative_to(out) for path in out.rglob("*")} - {Path("codes")}
    assert found == {path.relative_to(alone) for path in alone.rglob("*")}
    for path in (alone / "passkey.csv", alone / "passkey.png", *(alone / "cells").iterdir()):
        assert (out / path.relative_to(alone)).read_bytes() == path.read_bytes()


def test_where_memory_ends_an_option_is_named(tmp_path, runs, monkeypatch):
    measured, measure, error = [], Passkey.measure, RuntimeError("can't allocate memory: 3 GB")

    def ending(self, model, cell):
        if len(measured) == 2:
            raise error
        measured.append(cell.name)
        return measure(self, model, cell)

    monkeypatch.setattr(Passkey, "measure", ending)
    done = invoke(runs[0], "passkey", "--lengths", 96, "--samples", 1, "--out", tmp_path / "out")
    assert done.exit_code == 2 and len(done.stderr.splitlines()) == 1
    assert re.search(
        r"memory at length=96/.*lower --(lengths or --batch-tokens|batch-tokens or --lengths);", done.stderr
    )
    assert next((tmp_path / "out" / "cells").iterdir()).read_text().count("\n") == 3


def test_dry_run_measures_and_writes_nothing(tmp_path, runs):
    done = invoke(*runs, "passkey", "--lengths", 96, "--samples", 1, "--out", tmp_path / "out", "--dry-run")
    assert done.exit_code == 0
    assert "passkey" in done.output and not (tmp_path / "out").exists()


def test_models_are_compared_with_one_of_them(tmp_path, runs):
    """--against adds the model, and the table has a difference at every length, over the documents that both read."""
    out = tmp_path / "out"
    done = invoke(runs[0], "perplexity", "--lengths", "16,32", "--out", out, "--against", f"{runs[1]}/")
    assert done.exit_code == 0, done.stderr
    rows, both = table(out / "perplexity.paired.csv"), contents(out, "perplexity")
    labels = "text.test (run_a)", "text.test (run_b)"
    assert [(row["model"], row["against"], row["length"], row["score"]) for row in rows] == [
        (*labels, n, "bits_per_byte") for n in ("16", "32")
    ]
    for k, row in enumerate(rows):
        mine, other = (both[label]["rows"][k]["bits_per_byte"] for label in labels)
        assert float(row["difference"]) == pytest.approx(mine - other) and int(row["units"]) == 13
        assert float(row["low"]) < float(row["difference"]) < float(row["high"])
    assert "95% interval" in done.output and "documents" in done.output


def test_seeds_are_compared_by_their_mean(tmp_path):
    def seeded(name, seed, **config):
        run = saved_run(tmp_path / name, **config)
        recipe = {"name": "text.test", "modality": "text", "train": {"seed": seed}, "data": {"seed": seed}}
        (tmp_path / name / "recipe.json").write_text(json.dumps(recipe))
        return run

    runs, out = [seeded("a", 0), seeded("b", 1), seeded("c", 0, position="rope")], tmp_path / "out"
    with torch.no_grad():
        model = CausalLM.from_pretrained(tmp_path / "b" / "model")
        next(model.parameters()).mul_(2)
        model.save_pretrained(tmp_path / "b" / "model")
    options = ("perplexity", "--lengths", "16", "--samples", 13, "--out", out, "--against")
    done = invoke(*runs, *options, runs[2])
    assert done.exit_code == 0, done.stderr
    (row,) = table(out / "perplexity.paired.csv")
    found = {label: content["rows"][0]["bits_per_byte"] for label, content in contents(out, "perplexity").items()}
    first, second, other = (found[f"text.test ({name})"] for name in "abc")
    assert first != second and float(row["difference"]) == pytest.approx((first + second) / 2 - other)
    assert (row["model"], row["seeds"], row["against_seeds"]) == ("text.test (a)", "2", "1")
    assert float(row["seed_deviation"]) == pytest.approx(abs(first - second) / 2**0.5)
    assert "2, 1" in done.output
    again = invoke(*runs, *options, runs[1])
    assert again.exit_code == 0 and table(out / "perplexity.paired.csv")[0]["against"] == "text.test (a)"
    assert invoke(*runs[:2], *options, runs[0]).exit_code == 2  # nothing else to compare


@pytest.mark.slow
def test_all_names_every_evaluator(tmp_path, runs):
    done = invoke(runs[0], "all", "--lengths", 300, "--samples", 1, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    assert {p.stem for p in (tmp_path / "out").glob("*.csv")} == set(EVALUATORS) - {"heads"}
    assert len(list((tmp_path / "out").glob("heads.*.tsv"))) == 1  # a listing
    figures = {f"{name}.png" for name in EVALUATORS} | {"overview.png", "passkey_depth.png"}
    assert {p.name for p in (tmp_path / "out").glob("*.png")} == figures


def test_help_lists_the_options_of_the_models_evaluators(runs):
    text = invoke(runs[0], "passkey", "--help")
    assert text.exit_code == 0 and "--lengths" in text.output and "--mode" not in text.output
    every = invoke("--help").output
    assert "--lengths" in every and "--mode" in every and "resolution" in every


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["text_ggd_tinny", "passkey"], ["'text_ggd_tinny'", "text_ggd_tiny"]),
        (["text_ggd_tiny", "paskey"], ["'paskey'", "'passkey'"]),
        (["text_ggd_tiny"], ["model"]),
        ([], ["EVAL"]),
        (["text_ggd_tiny", ","], ["','", "perplexity", "passkey"]),
        ([",", "passkey"], ["','", "text_ggd_ssmax_tiny.facts"]),
        (["text_nothing_*", "passkey"], ["'text_nothing_*'"]),
        (["text_ggd_tiny", "passkey", "--lengths", "1x"], ["--lengths", "'1x'"]),
        (["text_ggd_tiny", "passkey", "--lengths", "1"], ["lengths", "[1]"]),
        (["text_ggd_tiny", "passkey", "--samples", "0"], ["samples", "0"]),
        (["text_ggd_tiny", "passkey", "--lengths", "12"], ["12", "41 tokens"]),
        (["text_ggd_tiny", "passkey", "--template", "heldot"], ["'heldot'", "'heldout'"]),
        (["text_ggd_tiny", "passkey", "--filler", "gras"], ["'gras'", "'grass'"]),
        (["text_ggd_tiny", "passkey", "--filler", "file:hay.txt"], ["no file hay.txt"]),
        (["text_ggd_tiny", "passkey", "--facts", "1,5"], ["facts=5", "heldout"]),
        (["text_ggd_tiny", "niah", "--template", "heldout", "--prefix-digits", "1"], ["'heldout'", "prefix_digits=1"]),
        (["text_ggd_tiny", "perplexity", "--against", "text_ggd_tiny"], ["'text_ggd_tiny'", "another"]),
        (["text_ggd_tiny", "perplexity", "--against", "text_goat_tinny"], ["'text_goat_tinny'", "text_goat_tiny"]),
        (
            ["text_ggd_tiny", "perplexity", "--against", "text_ggd*_tiny.*"],
            ["text_ggd_tiny.facts", "text_ggd_ssmax_tiny.facts"],
        ),
        (["text_ggd_tiny", "perplexity", "--lengths", "9000000"], ["9000000"]),
        (["text_ggd_tiny", "perplexity", "--source", "sotu-exerpt"], ["sotu-excerpt"]),
        (["text_ggd_tiny", "passkey", "--dtype", "float23"], ["'float32'"]),
        (["text_ggd_tiny", "passkey", "--sizes", "96"], ["--sizes"]),
        (["--sizes", "96", "text_ggd_tiny", "passkey"], ["--sizes", "passkey", "--lengths"]),
        (["runs/none", "passkey"], ["'runs/none'"]),
        (["text_rope_tiny", "passkey", "--set", "position_option.scaling=yarn"], ["'position_options'"]),
        (["text_rope_tiny", "passkey", "--set", "dim=64"], ["'dim': 64"]),
        (["text_rope_tiny", "passkey", "--set", "dim"], ["'dim'"]),
        (["text_ggd_tiny", "vision_ggd2d_small_patch16", "passkey"], ["text and vision"]),
        (["vision_goat_ssmax_tiny_patch8.glyphs", "markov-9", "resolution"], ["dna and vision"]),
    ],
)
def test_wrong_requests_name_the_nearest_valid_one(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = invoke(*arguments)
    assert done.exit_code == 2 and done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    assert all(word in done.stderr.replace("\n", " ") for word in words), done.stderr
    assert not list(tmp_path.iterdir())


def test_the_modality_of_a_word_is_known_without_loading_it(tmp_path, runs):
    run = runs[0]
    assert [modality_of(word) for word in (run, f"{run}/model", "vision_*.glyphs", "dna_x", "markov-2", "*")] == [
        *("text", "text", "vision", "dna", None, None)
    ]
    (tmp_path / "empty").mkdir()
    assert modality_of(str(tmp_path / "empty")) is None


def test_override_keeps_the_weights_and_changes_the_angles():
    torch.manual_seed(0)
    model = CausalLM(TextConfig(**(SMALL | {"position": "rope"})))
    changed = override(model, parse_overrides(["position_options.scaling=linear", "position_options.factor=4"]))
    assert changed.config.position_options == {"scaling": "linear", "factor": 4}
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), changed.parameters(), strict=True))
    tokens = torch.arange(64)[None]
    assert not torch.allclose(model(tokens), changed(tokens), atol=1e-4)


def test_override_of_one_option_of_a_sum_keeps_the_others():
    options = {"rope": {"theta": 500.0}, "table": {"length": 8}}
    model = CausalLM(TextConfig(**(SMALL | {"position": "rope+table", "position_options": options})))
    settings = [
        "position_options.rope.scaling=linear",
        "position_options.rope.factor=4",
        "position_options.table.beyond=zero",
    ]
    changed = override(model, parse_overrides(settings)).config.position_options
    assert changed["rope"] == {"theta": 500.0, "scaling": "linear", "factor": 4}
    assert changed["table"] == {"length": 8, "beyond": "zero"}


# -------------------------------------------------------------------------------------------------------- images


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A folder source of two classes, nine held-out images of 40 pixels each."""
    folder, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            (folder / split / label).mkdir(parents=True)
            for n in range(9 if split == "val" else 1):
                pixels = rng.integers(0, 255, (40, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / label / f"{n}.png")
    return f"folder:{folder}"


def vision_run(folder, source, seed=0, *, data=None, train=None, **config):
    torch.manual_seed(seed)
    small = dict(img_size=16, patch_size=8, num_classes=2, dim=16, num_layers=1, num_heads=2, hidden_dim=16)
    options = {"position": "ggd2d"} | config
    VisionTransformer(VisionConfig(**(small | options))).save_pretrained(folder / "model")
    recipe = {"name": f"vision.{options['position']}_test", "modality": "vision"}
    recipe["data"] = {"source": source, "num_classes": 2, "seed": seed} | (data or {})
    recipe["train"] = {"steps": 9, "seed": seed} | (train or {})
    (folder / "recipe.json").write_text(json.dumps(recipe))
    return str(folder)


def labelled_folder(root, *classes, count=6, size=40):
    rng = np.random.default_rng(len(classes))
    for label in classes:
        (root / label).mkdir(parents=True)
        for n in range(count):
            Image.fromarray(rng.integers(0, 255, (size, size, 3), dtype=np.uint8)).save(root / label / f"{n}.png")
    return f"folder:{root}"


def test_a_run_is_measured_on_what_its_training_held_out(tmp_path):
    """All of another folder, under the classes of the one trained on; not the tenth that the other would hold out."""
    train = labelled_folder(tmp_path / "train_images", "ant", "bee", "cat")
    other = labelled_folder(tmp_path / "other_images", "bee", "cat")
    data = {"heldout_source": other, "num_classes": 3}
    runs = [vision_run(tmp_path / name, train, n, data=data, num_classes=3) for n, name in enumerate("ab")]
    out = tmp_path / "out"
    done = invoke(*runs, "resolution", "--sizes", "16", "--out", out)
    assert done.exit_code == 0, done.output
    models = list(contents(out, "resolution").values())
    assert {model["source"] for model in models} == {f"all of {other}, classes of {train}"}
    held_out = open_heldout(heldout_by(find_targets(runs[:1], {}, "cpu", "float32")[0].data)).items
    labels = [held_out[n][1] for n in range(len(held_out))]
    assert sorted(labels) == [1] * 6 + [2] * 6
    model = VisionTransformer.from_pretrained(tmp_path / "a" / "model").eval()
    with torch.no_grad():
        right = sum(
            int(model(preprocess(held_out[n][0], 16, 16, train_size=16)[None]).argmax()) == label
            for n, label in enumerate(labels)
        )
    row = models[0]["rows"][0]
    assert (row["images"], row["top1"]) == (12, pytest.approx(right / 12))


def test_images_left_out_are_in_the_table_and_the_files(tmp_path):
    source = labelled_folder(tmp_path / "images" / "val", "cat", "dog")
    labelled_folder(tmp_path / "images" / "train", "cat", "dog", count=1)
    Image.new("RGB", (24, 24)).save(tmp_path / "images" / "val" / "cat" / "0.png")
    run, out = vision_run(tmp_path / "run", source.removesuffix("/val")), tmp_path / "out"
    done = invoke(run, "resolution", "--sizes", "16,32", "--out", out)
    assert done.exit_code == 0, done.output
    assert [line.split()[-3:] for line in done.output.splitlines() if "skipped" in line] == [["skipped", "1", "1"]]
    rows = table(out / "resolution.csv")
    assert {(row["skipped"], row["skipped_because"]) for row in rows} == {("1", "1 too small")}
    assert [m["rows"][0]["skipped"] for m in contents(out, "resolution").values()] == [1]
    done = invoke(run, "resolution", "--sizes", "16,32", "--mode", "resized", "--out", out)
    assert done.exit_code == 0 and "skipped" not in done.output


@pytest.mark.slow
def test_images_run_from_the_command_line(tmp_path, pictures, monkeypatch):
    runs = [vision_run(tmp_path / "run", pictures), vision_run(tmp_path / "run-s1", pictures, seed=1)]
    runs.append(vision_run(tmp_path / "other", pictures, position="learned"))
    out = tmp_path / "out"
    request = (*runs, "resolution", "--sizes", "16,24,40", "--batch-tokens", 100, "--out", out)
    done = invoke(*request)
    assert done.exit_code == 0, done.output
    found = contents(out, "resolution")
    labels = [f"vision.{name}" for name in ("ggd2d_test (run)", "ggd2d_test (run-s1)", "learned_test (other)")]
    assert {label: model["group"] for label, model in found.items()} == dict(
        zip(labels, ["vision.ggd2d_test (run)"] * 2 + [""], strict=True)
    )
    assert {m["train_size"] for m in found.values()} == {16} and {m["source"] for m in found.values()} == {pictures}
    rows = table(out / "resolution.csv")
    assert [(row["model"], row["size"]) for row in rows] == [(m, n) for m in labels for n in ("16", "24", "40")]
    assert {row["images"] for row in rows} == {"18"}
    assert (out / "resolution.png").read_bytes().startswith(b"\x89PNG")
    assert done.output.count("±") > 6  # the table's, at three sizes

    monkeypatch.setattr(Resolution, "measure", None)  # all is there: nothing is measured again
    alone = invoke(*request, "--no-group-seeds")
    assert alone.exit_code == 0 and "±" not in alone.output
    assert [m["rows"] for m in contents(out, "resolution").values()] == [m["rows"] for m in found.values()]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--lengths", "128"], ["--lengths"]),
        (["--seed", "1"], ["--seed"]),
        (["--sizes", "16,20"], ["20", "8", "16", "24"]),
        (["--sizes", "big"], ["'big'"]),
        (["--sizes", "48"], ["48", "40"]),
        (["--aspect", "2"], ["--aspect", "'2'"]),
        (["--aspect", "wide"], ["--aspect", "'wide'"]),
        (["--mode", "upsample"], ["'upsampled'"]),
        (["--source", "folder:/nowhere"], ["/nowhere"]),
    ],
)
def test_wrong_requests_for_images(tmp_path, pictures, options, words):
    done = invoke(vision_run(tmp_path / "run", pictures), "resolution", *options, "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert all(word in done.stderr.replace("\n", " ") for word in words), done.stderr
    assert not (tmp_path / "out").exists()


def test_models_of_other_data_are_not_measured_together(tmp_path, pictures):
    runs = [vision_run(tmp_path / "a", pictures), vision_run(tmp_path / "b", "glyphs-builtin")]
    done = invoke(*runs, "resolution", "--out", tmp_path / "out")
    assert done.exit_code == 2 and "--source" in done.stderr
    assert invoke(*runs, "resolution", "--source", pictures, "--dry-run").exit_code == 0


def test_seeds_are_equal_in_everything_else(tmp_path, pictures):
    def grouped(*runs, asked=None):
        return seed_groups(find_targets([str(run) for run in runs], {}, "cpu", "float32"), asked)

    first = vision_run(tmp_path / "goat", pictures)
    second = vision_run(tmp_path / "any-name", pictures, 1)
    label = "vision.ggd2d_test (goat)"
    assert grouped(first, second) == {label: label, "vision.ggd2d_test (any-name)": label}
    assert grouped(first, second, asked=False) == {}
    for n, options in enumerate(({"train": {"steps": 10}}, {"data": {"augment": "none"}}, {"dim": 32})):
        other = vision_run(tmp_path / f"goat-s{n + 2}", pictures, n + 2, **options)
        assert grouped(first, other) == {}
    again = vision_run(tmp_path / "again", pictures)  # the same seed
    assert grouped(first, again) == {} and set(grouped(first, again, asked=True).values()) == {label}


def test_shipped_weights_join_the_runs_of_their_recipe(tmp_path):
    """What `tools/weights.py measure` asks for: the published first seed, and run folders of the others."""
    name = "text_ggd_ssmax_tiny"
    weights, steps = f"{name}.facts", manifest()[f"{name}.facts"]["steps"]

    def run(folder, seed, **changes):
        create_model(name).save_pretrained(tmp_path / folder / "model")
        recipe = dataclasses.asdict(find_recipe("text.ggd_ssmax_tiny"))
        recipe["train"] |= {"seed": seed, "steps": steps} | changes
        recipe["data"]["seed"] = seed
        (tmp_path / folder / "recipe.json").write_text(json.dumps(recipe))
        return str(tmp_path / folder)

    def grouped(*names):
        return seed_groups(find_targets(list(names), {}, "cpu", "float32"), None)

    runs = [run("ggd_ssmax-s1", 1), run("ggd_ssmax-s2", 2)]
    labels = [weights, "text.ggd_ssmax_tiny (ggd_ssmax-s1)", "text.ggd_ssmax_tiny (ggd_ssmax-s2)"]
    assert grouped(weights, "text_rope_ssmax_tiny.facts", *runs) == dict.fromkeys(labels, weights)
    longer = run("longer-s3", 3, steps=steps + 1)
    assert grouped(weights, longer) == {}
    assert grouped(weights, run("other-rate", 4, batch=4), *runs) == dict.fromkeys(labels[1:], labels[1])
    assert grouped(weights, run("the-same", 0)) == {}  # the weights' own run: no second seed
