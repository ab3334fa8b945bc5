"""The same loop on DNA: bits per base on the way, tokenizers, resume."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from safetensors.torch import load_file

from recipes.runs import RunFolder
from recipes.train import main

SETTINGS = """data.source=yeast-chr01 data.context=32 model.options.num_layers=1 model.options.dim=32
model.options.num_heads=2 model.options.hidden_dim=32 train.batch=8 train.steps=4 train.save_every=2 train.log_every=1
optim.warmup=1 optim.prior_lr_scale=1 evaluate.every=2 evaluate.samples=16"""


def run(folder, recipe="dna.ggd_ssmax_tiny", *settings, resume=None) -> int:
    words = [word for setting in (*SETTINGS.split(), *settings) for word in ("--set", setting)]
    words = [recipe, *words, "--run-dir", str(folder)]
    return main(words + (["--resume", resume] if resume else []))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "settings", "bases"),
    [
        ("dna.ggd_ssmax_tiny", ["data.tokenizer=kmer:3"], 3),
        ("dna.ggd_ssmax_copy_tiny", ["model.options.copy_orders=[2, 4]"], 1),
    ],
)
def test_bits_per_base_and_exact_resume(recipe, settings, bases, tmp_path) -> None:
    """Two steps, then the rest from the checkpoint: windows, strands, weights and memory are those of a run in one piece."""
    assert run(tmp_path / "one", recipe, *settings) == run(tmp_path / "two", recipe, *settings) == 0
    records = [r for r in RunFolder(tmp_path / "one").metrics() if "heldout_loss" in r]
    for record in records:  # yeast has no unknown base, so every target stands for as many
        assert record["heldout_bits_per_base"] == pytest.approx(record["heldout_loss"] / math.log(2) / bases, rel=1e-5)
        assert 1.8 < record["heldout_bits_per_base"] < 2.4
    for name in ("checkpoints/step_00000004", "model"):  # as if stopped after step 2
        shutil.rmtree(tmp_path / "two" / name)
    assert run(tmp_path / "two", recipe, *settings, resume="auto") == 0
    ours, theirs = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("two", "one"))
    assert theirs.get("copy_expert.held", 4 * 88) == 4 * 88  # four batches of 8 rows of 33 digits, three to a byte
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, atol=0, rtol=0)


def test_what_is_missing_is_named(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("PRIORZOO_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for words, message in (
        (["dna.human_125m"], str(tmp_path / "human" / "genome.fa")),
        (["dna.goat_tiny"], "priorzoo fetch-data dna genomes"),
        (["dna.goat_tiny", "--set", "model.options.tokenizer=kmer:2", "--dry-run"], "set data.tokenizer alone"),
    ):
        assert main(words) == 2 and message in capsys.readouterr().err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
