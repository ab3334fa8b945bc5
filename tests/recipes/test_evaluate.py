"""recipes/evaluate.py from the command line down to its files: resuming, several models, run
folders, wrong requests."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import multiprocessing
import random
import re
import resource
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from modalities.text import CausalLM, TextConfig
from modalities.text.evaluators.passkey import Passkey
from modalities.vision import VisionConfig, VisionTransformer
from modalities.vision.evaluators.resolution import Resolution
from recipes import evaluate as command
from recipes import find_recipe, report
from recipes.cell_store import CellStore, outside_hash, weights_hash
from recipes.commands import facts_table
from recipes.overrides import override, parse_overrides
from recipes.targets import find_targets, seed_groups
from tests.launching import Done, call
from zoo import create_model
from zoo.console import Console
from zoo.pretrained import manifest

SMALL = dict(dim=32, num_layers=1, num_heads=2, hidden_dim=32, train_context=96)


def saved_run(folder: Path, seed: int = 0, *, data=None, model=None, **config) -> str:
    """A run folder as training leaves it: recipe.json and model/; of a text model, or of `model`
    with all its settings."""
    torch.manual_seed(seed)
    model = model or CausalLM(TextConfig(**(SMALL | config)))
    model.save_pretrained(folder / "model")
    recipe = {"name": f"{model.modality}.test", "modality": model.modality}
    recipe |= {"train": {"seed": seed}, "data": {"seed": seed} | (data or {})}
    (folder / "recipe.json").write_text(json.dumps(recipe))
    return str(folder)


def vision_run(folder: Path, source: str, seed: int = 0, **config) -> str:
    torch.manual_seed(seed)
    small = dict(
        img_size=16, patch_size=8, num_classes=2, dim=16, num_layers=1, num_heads=2, hidden_dim=16
    )
    model = VisionTransformer(VisionConfig(**(small | {"position": "ggd2d"} | config)))
    return saved_run(folder, seed, data={"source": source, "num_classes": 2}, model=model)


def invoke(*words) -> Done:
    return call(command.main, *words)


def contents(out: Path, evaluator: str) -> dict:
    """The JSON of each model, by its label."""
    results = [json.loads(path.read_text()) for path in sorted((out / evaluator).glob("*.json"))]
    return {content["label"]: content for content in results}


def table(path: Path, delimiter: str = ",") -> list[dict[str, str]]:
    with open(path) as file:
        return list(csv.DictReader(file, delimiter=delimiter))


def test_a_stopped_run_continues(tmp_path, monkeypatch):
    """What it stored before it was interrupted is not measured again; the files are those of a
    whole run."""
    monkeypatch.setattr(command, "print_plan", lambda *_, **__: None)  # which times two cells
    request = (saved_run(tmp_path / "run"), "passkey", "--lengths", 96, "--samples", 1, "--out")
    assert invoke(*request, tmp_path / "whole")[0] == 0
    measured = []
    measure = Passkey.measure
    failures = [KeyboardInterrupt(), RuntimeError("can't allocate memory")]

    def recording(self, model, cell):
        if failures and len(measured) in (7, 9):
            raise failures.pop(0)
        measured.append(cell.name)
        return measure(self, model, cell)

    monkeypatch.setattr(Passkey, "measure", recording)
    code, printed, _ = invoke(*request, tmp_path / "parts")
    assert code == 130
    assert "stopped in passkey" in printed
    assert not (tmp_path / "parts" / "passkey").exists()
    assert len(measured) == 7
    measured += ["", ""]
    code, _, errors = invoke(*request, tmp_path / "parts")
    assert code == 2
    assert re.search(r"memory at length=96/.*lower (--lengths|--batch-tokens) or --", errors)
    del measured[7:]
    assert invoke(*request, tmp_path / "parts")[0] == 0
    assert len(measured) == len(set(measured)) == 20
    folders = [tmp_path / name for name in ("whole", "parts")]
    assert len({(folder / "passkey.csv").read_bytes() for folder in folders}) == 1
    assert len({next((folder / "cells").iterdir()).read_bytes() for folder in folders}) == 1
    (path,) = (tmp_path / "parts" / "cells").iterdir()
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:5], lines[5][:30], *lines[6:]]) + "\n")
    assert "no cell in line 6: measured again" in invoke(*request, tmp_path / "parts")[1]
    assert measured[20:] == [measured[4]]
    # another measurement
    assert invoke(*request, tmp_path / "parts", "--seed", 7)[0] == 0
    assert len(measured) == 41


@pytest.mark.slow
def test_seeds_compared_by_mean(tmp_path):
    """--against adds a model; differences are over the documents that both read, seeds are
    averaged."""
    runs = [saved_run(tmp_path / "a"), saved_run(tmp_path / "b", 1)]
    runs.append(saved_run(tmp_path / "c", position="rope", ssmax=True))
    out = tmp_path / "out"
    options = ("perplexity", "--lengths", "16,32", "--samples", 13, "--out", out, "--against")
    code, printed, errors = invoke(*runs[:2], *options, f"{runs[2]}/")
    assert code == 0, errors
    assert "95% interval" in printed, errors
    assert "documents" in printed, errors
    assert "2, 1" in printed, errors
    rows = table(out / "perplexity.paired.csv")
    models = contents(out, "perplexity")
    facts = [
        (m["method"], m["evaluator"], m["train_context"], m["settings"]["lengths"])
        for m in models.values()
    ]
    assert facts == [
        (method, "perplexity", 96, [16, 32]) for method in ("ggd", "ggd", "rope_ssmax")
    ]
    written = [
        (r["model"], int(r["length"]), float(r["bits_per_byte"]))
        for r in table(out / "perplexity.csv")
    ]
    assert written == [
        (label, r["length"], r["bits_per_byte"]) for label, m in models.items() for r in m["rows"]
    ]
    assert not [path for path in out.rglob("*") if path.name.startswith(".")]
    assert [(r["length"], r["score"], r["units"]) for r in rows] == [
        (n, "bits_per_byte", "13") for n in ("16", "32")
    ]
    for k, row in enumerate(rows):
        first, second, other = (
            models[f"text.test ({name})"]["rows"][k]["bits_per_byte"] for name in "abc"
        )
        assert first != second
        assert float(row["difference"]) == pytest.approx((first + second) / 2 - other)
        assert float(row["low"]) < float(row["difference"]) < float(row["high"])
        assert (row["model"], row["seeds"], row["against_seeds"]) == ("text.test (a)", "2", "1")
        assert float(row["seed_deviation"]) == pytest.approx(abs(first - second) / 2**0.5)
    assert invoke(*runs, *options, runs[1])[0] == 0
    assert table(out / "perplexity.paired.csv")[0]["against"] == "text.test (a)"
    assert invoke(*runs[:2], *options, runs[0])[0] == 2  # nothing else to compare


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ("text_ggd_tinny passkey", ["'text_ggd_tinny'", "text_ggd_tiny"]),
        ("text_ggd_tiny paskey", ["'paskey'", "'passkey'"]),
        ("text_ggd_tiny", ["model"]),
        (", passkey", ["','", "text_ggd_ssmax_tiny.facts"]),
        ("text_ggd_tiny perplexity --against text_ggd_tiny", ["'text_ggd_tiny'", "another"]),
        (
            "text_ggd_tiny perplexity --against text_ggd*_tiny.*",
            ["text_ggd_tiny.facts", "text_ggd_ssmax_tiny.facts"],
        ),
        ("--sizes 96 text_ggd_tiny passkey", ["--sizes", "--samples"]),
        ("runs/none passkey", ["'runs/none'"]),
        ("text_rope_tiny passkey --set position_option.scaling=yarn", ["'position_options'"]),
        ("text_rope_tiny passkey --set dim=64", ["'dim': 64"]),
        ("vision_goat_ssmax_tiny_patch8.glyphs markov-9 resolution", ["dna and vision"]),
    ],
)
def test_wrong_requests_name_nearest(request_, words, tmp_path, monkeypatch):
    """Wrong requests name the nearest valid one."""
    monkeypatch.chdir(tmp_path)
    code, _, errors = invoke(*request_.split())
    assert code == 2
    assert errors.startswith("error: ")
    assert "Traceback" not in errors
    assert all(word in errors.replace("\n", " ") for word in words), errors
    assert not list(tmp_path.iterdir())


def test_override_keeps_weights():
    """Override keeps the weights and changes the options."""
    options = {"rope": {"theta": 500.0}, "table": {"length": 8}}
    model = CausalLM(
        TextConfig(**(SMALL | {"position": "rope+table", "position_options": options}))
    )
    settings = ("rope.scaling=linear", "rope.factor=4", "table.beyond=zero")
    changed = override(
        model, parse_overrides([f"position_options.{setting}" for setting in settings])
    )
    assert changed.config.position_options["rope"] == {
        "theta": 500.0,
        "scaling": "linear",
        "factor": 4,
    }
    assert changed.config.position_options["table"] == {"length": 8, "beyond": "zero"}
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), changed.parameters(), strict=True)
    )
    tokens = torch.arange(64)[None]
    assert not torch.allclose(model(tokens), changed(tokens), atol=1e-4)


# ---- images


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A folder source of two classes, six held-out images of 40 pixels each, one of them too
    small."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for split, label, n in (
        (s, c, n) for s in ("train", "val") for c in ("cat", "dog") for n in range(6)
    ):
        side = 24 if (split, label, n) == ("val", "cat", 0) else 40
        (folder / split / label).mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 255, (side, side, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / split / label / f"{n}.png")
    return f"folder:{folder}"


@pytest.mark.slow
def test_images_from_command_line(tmp_path, pictures, monkeypatch):
    """Images run from the command line."""
    runs = [
        vision_run(tmp_path / "run", pictures),
        vision_run(tmp_path / "run-s1", pictures, seed=1),
    ]
    runs.append(vision_run(tmp_path / "other", pictures, position="learned"))
    elsewhere = vision_run(tmp_path / "elsewhere", "glyphs-builtin")
    out = tmp_path / "out"
    code, _, errors = invoke(*runs, elsewhere, "resolution", "--out", out)
    # models of other data are not measured together
    assert code == 2
    assert "--source" in errors
    code, _, errors = invoke(*runs, "resolution", "--sizes", "16,20", "--out", out)
    assert code == 2
    assert "16 and 24" in errors
    assert not out.exists()
    request = (*runs, "resolution", "--sizes", "16,32", "--batch-tokens", 100, "--out", out)
    code, printed, errors = invoke(*request)
    assert code == 0, errors
    assert printed.count("±") > 6, errors
    line = "resolution: 11 of 12 pictures measured; left out: 1 too small; or --mode resized"
    assert line in " ".join(printed.split())
    models = contents(out, "resolution")
    rows = table(out / "resolution.csv")
    first = "vision.test (run)"
    labels = [first, "vision.test (run-s1)", "vision.test (other)"]
    assert {label: m["group"] for label, m in models.items()} == dict(
        zip(labels, (first, first, ""), strict=True)
    )
    assert {(m["train_size"], m["source"]) for m in models.values()} == {(16, pictures)}
    assert [(row["model"], row["size"]) for row in rows] == [
        (m, n) for m in labels for n in ("16", "32")
    ]
    assert {(row["images"], row["skipped"], row["skipped_because"]) for row in rows} == {
        ("11", "1", "1 too small")
    }
    assert any(
        line.split()[-3:-2] == ["skipped"] for line in printed.splitlines() if "skipped" in line
    )

    monkeypatch.setattr(Resolution, "measure", None)  # all is there: nothing is measured again
    assert invoke(*request).exit_code == 0
    assert [m["rows"] for m in contents(out, "resolution").values()] == [
        m["rows"] for m in models.values()
    ]


# ---- seeds


def groups(*runs) -> dict[str, str]:
    return seed_groups(find_targets([str(run) for run in runs], {}, "cpu", "float32"))


def test_shipped_weights_join_runs(tmp_path):
    """Shipped weights join the runs of their recipe."""
    name = "text_ggd_ssmax_tiny"
    weights = f"{name}.facts"
    steps = manifest()[f"{name}.facts"]["steps"]

    def run(folder, seed, **changes):
        recipe = dataclasses.asdict(find_recipe("text.ggd_ssmax_tiny"))
        recipe["train"] |= {"seed": seed, "steps": steps} | changes
        recipe["data"]["seed"] = seed
        saved_run(tmp_path / folder, model=create_model(name))
        (tmp_path / folder / "recipe.json").write_text(json.dumps(recipe))
        return str(tmp_path / folder)

    runs = [run("ggd_ssmax-s1", 1), run("ggd_ssmax-s2", 2)]
    labels = [weights, "text.ggd_ssmax_tiny (ggd_ssmax-s1)", "text.ggd_ssmax_tiny (ggd_ssmax-s2)"]
    assert groups(weights, "text_rope_ssmax_tiny.facts", *runs) == dict.fromkeys(labels, weights)
    assert groups(weights, run("longer-s3", 3, steps=steps + 1)) == {}
    assert groups(weights, run("other-rate", 4, batch=4), *runs) == dict.fromkeys(
        labels[1:], labels[1]
    )
    assert groups(weights, run("the-same", 0)) == {}  # the weights' own run: no second seed


# ---- the store of finished cells

KEY = {"evaluator": "bits", "model": "a model", "weights": "00", "settings": {"seed": 1}}


def filled(folder, count=3):
    store = CellStore(folder, KEY)
    for n in range(count):
        store.add(f"cell={n}", {"score": n / 3, "undefined": math.nan})
    return store


def test_cut_line_is_measured_again(tmp_path):
    """A line that a stopped run cut off is measured again."""
    path = filled(tmp_path).path
    whole = path.read_bytes()
    for size in (
        len(whole) - 1,
        len(whole) - 20,
        whole.index(b"\n") + 5,
        10,
    ):  # the last cuts the key itself
        path.write_bytes(whole[:size])
        left = max(whole[:size].count(b"\n") - 1, 0)
        assert list(CellStore(tmp_path, KEY).finished) == [f"cell={n}" for n in range(left)]
        filled(tmp_path)
        assert path.read_bytes() == whole


@pytest.mark.slow
def test_processes_share_a_file(tmp_path):
    """Five append the same cells in orders of their own, and two of them are killed meanwhile."""

    def append(seed):
        store = CellStore(tmp_path, KEY)
        for n in random.Random(seed).sample(range(300), 300):
            store.add(f"cell={n}", {"score": n / 3, "of": [n] * 200})

    processes = [
        multiprocessing.get_context("fork").Process(target=append, args=(seed,))
        for seed in range(5)
    ]
    for process in processes:
        process.start()
    path = CellStore(tmp_path, KEY).path
    for process, lines in zip(processes[:2], (40, 120), strict=True):
        while not path.exists() or path.read_bytes().count(b"\n") < lines:
            pass
        process.kill()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes[2:]] == [0, 0, 0]
    names = [json.loads(line).get("cell") for line in path.read_text().splitlines()]
    assert names[0] is None
    assert sorted(names[1:]) == sorted(f"cell={n}" for n in range(300))
    assert CellStore(tmp_path, KEY).damaged == []
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_failed_write_changes_nothing(tmp_path):
    """A write that fails leaves the file as it was."""
    store = filled(tmp_path)
    before = store.path.read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    # a write beyond the limit fails with EFBIG, after half of it
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limit[1]))
        with pytest.raises(OSError):
            store.add("next", {"score": 1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert store.path.read_bytes() == before
    assert "next" not in store.finished
    store.add("next", {"score": 1})
    assert list(CellStore(tmp_path, KEY).finished) == ["cell=0", "cell=1", "cell=2", "next"]


@pytest.mark.parametrize("line", ["[]", '{"cell": "cell=1"}', '{"cell": "cell=1", "va'])
def test_damaged_line_costs_one_cell(tmp_path, line):
    """A damaged line costs its cell alone."""
    path = filled(tmp_path).path
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], line, *lines[3:]]) + "\n")
    store = CellStore(tmp_path, KEY)
    assert list(store.finished) == ["cell=0", "cell=2"]
    assert store.damaged == [3]
    store.add("cell=1", {"score": 1 / 3})
    again = CellStore(tmp_path, KEY)
    assert sorted(again.finished) == ["cell=0", "cell=1", "cell=2"]
    assert again.damaged == [3]
    path.write_text("\n".join([line, *lines[1:]]) + "\n")
    with pytest.raises(ValueError, match=rf"{path.name} line 1\b"):
        CellStore(tmp_path, KEY)
    assert CellStore(tmp_path, KEY | {"settings": {"seed": 2}}).finished == {}


def test_outside_models_are_keyed():
    """Another rotary base changes buffers that are not saved, another epsilon nothing but the
    configuration."""
    transformers = pytest.importorskip("transformers")
    sizes = dict(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )

    def hashes(theta: float = 1e4, **options):
        torch.manual_seed(0)
        rope = {"rope_type": "default", "rope_theta": theta}
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**sizes, rope_parameters=rope, **options)
        )
        return weights_hash(model), outside_hash(model)

    assert hashes() == hashes()
    for other in (hashes(3.0), hashes(rms_norm_eps=0.5), hashes(sliding_window=4)):
        assert other[0] == hashes()[0]
        assert other[1] != hashes()[1]
    assert outside_hash(create_model("vision_goat_tiny_patch8")) is None


def test_flipped_bit_is_noticed(tmp_path):
    """No flipped bit changes a stored number."""
    store = filled(tmp_path)
    whole = store.path.read_bytes()
    for bit in random.Random(0).sample(range(8 * whole.index(b"\n") + 8, 8 * len(whole)), 100):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        store.path.write_bytes(damaged)
        cells = CellStore(tmp_path, KEY).finished
        assert repr(cells) == repr({name: store.finished[name] for name in cells})


@pytest.mark.filterwarnings("error:Glyph", "error:constrained_layout")
def test_folders_of_any_name(tmp_path):
    """Brackets, markup, commas, escape sequences, names as long as a file system allows, and names
    alike but for a sign."""
    names = ["lr[1e-3],[bold]a[/red]*\x1b[31m", "n" * 250, "a b", "a_b"]
    runs = [saved_run(tmp_path / name) for name in names]  # of one seed: no seeds of one set-up
    out = tmp_path / "out"
    result = invoke(
        *runs, "perplexity", "--lengths", "32", "--samples", 2, "--out", out, "--against", runs[0]
    )
    assert result.exit_code == 0, result.stderr
    assert "\x1b" not in result.output
    assert len(contents(out, "perplexity")) == 4


def test_time_is_estimated_first(tmp_path):
    """By two timed cells of each evaluator, which a dry run does not store and a measurement goes
    on from."""
    words = [
        saved_run(tmp_path / "run"),
        "perplexity",
        "--lengths",
        "32,64",
        "--samples",
        2,
        "--out",
        tmp_path / "out",
    ]
    dry = invoke(*words, "--dry-run")
    assert dry.exit_code == 0
    assert "tokens to read; " in dry.output
    assert not (tmp_path / "out").exists()
    assert re.search(r"\d:\d\d, by two cells", invoke(*words).output)


def test_imported_model_has_options(tmp_path):
    """A model of an imported file has its evaluators options."""
    code = """
