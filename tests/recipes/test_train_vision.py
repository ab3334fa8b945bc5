"""The same loop on images: figures on the way, averaged weights, resume, ranks."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from modalities import contract
from modalities.vision.config import VisionDataConfig
from modalities.vision.modality import draw_predictions
from modalities.vision.sources import class_names
from recipes.engine import WeightAverage
from recipes.runs import RunFolder, load_run
from recipes.train import main
from tests.recipes.test_train import launch

SMALL = [
    *["--set", "model.options.num_layers=1", "--set", "model.options.dim=32", "--set", "model.options.num_heads=1"],
    *[
        "--set",
        "model.options.hidden_dim=32",
        "--set",
        "data.source=glyphs-builtin",
        "--set",
        "data.label_smoothing=0.1",
    ],
    *["--set", "data.mixup=0.2", "--set", "data.image_size=24", "--set", "train.batch=8", "--set", "train.steps=4"],
    *["--set", "train.save_every=2", "--set", "train.log_every=1", "--set", "train.ema=0.9", "--set", "optim.warmup=1"],
    *["--set", "evaluate.every=2", "--set", "evaluate.samples=16", "--set", "optim.prior_lr_scale=1"],
]


def run(folder, *settings, resume=None):
    arguments = ["vision.ggd2d_ssmax_tiny", *SMALL, "--run-dir", str(folder)] + (["--resume", resume] if resume else [])
    return main(arguments + [part for setting in settings for part in ("--set", setting)])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert run(folder) == 0
    return folder


def test_accuracy_is_measured_on_the_way(whole) -> None:
    records = [r for r in RunFolder(whole).metrics() if "heldout_loss" in r]
    assert [r["step"] for r in records] == [2, 4]
    for record in records:
        assert 0 <= record["heldout_top1"] <= record["heldout_top5"] <= 1
    assert [r["images"] for r in RunFolder(whole).metrics() if "loss" in r] == [8, 16, 24, 32]


def test_the_averaged_weights_are_what_is_exported(whole) -> None:
    model, _ = load_run(whole)
    average = load_file(whole / "checkpoints" / "step_00000004" / WeightAverage.FILE)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, average[name], atol=0, rtol=0)
    assert model.config.img_size == 24 and model.config.num_classes == 26


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
def test_resume_is_exact_with_augmentation_and_average(stage, whole, tmp_path) -> None:
    """Two steps, then the rest from the checkpoint: the weights are those of a run in one piece."""
    assert run(tmp_path / "one", f"train.zero_stage={stage}") == 0
    part = tmp_path / "two"
    assert run(part, f"train.zero_stage={stage}") == 0
    for left in (part / "checkpoints" / "step_00000004", part / "model"):  # as if stopped after step 2
        (left / "complete.json").unlink(missing_ok=True)
    assert run(part, f"train.zero_stage={stage}", resume="auto") == 0
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (part, tmp_path / "one"))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, atol=0, rtol=0)


@pytest.mark.slow
def test_bf16_and_the_average_through_another_number_of_ranks(tmp_path) -> None:
    """Two ranks in bf16 at ZeRO-1 save; one rank goes on from the converted checkpoint, average included."""
    folder = tmp_path / "run"
    more = ["--set", "train.precision=bf16", "--set", "model.options.class_token=true", "--set", "train.save_every=4"]
    two, recipe = ["--set", "train.steps=2"], "vision.learned_tiny"
    done = launch([sys.executable], folder, *more, *two, recipe=recipe, settings=SMALL, ranks=2)
    assert done.returncode == 0, done.stderr[-2000:]
    before = load_file(folder / "checkpoints" / "step_00000002" / WeightAverage.FILE)
    resumed = ["vision.learned_tiny", *SMALL, *more, "--run-dir", str(folder), "--resume", "auto"]
    assert main(resumed) == 0
    after = load_file(folder / "checkpoints" / "step_00000004" / WeightAverage.FILE)
    change = {name: (after[name] - before[name]).abs().max() for name in before}
    assert all(value.dtype == torch.float32 for value in after.values())
    # Two steps of at most 2e-3 from the average of before: it was loaded, not begun again from other weights.
    assert 0 < max(change.values()) < 8e-3


def test_another_classifier_on_the_same_features(whole, tmp_path) -> None:
    from recipes.runs import load_weights
    from zoo import create_model

    model, _ = load_run(whole)
    fresh = create_model("vision_ggd2d_ssmax_tiny_patch8", **{**vars(model.config), "num_classes": 5})
    load_weights(fresh, str(whole))
    assert torch.equal(fresh.layers[0].attention.query.weight, model.layers[0].attention.query.weight)
    assert fresh.head.out_features == 5


def test_no_average_at_stage_three(tmp_path, capsys) -> None:
    assert run(tmp_path / "run", "train.zero_stage=3") == 2
    assert "train.ema" in capsys.readouterr().err


def test_a_checkpoint_without_an_average_says_so(whole, tmp_path, capsys) -> None:
    folder = tmp_path / "run"
    assert run(folder, "train.ema=0", "train.steps=2") == 0
    assert run(folder, "train.steps=4", resume="auto") == 2
    assert "train.ema=0" in capsys.readouterr().err


def test_the_average_follows_its_formula() -> None:
    model = nn.Linear(3, 2)
    average = WeightAverage(model, 0.5)
    expected = model.weight.detach().clone()
    for step in (1, 2, 3):
        with torch.no_grad():
            model.weight.add_(step)
        average.update(model)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * model.weight.detach()
    torch.testing.assert_close(average.average["weight"], expected)
    own = model.weight.detach().clone()
    with average.in_place(model):
        torch.testing.assert_close(model.weight.detach(), expected)
    assert torch.equal(model.weight.detach(), own)
    assert math.isclose(decay, 4 / 13)


def test_pictures_show_what_the_model_takes_held_out_images_for(whole, tmp_path, capsys) -> None:
    folder = tmp_path / "run"
    assert run(folder, 'evaluate.during={"predict": {"every": 4, "count": 5}}', "train.report_to=tensorboard") == 0
    (picture,) = (folder / "samples").iterdir()
    assert picture.name == "step_00000004.png" and f"step 4 draws {picture}" in " ".join(
        capsys.readouterr().out.split()
    )
    losses = [[r["loss"] for r in RunFolder(path).metrics() if "loss" in r] for path in (folder, whole)]
    assert losses[0] == losses[1]
    model, recipe = load_run(folder)
    data = VisionDataConfig(**recipe["data"])
    figure = draw_predictions(model.eval(), data, 5)
    titles = [axis.get_title() for axis in figure.axes if axis.images]
    (batch,) = contract.find_modality("vision").heldout(data, samples=5, rank=0, world=1, micro_batch=5)
    found = model(batch["images"]).argmax(-1).tolist()
    names = class_names(data.source)
    for title, guess, label in zip(titles, found, batch["targets"].tolist(), strict=True):
        assert title.startswith(f"{names[guess]} ") and (guess == label or title.endswith(f"is {names[label]}"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert "samples" in EventAccumulator(str(folder / "tensorboard")).Reload().Tags()["images"]


def test_what_has_no_picture_is_refused(tmp_path, capsys) -> None:
    with pytest.raises(ValueError, match=r"data\.target is 'count'"):
        draw_predictions(nn.Identity(), VisionDataConfig(target="count", augment="window"), 2)
    assert run(tmp_path / "run", 'evaluate.during={"generate": 2}') == 2
    assert "no evaluator 'generate' for vision models" in capsys.readouterr().err and not list(tmp_path.iterdir())
