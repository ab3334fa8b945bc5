"""The example of a modality from outside, examples/audio, by the real commands."""

from __future__ import annotations

import csv
import json
import re
import sys
import tomllib

import pytest

from recipes.run_folder import RunFolder
from tests.launching import ROOT, command

AUDIO = ROOT / "examples" / "audio"
COMMANDS = """
import json, sys
from recipes import evaluate, train
for command, *words in json.loads(sys.argv[1]):
    assert {"train": train, "evaluate": evaluate}[command].main(words) == 0, words
"""


def test_audio_imports_no_shipped_modality():
    source = "".join(path.read_text() for path in AUDIO.rglob("audio/**/*.py"))
    rooms = set(re.findall(r"^from modalities\.(\w+)", source, flags=re.MULTILINE))
    assert rooms == {"contract", "encoder", "loading"}


@pytest.mark.slow
def test_audio_trains_and_is_measured(tmp_path):
    """The entry point is read from a folder such as pip makes."""
    project = tomllib.loads((AUDIO / "pyproject.toml").read_text())["project"]
    [(group, points)] = project["entry-points"].items()
    installed = tmp_path / "priorzoo_audio-0.1.dist-info"
    installed.mkdir()
    lines = [f"{name} = {value}" for name, value in points.items()]
    (installed / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]))
    run = tmp_path / "run"
    settings = ["train.steps=10", "train.batch=16", "optim.warmup=2", "evaluate.samples=16"]
    train = ["train", "audio.ggd2d_ssmax_tiny", "--run-dir", str(run)]
    train += [word for setting in settings for word in ("--set", setting)]
    sizes = ["--sizes", "64,256", "--samples", "16", "--out", str(tmp_path)]
    words = json.dumps([train, ["evaluate", str(run), "duration", *sizes]])
    command([sys.executable, "-c", COMMANDS, words], folder=ROOT, PYTHONPATH=f"{AUDIO}:{tmp_path}")
    losses = [record["loss"] for record in RunFolder(run).metrics() if "loss" in record]
    assert sum(losses[-3:]) < sum(losses[:3])
    with open(tmp_path / "duration.csv") as file:
        assert [(row["width"], row["clips"]) for row in csv.DictReader(file)] == [
            ("64", "16"),
            ("256", "16"),
        ]
