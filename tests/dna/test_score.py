"""Scores of records against likelihoods computed base by base, and what becomes of long, short and unknown records."""

from __future__ import annotations

import csv
import json
import math
from itertools import islice

import numpy as np
import pytest
from rich.console import Console

from modalities.dna import reading
from modalities.dna.bases import decode, encode, reverse_complement
from modalities.dna.evaluation import RegionSettings
from modalities.dna.evaluators.score import Score
from modalities.dna.reading import Span, cost
from modalities.evaluation import ModelResult
from tests.dna.models import Composed, letters, tiny


@pytest.fixture
def fasta(tmp_path):
    """Records by name, in an order that is not sorted, to a FASTA."""

    def write(**sequences):
        path = tmp_path / "records.fa"
        path.write_text("".join(f">{name} described\n{text}\n" for name, text in sequences.items()))
        return str(path)

    return write


def of(**options):
    return Score(RegionSettings(**options))


def score(model, path, **options):
    evaluator = of(fasta=path, **options)
    return {row["name"]: row for row in evaluator.rows(json.loads(json.dumps(dict(evaluator.run(model)))))}


def test_unknown_bases_are_listed_and_not_counted(fasta):
    sequences = {"n": "NNNN", "some": "ACNNRGT", "tail": "ACGTNN", "short": "AC"}
    rows = score(Composed(), fasta(**sequences))
    assert list(rows) == list(sequences)
    assert [rows[name]["unknown"] for name in sequences] == [4, 3, 2, 0]
    assert [rows[name]["bases"] for name in sequences] == [0, 4, 4, 2]
    for column in ("gc", "log_likelihood", "nats_per_base", "bits_per_base"):
        assert math.isnan(rows["n"][column])
    assert rows["some"]["bits_per_base"] == pytest.approx(2, abs=1e-15) and rows["some"]["gc"] == 0.5
    kmers = score(tiny("kmer:3"), fasta(**sequences))
    assert [kmers[name]["bases"] for name in sequences] == [0, 0, 3, 0]  # no k-mer of "ACN NRG" is known


def test_parts_and_batches_change_nothing(fasta, monkeypatch):
    model = tiny()
    texts = {f"r{n}": letters(int(length), n) for n, length in enumerate(np.random.default_rng(0).integers(5, 200, 30))}
    path = fasta(**texts)
    whole = score(model, path, window=32)
    monkeypatch.setattr(reading, "CELL_BASES", 100)
    evaluator = of(fasta=path, window=32, batch_tokens=70)
    cells = dict(evaluator.run(model))
    records = [record["name"] for cell in cells.values() for record in cell["records"]]
    assert len(cells) > 20 and len(set(records)) == 30 < len(records)  # some records lie in several
    for row in evaluator.rows(cells):
        numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
        assert numbers == pytest.approx({name: whole[row["name"]][name] for name in numbers}, rel=1e-5)
    told = []
    evaluator.advance = told.append
    stopped = json.loads(json.dumps(dict(islice(evaluator.run(model), 9))))
    again = dict(evaluator.run(model, stopped))
    assert again == cells and evaluator.rows(again) == evaluator.rows(cells)  # to the bit
    whole_spans = [Span(0, name, len(text), 0, len(text)) for name, text in texts.items()]
    planned = [cell.cost for cell in evaluator.cells(model)]
    assert sum(planned) == sum(told) == sum(cost(span, 16, both=False) for span in whole_spans)  # nothing is read twice
    assert max(planned) <= 100 + 32


@pytest.mark.parametrize("tokenizer", ["bases", "kmer:3"])
def test_a_region_of_the_other_strand_is_read_there(fasta, tmp_path, tokenizer):
    model, text = tiny(tokenizer), letters(200)
    turned = decode(reverse_complement(encode(text)))
    (tmp_path / "a.bed").write_text("a\t40\t110\tthe gene\t0\t-\na\t0\t70\tstart\t0\t-\na\t40\t110\tplus\t0\t+\n")
    rows = score(model, fasta(a=text), regions=str(tmp_path / "a.bed"), window=36, strands="one")
    assert {name: row["strand"] for name, row in rows.items()} == {"the gene": "-", "start": "-", "plus": "+"}
    (tmp_path / "b.bed").write_text("a\t90\t160\tthe gene\na\t130\t200\tstart\n")
    other = score(model, fasta(a=turned), regions=str(tmp_path / "b.bed"), window=36, strands="one")
    for name, row in other.items():
        for column in ("log_likelihood", "bases", "gc"):
            assert rows[name][column] == pytest.approx(row[column], rel=1e-5)
    assert rows["the gene"]["log_likelihood"] != pytest.approx(rows["plus"]["log_likelihood"])


def test_requests_that_cannot_be_served(fasta, tmp_path):
    with pytest.raises(ValueError, match="--fasta"):
        of().cells(tiny())
    with pytest.raises(ValueError, match=r"window 5: .*'kmer:3' needs at least 6"):
        of(fasta=fasta(r="ACGT"), window=5).cells(tiny("kmer:3"))
    with pytest.raises((FileNotFoundError, ValueError), match=r"nothing\.fa"):
        of(fasta=str(tmp_path / "nothing.fa")).cells(tiny())
    assert of(window=20).window(tiny("kmer:3")) == 18
    assert of().window(tiny("kmer:3")) == 16 * 16 * 3


def test_tables_and_terminal(fasta, tmp_path):
    """Places count as in BED, from 0; the terminal says what was measured, and what was left out."""
    text = letters(40)
    (tmp_path / "r.bed").write_text("a\t10\t30\tg\na\t38\t40\n" + "a\t0\t5\tx\n" * 20)
    evaluator = of(fasta=fasta(a=text[:12] + "NN" + text[14:]), regions=str(tmp_path / "r.bed"))
    cells = dict(evaluator.run(Composed()))
    results = [ModelResult(label, 8, evaluator.rows(cells), cells) for label in ("goat a/b", "ggd (run)")]
    evaluator.write(results, tmp_path / "out")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"score.goat_a_b.tsv", "score.ggd__run_.tsv"}
    with open(tmp_path / "out" / "score.goat_a_b.tsv") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    places = [(row["name"], row["contig"], int(row["bed_start"]), int(row["bed_stop"])) for row in rows]
    assert places[:2] == [("g", "a", 10, 30), ("a:39-40", "a", 38, 40)]
    said = evaluator.measured(results)
    assert said.startswith("score: 120 of the 122 bases of 22 regions of") and "; 2 left out: unknown" in said
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    evaluator.show(results, console)
    shown = console.export_text()
    assert "all 22" in shown and "2.0000" in shown and "2 more in the files" in shown
