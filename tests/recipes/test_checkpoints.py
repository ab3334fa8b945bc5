"""Checkpoints are verified and read as data; a run folder has one writer. (Broken writes: tests/tools/test_faults.py.)"""

from __future__ import annotations

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
from recipes.checkpoints import checkpoint_facts, complete_checkpoints, convert, damage, quarantine, seal
from recipes.config import ConfigError
from recipes.ownership import RunLock
from recipes.runs import RunFolder, load_run, new_run_dir, newest_run_dir
from tests.recipes.test_train import SMALL, curve, main, run
from zoo.files import file_digests


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert run(folder, "evaluate.every=0") == 0
    return folder


@pytest.fixture
def copy(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "copy"))


class Mark:
    """A pickle that makes a folder where it is executed."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def poison(file: Path, mark: Path) -> None:
    """Replace a file of torch by one that would make `mark`, its digest with it."""
    torch.save({"module": Mark(mark)}, file)
    folder = next(parent for parent in file.parents if (parent / "complete.json").exists())
    facts = checkpoint_facts(folder)
    assert facts is not None
    facts["files"] |= file_digests(folder, [str(file.relative_to(folder))])
    (folder / "complete.json").write_text(json.dumps(seal(facts)))


def test_a_pickle_in_a_checkpoint_is_not_run(copy, tmp_path, capsys):
    mark = tmp_path / "executed"
    assert pickle.loads(pickle.dumps(Mark(mark))) is None and mark.exists()
    mark.rmdir()
    newest = RunFolder(copy).checkpoints()[-1]
    poison(newest / "mp_rank_00_model_states.pt", mark)
    for resume in ("auto", str(copy), str(newest)):
        assert run(copy, "evaluate.every=0", resume=resume) == 2
        error = capsys.readouterr().err
        assert "nothing in it was executed" in error and "posix.mkdir" in error and "Traceback" not in error
    assert not mark.exists()
    load_run(copy)  # safetensors alone
    assert run(tmp_path / "other", f"model.init_from={copy}") == 0 and not mark.exists()


def test_a_pickle_is_not_run_by_a_conversion(tmp_path, capsys):
    folder = tmp_path / "run"
    assert run(folder, "train.zero_stage=1", "evaluate.every=0") == 0
    newest, mark = RunFolder(folder).checkpoints()[-1], tmp_path / "executed"
    optimiser = next(newest.glob("*optim_states.pt"))
    poison(optimiser, mark)
    with pytest.raises(ConfigError, match="nothing in it was executed"):
        convert(newest, newest.with_name("converted"))
    assert run(folder, "train.zero_stage=1", "evaluate.every=0", resume="auto") == 2
    assert not mark.exists() and sorted(p.name for p in newest.parent.glob("*converted*")) == []


@pytest.mark.slow
def test_a_torn_conversion_is_made_again(tmp_path):
    settings = ("train.steps=5", "evaluate.every=0")
    assert run(tmp_path / "run", "train.zero_stage=1", "evaluate.every=0") == 0
    torn = tmp_path / "run/checkpoints/step_00000004.universal"
    torn.mkdir()
    (torn / "complete.json").write_text("{")
    assert run(tmp_path / "run", "train.zero_stage=2", *settings, resume="auto") == 0
    assert damage(torn) is None and [r["step"] for r in RunFolder(tmp_path / "run").metrics()] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_what_deepspeed_stores_is_on_the_list(precision, tmp_path):
    from deepspeed.accelerator import get_accelerator

    if precision == "fp16" and not get_accelerator().is_fp16_supported():
        pytest.skip("DeepSpeed trains in fp16 where the processor computes in it")
    settings = (f"train.precision={precision}", "train.zero_stage=1", "evaluate.every=0")
    assert run(tmp_path / "run", *settings, "train.steps=2") == 0
    assert run(tmp_path / "run", *settings, resume="auto") == 0
    assert [r["step"] for r in RunFolder(tmp_path / "run").metrics()] == [1, 2, 3, 4]


def test_a_checkpoint_written_before_digests_is_read(copy, capsys):
    for path in RunFolder(copy).checkpoints():
        facts = json.loads((path / "complete.json").read_text())
        del facts["files"], facts["sha256"]
        (path / "complete.json").write_text(json.dumps(facts))
        (path / "model" / "manifest.json").unlink()
    assert run(copy, "evaluate.every=0", resume="auto") == 0
    assert verify.main([str(copy)]) == 0 and "no digests" in capsys.readouterr().out


def test_where_no_checkpoint_is_whole_nothing_starts_anew(copy, capsys):
    for path in RunFolder(copy).checkpoints():
        (path / "mp_rank_00_model_states.pt").write_bytes(b"")
    for _ in range(2):  # a scheduler tries again
        assert run(copy, "evaluate.every=0", resume="auto") == 2
        assert "0 bytes" in (error := capsys.readouterr().err) and "another --run-dir" in error
    for path in RunFolder(copy).checkpoints():
        quarantine(path)
    assert run(copy, "evaluate.every=0", resume="auto") == 2 and "set aside" in capsys.readouterr().err
    assert len(RunFolder(copy).metrics()) == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.unlink(),
        lambda path: path.write_text(path.read_text().replace('"files"', '"fileq"')),
        lambda path: path.write_text(path.read_text().replace('"fp32"', '"fp72"')),
        lambda path: path.write_text(path.read_text().replace('"sha256"', '"sha257"')),
        lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | {"step": 3})),
    ],
)
def test_what_a_checkpoint_says_of_itself_is_verified_too(change, copy, whole, capsys):
    newest = RunFolder(copy).checkpoints()[-1]
    change(newest / "complete.json")
    assert verify.main([str(copy)]) == 1
    assert run(copy, "evaluate.every=0", resume="auto") == 0
    assert f"{newest} is damaged: complete.json is" in capsys.readouterr().err
    assert curve(copy)[0] == curve(whole)[0]


def test_what_others_put_beside_checkpoints_stays(copy, tmp_path, capsys):
    root = copy / "checkpoints"
    shutil.copytree(root / "step_00000002", root / "step_best")
    (root / "step_500.backup").mkdir()
    (root / "step_notes.txt").write_text("kept")
    moved = tmp_path / "moved"
    (root / "step_00000002").rename(moved)
    (root / "step_00000002").symlink_to(moved)
    assert run(copy, "evaluate.every=0", "train.steps=5", "train.keep=1", resume="auto") == 0
    assert sorted(path.name for path in root.glob("step_*")) == [
        *("step_00000005", "step_500.backup", "step_best", "step_notes.txt")
    ]
    assert (moved / "complete.json").exists()
    folder = tmp_path / "mine"
    (folder / "checkpoints" / "step_1000").mkdir(parents=True)
    assert run(folder, "evaluate.every=0") == 2 and "already holds a run" in capsys.readouterr().err


def test_resume_names_one_run(copy, whole, monkeypatch, capsys):
    assert main([*SMALL, "--run-dir", str(whole), "--resume", str(copy)]) == 2
    assert "leave out --run-dir" in capsys.readouterr().err
    monkeypatch.chdir(copy / "checkpoints")
    assert main([*SMALL, "--set", "evaluate.every=0", "--resume", "step_00000002"]) == 0


def test_a_checkpoint_by_name_must_be_whole_and_later_ones_are_quarantine(copy, whole, capsys):
    first, second = RunFolder(copy).checkpoints()
    (second / "model" / "config.json").write_text("{}")
    assert run(copy, "evaluate.every=0", resume=str(second)) == 2
    assert "config.json has 2 bytes" in capsys.readouterr().err and second.exists()
    assert run(copy, "evaluate.every=0", "train.steps=3", resume=str(first)) == 0
    assert [p.name for p in complete_checkpoints(copy / "checkpoints")] == ["step_00000002", "step_00000003"]
    assert (copy / "checkpoints" / "step_00000004.aside").exists()
    assert run(copy, "evaluate.every=0", resume="auto") == 0
    assert curve(copy)[0][:3] == curve(whole)[0][:3]  # after them the rates are those of another number of steps
    assert not list((copy / "checkpoints").glob("*.aside"))


def test_records_survive_a_torn_line(copy, whole, capsys):
    lines = (copy / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_bytes(b"".join([lines[0], lines[1][:9] + b"\xff\n", b"[]\n", *lines[2:], b'{"st']))
    assert [r["step"] for r in RunFolder(copy).metrics()] == [1, 3, 4]
    assert verify.main([str(copy)]) == 1 and "3 unreadable" in capsys.readouterr().out
    assert run(copy, "evaluate.every=0", resume="auto") == 0
    assert "3 unreadable lines" in capsys.readouterr().err
    assert [r["step"] for r in RunFolder(copy).metrics()] == [1, 3, 4]


def test_verify_names_what_is_damaged(copy, tmp_path, capsys):
    assert verify.main([str(copy), str(copy / "model"), str(copy / "checkpoints" / "step_00000004")]) == 0
    content = bytearray((copy / "model" / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (copy / "model" / "model.safetensors").write_bytes(content)
    assert verify.main([str(copy)]) == 1
    assert "model.safetensors has another SHA-256" in " ".join(capsys.readouterr().out.replace("│", "").split())
    assert verify.main([str(tmp_path / "nothing")]) == 2
    with pytest.raises(ValueError, match="another SHA-256"):
        torch.manual_seed(0)
        type(load_run(copy)[0]).from_pretrained(copy / "model")


def test_weights_that_rotted_are_passed_over(copy, whole, capsys):
    path = RunFolder(copy).checkpoints()[-1] / "model" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    model, _ = load_run(copy)
    assert "reading an older one" in capsys.readouterr().err
    expected = type(model).from_pretrained(whole / "checkpoints" / "step_00000002" / "model")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


@pytest.mark.parametrize(
    "files",
    [[], {"a": 1}, {"a": {"bytes": 1}}, {"../a": {"bytes": 0, "sha256": ""}}, {"a": {"bytes": "x", "sha256": 3}}],
)
def test_hostile_digests_are_damage(files, tmp_path):
    (tmp_path / "a").write_text("x")
    facts = {"step": 1, "world": 1, "zero_stage": 0, "precision": "fp32", "files": files}
    (tmp_path / "complete.json").write_text(json.dumps(seal(facts)))
    assert damage(tmp_path)


def test_a_lock_is_held_by_one_and_ends_with_its_process(tmp_path):
    script = "import sys, time; from pathlib import Path; from recipes.ownership import RunLock\n"
    script += "lock = RunLock(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=rf"in use: process {other.pid} on "):
            RunLock(tmp_path)
        assert str(other.pid) in str(RunLock.holder(tmp_path))
        other.kill()
        other.wait()
    assert RunLock.holder(tmp_path) is None
    lock = RunLock(tmp_path)  # what a killed process left in the file is no lock
    ready, told = os.pipe()
    child = os.fork()
    if not child:  # as a data worker: it must not keep the lock when its parent is gone
        os.write(told, b"forked")
        signal.pause()
    try:
        os.read(ready, 6)
        lock.release()
        assert RunLock.holder(tmp_path) is None
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_lock_of_a_folder_that_was_removed_meanwhile_is_none(tmp_path, monkeypatch):
    import fcntl

    real, calls = fcntl.flock, []

    def removed_once(file, how):
        real(file, how)
        calls.append(file)
        if len(calls) == 1:
            shutil.rmtree(tmp_path / "run")

    monkeypatch.setattr(fcntl, "flock", removed_once)
    RunLock(tmp_path / "run").release()
    assert len(calls) == 2 and (tmp_path / "run" / "run.lock").exists()


def test_a_refused_launch_takes_nothing_of_the_other_away(tmp_path, monkeypatch):
    def taken(folder):  # between this launch's look at the folder and its try for the lock
        folder.mkdir()
        (folder / "run.lock").write_text("")
        (folder / "recipe.json").write_text("{}")
        raise ConfigError(f"{folder} is in use")

    monkeypatch.setattr("recipes.ownership.RunLock", taken)
    assert run(tmp_path / "run") == 2
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["recipe.json", "run.lock"]


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch, capsys):
    def none(file, how):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", none)
    RunLock(tmp_path).release()
    assert "without locks" in capsys.readouterr().err


def test_the_newest_run_is_that_of_the_greatest_number(whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda *_: "20990101-000000")
    first = new_run_dir("text.x")
    monkeypatch.setattr("time.strftime", lambda *_: "20261121-211332")
    second, third = new_run_dir("text.x"), new_run_dir("text.x")
    assert [path.name[:4] for path in (first, second, third)] == ["0001", "0002", "0003"]
    old = first.with_name("20991231-235959")  # of a version that named runs by their time alone
    for path in (first, second, old):
        shutil.copytree(whole, path, dirs_exist_ok=True)
    assert newest_run_dir("text.x") == Path("runs/text.x") / second.name


def test_a_live_run_is_not_continued(copy, monkeypatch, capsys):
    lock = RunLock(copy)
    try:
        for resume, told in (("auto", "in use"), (str(copy), "in use"), ("", "--resume is empty")):
            assert main([*SMALL, "--run-dir", str(copy), "--resume", resume]) == 2
            assert told in capsys.readouterr().err
        assert verify.main([str(copy)]) == 0 and "trains here" in capsys.readouterr().out
    finally:
        lock.release()
