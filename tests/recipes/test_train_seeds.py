"""`priorzoo train-seeds`: which runs it starts, where, and what it measures afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest

from recipes import train, train_seeds
from recipes.cli import main


@pytest.fixture
def started(monkeypatch):
    """Commands that would run, as words; those in `statuses` fail."""
    commands = []

    def run(words, **_):
        commands.append([str(word) for word in words])
        return subprocess.CompletedProcess(words, run.statuses.pop(0) if run.statuses else 0)

    run.statuses = []
    monkeypatch.setattr(train_seeds.subprocess, "run", run)
    return commands, run.statuses


def test_every_recipe_runs_with_every_seed_and_all_are_measured_together(started, tmp_path, capsys):
    commands, _ = started
    words = ["text.ggd_tiny", "text.rope_tiny", "--seeds", "0,2", "--out", str(tmp_path), "--set", "train.steps=5"]
    assert train_seeds.main([*words, "--evaluate", "passkey --lengths 64"]) == 0
    *runs, measured = commands
    folders = [str(tmp_path / f"text.{method}_tiny-s{seed}") for method in ("ggd", "rope") for seed in (0, 2)]
    assert [run[run.index("--run-dir") + 1] for run in runs] == folders
    assert all(run[1].endswith("recipes/train.py") and "train.steps=5" in run for run in runs)
    assert [("train.seed=2" in run, "data.seed=2" in run) for run in runs] == [(False, False), (True, True)] * 2
    assert measured[0] == sys.executable and measured[2:] == [
        *folders, "passkey", "--lengths", "64", "--out", str(tmp_path / "results")
    ]  # fmt: skip
    assert f"4 runs, folders in {tmp_path}" in capsys.readouterr().out


def test_nothing_is_measured_where_a_run_failed(started, tmp_path, capsys):
    commands, statuses = started
    statuses += [0, 1, 0]
    assert train_seeds.main(["text.ggd_tiny", "--out", str(tmp_path), "--evaluate", "passkey"]) == 1
    assert len(commands) == 3 and "text.ggd_tiny-s1: failed (1)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["text.ggd_tinny"], "'text.ggd_tiny'"),
        (["text.ggd_tiny", "--seeds", "a"], "--seeds 'a'"),
        (["text.ggd_tiny", "--set", "train.stepz=1"], "stepz"),
    ],
)
def test_what_cannot_run_is_said_before_anything_does(started, tmp_path, capsys, words, named):
    assert train_seeds.main([*words, "--out", str(tmp_path / "out")]) == 2
    assert named in capsys.readouterr().err and started[0] == [] and not (tmp_path / "out").exists()


def test_missing_packages_are_said_before_work_starts(monkeypatch, tmp_path, capsys):
    out = ["--out", str(tmp_path / "out")]
    sharded = ["text.ggd_tiny", "--set", "train.zero_stage=1", "--set", "train.steps=1"]
    for package, extra, words in (
        ("deepspeed", "train", ["train-seeds", *sharded, *out]),
        ("matplotlib", "figures", ["train", *sharded, "--run-dir", str(tmp_path / "out")]),
        ("matplotlib", "figures", ["evaluate", "text_ggd_tiny.facts", "perplexity", *out]),
        ("huggingface_hub", "hub", ["hub", "text_ggd_tiny.facts", "--push", "a/b", *out]),
    ):
        with monkeypatch.context() as without:
            without.setitem(sys.modules, package, None)
            # `priorzoo train` ends the process
            assert (train.main(words[1:]) if words[0] == "train" else main(words)) == 2
        errors = capsys.readouterr().err
        assert f"needs the package {package}: pip install 'priorzoo[{extra}]'" in errors and not list(
            tmp_path.iterdir()
        )
