"""recipes/evaluate.py on DNA: baselines beside models, listings of files, options."""

from __future__ import annotations

import csv
import dataclasses
import json

import pytest
import torch

from modalities.dna.config import DnaDataConfig
from modalities.dna.model import DnaConfig, DnaDecoder
from recipes import evaluate as command
from recipes.targets import find_baselines, find_targets

SMALL = dict(dim=32, num_layers=1, num_heads=2, hidden_dim=32, train_context=64)


@pytest.fixture
def invoke(capsys):
    """The command, as (exit code, all it printed)."""

    def called(*arguments):
        code = command.main([str(a) for a in arguments])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return called


@pytest.fixture
def run(tmp_path) -> str:
    torch.manual_seed(0)
    DnaDecoder(DnaConfig(**SMALL)).save_pretrained(tmp_path / "run" / "model")
    data = dataclasses.asdict(DnaDataConfig(context=64))
    (tmp_path / "run" / "recipe.json").write_text(json.dumps({"name": "dna.test", "modality": "dna", "data": data}))
    return str(tmp_path / "run")


def test_baselines_go_by_name_and_pattern(run) -> None:
    assert set(find_baselines("markov-*")) == {f"markov-{order}" for order in range(13)}
    for other in ("dna_*", "text_ggd_tiny", "*", "markov-13", run):
        assert find_baselines(other) == {}
    targets = find_targets(["uniform", run, "markov-1?"], {}, "cpu", "float32")
    assert [t.label for t in targets] == ["dna.test (run)", "uniform", "markov-10", "markov-11", "markov-12"]
    for target in targets:  # at the model's lengths, on the data that its training held out
        assert target.modality == "dna" and target.model.config.train_context == 64
        assert target.data["source"] == "yeast-chr01"
    with pytest.raises(ValueError, match="markov-13"):
        find_targets(["markov-13"], {}, "cpu", "float32")


@pytest.mark.slow
def test_a_model_beside_baselines(tmp_path, run, invoke) -> None:
    out = tmp_path / "out"
    code, printed = invoke(run, "uniform,markov-2", "bits", "--lengths", "64,256", "--samples", 2, "--out", out)
    assert code == 0, printed
    found = {path.stem: json.loads(path.read_text())["rows"] for path in (out / "bits").glob("*.json")}
    assert [row["length"] for row in found["dna.test__run_"]] == [64, 256]
    assert [row["bits_per_base"] for row in found["uniform"]] == [2.0, 2.0]
    assert all(1.85 < row["bits_per_base"] < 2.0 for row in found["markov-2"])
    assert (out / "bits.png").is_file() and (out / "bits.contigs.csv").is_file()
    assert "markov-2" in printed

    options = ("--lengths", "64,256", "--samples", 2, "--out", out)
    code, printed = invoke(run, "uniform,markov-0", "bits", *options, "--against", "markov-2")
    assert code == 0, printed
    rows = {(row["model"], row["score"], row["length"]): row for row in read(out / "bits.paired.csv")}
    assert len(rows) == 4 + 4 + 4 and ("markov-0", "accuracy", "64") in rows
    far = rows["uniform", "bits_per_base", "256"]
    assert float(far["difference"]) == pytest.approx(2.0 - found["markov-2"][1]["bits_per_base"])
    assert (far["units"], far["low"]) == ("1", "nan")  # one contig tells nothing of others


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_variants_of_a_file(tmp_path, run, invoke) -> None:
    fasta, calls, out = tmp_path / "ref.fa", tmp_path / "calls.vcf", tmp_path / "out"
    fasta.write_text(">chr1\n" + "ACGT" * 50 + "\n")
    head = "##fileformat=VCFv4.3\n#CHROM\tPOS\tID\tREF\tALT\tQUAL\tFILTER\tINFO\n"
    calls.write_text(head + "chr1\t101\t.\tA\tG,*\t9.50\t.\tX\n")
    words = (
        "--fasta",
        fasta,
        "--variants",
        calls,
        "--window",
        "64",
        "--strands",
        "both",
        "--info",
        "LLR",
        "--out",
        out,
    )
    code, printed = invoke(run, "uniform", "variants", *words)
    assert code == 0 and "1 with a symbolic allele" in printed, printed
    assert sorted(path.name for path in out.glob("variants.*.vcf")) == [
        "variants.dna.test__run_.vcf",
        "variants.uniform.vcf",
    ]
    lines = (out / "variants.uniform.vcf").read_text().splitlines()
    assert any(line.startswith("##INFO=<ID=LLR,Number=A") and "; uniform" in line for line in lines)
    assert lines[-1] == "chr1\t101\t.\tA\tG,*\t9.5\t.\tX;LLR=0,.;LLR_FLANK=0,."


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("score", "--fasta", "nothing.fa"), "nothing.fa"),
        (("variants", "--fasta", "nothing.fa"), "--variants"),
        (("bits", "--source", "yeast-chr01", "--split", "some.bed"), "some.bed"),
        (("bits", "--strands", "bth"), "did you mean 'both'"),
        (("bits", "--lengths", "1m"), "1048576"),
    ],
)
def test_wrong_requests(tmp_path, run, invoke, words, message) -> None:
    code, printed = invoke(run, *words, "--out", tmp_path / "out")
    assert code == 2 and message in printed.replace(",", "").replace("\n", " ") + printed
    assert not (tmp_path / "out").exists()
