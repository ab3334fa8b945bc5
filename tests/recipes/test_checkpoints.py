"""Checkpoints are verified and read as data; a run folder has one writer. Broken writes:
tests/durability."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from recipes import verify
from recipes.checkpoints import FACTS, convert, seal
from recipes.commands import ConfigError
from recipes.lock import RunLock
from recipes.plan import resolve
from recipes.registry import find_recipe
from recipes.resume import check_same
from recipes.run_folder import RunFolder, load_run, new_run_dir, newest_run_dir
from tests.durability.files import Runs
from tests.recipes.test_train import SMALL, main, run
from tests.refusals import refuses


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert run(folder, "evaluate.every=0") == 0
    return folder


@pytest.fixture
def copy(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def poison(file: Path, mark: Path) -> None:
    """Replace a file of torch by one that would make `mark`, its digest with it."""
    torch.save({"module": Runs(mark)}, file)
    folder = next(parent for parent in file.parents if (parent / "complete.json").exists())
    facts = json.loads((folder / "complete.json").read_text())
    (folder / "complete.json").unlink()
    seal(folder, {name: facts[name] for name in FACTS})


@pytest.mark.slow
def test_checkpoint_pickle_is_not_run(copy, tmp_path, capsys):
    """A pickle in a checkpoint is not run."""
    mark = tmp_path / "executed"
    assert pickle.loads(pickle.dumps(Runs(mark))) is None
    assert mark.exists()
    mark.rmdir()
    poison(RunFolder(copy).checkpoints()[-1] / "mp_rank_00_model_states.pt", mark)
    assert run(copy, "evaluate.every=0", resume="auto") == 2
    error = capsys.readouterr().err
    assert "nothing in it was executed" in error
    assert "posix.mkdir" in error
    assert "Traceback" not in error
    assert not mark.exists()
    load_run(copy)  # safetensors alone
    assert run(tmp_path / "other", f"model.init_from={copy}") == 0
    assert not mark.exists()


@pytest.mark.slow
def test_conversion_runs_no_pickle(tmp_path):
    """A pickle is not run by a conversion."""
    assert run(tmp_path / "run", "train.zero_stage=1", "evaluate.every=0") == 0
    newest = RunFolder(tmp_path / "run").checkpoints()[-1]
    mark = tmp_path / "executed"
    poison(next(newest.glob("*optim_states.pt")), mark)
    refuses(
        "nothing in it was executed",
        convert,
        newest,
        tmp_path / "universal" / newest.name,
        error=ConfigError,
    )
    assert not mark.exists()


def test_checkpoint_without_digests(copy, capsys):
    """A checkpoint written before digests is read."""
    for path in RunFolder(copy).checkpoints():
        facts = json.loads((path / "complete.json").read_text())
        (path / "complete.json").write_text(json.dumps({name: facts[name] for name in FACTS}))
        (path / "model" / "manifest.json").unlink()
    assert run(copy, "evaluate.every=0", resume="auto") == 0
    assert verify.main([str(copy)]) == 0
    assert capsys.readouterr().out.count("no digests") == 2


def test_no_whole_checkpoint_stops(copy, capsys):
    """Where no checkpoint is whole nothing starts anew."""
    for path in RunFolder(copy).checkpoints():
        (path / "mp_rank_00_model_states.pt").write_bytes(b"")
    assert run(copy, "evaluate.every=0", resume="auto") == 2
    error = capsys.readouterr().err
    assert "0 bytes" in error
    assert "another --run-dir" in error
    assert len(RunFolder(copy).metrics()) == 4


@pytest.mark.parametrize("change", [("", None), ('"step": 4', '"step": 3')])
def test_checkpoint_record_is_verified(change, copy, capsys):
    """What a checkpoint says of itself is verified too."""
    newest = RunFolder(copy).checkpoints()[-1]
    old, new = change
    content = (newest / "complete.json").read_text()
    (newest / "complete.json").unlink()
    if new:
        (newest / "complete.json").write_text(content.replace(old, new))
    assert verify.main([str(copy)]) == 1
    assert run(copy, "evaluate.every=0", resume="auto") == 0
    assert f"{newest} is damaged: complete.json is" in capsys.readouterr().err


def test_foreign_files_stay(copy, tmp_path):
    """What others put beside checkpoints stays."""
    root = copy / "checkpoints"
    moved = tmp_path / "moved"
    shutil.copytree(root / "step_00000002", root / "step_best")
    (root / "step_notes.txt").write_text("")
    (root / "step_00000002").rename(moved)
    (root / "step_00000002").symlink_to(moved)
    assert run(copy, "evaluate.every=0", "train.steps=5", "train.keep=1", resume="auto") == 0
    assert sorted(path.name for path in root.glob("step_*")) == [
        "step_00000005",
        "step_best",
        "step_notes.txt",
    ]
    assert (moved / "complete.json").exists()


def test_records_survive_a_torn_line(copy, whole, capsys):
    lines = (copy / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_bytes(
        b"".join([lines[0], lines[1][:9] + b"\xff\n", b"[]\n", *lines[2:], b'{"st'])
    )
    assert [r["step"] for r in RunFolder(copy).metrics()] == [1, 3, 4]
    assert verify.main([str(copy)]) == 1
    assert "3 unreadable" in capsys.readouterr().out
    assert run(copy, "evaluate.every=0", resume="auto") == 0
    assert "3 unreadable lines" in capsys.readouterr().err
    assert [r["step"] for r in RunFolder(copy).metrics()] == [1, 3, 4]


def test_rotten_weights_are_passed_over(copy, whole, capsys):
    """Weights that rotted are named and passed over."""
    path = RunFolder(copy).checkpoints()[-1] / "model" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    assert verify.main([str(copy)]) == 1
    assert "model.safetensors has another SHA-256" in capsys.readouterr().out
    assert verify.main([str(copy / "model"), str(copy / "checkpoints" / "step_00000002")]) == 0
    assert verify.main([str(copy / "plots")]) == 2
    (copy / "metrics.jsonl").unlink()
    os.mkfifo(copy / "metrics.jsonl")
    assert verify.main([str(copy)]) == 1
    assert "damaged: missing" in capsys.readouterr().out
    model, _ = load_run(copy)
    assert "reading an older one" in capsys.readouterr().err
    expected = type(model).from_pretrained(whole / "checkpoints" / "step_00000002" / "model")
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True)
    )


@pytest.mark.slow
def test_lock_ends_with_process(tmp_path):
    """A lock is held by one and ends with its process."""
    script = "import sys, time; from pathlib import Path; from recipes.lock import RunLock\n"
    script += "lock = RunLock(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        refuses(rf"in use: process {other.pid} on ", RunLock, tmp_path, error=ConfigError)
        other.kill()
    lock = RunLock(tmp_path)  # what a killed process left in the file is no lock
    ready, started = os.pipe()
    child = os.fork()
    if not child:  # as a data worker: it must not keep the lock when its parent is gone
        os.write(started, b"!")
        signal.pause()
    try:
        os.read(ready, 1)
        lock.release()
        RunLock(tmp_path).release()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_newest_run_has_greatest_number(whole, tmp_path, monkeypatch):
    """The newest run is that of the greatest number."""
    monkeypatch.chdir(tmp_path)
    first, second, third = (new_run_dir("text.x") for _ in range(3))
    assert [path.name[:4] for path in (first, second, third)] == ["0001", "0002", "0003"]
    for path in (
        first,
        second,
        first.with_name("20991231-235959"),
    ):  # the last: of a version without numbers
        shutil.copytree(whole, path, dirs_exist_ok=True)
    assert newest_run_dir("text.x") == Path("runs/text.x") / second.name


def test_forbidden_distances_resume(tmp_path):
    """Forbidden distances do not stop a resume."""
    recipe = find_recipe("text.table_tiny")
    recipe.model.options["position_options"] = {"values": torch.tensor([0.0, float("-inf")])}
    plan = resolve(recipe, world=1)
    RunFolder(tmp_path).describe(plan)
    check_same(plan, tmp_path)
    recipe.model.options["position_options"] = {"values": [0.0, 1.0]}
    refuses("position_options", check_same, resolve(recipe, world=1), tmp_path, error=ConfigError)


def test_older_version_is_resumed(tmp_path):
    """A run of a version with fewer settings is resumed."""
    recipe = find_recipe("text.ggd_tiny")
    RunFolder(tmp_path).describe(resolve(recipe, world=1))
    stored = json.loads((tmp_path / "recipe.json").read_text())
    del stored["data"]["documents"]
    (tmp_path / "recipe.json").write_text(json.dumps(stored))
    check_same(resolve(recipe, world=1), tmp_path)
    recipe.data = dataclasses.replace(recipe.data, documents="packed")
    with pytest.raises(
        ConfigError, match=r"its data\.documents is 'masked', this recipe has 'packed'"
    ):
        check_same(resolve(recipe, world=1), tmp_path)


def test_live_run_is_not_continued(copy, capsys):
    """A live run is not continued."""
    lock = RunLock(copy)
    try:
        for resume, message in (("auto", "in use"), ("", "--resume '': expected")):
            assert main([*SMALL, "--run-dir", str(copy), "--resume", resume]) == 2
            assert message in capsys.readouterr().err
        assert verify.main([str(copy)]) == 0
    finally:
        lock.release()


def test_lock_is_a_file(tmp_path):
    """A lock is a file of its own."""
    (tmp_path / "precious").write_text("precious")
    for name in ("link", "pipe"):
        (tmp_path / name).mkdir()
    (tmp_path / "link/run.lock").symlink_to(tmp_path / "precious")
    os.mkfifo(tmp_path / "pipe/run.lock")
    for name in ("link", "pipe"):
        refuses("is a link or no regular file", RunLock, tmp_path / name, error=ConfigError)
    assert (tmp_path / "precious").read_text() == "precious"
