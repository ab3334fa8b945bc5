"""Scores of records against likelihoods computed base by base, and what becomes of long, short and unknown records."""

from __future__ import annotations

import csv
import json
import math
from itertools import islice

import numpy as np
import pytest
import torch
from rich.console import Console

from modalities.dna.baselines import BaselineConfig, create_baseline
from modalities.dna.bases import decode, encode, reverse_complement
from modalities.dna.evaluation import RegionSettings, step_of
from modalities.dna.evaluators import score as records
from modalities.dna.evaluators.score import Score
from modalities.dna.genome import open_genome
from modalities.dna.model import DnaConfig, DnaDecoder
from modalities.dna.reading import Span, base_nats, cost
from modalities.dna.scoring import Scores, WindowScorer
from modalities.dna.sources import find_source
from modalities.dna.tokenizers import load_tokenizer, train_bpe
from modalities.evaluation import ModelResult

BIT = math.log(2)


def tiny(tokenizer="bases", **options):
    torch.manual_seed(2)
    vocabulary = load_tokenizer(tokenizer)
    sizes = dict(vocab_size=vocabulary.vocab_size, num_targets=vocabulary.num_targets, tokenizer=tokenizer)
    config = DnaConfig(
        dim=32, num_layers=1, num_heads=2, hidden_dim=48, train_context=8, position="alibi", **sizes, **options
    )
    model = DnaDecoder(config).eval()
    with torch.no_grad():
        model.embedding.weight *= 4  # far from uniform
    return model


class Seen(WindowScorer):
    """A base costs as many nats as bases of its window were read before it."""

    def __init__(self):
        super().__init__()
        self.config = BaselineConfig("seen", train_context=8)

    def score(self, windows):
        known = torch.from_numpy(windows < 4)
        nll = torch.arange(windows.shape[1], dtype=torch.float64).expand(windows.shape)
        return Scores(nll.where(known, 0.0), known.long(), known.double())


def letters(count, seed=0):
    return decode(np.random.default_rng(seed).choice(4, count, p=(0.4, 0.1, 0.2, 0.3)).astype(np.uint8))


@pytest.fixture
def fasta(tmp_path):
    """Records by name, in an order that is not sorted, to a FASTA."""

    def write(**sequences):
        path = tmp_path / "records.fa"
        path.write_text("".join(f">{name} described\n{text}\n" for name, text in sequences.items()))
        return str(path)

    return write


def score(model, path, **options):
    evaluator = of(fasta=path, **options)
    return {row["name"]: row for row in evaluator.rows(json.loads(json.dumps(dict(evaluator.run(model)))))}


def of(**options):
    return Score(RegionSettings(**options))


@torch.no_grad()
def naive(model, text, window):
    """Nats of every base, each predicted by a pass of its own from what the documented window shows of it."""
    codes, half, nats = encode(text).astype(np.int64), window // 2, []
    for at in range(len(codes)):
        start = 0 if at < window else (at - window) // half * half + half
        read = torch.tensor([[model.config.num_targets + 1, *codes[start:at]]])
        nats.append(-float(model(read)[0, -1].double().log_softmax(-1)[codes[at]]))
    return nats


@pytest.mark.slow
@pytest.mark.parametrize("length", [31, 33, 48, 100])
def test_a_long_record_is_read_in_windows_that_overlap_by_half(fasta, length):
    model, text = tiny(), letters(length)
    rows = score(model, fasta(r=text), window=32)
    nats = naive(model, text, 32)
    assert rows["r"]["log_likelihood"] == pytest.approx(-sum(nats), rel=1e-5)
    assert rows["r"]["bases"] == length


