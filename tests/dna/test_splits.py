"""BED files, good and bad; the split by rule; held-out stretches."""

from __future__ import annotations

import gzip
from itertools import pairwise

import numpy as np
import pytest

from modalities.dna.baselines import fit
from modalities.dna.genome import Contig, open_genome
from modalities.dna.sources import DnaSource, find_source
from modalities.dna.splits import Region, load_regions, open_heldout, read_bed, split_contigs
from modalities.dna.tokenizers import decode
from tests.dna.models import genome_of


def write(folder, contigs, rows=""):
    """A FASTA and a BED in `folder`, as a source."""
    folder.mkdir(exist_ok=True)
    (folder / "g.fa").write_text("".join(f">{name}\n{letters}\n" for name, letters in contigs.items()))
    (folder / "g.bed").write_text(rows)
    return find_source(str(folder / "g.fa"), folder / "g.bed")


def contigs(sizes):
    return [Contig(name, size, "a.fa", np.empty((0, 2), np.int64)) for name, size in sizes.items()]


@pytest.fixture
def genome():
    return genome_of(chr1="ACGT" * 25, chr2="ACGT" * 10, chr3="ACGT" * 5)


def test_beds_of_other_programs(tmp_path, genome):
    bed = tmp_path / "a.bed"
    bed.write_bytes(
        b"\xef\xbb\xbf# made by hand\r\ntrack name=split\r\nbrowser position chr1\r\n\r\n"
        b"chr1\t0\t60\ttrain\t0\t+\r\nchr1\t60\t100\tvalid\r\nchr2  0  40   test  \r\n"
    )
    rows = ("chr1", 0, 60, "train"), ("chr1", 60, 100, "heldout"), ("chr2", 0, 40, "heldout")
    assert read_bed(bed, genome, splits=True) == tuple(Region(*row) for row in rows)
    bed.write_bytes(gzip.compress(b"chr1\t3\t9\tgene one\t0\t-\nchr1 3 9 two 0 +\nchr1\t3\t9\t\t0\t.\nchr2\t3\t9\n"))
    names = [(row.name, row.strand) for row in read_bed(bed, genome)]
    assert names == [("gene one", "-"), ("two", "+"), ("chr1:4-9", "+"), ("chr2:4-9", "+")]


def test_malformed_bed_files(tmp_path, genome):
    bed = tmp_path / "a.bed"
    for rows, message in (
        ("chr1\t0\t5", r"line 1: 3 columns, expected 4: contig, start, stop, split"),
        ("chr1\t0\t5\tTrian", r"line 1: split 'Trian'; did you mean 'train'\? expected one of train, heldout"),
        ("chr1 10 20 train\nchr2 0 40 train\nchr1 19 21 heldout", r"share bases 19 to 20 of 'chr1'"),
        ("chr1 0 90 train\nchr1 5 10 train\nchr1 50 60 test", r"share bases 50 to 60 of 'chr1'"),
        ("chr1\t3\t9\ttrain\nchrb\t3\t9\ttrain\n", "line 2: no contig 'chrb'"),
        ("chr1\t9\t3\ttrain\n", "line 1: start 9 is not below stop 3"),
        ("chr1\t0\t101\ttrain\n", "line 1: stop 101 is beyond the end of 'chr1', which has 100"),
        ("chr1\t-1\t3\ttrain\n", "must be whole numbers from 0"),
        ("# none\n", "no row for any of the 3 contigs"),
        ("x" * (1 << 20 | 1), "line 1: 1,048,576 bytes or more"),
    ):
        bed.write_text(rows)
        with pytest.raises(ValueError, match=message) as error:
            load_regions(DnaSource("g", (), bed), genome)
        assert str(bed) in str(error.value)


def test_named_sources(tmp_path, monkeypatch):
    def regions_of(spec):
        return load_regions(find_source(spec), open_genome(find_source(spec)))

    assert [region.label for region in regions_of("yeast-chr01")] == ["train", "heldout", "train"]
    monkeypatch.setenv("PRIORZOO_DATA", str(tmp_path))
    folder = tmp_path / "genomes"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.fa").write_text(f">{name}1\nACGTACGT\n>{name}2\nACGT\n")
    with pytest.raises(FileNotFoundError, match=r"no BED file .*split\.bed"):
        regions_of("genomes")
    (folder / "split.bed").write_text("a1 0 8 train\na2 0 4 heldout\nb1 0 8 train\nb2 0 4 heldout\n")
    assert regions_of("genomes:b") == (Region("b1", 0, 8, "train"), Region("b2", 0, 4, "heldout"))


