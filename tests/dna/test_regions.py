"""`score` and `track`: a base costs the same wherever it is asked for, and equals a likelihood
computed window by window."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from modalities.dna.evaluators import regions
from modalities.dna.evaluators.regions import RegionScore, RegionSettings, Track
from modalities.dna.scoring import score_windows
from modalities.dna.tokenizers import decode, encode, reverse_complement
from modalities.results import ModelResult
from tests.dna.models import Composed, letters, tiny, write_fasta

CONTIGS = {"b": letters(100), "a": letters(37, 1)[:20] + "NNN" + letters(14, 2), "tiny": "ACG"}


@pytest.fixture(scope="module")
def model():
    return tiny(train_context=8)


def bed(tmp_path, text):
    (tmp_path / "r.bed").write_text(text)
    return str(tmp_path / "r.bed")


def score(model, **options):
    evaluator = RegionScore(RegionSettings(**options))
    return {
        row["name"]: row
        for row in evaluator.rows(json.loads(json.dumps(dict(evaluator.run(model)))))
    }


def expected(model, text, window, both):
    """Bits of every base, window by window as documented, NaN where unknown."""
    half = window // 2
    codes = encode(text)
    strands = []
    for strand in (codes, reverse_complement(codes))[: 1 + both]:
        nats = np.full(len(strand), np.nan)
        for start in range(0, max(1, len(strand) - half), half):
            scores = score_windows(model, strand[None, start : start + window])
            first = half if start else 0
            nats[start + first : start + window] = np.where(
                scores.bases[0] > 0, scores.nll[0], np.nan
            )[first:]
        strands.append(nats if not strands else nats[::-1])
    return np.mean(strands, axis=0) / math.log(2)


@pytest.mark.parametrize("strands", ["one", "both"])
def test_tracks_hold_every_base(tmp_path, model, strands, monkeypatch):
    """Places count from 0, half-open, as BED does."""
    monkeypatch.setattr(regions, "CELL_BASES", 50)
    settings = RegionSettings(
        fasta=write_fasta(tmp_path, **CONTIGS), window=16, strands=strands, batch_tokens=40
    )
    evaluator = Track(settings)
    assert len(evaluator.cells(model)) > 3
    cells = json.loads(json.dumps(dict(evaluator.run(model))))
    result = ModelResult("m (a)", 8, evaluator.rows(cells), cells)
    evaluator.write([result], tmp_path / "out")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "track.m__a_.tsv",
        "track.m__a_.bedgraph",
    }
    lines = [
        line.split("\t")
        for line in (tmp_path / "out" / "track.m__a_.bedgraph").read_text().splitlines()
    ]
    assert all(int(stop) == int(start) + 1 for _, start, stop, _ in lines)
    values = {(contig, int(start)): float(value) for contig, start, _, value in lines}
    assert list(values) == [
        (c, n) for c, text in CONTIGS.items() for n, base in enumerate(text) if base != "N"
    ]
    for name, text in CONTIGS.items():
        bits = expected(model, text, 16, strands == "both")
        np.testing.assert_allclose(
            [values.get((name, n), np.nan) for n in range(len(text))], bits, rtol=1e-4
        )
        (row,) = (row for row in result.rows if row["contig"] == name)
        assert row["bases"] == np.isfinite(bits).sum()
        assert row["bits_per_base"] == pytest.approx(np.nanmean(bits), rel=1e-4)
    assert evaluator.measured([result]).startswith("track: 137 of the 140 bases of 3 records of")


def test_regions_agree_on_a_base(tmp_path, model):
    """A base costs the same in every region."""
    options = dict(fasta=write_fasta(tmp_path, **CONTIGS), window=16)
    rows = bed(tmp_path, "#r\nb\t3\t9\tg1\nb 40 77\nb\t5\t9\tg1\t0\t+\na\t0\t37\nb\t60\t61\n")
    whole = Track(RegionSettings(**options))
    part = Track(RegionSettings(**options, regions=rows))
    bits = {name: expected(model, text, 16, False) for name, text in CONTIGS.items()}
    for _, contig, start, values in regions._values(dict(part.run(model))):
        np.testing.assert_allclose(values, bits[contig][start : start + len(values)], rtol=1e-4)
    places = [
        (row["contig"], row["bed_start"], row["bed_stop"])
        for row in part.rows(dict(part.run(model)))
    ]
    assert places == [
        ("b", 3, 9),
        ("b", 40, 77),
        ("a", 0, 37),
    ]  # joined, in the order of the genome
    evaluator = RegionScore(RegionSettings(**options, regions=rows))
    scored = evaluator.rows(dict(evaluator.run(model)))
    assert [row["name"] for row in scored] == ["g1", "b:41-77", "g1", "a:1-37", "b:61-61"]
    assert [(row["bed_start"], row["bed_stop"]) for row in scored] == [
        (3, 9),
        (40, 77),
        (5, 9),
        (0, 37),
        (60, 61),
    ]
    for row in scored:
        costs = bits[row["contig"]][row["bed_start"] : row["bed_stop"]]
        assert row["bits_per_base"] == pytest.approx(np.nanmean(costs), rel=1e-5)
        assert row["bases"] == np.isfinite(costs).sum() == row["length"] - row["unknown"]
    assert part.identity(model) != whole.identity(model)


def test_unknown_bases_are_listed(tmp_path):
    """Unknown bases are listed and not counted."""
    sequences = {"n": "NNNN", "some": "ACNNRGT", "tail": "ACGTNN", "short": "AC"}
    rows = score(Composed(), fasta=write_fasta(tmp_path, **sequences))
    assert list(rows) == list(sequences)
    assert [rows[name]["unknown"] for name in sequences] == [4, 3, 2, 0]
    assert [rows[name]["bases"] for name in sequences] == [0, 4, 4, 2]
    for column in ("gc", "log_likelihood", "nats_per_base", "bits_per_base"):
        assert math.isnan(rows["n"][column])
    assert rows["some"]["bits_per_base"] == pytest.approx(2, abs=1e-15)
    assert rows["some"]["gc"] == 0.5
    kmers = score(tiny("kmer:3"), fasta=write_fasta(tmp_path, **sequences))
    assert [kmers[name]["bases"] for name in sequences] == [
        0,
        0,
        3,
        0,
    ]  # no k-mer of "ACN NRG" is known


def test_reverse_strand_region(tmp_path):
    """A region of the other strand is read there."""
    model = tiny("kmer:3")
    text = letters(200)
    rows = bed(
        tmp_path, "a\t40\t110\tthe gene\t0\t-\na\t0\t70\tstart\t0\t-\na\t40\t110\tplus\t0\t+\n"
    )
    ours = score(model, fasta=write_fasta(tmp_path, a=text), regions=rows, window=36)
    assert {name: row["strand"] for name, row in ours.items()} == {
        "the gene": "-",
        "start": "-",
        "plus": "+",
    }
    turned = write_fasta(tmp_path, a=decode(reverse_complement(encode(text))))
    other = score(
        model,
        fasta=turned,
        regions=bed(tmp_path, "a\t90\t160\tthe gene\na\t130\t200\tstart\n"),
        window=36,
    )
    for name, row in other.items():
        for column in ("log_likelihood", "bases", "gc"):
            assert ours[name][column] == pytest.approx(row[column], rel=1e-5)
    assert ours["the gene"]["log_likelihood"] != pytest.approx(ours["plus"]["log_likelihood"])


def test_requests_that_cannot_be_served(tmp_path):
    kmers = tiny("kmer:3")
    with pytest.raises(ValueError, match="--fasta"):
        RegionScore(RegionSettings()).cells(kmers)
    with pytest.raises(ValueError, match=r"window 5: .*'kmer:3' needs at least 6"):
        RegionScore(RegionSettings(fasta=write_fasta(tmp_path, r="ACGT"), window=5)).cells(kmers)
    with pytest.raises(FileNotFoundError, match=r"no BED file none\.bed"):
        Track(RegionSettings(fasta=write_fasta(tmp_path, r="ACGT"), regions="none.bed")).cells(
            kmers
        )
    assert [RegionScore(RegionSettings(window=window)).window(kmers) for window in (20, None)] == [
        18,
        16 * 16 * 3,
    ]
