"""`--calibrate`: real steps are timed, what the table says of them is arithmetic, and nothing is left behind."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from modalities.contract import find_modality
from recipes import estimate
from recipes.config import apply_overrides, resolve
from recipes.engine import Ranks
from recipes.registry import find_recipe
from recipes.train import main

SMALL = ["model.options.num_layers=1", "model.options.dim=16", "model.options.num_heads=2"]
SMALL += ["model.options.hidden_dim=32", "data.context=96", "train.batch=2", "train.steps=7200", "optim.name=adamw"]
ALONE = Ranks(0, 1, 0, torch.device("cpu"))


def settings(*more: str) -> list[str]:
    return [word for setting in (*SMALL, *more) for word in ("--set", setting)]


def test_what_the_table_says_follows_from_what_was_measured():
    plan = resolve(apply_overrides(find_recipe("text.ggd_tiny"), SMALL)[0], world=2)
    # 4 GFLOP a step of one second, on two ranks of 5 GFLOP/s
    lines = estimate.calibration(plan, (3.0, 0.5, 1.0), 400.0, 3 * 2**29, 4e9, (5e9, "a sheet"))
    assert lines["measured speed"] == "400 tokens/s"
    assert (
        lines["measured seconds a step"].startswith("1, the median of 3")
        and "0.5 to 3" in lines["measured seconds a step"]
    )
    assert lines["MFU"] == "40.0% of 5GFLOP/s a rank (a sheet)"
    assert lines["measured memory per rank"] == "1.50 GiB at the peak"
    assert lines["time to the end"] == "2:00:00 for 7,200 steps, without evaluation and saving"


def test_peaks_are_of_data_sheets_or_measured(monkeypatch):
    def peak(name: str, precision: str) -> tuple[float, str]:
        monkeypatch.setattr(estimate, "device_name", lambda device: name)
        return estimate.find_peak(ALONE, precision)

    assert peak("NVIDIA H100 80GB HBM3", "bf16")[0] == 989e12
    assert peak("NVIDIA H100 PCIe", "fp32")[0] == 51e12
    assert peak("NVIDIA A100-SXM4-80GB", "fp16")[0] == 312e12
    monkeypatch.setitem(estimate.PRODUCT, "cpu", (64, 1))
    for other in ("NVIDIA A10G", "NVIDIA L400", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "cpu"):
        reached, source = peak(other, "fp32")
        assert 0 < reached < 1e13 and "products of 64 × 64" in source


def test_a_calibration_trains_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["text.ggd_ssmax_tiny", *settings(), "--calibrate", "2"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "the median of 2 after 2" in printed and "the recipe's data" in printed and "7,200 steps" in printed
    assert main(["text.ggd_ssmax_tiny", *settings("data.source=nowhere.txt"), "--calibrate", "1"]) == 0
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "random batches of its shapes" in printed and "nowhere.txt" in printed
    assert main(["text.ggd_ssmax_tiny", *settings(), "--calibrate", "1", "--world", "2"]) == 2
    assert "without --world" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["text.goat_tiny", "dna.goat_tiny", "vision.goat_tiny"])
def test_random_batches_have_the_shapes_of_real_ones(name):
    recipe = find_recipe(name)
    modality, options = find_modality(recipe.modality), {"dim": 64, "num_layers": 1, "num_heads": 2}
    model = modality.build(recipe.model.name, options, recipe.data)
    assert modality.example is not None
    batch = modality.example(model, recipe.data, 3)
    assert modality.loss(model, batch)[0].isfinite()
    assert modality.weight(batch)[1] == 3 * modality.cost(model, recipe.data, 4).units
    if recipe.modality == "vision":
        for target, names in {"map": ["targets"], "count+map": ["targets", "maps"]}.items():
            data = dataclasses.replace(recipe.data, target=target, augment="window")
            given = modality.example(model, data, 2)
            assert [given[name].shape[1:] for name in names][-1] == (data.image_size, data.image_size)