def test_split_by_rule():
    sizes = {f"chr{n}": 1000 + 10 * n for n in range(100)}
    for order in (sizes, dict(reversed(sizes.items()))):
        held = [region.contig for region in split_contigs(contigs(order)) if region.label == "heldout"]
        assert sorted(held) == ["chr0", "chr17", "chr21", "chr42", "chr73", "chr91"]  # the key is never to change
    (one,), empty = contigs({"a": 230_218}), Contig("n", 50, "a.fa", np.array([[0, 50]]))
    cut = (Region("a", 0, 207_197, "train"), Region("a", 207_197, 230_218, "heldout"))
    assert split_contigs([empty, one]) == cut
    for few, message in (([empty], "no contig has a known base"), (contigs({"a": 5}), "has 5 bases: too few")):
        with pytest.raises(ValueError, match=message):
            split_contigs(few)


# ---- held-out stretches ----

SPLIT = "a 0 1000 train\na 1000 3000 heldout\na 3100 4000 test\nb 0 900 heldout\n"


def letters(count, seed):
    return decode(np.random.default_rng(seed).integers(0, 4, count).astype(np.uint8))


@pytest.fixture
def source(tmp_path):
    a = letters(4000, 0)
    return write(tmp_path, {"a": a[:1500] + "N" * 700 + a[2200:], "b": letters(900, 1)}, SPLIT)


def test_stretches(source, tmp_path):
    data = open_heldout(source).items
    stretches = data.stretches(50, 12, seed=1)
    assert {name: len(places) for name, places in stretches.items()} == {"a": 12, "b": 12}
    for name, places in stretches.items():
        assert all(before.stop <= after.start for before, after in pairwise(places))
        for s in places:
            assert any(r.start <= s.start and s.stop <= r.stop for r in data.contigs[name])
            assert (data.codes(s) == 4).mean() <= 0.1
    starts = [s.start for s in stretches["a"]]
    assert min(starts) < 1500 and max(starts) > 3100  # spread over all regions
    assert stretches == open_heldout.__wrapped__(source).items.stretches(50, 12, seed=1)
    assert stretches != data.stretches(50, 12, seed=4)
    alone = write(tmp_path / "alone", {"b": letters(900, 1)}, "b 0 900 heldout\n")
    assert open_heldout(alone).items.stretches(50, 12, seed=1)["b"] == stretches["b"]
    assert open_heldout(alone).fingerprint != open_heldout(source).fingerprint

    assert list(data.stretches(800, 5, seed=0)) == ["a", "b"]
    (stretch,) = data.stretches(900, 5, seed=0)["a"]  # 1000 to 3000 has no 900 bases beside its gap
    assert (stretch.start, stretch.stop) == (3100, 4000)
    assert (data.reaching(0.5), data.reaching(0.9)) == (2000, 900)  # a has 2900 of 3800 bases, in 2000 and 900
    with pytest.raises(ValueError, match=r"has 2001 bases in one piece.* longest region has 2000"):
        data.stretches(2001, 1, seed=0)
    with pytest.raises(ValueError, match="at most 10% of them unknown"):
        data.stretches(2000, 1, seed=0)


def test_shared_bases_count_once(tmp_path):
    once, twice = "a 0 3000 heldout\na 3000 6000 train\n", "a 0 2000 heldout\na 1000 3000 heldout\na 3000 6000 train\n"
    folders = [(tmp_path / "once", once), (tmp_path / "twice", twice + "a 3500 5000 train\n")]
    plain, shared = (open_heldout(write(folder, {"a": letters(6000, 3)}, rows)).items for folder, rows in folders)
    assert shared.stretches(500, 100, 0) == plain.stretches(500, 100, 0)
    tables = [fit(data.genome, data.regions, 2).tables[-1] for data in (plain, shared)]
    np.testing.assert_array_equal(*tables)
    assert tables[0].sum() == 2 * (3000 - 2)
