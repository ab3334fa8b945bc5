"""Tracks and regions: a base's bits wherever it is asked for, in both formats."""

from __future__ import annotations

import gzip
import json
import math
import sys

import numpy as np
import pyBigWig
import pytest

from modalities.dna import reading
from modalities.dna.bases import encode, reverse_complement
from modalities.dna.bed import BedRow, bed_rows, merged
from modalities.dna.evaluation import RegionSettings
from modalities.dna.evaluators import track as tracks
from modalities.dna.evaluators.score import Score
from modalities.dna.evaluators.track import Track, TrackSettings
from modalities.dna.genome import open_genome
from modalities.dna.scoring import score_windows
from modalities.dna.sources import find_source
from modalities.evaluation import ModelResult
from tests.dna.models import Composed, letters, tiny

CONTIGS = {"b": letters(100), "a": letters(37, 1)[:20] + "NNN" + letters(14, 2), "tiny": "ACG"}


@pytest.fixture(scope="module")
def model():
    return tiny(train_context=8)


@pytest.fixture
def fasta(tmp_path):
    (tmp_path / "g.fa").write_text("".join(f">{name}\n{text}\n" for name, text in CONTIGS.items()))
    return str(tmp_path / "g.fa")


def bed(tmp_path, text, name="r.bed"):
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    return str(tmp_path / name)


def result(model, evaluator):
    cells = json.loads(json.dumps(dict(evaluator.run(model))))
    return ModelResult("m (a)", 8, evaluator.rows(cells), cells, method="alibi")


def expected(model, text, window, both):
    """Bits of every base, window by window as documented, NaN where unknown."""
    half, codes, strands = window // 2, encode(text), []
    for strand in (codes, reverse_complement(codes))[: 1 + both]:
        nats = np.full(len(strand), np.nan)
        for start in range(0, max(1, len(strand) - half), half):
            scores = score_windows(model, strand[None, start : start + window])
            first = half if start else 0
            costs = np.where(scores.bases[0] > 0, scores.nll[0], np.nan)
            nats[start + first : start + window] = costs[first:]
        strands.append(nats if not strands else nats[::-1])
    return np.mean(strands, axis=0) / math.log(2)


@pytest.mark.parametrize("strands", ["one", "both"])
def test_tracks_hold_every_base_and_agree(tmp_path, fasta, model, strands, monkeypatch):
    """Both files count from 0, half-open, as BED does."""
    monkeypatch.setattr(reading, "CELL_BASES", 50)
    settings = TrackSettings(fasta=fasta, window=16, strands=strands, formats=("bedgraph", "bigwig"), batch_tokens=40)
    evaluator = Track(settings)
    assert len(evaluator.cells(model)) > 3
    measured = result(model, evaluator)
    evaluator.write([measured], tmp_path / "out")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {f"track.m__a_.{end}" for end in ("tsv", "bedgraph", "bw")}
    lines = [line.split("\t") for line in (tmp_path / "out" / "track.m__a_.bedgraph").read_text().splitlines()]
    assert all(int(stop) == int(start) + 1 for _, start, stop, _ in lines)
    text = {(contig, int(start)): float(value) for contig, start, _, value in lines}
    assert [contig for contig, _ in text] == [c for c, t in CONTIGS.items() for base in t if base != "N"]
    binary = pyBigWig.open(str(tmp_path / "out" / "track.m__a_.bw"))
    assert binary.chroms() == {name: len(text) for name, text in CONTIGS.items()}
    for name, sequence in CONTIGS.items():
        bits, values = expected(model, sequence, 16, strands == "both"), np.array(binary.values(name, 0, len(sequence)))
        np.testing.assert_allclose(values, bits, rtol=1e-4)
        for at, value in enumerate(values):
            assert np.float32(text[name, at]) == np.float32(value) if np.isfinite(value) else (name, at) not in text
    (row,) = (row for row in measured.rows if row["contig"] == "a")
    assert row["bases"] == 34 and row["bits_per_base"] == pytest.approx(np.nanmean(binary.values("a", 0, 37)), rel=1e-5)
    assert evaluator.measured([measured]).startswith("track: 137 of the 140 bases of 3 records of")


