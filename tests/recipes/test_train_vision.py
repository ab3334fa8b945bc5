"""The same loop on images: accuracies on the way, averaged weights, resume, ranks."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from recipes.engine import WeightAverage
from recipes.runs import RunFolder, load_run
from recipes.train import main

OPTIONS = {
    **{
        f"model.options.{name}": value for name, value in dict(num_layers=1, dim=32, num_heads=1, hidden_dim=32).items()
    },
    **{"data.source": "glyphs-builtin", "data.label_smoothing": 0.1, "data.mixup": 0.2, "data.image_size": 24},
    **{"train.batch": 8, "train.steps": 4, "train.save_every": 2, "train.log_every": 1, "train.ema": 0.9},
    **{"optim.warmup": 1, "optim.prior_lr_scale": 1, "evaluate.every": 2, "evaluate.samples": 16},
}
SMALL = [part for name, value in OPTIONS.items() for part in ("--set", f"{name}={value}")]


def run(folder, *settings, resume=None):
    arguments = ["vision.ggd2d_ssmax_tiny", *SMALL, "--run-dir", str(folder)] + (["--resume", resume] if resume else [])
    return main(arguments + [part for setting in settings for part in ("--set", setting)])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert run(folder) == 0
    return folder


def test_accuracy_on_the_way_and_averaged_weights(whole) -> None:
    records = [r for r in RunFolder(whole).metrics() if "heldout_loss" in r]
    assert [r["step"] for r in records] == [2, 4]
    assert all(0 <= r["heldout_top1"] <= r["heldout_top5"] <= 1 for r in records)
    assert [r["images"] for r in RunFolder(whole).metrics() if "loss" in r] == [8, 16, 24, 32]
    average = load_file(whole / "checkpoints" / "step_00000004" / WeightAverage.FILE)
    for name, parameter in load_run(whole)[0].named_parameters():
        torch.testing.assert_close(parameter, average[name], atol=0, rtol=0)


@pytest.mark.slow
def test_resume_is_exact_with_augmentation_and_average(whole, tmp_path) -> None:
    """Two steps, then the rest from the checkpoint, at ZeRO-1: the weights are those of a run in one piece."""
    assert run(tmp_path / "one", "train.zero_stage=1") == run(tmp_path / "two", "train.zero_stage=1") == 0
    for name in ("checkpoints/step_00000004", "model"):  # as if stopped after step 2
        shutil.rmtree(tmp_path / "two" / name)
    assert run(tmp_path / "two", "train.zero_stage=1", resume="auto") == 0
    ours, theirs = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("two", "one"))
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_the_average_follows_its_formula() -> None:
    model = nn.Linear(3, 2)
    average, expected = WeightAverage(model, 0.5), model.weight.detach().clone()
    for step in (1, 2, 3):
        model.weight.data.add_(step)
        average.update(model)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * model.weight.detach()
    trained = model.weight.detach().clone()
    with average.in_place(model):
        torch.testing.assert_close(model.weight.detach(), expected)
    assert torch.equal(model.weight.detach(), trained)
