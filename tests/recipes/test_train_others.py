"""The same loop on images and DNA: metrics on the way, averaged weights, tokenizers, resume."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from recipes.optim import WeightAverage
from recipes.run_folder import RunFolder, load_run
from recipes.train import main
from tests.recipes.test_train import run

SIZES = """model.options.num_layers=1 model.options.dim=32 model.options.num_heads=1 model.options.hidden_dim=32 train.batch=8
train.steps=4 train.save_every=2 optim.warmup=1 optim.prior_lr_scale=1 evaluate.every=2 evaluate.samples=16"""
IMAGES = """data.source=glyphs-builtin data.label_smoothing=0.1 data.mixup=0.2 data.image_size=24 train.ema=0.9"""


def small(recipe: str, *settings: str) -> list[str]:
    return [
        recipe,
        *(word for setting in (*SIZES.split(), *settings) for word in ("--set", setting)),
    ]


VISION = small("vision.ggd2d_ssmax_tiny", *IMAGES.split())
KMERS = small(
    "dna.ggd_ssmax_tiny", "data.source=yeast-chr01", "data.context=32", "data.tokenizer=kmer:3"
)
COPIES = small(
    "dna.ggd_ssmax_copy_tiny",
    "data.source=yeast-chr01",
    "data.context=32",
    "model.options.copy_orders=[2,4]",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [[*VISION, "--set", "train.zero_stage=1"], KMERS, COPIES], ids=lambda words: words[0]
)
def test_two_parts_equal_one(words, tmp_path) -> None:
    """Data, augmentation, averages and memory go on where step 2 left them; images are scored on
    the way."""
    assert run(tmp_path / "one", words=words) == run(tmp_path / "two", words=words) == 0
    records = RunFolder(tmp_path / "one").metrics()
    for record in records:  # yeast has no unknown base: every target stands for as many
        if bits := record.get("heldout_bits_per_base"):
            bases = 3 if words is KMERS else 1
            assert bits == pytest.approx(record["heldout_loss"] / math.log(2) / bases, rel=1e-5)
            assert 1.8 < bits < 2.4
    if words[0] == VISION[0]:
        accuracies = [
            (r["step"], r["heldout_top1"], r["heldout_top5"])
            for r in records
            if "heldout_loss" in r
        ]
        assert [step for step, *_ in accuracies] == [2, 4]
        assert all(0 <= a <= b <= 1 for _, a, b in accuracies)
        assert [r["images"] for r in records if "loss" in r] == [8, 16, 24, 32]
        average = load_file(tmp_path / "one/checkpoints/step_00000004" / WeightAverage.FILE)
        exported = load_run(tmp_path / "one")[0].named_parameters()
        assert all(torch.equal(value, average[name]) for name, value in exported)
    for name in ("checkpoints/step_00000004", "model"):
        shutil.rmtree(tmp_path / "two" / name)
    assert run(tmp_path / "two", words=words, resume="auto") == 0
    ours, theirs = (
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("two", "one")
    )
    assert (
        theirs.get("copy_expert.held", 4 * 88) == 4 * 88
    )  # four batches of 8 rows of 33 digits, three to a byte
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_the_average_follows_its_formula() -> None:
    model = nn.Linear(3, 2)
    average = WeightAverage(model, 0.5)
    expected = model.weight.detach().clone()
    for step in (1, 2, 3):
        model.weight.data.add_(step)
        average.update(model)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * model.weight.detach()
    trained = model.weight.detach().clone()
    with average.in_place(model):
        torch.testing.assert_close(model.weight.detach(), expected)
    assert torch.equal(model.weight.detach(), trained)


@pytest.mark.slow
def test_what_is_missing_is_named(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("PRIORZOO_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for words, message in (
        (["dna.human_125m"], str(tmp_path / "human" / "genome.fa")),
        (["dna.goat_tiny"], "priorzoo fetch-data dna genomes"),
        (
            ["dna.goat_tiny", "--set", "model.options.tokenizer=kmer:2", "--dry-run"],
            "set data.tokenizer alone",
        ),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