def test_a_base_costs_the_same_in_every_region(tmp_path, fasta, model):
    regions = bed(tmp_path, "#r\nb\t3\t9\tg1\nb 40 77\nb\t5\t9\tg1\t0\t+\na\t0\t37\nb\t60\t61\n", "r.bed.gz")
    whole = Track(TrackSettings(fasta=fasta, window=16))
    bits = {}
    for _, contig, start, values in tracks._values(dict(whole.run(model))):
        bits.setdefault(contig, np.full(100, np.nan))[start : start + len(values)] = values
    part = Track(TrackSettings(fasta=fasta, window=16, regions=regions))
    for _, contig, start, values in tracks._values(dict(part.run(model))):
        np.testing.assert_allclose(values, bits[contig][start : start + len(values)], rtol=1e-4)
    rows = result(model, part).rows
    assert [(r["contig"], r["bed_start"], r["bed_stop"]) for r in rows] == [("b", 3, 9), ("b", 40, 77), ("a", 0, 37)]
    scored = result(model, Score(RegionSettings(fasta=fasta, window=16, regions=regions))).rows
    assert [row["name"] for row in scored] == ["g1", "b:41-77", "g1", "a:1-37", "b:61-61"]
    assert [(row["bed_start"], row["bed_stop"]) for row in scored] == [(3, 9), (40, 77), (5, 9), (0, 37), (60, 61)]
    for row in scored:
        costs = bits[row["contig"]][row["bed_start"] : row["bed_stop"]]
        assert row["bits_per_base"] == pytest.approx(np.nanmean(costs), rel=1e-5)
        assert row["bases"] == np.isfinite(costs).sum() == row["length"] - row["unknown"]
    assert part.identity(model) != whole.identity(model)


def test_rows_of_bed(tmp_path, fasta):
    genome = open_genome(find_source(fasta))
    rows = [BedRow("a", 5, 9), BedRow("b", 0, 4), BedRow("a", 9, 12), BedRow("b", 3, 8), BedRow("b", 9, 10)]
    assert merged(rows, genome) == [BedRow("b", 0, 8), BedRow("b", 9, 10), BedRow("a", 5, 12)]
    named = bed_rows(tmp_path / bed(tmp_path, "b\t3\t9\tgene one\t0\t-\nb 3 9 two 0 +\nb\t3\t9\t\t0\t.\n"), genome)
    assert [(row.name, row.strand) for row in named] == [("gene one", "-"), ("two", "+"), ("b:4-9", "+")]
    for text, message in (
        ("b\t3\n", "line 1: 2 columns, expected 3: contig, start, stop"),
        ("b\t3\t9\nchrb\t3\t9\n", "line 2: no contig 'chrb'"),
        ("b\t9\t3\n", "line 1: start 9 is not below stop 3"),
        ("b\t0\t101\n", "line 1: stop 101 is beyond the end of 'b', which has 100"),
        ("b\t-1\t3\n", "must be whole numbers from 0"),
        ("# none\n", "no row for any of the 3 contigs"),
        ("x" * (1 << 20 | 1), "line 1: 1,048,576 bytes or more"),
    ):
        with pytest.raises(ValueError, match=message):
            bed_rows(tmp_path / bed(tmp_path, text), genome)
    with pytest.raises(ValueError, match=r"r\.bed\.gz.*(truncated|damaged)"):
        path = tmp_path / "r.bed.gz"
        path.write_bytes(gzip.compress(b"b\t3\t9\n" * 50)[:-9])
        bed_rows(path, genome)


def test_requests_that_cannot_be_served(tmp_path, fasta, model, monkeypatch):
    with pytest.raises(ValueError, match=r"format 'bigwigg': did you mean 'bigwig'"):
        tracks.formats("bedgraph,bigwigg")
    with pytest.raises(FileNotFoundError, match=r"no BED file none\.bed"):
        Track(TrackSettings(fasta=fasta, regions="none.bed")).cells(model)
    (tmp_path / "n.fa").write_text(">n\nNNNN\n")
    evaluator = Track(TrackSettings(fasta=str(tmp_path / "n.fa"), formats=("bigwig",)))
    with pytest.raises(ValueError, match="no base of the regions has a value"):
        evaluator.rows(dict(evaluator.run(Composed())))  # of which files are written
    monkeypatch.setitem(sys.modules, "pyBigWig", None)
    with pytest.raises(ImportError, match="bigWig needs the package `pyBigWig`: pip install pyBigWig"):
        evaluator.cells(model)
