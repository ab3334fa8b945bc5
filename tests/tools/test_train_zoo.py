"""The tool that trains, sweeps, measures and publishes the zoo: what it asks the project's commands for."""

from __future__ import annotations

import csv
import dataclasses
import json

import pytest
import typer

from modalities.evaluation import ModelResult
from recipes.registry import find_recipe
from tools import train_zoo
from zoo.pretrained import manifest


@pytest.mark.parametrize("name", train_zoo.FAMILIES)
def test_every_method_and_variant_has_a_recipe(name):
    kind = train_zoo.FAMILIES[name]
    for method in kind.methods:
        assert find_recipe(kind.recipe(method)).modality == kind.modality
    for method, *_ in kind.variants.values():
        find_recipe(kind.recipe(method))


def test_variants_are_models_that_can_be_built():
    from modalities.contract import find_modality
    from recipes.config import apply_overrides

    kind = train_zoo.FAMILIES["text"]
    build = find_modality("text").build
    for name, (method, *settings) in kind.variants.items():
        recipe, _ = apply_overrides(find_recipe(kind.recipe(method)), list(settings))
        assert build(recipe.model.name, recipe.model.options, recipe.data).config.train_context == 256, name


def test_seeds_of_methods_and_of_baselines_are_groups_and_methods_come_first():
    kind = train_zoo.FAMILIES["dna_copy"]
    labels = ["mixer-s1", kind.label("rope", 0), "mixer", kind.label("goat", 1), "markov-12", kind.label("goat", 0)]
    found = train_zoo._in_order(kind, [ModelResult(label, 1024, []) for label in labels])
    goat = kind.weights("goat")
    assert [(r.label, r.group) for r in found] == [
        (goat, goat), (kind.label("rope", 0), ""), (kind.label("goat", 1), goat),
        ("markov-12", ""), ("mixer", "mixer"), ("mixer-s1", "mixer"),
    ]  # fmt: skip


def test_figures_show_the_methods_of_several_seeds_and_baselines():
    kind = train_zoo.FAMILIES["dna"]
    several = [kind.label(method, seed) for method, seeds in (("rope", (0, 1, 2)), ("goat", (0, 2))) for seed in seeds]
    labels = ["mixer", *several, kind.label("nope", 0), "markov-12"]
    drawn = train_zoo._drawn(kind, [ModelResult(label, 256, []) for label in labels])
    assert [result.label for result in drawn] == [label for label in labels if "nope" not in label]
    alone = [ModelResult(kind.label(method, 0), 256, []) for method in ("rope", "nope")]
    assert train_zoo._drawn(kind, alone) == alone  # of one seed each, all


def test_runs_of_seeds_have_folders_and_labels_of_their_own():
    kind = train_zoo.FAMILIES["text"]
    assert kind.run("ggd", 0) != kind.run("ggd", 1)
    assert kind.label("ggd", 0) == kind.weights("ggd") and kind.run("ggd", 1).name in kind.label("ggd", 1)
    assert train_zoo.seed_settings(0) == () and train_zoo.seed_settings(2) == ("train.seed=2", "data.seed=2")


