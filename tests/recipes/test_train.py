"""The loop on a very small model: ranks, ZeRO stages, resume, failure, signals, launchers, the run folder."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from recipes import text
from recipes.runs import RunFolder, load_run, model_folder
from recipes.train import main

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "text.ggd_ssmax_tiny",
    *["--set", "model.options.num_layers=1", "--set", "model.options.dim=16", "--set", "model.options.num_heads=2"],
    *["--set", "model.options.hidden_dim=32", "--set", "data.context=32", "--set", "data.passkey_fraction=0"],
    *["--set", "train.batch=8", "--set", "train.steps=4", "--set", "train.save_every=2", "--set", "train.log_every=1"],
    *["--set", "optim.warmup=1", "--set", "optim.lr=0.01", "--set", "evaluate.every=2", "--set", "evaluate.samples=16"],
]


def run(folder, *settings, resume=None):
    """Train in this process; returns the exit code."""
    arguments = [*SMALL, "--run-dir", str(folder), *(["--resume", resume] if resume else [])]
    return main(arguments + [part for setting in settings for part in ("--set", setting)])


def launch(command, folder, *more):
    """Train in a process of its own; returns the finished process."""
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    return subprocess.run(
        [*command, str(ROOT / "recipes/train.py"), *SMALL, "--run-dir", str(folder), *more],
        env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


def curve(folder):
    """(training losses, held-out losses, gradient norms)"""
    records = RunFolder(folder).metrics()
    assert [r["step"] for r in records if "loss" in r] == [1, 2, 3, 4]
    return tuple([r[name] for r in records if name in r] for name in ("loss", "held_out_loss", "grad_norm"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert run(folder) == 0
    return folder


def same(a, b):
    for ours, theirs in zip(curve(a), curve(b), strict=True):
        assert ours == pytest.approx(theirs, abs=2e-5)


def test_a_run_folder_is_complete(whole):
    assert json.loads((whole / "recipe.json").read_text())["train"]["micro_batch"] == 8
    assert json.loads((whole / "deepspeed.json").read_text())["train_batch_size"] == 8
    assert json.loads((whole / "environment.json").read_text())["versions"]["torch"]
    assert (whole / "plots" / "loss.png").stat().st_size > 1000
    model, config = load_run(whole)
    assert config["name"] == "text.ggd_ssmax_tiny" and model.config.dim == 16
    assert (whole / "checkpoints" / "latest").read_text() == "step_00000004"
    assert not list(whole.rglob("*.partial"))
    losses, held_out, norms = curve(whole)
    assert losses[-1] < losses[0] and len(held_out) == 2 and all(n > 0 for n in norms)


def test_a_used_folder_needs_resume(whole, capsys):
    assert run(whole) == 2
    assert "--resume auto" in capsys.readouterr().err


def test_resume_refuses_another_model(whole, capsys):
    assert run(whole, "model.options.dim=32", resume="auto") == 2
    assert "model.options" in capsys.readouterr().err


def test_a_finished_run_has_nothing_to_resume(whole):
    before = (whole / "metrics.jsonl").read_text()
    assert run(whole, resume="auto") == 0
    assert (whole / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_stages_give_the_same_losses(stage, whole, tmp_path):
    assert run(tmp_path / "run", f"train.zero_stage={stage}") == 0
    same(tmp_path / "run", whole)
    load_run(tmp_path / "run")


def test_accumulation_gives_the_same_losses(whole, tmp_path):
    assert run(tmp_path / "run", "train.accumulation=4") == 0
    same(tmp_path / "run", whole)


def test_bf16_trains(whole, tmp_path):
    assert run(tmp_path / "run", "train.precision=bf16", "train.zero_stage=1", "optim.name=radam") == 0
    losses = curve(tmp_path / "run")[0]
    assert losses[0] == pytest.approx(curve(whole)[0][0], abs=0.05) and all(map(math.isfinite, losses))


def test_a_signal_saves_and_resume_is_exact(whole, tmp_path, monkeypatch, capsys):
    calls, loss = [], text.loss

    def interrupted(model, batch):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss(model, batch)

    folder = tmp_path / "run"
    monkeypatch.setattr(text, "loss", interrupted)
    assert run(folder, "evaluate.every=0", "train.save_every=0") == 128 + signal.SIGTERM
    assert "--resume auto" in capsys.readouterr().out
    monkeypatch.setattr(text, "loss", loss)
    done = RunFolder(folder).checkpoints()
    assert [path.name for path in done] == ["step_00000003"]
    assert run(folder, "evaluate.every=0", resume="auto") == 0
    assert curve(folder)[0] == curve(whole)[0]  # to the last bit
    assert curve(folder)[2] == curve(whole)[2]


def test_resume_survives_torn_files(whole, tmp_path):
    import shutil

    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    checkpoints = folder / "checkpoints"
    (checkpoints / "latest").write_text("step_0000")  # a crash in the middle of writing
    (checkpoints / "step_00000004" / "complete.json").unlink()
    os.rename(checkpoints / "step_00000004", checkpoints / "step_00000004.partial")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')
    assert model_folder(folder).parent.name == "step_00000002"
    assert run(folder, resume="auto") == 0
    same(folder, whole)
    assert curve(folder)[0] == curve(whole)[0]


def test_nan_stops_the_run_and_names_the_step(tmp_path, monkeypatch, capsys):
    calls, loss = [], text.loss

    def broken(model, batch):
        calls.append(1)
        value, figures = loss(model, batch)
        return (value * float("nan") if len(calls) == 4 else value), figures

    monkeypatch.setattr(text, "loss", broken)
    assert run(tmp_path / "run", "train.save_every=2", "evaluate.every=0") == 1
    message = capsys.readouterr().err
    assert "nan at step 4" in message and "step_00000002" in message
    assert [p.name for p in RunFolder(tmp_path / "run").checkpoints()] == ["step_00000002"]


def test_stage_0_and_stage_1_checkpoints_do_not_mix(whole, capsys):
    assert run(whole, "train.zero_stage=1", resume="auto") == 2
    assert "zero_stage=0" in capsys.readouterr().err


def test_errors_of_data_and_model_are_one_line(tmp_path, capsys):
    assert run(tmp_path / "a", "data.source=nowhere/*.txt") == 2
    assert run(tmp_path / "a", "model.options.dims=3") == 2
    errors = capsys.readouterr().err
    assert "nowhere" in errors and "'dim'" in errors and "Traceback" not in errors


def test_weights_of_another_run_are_a_start(whole, tmp_path):
    assert run(tmp_path / "run", f"model.init_from={whole}", "optim.lr=1e-9") == 0
    assert curve(tmp_path / "run")[1][0] == pytest.approx(curve(whole)[1][-1], abs=1e-4)


def test_dry_run_touches_no_disk(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*SMALL, "--dry-run", "--world", "4"]) == 0
    printed = capsys.readouterr().out
    assert "micro-batch 2" in printed and "train_micro_batch_size_per_gpu" in printed and not list(tmp_path.iterdir())


def test_two_ranks_under_the_launcher_are_one_rank(whole, tmp_path):
    """ZeRO-1 on two ranks is the same run; its checkpoint then goes on in one process."""
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", "2", "--master_port", "29871"]
    done = launch(launcher, tmp_path / "run", "--set", "train.zero_stage=1")
    assert done.returncode == 0, done.stdout + done.stderr
    same(tmp_path / "run", whole)
    assert run(tmp_path / "run", "train.zero_stage=1", "train.steps=5", resume="auto") == 0
    assert run(whole, "train.steps=5", resume="auto") == 0
    last = [RunFolder(folder).metrics()[-2]["loss"] for folder in (tmp_path / "run", whole)]
    assert last[0] == pytest.approx(last[1], abs=2e-5)


def test_torchrun_and_plain_python(tmp_path):
    for name, command in {
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29872"],
        "python": [sys.executable],
    }.items():
        done = launch(command, tmp_path / name)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "WARNING" not in done.stdout
    same(tmp_path / "torchrun", tmp_path / "python")
