"""`--calibrate`: real steps are timed, what the table says of them is arithmetic, and nothing is left behind."""

from __future__ import annotations

import torch

from recipes import estimate
from recipes.config import apply_overrides, resolve
from recipes.engine import Ranks
from recipes.registry import find_recipe
from recipes.train import main

SMALL = ["model.options.num_layers=1", "model.options.dim=16", "model.options.num_heads=2"]
SMALL += ["model.options.hidden_dim=32", "data.context=96", "train.batch=2", "train.steps=7200", "optim.name=adamw"]


def test_what_the_table_says_follows_from_what_was_measured():
    plan = resolve(apply_overrides(find_recipe("text.ggd_tiny"), SMALL)[0], world=2)
    # 4 GFLOP a step of one second, on two ranks of 5 GFLOP/s
    lines = estimate.calibration(plan, (3.0, 0.5, 1.0), 400.0, 3 * 2**29, 4e9, (5e9, "a sheet"))
    assert lines["measured speed"] == "400 tokens/s" and lines["measured memory per rank"] == "1.50 GiB at the peak"
    assert lines["MFU"] == "40.0% of 5GFLOP/s a rank (a sheet)" and lines["time to the end"].startswith("2:00:00 for")


def test_peaks_are_of_data_sheets_or_measured(monkeypatch):
    ranks = Ranks(0, 1, 0, torch.device("cpu"))
    monkeypatch.setitem(estimate.PRODUCT, "cpu", (64, 1))
    for name, precision, flops in (
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "fp32", 51e12),
        ("NVIDIA A100-SXM4-80GB", "fp16", 312e12),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "fp32", None),
        ("NVIDIA L400", "fp32", None),
    ):
        monkeypatch.setattr(estimate, "device_name", lambda device, name=name: name)
        peak, source = estimate.find_peak(ranks, precision)
        assert peak == flops or (flops is None and "products of 64 × 64" in source)


def test_a_calibration_trains_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["text.ggd_ssmax_tiny", *(word for setting in SMALL for word in ("--set", setting)), "--calibrate"]
    assert main([*words, "2"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "the median of 2 after 2" in printed and "the recipe's data" in printed and "7,200 steps" in printed
    assert main([*words, "1", "--set", "data.source=nowhere.txt"]) == 0
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "random batches of its shapes" in printed and "nowhere.txt" in printed
    assert main([*words, "1", "--world", "2"]) == 2 and "without --world" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