from zoo.catalog import model_entry, register_model
entry = model_entry("text_ggd_tiny")
register_model("text_mine", entry.build, modality="text", config=entry.config)
"""
    (tmp_path / "mine.py").write_text(code)
    words = [
        "text_mine",
        "passkey",
        "--import",
        str(tmp_path / "mine.py"),
        "--lengths",
        "64",
        "--samples",
        "1",
    ]
    planned = invoke(*words, "--dry-run")
    assert planned.exit_code == 0
    assert "passkey of text_mine" in planned.output


@pytest.mark.slow
def test_figure_formats_and_width(tmp_path):
    """Figures come in the formats and the width of a page."""
    words = [
        saved_run(tmp_path / "run"),
        "perplexity,passkey",
        "--lengths",
        96,
        "--samples",
        1,
        "--out",
        tmp_path,
    ]
    assert invoke(*words, "--format", "pdf,svg", "--width", 3.25).exit_code == 0
    names = {"perplexity", "passkey", "passkey_depth", "overview"}
    assert {path.stem for path in tmp_path.glob("*.pdf")} == names
    assert not list(tmp_path.glob("*.png"))
    assert (tmp_path / "perplexity.pdf").read_bytes().startswith(b"%PDF")
    assert f'width="{3.25 * 72:g}pt"' in (tmp_path / "perplexity.svg").read_text()
    assert "'pdf'" in invoke(*words, "--format", "pfd").stderr


def test_progress_prints_lines(monkeypatch):
    """Names are printed as they are: markup has no meaning, and control characters are not sent to
    the terminal."""
    now = [0.0]
    file = io.StringIO()
    name = "[bold]a[/red]\x1b[31m"
    terminal = Console(file=file, force_terminal=True, color_system=None, width=100)
    monkeypatch.setattr(report.time, "perf_counter", lambda: now[0])
    progress = report.CellProgress(name, 4000, "tokens", terminal)
    for now[0] in (10, 20):
        progress.advance(200)
    now[0] = 100
    progress.finish(2000)
    terminal.print(facts_table(name, {name: name}))
    lines = file.getvalue().splitlines()
    name = r"[bold]a[/red]\x1b[31m"
    assert lines[:2] == [
        f"{name}  400/4k tokens  20/s  left 3:00",
        f"{name}  2k/4k tokens  20/s  left 1:40",
    ]
    assert file.getvalue().count(name) == 5
    assert "\x1b[31m" not in file.getvalue()
