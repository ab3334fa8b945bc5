"""`priorzoo train-seeds`: which runs it starts, where, and what it measures afterwards; packages
that commands miss."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time

import pytest

from recipes import train, train_seeds
from recipes.cli import main


@pytest.fixture
def started(monkeypatch):
    """Commands that would run, as words; `statuses` are those of the first."""
    commands = list[list[str]]()
    statuses = list[int]()

    def run(words):
        commands.append([str(word) for word in words])
        return statuses.pop(0) if statuses else 0

    class Process(contextlib.nullcontext):
        def __init__(self, words, **_):
            super().__init__(self)
            self.stdout = ["step 1/5  loss 3.2\n", "step 2/5  loss 3.1\n"]
            self.wait = lambda: run(words)

    monkeypatch.setattr(train_seeds.subprocess, "Popen", Process)
    return commands, statuses


def test_recipes_times_seeds(started, tmp_path, monkeypatch, capsys):
    """Every recipe runs with every seed and all are measured together."""
    commands, statuses = started
    monkeypatch.setattr(
        "recipes.evaluate.main",
        lambda words: commands.append(["priorzoo", "evaluate", *words]) or 0,
    )
    words = [
        "text.ggd_tiny",
        "text.rope_tiny",
        "--seeds",
        "0,2",
        "--out",
        str(tmp_path),
        "--set",
        "train.steps=5",
    ]
    assert train_seeds.main([*words, "--evaluate", "passkey --lengths 64"]) == 0
    *runs, measured = commands
    folders = [
        str(tmp_path / f"text.{method}_tiny-s{seed}")
        for method in ("ggd", "rope")
        for seed in (0, 2)
    ]
    assert [run[run.index("--run-dir") + 1] for run in runs] == folders
    assert capsys.readouterr().out.count("text.ggd_tiny-s2: step 1/5  loss 3.2\n") == 1
    assert (tmp_path / "text.ggd_tiny-s2.log").read_text().count("step") == 2
    assert all(run[1].endswith("recipes/train.py") and "train.steps=5" in run for run in runs)
    assert [("train.seed=2" in run, "data.seed=2" in run) for run in runs] == [
        (False, False),
        (True, True),
    ] * 2
    assert measured[2:] == [
        *folders,
        "passkey",
        "--lengths",
        "64",
        "--out",
        str(tmp_path / "results"),
    ]
    commands.clear()
    statuses += [0, 1, 0]
    assert train_seeds.main(["text.ggd_tiny", "--out", str(tmp_path), "--evaluate", "passkey"]) == 1
    assert len(commands) == 3
    assert "text.ggd_tiny-s1: failed (1)" in capsys.readouterr().out


def test_signal_reaches_runs(monkeypatch, tmp_path):
    """A signal reaches the runs and no other starts."""
    signals = []
    folders = []

    class Process(contextlib.nullcontext):
        def __init__(self, words, **_):
            super().__init__(self)
            folders.append(words[-3])
            self.stdout = self.lines()
            self.send_signal = signals.append
            self.wait = lambda: 143

        def lines(self):
            # in this thread: it does not wake the one that waits and has the handler
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
            end = time.monotonic() + 60
            while not signals and time.monotonic() < end:
                yield "step 1/5\n"

    monkeypatch.setattr(train_seeds.subprocess, "Popen", Process)
    assert train_seeds.main(["text.ggd_tiny", "--out", str(tmp_path)]) == 143
    assert signals == [signal.SIGTERM]
    assert folders == [str(tmp_path / "text.ggd_tiny-s0")]


def test_impossible_run_said_first(started, monkeypatch, tmp_path, capsys):
    """What cannot run is said before anything does."""
    out = ["--out", str(tmp_path / "out")]
    zero = ["--set", "train.zero_stage=1", "--set", "train.steps=1"]
    for package, words, message in (
        ("", ["train-seeds", "text.ggd_tinny", *out], "'text.ggd_tiny'"),
        ("", ["train-seeds", "text.ggd_tiny", "--seeds", "a", *out], "--seeds 'a'"),
        ("", ["train-seeds", "text.ggd_tiny", "--evaluate", "passkeyy", *out], "'passkey'"),
        (
            "",
            ["evaluate", "text.ggd_tiny", "passkey", *out],
            "'text.ggd_tiny' here; it is a recipe",
        ),
        ("deepspeed", ["train-seeds", "text.ggd_tiny", *zero, *out], "[train]"),
        (
            "matplotlib",
            ["train", "text.ggd_tiny", *zero, "--run-dir", str(tmp_path / "out")],
            "[figures]",
        ),
        ("matplotlib", ["evaluate", "text_ggd_tiny.facts", "perplexity", *out], "[figures]"),
        ("huggingface_hub", ["hub", "text_ggd_tiny.facts", "--push", "a/b", *out], "[hub]"),
    ):
        with monkeypatch.context() as without:
            if package:
                without.setitem(sys.modules, package, None)
            # `priorzoo train` ends the process
            assert (train.main(words[1:]) if words[0] == "train" else main(words)) == 2
        errors = capsys.readouterr().err
        assert message in errors
        assert package in errors
        assert not list(tmp_path.iterdir())
        assert started[0] == []
