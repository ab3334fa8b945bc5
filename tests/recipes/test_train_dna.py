"""The same loop on DNA: bits per base on the way, tokenizers, both strands, resume."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file

from recipes.runs import RunFolder, load_run
from recipes.train import main

SETTINGS = {
    "data.source": "yeast-chr01",
    "data.context": 32,
    "model.options.num_layers": 1,
    "model.options.dim": 32,
    "model.options.num_heads": 2,
    "model.options.hidden_dim": 32,
    "train.batch": 8,
    "train.steps": 4,
    "train.save_every": 2,
    "train.log_every": 1,
    "optim.warmup": 1,
    "optim.prior_lr_scale": 1,
    "evaluate.every": 2,
    "evaluate.samples": 16,
}


def words(**changes) -> list[str]:
    settings = SETTINGS | {name.replace("__", "."): value for name, value in changes.items()}
    return [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]


def run(folder, recipe="dna.ggd_ssmax_tiny", resume=None, **changes) -> int:
    arguments = [recipe, *words(**changes), "--run-dir", str(folder)]
    return main(arguments + (["--resume", resume] if resume else []))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokenizer", "strands", "bases"), [("bases", "one", 1), ("bases", "both", 1), ("kmer:3", "both", 3)]
)
def test_bits_per_base_are_measured_on_the_way(tokenizer, strands, bases, tmp_path) -> None:
    assert run(tmp_path / "run", data__tokenizer=tokenizer, model__options__strands=strands) == 0
    records = [r for r in RunFolder(tmp_path / "run").metrics() if "heldout_loss" in r]
    assert [r["step"] for r in records] == [2, 4]
    for record in records:  # yeast has no unknown base, so every target stands for as many
        assert record["heldout_bits_per_base"] == pytest.approx(record["heldout_loss"] / math.log(2) / bases, rel=1e-5)
        assert 1.8 < record["heldout_bits_per_base"] < 2.4
    config = load_run(tmp_path / "run")[0].config
    assert (config.tokenizer, config.strands, config.num_targets, config.train_context) == (
        *(tokenizer, strands, 4**bases, 32),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "changes"),
    [("dna.ggd_ssmax_tiny", {}), ("dna.ggd_ssmax_copy_tiny", {"model__options__copy_orders": [2, 4]})],
)
def test_resume_is_exact(recipe, changes, tmp_path) -> None:
    """Two steps, then the rest from the checkpoint: windows, strands, weights and memory are those of a run in one piece."""
    assert run(tmp_path / "one", recipe, **changes) == 0
    assert run(tmp_path / "two", recipe, **changes) == 0
    for left in (tmp_path / "two" / "checkpoints" / "step_00000004", tmp_path / "two" / "model"):
        (left / "complete.json").unlink(missing_ok=True)  # as if stopped after step 2
    assert run(tmp_path / "two", recipe, resume="auto", **changes) == 0
    ours, theirs = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("two", "one"))
    assert theirs.get("copy_expert.held", 4 * 88) == 4 * 88  # four batches of 8 rows of 33 digits, three to a byte
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, atol=0, rtol=0)


def test_what_is_missing_is_named(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("PRIORZOO_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["dna.human_125m", "--run-dir", str(tmp_path / "run")]) == 2
    assert str(tmp_path / "human" / "genome.fa") in capsys.readouterr().err
    assert main(["dna.goat_tiny", "--run-dir", str(tmp_path / "run")]) == 2
    assert "recipes/fetch_data.py dna genomes" in capsys.readouterr().err
    assert main(["dna.goat_tiny", "--set", "model.options.tokenizer=kmer:2", "--dry-run"]) == 2
    assert "set data.tokenizer alone" in capsys.readouterr().err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