def test_a_sweep_takes_one_rate_for_all_weights_and_then_the_best_of_each_prior(monkeypatch, tmp_path):
    """Held-out losses are least at 4e-3; there short runs prefer a prior's rate of 20 times that, whole ones 5 times."""
    asked = []

    def train_all(queue, jobs):
        for run in queue:
            values = dict(setting.split("=") for setting in run.settings)
            lr, scale, whole = (
                float(values["optim.lr"]),
                float(values["optim.prior_lr_scale"]),
                "train.steps" not in values,
            )
            asked.append((run.recipe, lr, scale, whole))
            (run.folder / "model").mkdir(parents=True)
            loss = abs(lr - 4e-3) * 100 + abs(scale - (5 if whole else 20)) / 100
            records = [{"step": 1, "loss": 9.0}, {"step": 2, "heldout_loss": 8.0}, {"step": 400, "heldout_loss": loss}]
            (run.folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    monkeypatch.setattr(train_zoo, "train_all", train_all)
    monkeypatch.setattr(train_zoo, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(train_zoo, "ROOT", tmp_path)
    train_zoo.sweep("text")
    methods = train_zoo.FAMILIES["text"].methods
    fixed = {"alibi", "cable", "rope"}  # their positions have no parameters of their own
    # Three rates of the weights; of a prior with parameters two more at the best, and the better two in full.
    assert len(asked) == 7 * len(methods) - 4 * len(fixed)
    assert {scale for *_, scale, whole in asked if whole} == {5.0, 20.0}
    with (tmp_path / "benchmarks" / "text_tiny" / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    best = [
        tuple(row[name] for name in ("method", "lr", "prior_lr_scale", "steps")) for row in rows if row["best"] == "1"
    ]
    assert best == [(method, "0.004", "5.0", "300" if method in fixed else "4500") for method in methods]
    asked.clear()
    train_zoo.sweep("text")
    assert not asked  # finished runs are kept


def test_the_recipes_hold_what_the_sweep_found():
    kind = train_zoo.FAMILIES["text"]
    with (kind.measured / "sweep.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["best"] == "1"]
    found = {row["method"]: (float(row["lr"]), float(row["prior_lr_scale"])) for row in rows}
    recipes = {method: find_recipe(kind.recipe(method)).optim for method in kind.methods}
    assert found == {method: (optim.lr, optim.prior_lr_scale) for method, optim in recipes.items()}


def test_a_card_has_a_column_for_every_score_and_the_commands_that_measure_them():
    kind = train_zoo.FAMILIES["text"]
    rows = [{"length": 256, "free_generation (facts=5)": 0.9, "nll": 2.0}, {"length": 16384, "nll": 2.1}]
    card = train_zoo.card(kind, "text_ggd_tiny.facts", manifest()["text_ggd_tiny.facts"] | {"measured": rows})
    assert "| length | free_generation (facts=5) | nll |" in card and "| 16384 | – | 2.1 |" in card
    assert "text_ggd_tiny.facts passkey --template heldout --facts 1,5" in card


@pytest.mark.parametrize(("family", "names"), [("text", "ggd_goat-rank5"), ("dna", "")])
def test_unknown_variants_are_refused(family, names):
    with pytest.raises(Exception, match="expected some of"):
        train_zoo.variants(family, names)


def test_the_summary_has_a_row_a_method_with_the_spread_of_its_seeds(monkeypatch):
    from modalities.evaluation import ModelResult

    kind = train_zoo.FAMILIES["text"]
    columns = {column.score for column in kind.summary}

    def load_results(evaluator, out):
        places = {column.place for column in kind.summary if column.evaluator == evaluator.name}
        rows = [{"length": place} | dict.fromkeys(columns, 0.5) for place in places]
        further = [row | dict.fromkeys(columns, 0.7) for row in rows]
        slow = [row | dict.fromkeys(columns, 0.3) for row in rows]
        found = {kind.label("ggd", 0): ("ggd", rows), kind.label("ggd", 2): ("ggd", further)}
        found |= {kind.label("rope", 0): ("rope", slow)}
        if "variants" in out.parts:
            found = {"text.ggd_goat_ssmax_tiny (text_variant_rank8)": ("ggd_goat_ssmax", slow)}
        return [ModelResult(label, 256, rows, method=method) for label, (method, rows) in found.items()]

    def settings(evaluator, out):
        conditions = (
            {"facts": (1, 5), "template": "heldout"}
            if evaluator.name == "passkey" and out == kind.measured / ""
            else {}
        )
        return evaluator.settings_class(**conditions)

    monkeypatch.setattr(train_zoo, "load_results", load_results)
    monkeypatch.setattr(train_zoo, "stored_settings", settings)
    head, _, *lines = train_zoo.summary(kind).splitlines()
    assert len(lines) == len(kind.methods) and head.count("|") == lines[0].count("|")
    by_method = {line.split("`")[1]: line for line in lines}
    assert "0.600 ± 0.141" in by_method["ggd"] and "32 + 0" in by_method["ggd"]
    assert by_method["rope"].count("0.300†") == 11  # shares; of bits per byte less is better
    assert by_method["ggd"].count("†") == 3
    assert "–" in by_method["goat"] and "32 + 9" in by_method["goat"]

    lines = {line.split("`")[1]: line for line in train_zoo.ablation(kind).splitlines()[2:]}
    assert list(lines) == ["ggd_goat_ssmax", "goat", "alibi", *kind.variants]
    assert "32 + 21" in lines["rank8"] and lines["rank8"].count(" 0.300 ") == len(kind.summary)
    assert "0.300" not in lines["rank4"] and "–" in lines["rank4"]
    assert "23 + 9" in lines["inside"]  # of a head of 32


@pytest.mark.parametrize("name", ["scenes", "scenes_shapes", "count"])
def test_scene_models_are_published_as_they_are_registered_and_their_variants_differ_in_reach(name):
    from modalities.contract import find_modality
    from recipes.config import apply_overrides
    from zoo.registry import model_entry

    kind, build = train_zoo.FAMILIES[name], find_modality("vision").build
    for method in kind.methods:
        recipe = find_recipe(kind.recipe(method))
        made = build(recipe.model.name, recipe.model.options, recipe.data)
        entry = model_entry(kind.weights(method).partition(".")[0])
        assert made.config == entry.build(**entry.config).config
        assert kind.describe(
            {"data": dataclasses.asdict(recipe.data), "train": {"steps": 1, "batch": 1}, "model": {"options": {}}}
        )
    slowest = set()
    for method, *settings in kind.variants.values():
        recipe, _ = apply_overrides(find_recipe(kind.recipe(method)), settings)
        prior = build(recipe.model.name, recipe.model.options, recipe.data).layers[0].attention.prior
        slowest.add((method, round(float(prior.spectral.y.omega[-1]), 6)))
    assert len(slowest) == len(kind.variants) == 8


def test_a_call_may_concern_some_methods_alone():
    call = train_zoo.Call("find", methods=("rope2d_axial",))
    assert call.concerns("rope2d_axial") and not call.concerns("goat") and train_zoo.Call("find").concerns("goat")


@pytest.mark.parametrize("bundled", [10_000, 2_000_000])
def test_weights_go_into_the_package_or_where_they_are_larger_into_the_release_folder(bundled, tmp_path, monkeypatch):
    from recipes.config import resolve
    from zoo import create_model, pretrained

    kind = dataclasses.replace(train_zoo.FAMILIES["text"], methods=("alibi",))
    for name, value in {"FAMILIES": {"text": kind}, "RUNS": tmp_path / "runs", "WEIGHTS": tmp_path / "package"}.items():
        monkeypatch.setattr(train_zoo, name, value)
    monkeypatch.setattr(train_zoo, "RELEASE", tmp_path / "release")
    monkeypatch.setattr(train_zoo, "BUNDLED", bundled)
    run, name = kind.run("alibi", 0), kind.weights("alibi")
    create_model("text_alibi_tiny").save_pretrained(run / "model")
    recipe = resolve(find_recipe("text.alibi_tiny"), world=1, device="cpu").to_dict()
    (run / "recipe.json").write_text(json.dumps(recipe))
    (run / "environment.json").write_text(json.dumps({"commit": "unknown"}))
    train_zoo.publish("text", source="hf:me/weights")
    entry, file = json.loads((tmp_path / "package/manifest.json").read_text())[name], f"{name}.safetensors"
    beyond = entry["bytes"] > bundled
    assert (
        ("source" in entry)
        == beyond
        == (tmp_path / "release" / file).is_file()
        != (tmp_path / "package" / file).is_file()
    )
    monkeypatch.setattr(pretrained, "WEIGHTS", tmp_path / "package")
    monkeypatch.setenv("PRIORZOO_WEIGHTS", str(tmp_path / "release"))
    assert pretrained.verified_file(name).stat().st_size == entry["bytes"]


def test_published_weights_are_trained_on_and_compared_with_themselves(monkeypatch):
    queue, calls = [], []
    monkeypatch.setattr(train_zoo, "train_all", lambda runs, jobs: queue.extend(runs))
    monkeypatch.setattr(train_zoo, "_evaluate", lambda *words: calls.append(words))
    train_zoo.extend("text", "alibi")
    [run], name = queue, "text_alibi_tiny.facts"
    assert run.recipe == "text.alibi_tiny_extend" and run.settings == (f"model.init_from={name}",)
    assert [each.evaluators for _, each, *_ in calls] == ["passkey", "perplexity", "niah"]
    for models, _, out, against in calls:
        assert (
            models == [str(run.folder)] and out.parts[-2:] == ("extended", "alibi") and against == ("--against", name)
        )
    with pytest.raises(ValueError, match=r"dna\.goat_tiny_extend"):  # no such recipe
        train_zoo.extend("dna", "goat")
    for command in (train_zoo.extend, train_zoo.publish, train_zoo.measure):
        with pytest.raises(typer.BadParameter, match=r"'?ggdd'?: expected some of ggd_goat,"):
            command("text", methods="ggdd")
    assert len(queue) == 1


@pytest.mark.parametrize("name", [name for name, kind in train_zoo.FAMILIES.items() if kind.measured.is_dir()])
def test_the_stored_results_can_be_drawn_again(name):
    """Every evaluator that the family calls, in the folder where its call puts results."""
    from modalities.contract import find_modality

    kind = train_zoo.FAMILIES[name]
    known, read = find_modality(kind.modality).evaluators, 0
    for call in kind.calls:
        for evaluator in call.evaluators.split(","):
            folder = kind.measured / call.part
            if (folder / evaluator).is_dir():
                results = train_zoo.load_results(known[evaluator], folder)
                assert results and train_zoo.stored_settings(known[evaluator], folder)
                read += 1
    assert read


def test_weights_of_further_seeds_are_kept_and_measure_as_their_run(monkeypatch, tmp_path):
    from recipes.targets import find_targets

    kind = train_zoo.FAMILIES["text"]
    monkeypatch.setattr(train_zoo, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(train_zoo, "FURTHER", tmp_path / "seeds")
    monkeypatch.setattr(train_zoo, "WEIGHTS", tmp_path / "weights")
    with pytest.raises(typer.BadParameter, match="no finished run"):
        train_zoo.publish("text", methods="ggd", seeds="1")
    run, recipe = kind.run("ggd", 1), dataclasses.asdict(find_recipe(kind.recipe("ggd")))
    recipe["train"]["seed"] = recipe["data"]["seed"] = 1
    train_zoo._fresh(kind.recipe("ggd")).save_pretrained(run / "model")
    (run / "recipe.json").write_text(json.dumps(recipe))
    (run / "environment.json").write_text(
        json.dumps({"commit": "c", "versions": {}, "platform": "p", "command": ["/x"]})
    )
    assert kind.measurable("ggd", 1) == run and kind.measurable("ggd", 2) is None
    train_zoo.publish("text", methods="ggd", seeds="1")
    kept = kind.measurable("ggd", 1)
    assert kept == tmp_path / "seeds" / "text_ggd-s1" and not json.loads(
        (tmp_path / "weights/manifest.json").read_text()
    )
    assert "command" not in json.loads((kept / "environment.json").read_text())
    trained, stored = find_targets([str(run), str(kept)], {}, "cpu", "float32")
    assert stored.label == trained.label == kind.label("ggd", 1) and stored.seed == (1, 1)


def test_measuring_some_methods_keeps_the_paired_rows_of_the_others(tmp_path, monkeypatch):
    kind = dataclasses.replace(train_zoo.FAMILIES["dna_copy"], seeds=(0,))
    goat, rope = map(kind.weights, kind.methods)
    kind = dataclasses.replace(
        kind, methods=("goat", "rope", "alibi"), calls=(train_zoo.Call("bits", (), ("uniform",)),)
    )
    alibi, path = kind.weights("alibi"), tmp_path / "benchmarks" / "dna_copy_tiny" / "bits.paired.csv"
    path.parent.mkdir(parents=True)

    def row(model, difference, against=goat):
        return {"model": model, "against": against, "score": "bits_per_base", "difference": str(difference)}

    def evaluate(models, each, out, more=(), jobs=1):
        train_zoo.write_table(
            out / "bits.paired.csv", [row(model, 2) for model in (*models, *each.beside) if model != goat]
        )

    old = [row(alibi, 1), row(rope, 1), row("uniform", 1), row("gone", 1), row(rope, 1, "another")]
    train_zoo.write_table(path, old)
    monkeypatch.setattr(train_zoo, "ROOT", tmp_path)
    monkeypatch.setattr(train_zoo, "FAMILIES", {"dna_copy": kind})
    monkeypatch.setattr(train_zoo, "_evaluate", evaluate)
    monkeypatch.setattr(train_zoo, "draw", lambda family: None)
    train_zoo.measure("dna_copy", "alibi")
    assert train_zoo._read_rows(path) == [row(rope, 1), row(alibi, 2), row("uniform", 2)]
    train_zoo.measure("dna_copy", "goat,rope")
    assert train_zoo._read_rows(path) == [row(rope, 2), row(alibi, 2), row("uniform", 2)]
