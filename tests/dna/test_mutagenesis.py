"""Saturation mutagenesis: every substitution of regions has the score that `variants` gives it."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from rich.console import Console

from modalities.dna.bases import BASES, decode
from modalities.dna.evaluation import RegionSettings
from modalities.dna.evaluators import mutagenesis
from modalities.dna.evaluators.mutagenesis import Mutagenesis, llr_map
from modalities.dna.evaluators.variants import Variants, VariantSettings
from modalities.dna.model import DnaConfig, DnaDecoder
from modalities.dna.tokenizers import load_tokenizer
from modalities.evaluation import ModelResult

TEXT = decode(np.random.default_rng(3).integers(0, 4, 60).astype(np.uint8))
TEXT = TEXT[:30] + "NN" + TEXT[32:]


def tiny(tokenizer="bases"):
    torch.manual_seed(2)
    vocabulary = load_tokenizer(tokenizer)
    sizes = dict(vocab_size=vocabulary.vocab_size, num_targets=vocabulary.num_targets, tokenizer=tokenizer)
    model = DnaDecoder(
        DnaConfig(dim=32, num_layers=1, num_heads=2, hidden_dim=48, train_context=8, position="alibi", **sizes)
    )
    with torch.no_grad():
        model.embedding.weight *= 4
    return model.eval()


@pytest.fixture
def files(tmp_path):
    (tmp_path / "g.fa").write_text(f">c\n{TEXT}\n>s\nAC\n")
    (tmp_path / "r.bed").write_text("c\t0\t5\nc\t28\t35\nc\t3\t8\ns\t0\t2\nc\t58\t60\n")
    rows = [
        (name, at + 1, sequence[at], alt)
        for name, sequence, places in (("c", TEXT, [*range(8), *range(28, 35), 58, 59]), ("s", "AC", [0, 1]))
        for at in places
        for alt in BASES
        if sequence[at] not in (alt, "N")
    ]
    table = "chrom,pos,ref,alt\n" + "".join(",".join(map(str, row)) + "\n" for row in rows)
    (tmp_path / "v.csv").write_text(table)
    return {"fasta": str(tmp_path / "g.fa"), "regions": str(tmp_path / "r.bed")}, str(tmp_path / "v.csv"), rows


def run(model, evaluator):
    return evaluator.rows(json.loads(json.dumps(dict(evaluator.run(model)))))


@pytest.mark.parametrize(("tokenizer", "strands"), [("bases", "one"), ("bases", "both"), ("kmer:3", "one")])
def test_every_substitution_once_as_variants_scores_it(files, tokenizer, strands, monkeypatch):
    monkeypatch.setattr(mutagenesis, "CELL_SITES", 3)
    where, variants, changes = files
    model, options = tiny(tokenizer), dict(window=16, strands=strands)
    evaluator = Mutagenesis(RegionSettings(**where, **options))
    assert len(evaluator.cells(model)) == 8
    found = run(model, evaluator)
    single = run(model, Variants(VariantSettings(fasta=where["fasta"], variants=variants, **options)))
    assert [(row["chrom"], row["pos"], row["ref"], row["alt"]) for row in found] == changes
    assert [(row["chrom"], row["pos"], row["ref"], row["alt"]) for row in single] == changes
    for mine, other in zip(found, single, strict=True):
        assert mine["llr_nats"] == pytest.approx(other["llr_nats"], abs=1e-5, nan_ok=True)
        assert math.isnan(mine["llr_nats"]) == bool(mine["reason"]) == (tokenizer != "bases" and mine["chrom"] == "s")


def test_limits_and_identity(files, monkeypatch):
    where, *_ = files
    model = tiny()
    base = Mutagenesis(RegionSettings(**where)).identity(model)
    assert Mutagenesis(RegionSettings(fasta=where["fasta"])).identity(model) != base
    assert Mutagenesis(RegionSettings(**where, window=16)).identity(model) != base
    monkeypatch.setattr(mutagenesis, "MOST_SITES", 18)
    with pytest.raises(ValueError, match=r"19 bases to substitute: expected at most 18; .*--regions"):
        Mutagenesis(RegionSettings(**where)).cells(model)


def test_map_figure_and_terminal(files, tmp_path):
    where, *_ = files
    evaluator = Mutagenesis(RegionSettings(**where, window=16))
    rows = run(tiny(), evaluator)
    first, values = llr_map(rows)
    assert first == 1 and values.shape == (4, 60)
    for row in rows:
        if row["chrom"] == "c":
            assert values[BASES.index(row["alt"]), row["pos"] - 1] == row["llr_nats"]
    assert np.isnan(values[:, 8:28]).all() and np.isnan(values[:, 30:32]).all()
    assert (values[[BASES.index(base) for base in TEXT[:8]], range(8)] == 0).all()
    results = [ModelResult("one", 8, rows), ModelResult("two", 8, [])]
    evaluator.draw(results, tmp_path / "m.png")
    evaluator.write(results, tmp_path)
    assert (tmp_path / "m.png").stat().st_size > 5000 and (tmp_path / "mutagenesis.one.tsv").is_file()
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    evaluator.show(results, console)
    lowest = min(row["llr_nats"] for row in rows)
    assert f"{lowest:+.3f}" in console.export_text()
