"""recipes/evaluate.py on DNA: baselines beside models, listings of files, options."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from modalities.dna import baselines
from modalities.dna.config import DnaDataConfig
from modalities.dna.model import DnaConfig, DnaDecoder
from recipes.models import find_baselines
from recipes.targets import find_targets
from tests.recipes.test_evaluate import invoke, saved_run, table

SMALL = dict(dim=32, num_layers=1, num_heads=2, hidden_dim=32, train_context=64)


@pytest.fixture
def run(tmp_path) -> str:
    torch.manual_seed(0)
    data = dataclasses.asdict(DnaDataConfig(context=64))
    return saved_run(tmp_path / "run", data=data, model=DnaDecoder(DnaConfig(**SMALL)))


def test_baselines_by_name(run) -> None:
    """Baselines go by name and pattern."""
    assert [find_baselines(other) for other in ("dna_*", "*", "markov-13", run)] == [{}] * 4
    targets = find_targets([run, "markov-1?"], {}, "cpu", "float32")
    assert [t.label for t in targets] == ["dna.test (run)", "markov-10", "markov-11", "markov-12"]
    for target in targets:  # at the model's lengths, on the data that its training held out
        assert (target.modality, target.model.config.train_context) == ("dna", 64)
        assert target.data["source"] == "yeast-chr01"
    with pytest.raises(ValueError, match="markov-13"):
        find_targets(["markov-13"], {}, "cpu", "float32")


@pytest.mark.slow
def test_a_model_beside_baselines(tmp_path, run, monkeypatch) -> None:
    monkeypatch.setattr(baselines, "ORDER", 2)
    out = tmp_path / "out"
    options = ("bits", "--lengths", "64,256", "--samples", 2, "--out", out, "--against", "markov-2")
    code, printed, errors = invoke(run, "markov-0", *options)
    assert code == 0, errors
    assert "markov-2" in printed, errors
    results = {
        path.stem: json.loads(path.read_text())["rows"] for path in (out / "bits").glob("*.json")
    }
    assert [row["length"] for row in results["dna.test__run_"]] == [64, 256]
    assert all(1.85 < row["bits_per_base"] < 2.0 for row in results["markov-2"])
    assert (out / "bits.png").is_file()
    assert (out / "bits.contigs.csv").is_file()
    rows = {
        (row["model"], row["score"], row["length"]): row for row in table(out / "bits.paired.csv")
    }
    assert len(rows) == 4 + 4
    assert ("markov-0", "accuracy", "64") in rows
    far = rows["markov-0", "bits_per_base", "256"]
    pair = (results[name][1]["bits_per_base"] for name in ("markov-0", "markov-2"))
    assert float(far["difference"]) == pytest.approx(next(pair) - next(pair))
    assert (far["units"], far["low"]) == ("1", "nan")  # one contig tells nothing of others


def test_files_are_listed(tmp_path, run) -> None:
    fasta = tmp_path / "ref.fa"
    calls = tmp_path / "calls.vcf"
    out = tmp_path / "out"
    fasta.write_text(">chr1\n" + "ACGT" * 50 + "\n>none\nNNN\n")
    code, printed, errors = invoke(run, "score", "--fasta", fasta, "--out", out)
    assert code == 0, errors
    for path in out.rglob("*.json"):  # what has no base is NaN, which JSON does not have
        json.loads(path.read_text(), parse_constant=pytest.fail)
    assert [row["bases"] for row in table(out / "score.dna.test__run_.tsv", "\t")] == ["200", "0"]
    assert "score: 200 of the 203 bases of 2 records of" in printed
    assert "all 2" in printed
    head = "##fileformat=VCFv4.3\n#CHROM\tPOS\tID\tREF\tALT\tQUAL\tFILTER\tINFO\n"
    calls.write_text(head + "chr1\t101\t.\tA\tG,*\t9.50\t.\tX\n")
    words = f"variants --fasta {fasta} --variants {calls} --window 64 --strands both --out {out}"
    code, printed, errors = invoke(run, *words.split())
    assert code == 0, errors
    assert "not scored: 1 with a symbolic allele" in printed, errors
    snv, other = table(out / "variants.dna.test__run_.tsv", "\t")
    assert (
        " ".join(snv)
        == "chrom pos id ref alt kind reason llr_nats llr_bits flank_llr_nats window flank"
    )
    assert (snv["pos"], snv["kind"], snv["flank"], other["alt"]) == ("101", "snv", "63", "*")
    assert f"{float(snv['llr_nats']):+.3f}" in printed
