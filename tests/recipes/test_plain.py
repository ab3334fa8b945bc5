"""Training without DeepSpeed: what it finds is what DeepSpeed finds, either continues the other, and the rest is refused."""

from __future__ import annotations

import shutil
import sys
from contextlib import contextmanager

import pytest
from safetensors.torch import load_file

from recipes.runs import RunFolder
from recipes.train import main

MODEL = {"num_layers": 1, "dim": 16, "num_heads": 2, "hidden_dim": 32}
SETTINGS = (
    *(f"model.options.{name}={value}" for name, value in MODEL.items()),
    *("data.context=32", "data.tokenizer=bytes", "data.facts_fraction=0", "data.copies_fraction=0"),
    *("train.batch=8", "train.accumulation=2", "train.steps=4", "train.save_every=2", "train.clip=0.5"),
    *(
        "train.zero_stage=0",
        "train.ema=0.9",
        "optim.name=adamw",
        "optim.warmup=1",
        "evaluate.every=2",
        "evaluate.samples=8",
    ),
)


@contextmanager
def hidden():
    """DeepSpeed is not installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "deepspeed", None)
        yield


def run(folder, *settings, resume=None):
    words = [word for setting in (*SETTINGS, *settings) for word in ("--set", setting)]
    return main(["text.ggd_ssmax_tiny", "--run-dir", str(folder), *words, *(["--resume", resume] if resume else [])])


def results(folder):
    """Losses, gradient norms and rates by step, and the weights, averaged."""
    names = ("step", "loss", "grad_norm", "lr", "heldout_loss")
    records = [{k: r[k] for k in names if k in r} for r in RunFolder(folder).metrics()]
    return records, load_file(folder / "model" / "model.safetensors")


def half(folder, to):
    """A copy of a run that ended after half of its steps."""
    shutil.copytree(folder, to)
    shutil.rmtree(to / "checkpoints" / "step_00000004")
    shutil.rmtree(to / "model")
    return to


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["train.precision=fp32", "train.precision=bf16", "optim.name=muon"])
def test_it_finds_what_deepspeed_finds(tmp_path, setting):
    """With AdamW in fp32 to the bit, also where one continues the other. In bf16 clipped gradients are rounded otherwise.
    Without Muon's moments the last gradient's norm would be 1% off."""
    assert run(tmp_path / "deepspeed", setting) == 0
    with hidden():
        assert run(tmp_path / "plain", setting) == 0
        assert run(half(tmp_path / "deepspeed", tmp_path / "taken over"), setting, resume="auto") == 0
    assert run(half(tmp_path / "plain", tmp_path / "given back"), setting, resume="auto") == 0
    records, weights = results(tmp_path / "deepspeed")
    assert len(records) == 6 and max(r.get("grad_norm", 0) for r in records) > 0.5  # clipped
    for name in ("plain", "taken over", "given back"):
        ours, theirs = results(tmp_path / name)
        if setting == "train.precision=fp32":
            assert [r | {"grad_norm": 0} for r in ours] == [r | {"grad_norm": 0} for r in records]
        for a, b in zip(ours, records, strict=True):
            assert a == pytest.approx(b, rel=2e-3 if "muon" not in setting else 5e-3)
        for key, weight in weights.items():
            apart = (theirs[key] - weight).abs()
            if setting == "train.precision=fp32":
                assert not apart.any(), (name, key)
            elif setting == "optim.name=muon":
                assert apart.norm() <= 5e-3 * weight.norm(), (name, key)
            else:  # rounding decides the sign of a gradient near 0, and with it a whole step of Adam
                assert (apart > 1e-4).float().mean() < 0.02 and apart.max() < 4e-3, (name, key)


def test_what_needs_deepspeed_is_named(tmp_path, monkeypatch, capsys):
    for setting in ("train.zero_stage=1", "train.sequence_parallel=2", "train.precision=fp16", "train.precision=fp32"):
        if setting == "train.precision=fp32":
            monkeypatch.setenv("WORLD_SIZE", "2")
        with hidden():
            assert run(tmp_path / "run", setting) == 2
        error = capsys.readouterr().err
        assert ("2 ranks needs" if "fp32" in setting else f"{setting} needs") in error
        assert "pip install 'priorzoo[train]'" in error and not (tmp_path / "run").exists()