@pytest.mark.parametrize("tokenizer", ["bases", "kmer:3", "bpe"])
def test_each_base_counts_once_whatever_the_tokens(tmp_path, fasta, tokenizer):
    text = letters(203)
    path = fasta(r=text)
    if tokenizer == "bpe":
        genome = open_genome(find_source(path))
        tokenizer = str(tmp_path / "bpe.json")
        from modalities.dna.splits import Region

        train_bpe(genome, [Region("r", 0, 203, "train")], 20, tokenizer)
    model = tiny(tokenizer)
    step = step_of(load_tokenizer(tokenizer))
    row = score(model, path, window=60)["r"]
    assert row["bases"] == 203 // step * step and row["remainder"] == 203 % step and row["length"] == 203
    direct = 0.0
    for k, start in enumerate(range(0, 203 - 30, 30)):
        nats, counted = base_nats(model, encode(text)[None, start : start + 60], 4096)
        direct += nats[0, 30 if k else 0 :].sum()
        assert counted[0, : (60 if start + 60 <= 203 else 203 - start) // step * step].all()
    assert row["log_likelihood"] == pytest.approx(-direct, rel=1e-5)


def test_unknown_bases_are_listed_and_not_counted(fasta):
    sequences = {"n": "NNNN", "some": "ACNNRGT", "tail": "ACGTNN", "short": "AC"}
    rows = score(create_baseline("uniform"), fasta(**sequences))
    assert list(rows) == list(sequences)
    assert [rows[name]["unknown"] for name in sequences] == [4, 3, 2, 0]
    assert [rows[name]["bases"] for name in sequences] == [0, 4, 4, 2]
    for column in ("gc", "log_likelihood", "nats_per_base", "bits_per_base"):
        assert math.isnan(rows["n"][column])
    assert rows["some"]["bits_per_base"] == pytest.approx(2, abs=1e-15) and rows["some"]["gc"] == 0.5
    kmers = score(tiny("kmer:3"), fasta(**sequences))
    assert [kmers[name]["remainder"] for name in sequences] == [1, 1, 0, 2]
    assert [kmers[name]["bases"] for name in sequences] == [0, 0, 3, 0]  # no k-mer of "ACN NRG" is known


@pytest.mark.slow
def test_parts_and_batches_change_nothing(fasta, monkeypatch):
    model = tiny()
    texts = {f"r{n}": letters(int(length), n) for n, length in enumerate(np.random.default_rng(0).integers(5, 200, 30))}
    path = fasta(**texts)
    whole = score(model, path, window=32)
    monkeypatch.setattr(records, "CELL_BASES", 100)
    evaluator = of(fasta=path, window=32, batch_tokens=70)
    cells = dict(evaluator.run(model))
    assert len(cells) > 20 and len({name for cell in cells.values() for name in cell["record"]}) == 30
    assert sum(len(cell["record"]) for cell in cells.values()) > 30  # some records lie in several
    for row in evaluator.rows(cells):
        numbers = {name: value for name, value in row.items() if name != "name"}
        assert numbers == pytest.approx({name: whole[row["name"]][name] for name in numbers}, rel=1e-5)
    planned = evaluator.cells(model)
    told = []
    evaluator.advance = told.append
    dict(evaluator.run(model))
    assert sum(cell.cost for cell in planned) == sum(told)
    whole_spans = [Span(0, name, len(text), 0, len(text)) for name, text in texts.items()]
    assert sum(told) == sum(cost(span, 16, both=False) for span in whole_spans)  # parts read nothing twice
    half = dict(list(cells.items())[::2])
    assert dict(evaluator.run(model, half)) == cells


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
        for column in ("log_likelihood", "bases", "remainder", "gc"):
            assert rows[name][column] == pytest.approx(row[column], rel=1e-5)
    assert rows["the gene"]["log_likelihood"] != pytest.approx(rows["plus"]["log_likelihood"])


def test_a_stopped_measurement_goes_on_inside_a_record(fasta, monkeypatch):
    monkeypatch.setattr(records, "CELL_BASES", 128)
    model, evaluator = tiny(), of(fasta=fasta(long=letters(1500), short=letters(40)), window=32)
    whole, measured, measure = dict(evaluator.run(model)), [], Score.measure
    assert sum(cell["record"] == ["long"] for cell in whole.values()) > 20
    assert max(cell.cost for cell in evaluator.cells(model)) <= 128 + 32
    monkeypatch.setattr(Score, "measure", lambda *a: measured.append(a[2].name) or measure(*a))
    stopped = dict(islice(evaluator.run(model), 9))
    again = dict(evaluator.run(model, json.loads(json.dumps(stopped))))
    assert measured == list(whole)  # nothing twice
    assert again == whole and evaluator.rows(again) == evaluator.rows(whole)  # to the bit


def test_requests_that_cannot_be_served(fasta, tmp_path):
    with pytest.raises(ValueError, match="--fasta"):
        of().cells(tiny())
    with pytest.raises(ValueError, match=r"window 5: .*'kmer:3' needs at least 6"):
        of(fasta=fasta(r="ACGT"), window=5).cells(tiny("kmer:3"))
    with pytest.raises((FileNotFoundError, ValueError), match=r"nothing\.fa"):
        of(fasta=str(tmp_path / "nothing.fa")).cells(tiny())
    assert of(window=20).window(tiny("kmer:3")) == 18
    assert of().window(tiny("kmer:3")) == 16 * 8 * 3


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 30])
def test_tables_figures_and_terminal(tmp_path, count):
    rng = np.random.default_rng(0)
    lengths, bits = rng.integers(1, 5000, count), rng.normal(1.9, 0.05, count)
    rows = [
        records._row(
            dict(
                name=f"r{n}",
                length=m,
                known=m,
                bases=m,
                read=m,
                remainder=0,
                strong=m // 2,
                nats=m * b * BIT,
                strands=1,
            )
        )
        for n, (m, b) in enumerate(zip(lengths.tolist(), bits.tolist(), strict=True))
    ]
    rows.append(
        records._row(dict(name="none", length=5, known=0, bases=0, read=0, remainder=0, strong=0, nats=0, strands=1))
    )
    results = [ModelResult(label, 8, rows, {}, method=label[:4]) for label in ("goat a/b", "ggd (run)")]
    Score().draw(results, tmp_path / "score.png")
    Score().write(results, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"score.png", "score.goat_a_b.tsv", "score.ggd__run_.tsv"}
    with open(tmp_path / "score.goat_a_b.tsv") as file:
        read = list(csv.DictReader(file, delimiter="\t"))
    assert [row["name"] for row in read] == [row["name"] for row in rows]
    assert float(read[0]["bits_per_base"]) == rows[0]["bits_per_base"] and read[-1]["bits_per_base"] == "nan"
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    Score().show(results, console)
    shown = console.export_text()
    total = float((lengths * bits).sum() / lengths.sum())
    assert f"all {count + 1:,} records" in shown and f"{total:.4f}" in shown and f"{bits[0]:.4f}" in shown
    assert ("more records" in shown) == (count > 19)
