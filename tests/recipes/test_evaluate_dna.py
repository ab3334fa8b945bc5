"""recipes/evaluate.py on DNA: baselines beside models, listings of files, options."""

from __future__ import annotations

import csv
import dataclasses
import json

import pytest
import torch
from typer.testing import CliRunner

from modalities.dna.data import DnaDataConfig
from modalities.dna.model import DnaConfig, DnaDecoder
from recipes import evaluate as command
from recipes.targets import RequestError, find_baselines, find_targets, parse_window

SMALL = dict(dim=32, num_layers=1, num_heads=2, hidden_dim=32, train_context=64)


def invoke(*arguments):
    return CliRunner().invoke(command.app, [str(a) for a in arguments])


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
    assert find_targets(["gzip"], {}, "cpu", "float32")[0].method == "gzip"
    with pytest.raises(RequestError, match="markov-13"):
        find_targets(["markov-13"], {}, "cpu", "float32")


def test_a_model_beside_baselines(tmp_path, run) -> None:
    out = tmp_path / "out"
    done = invoke(run, "uniform,markov-2", "bits,contigs", "--lengths", "64,256", "--samples", 2, "--out", out)
    assert done.exit_code == 0, done.output
    found = {m["label"]: m["rows"] for m in json.loads((out / "bits.json").read_text())["models"]}
    assert [row["length"] for row in found["dna.test (run)"]] == [64, 256]
    assert [row["bits_per_base"] for row in found["uniform"]] == [2.0, 2.0]
    assert all(1.85 < row["bits_per_base"] < 2.0 for row in found["markov-2"])
    (only,) = json.loads((out / "contigs.json").read_text())["models"][0]["rows"]
    assert only["contig"] == "yeast_chr01"
    assert (out / "bits.png").is_file() and (out / "contigs.png").is_file()
    assert "markov-2" in done.output and "yeast_chr01" in done.output


def test_records_of_a_file(tmp_path, run) -> None:
    fasta, out = tmp_path / "some.fa", tmp_path / "out"
    fasta.write_text(">one\nACGTNACGTAC\n>two\r\nTTTTGGGG\r\n\r\nCCCCAAAA\r\n>none\nNNN\n")
    done = invoke(run, "uniform", "score", "--fasta", fasta, "--out", out)
    assert done.exit_code == 0, done.output
    tables = sorted(out.glob("score.*.tsv"))
    assert len(tables) == 2
    with tables[1].open() as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    assert [next(iter(row.values())) for row in rows] == ["one", "two", "none"]
    assert [row["bits_per_base"] for row in rows] == ["2.0", "2.0", "nan"]
    assert "two" in done.output


def test_variants_of_a_file(tmp_path, run) -> None:
    fasta, calls, out = tmp_path / "ref.fa", tmp_path / "calls.vcf", tmp_path / "out"
    fasta.write_text(">chr1\n" + "ACGT" * 50 + "\n")
    calls.write_text("#CHROM\tPOS\tID\tREF\tALT\nchr1\t101\tsnv\tA\tG\nchr1\t101\tins\tA\tAGG\n")
    words = ("variants", "--fasta", fasta, "--variants", calls, "--window", "64", "--strands", "both", "--out", out)
    done = invoke(run, *words)
    assert done.exit_code == 0, done.output
    (table,) = out.glob("variants.*.tsv")
    with table.open() as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    assert [row["kind"] for row in rows] == ["snv", "insertion"] and all(float(row["llr_nats"]) for row in rows)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("score",), "--fasta"),
        (("score", "--fasta", "nothing.fa"), "nothing.fa"),
        (("variants", "--fasta", "nothing.fa"), "--variants"),
        (("score", "--fasta", "nothing.fa", "--samples", "3"), "samples (3) do not apply"),
        (("bits", "--split", "some.bed"), "needs the source"),
        (("bits", "--source", "yeast-chr01", "--split", "some.bed"), "some.bed"),
        (("bits", "--strands", "bth"), "did you mean 'both'"),
        (("bit",), "did you mean 'bits'"),
        (("bits", "--sizes", "96"), "--sizes does not apply to dna"),
        (("score", "--window", "1k,2k"), "expected one number of bases"),
        (("bits", "--lengths", "1m"), "1048576"),
    ],
)
def test_wrong_requests(tmp_path, run, words, message) -> None:
    done = invoke(run, *words, "--out", tmp_path / "out")
    assert done.exit_code == 2 and message in done.output.replace(",", "").replace("\n", " ") + done.output
    assert not (tmp_path / "out").exists()


def test_parsing_of_windows() -> None:
    assert (parse_window("4k"), parse_window("512"), parse_window(None)) == (4096, 512, None)
