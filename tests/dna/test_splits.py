"""BED files, good and bad; the split by rule; selecting and describing."""

from __future__ import annotations

import numpy as np
import pytest

from modalities.dna.genome import Contig, open_genome
from modalities.dna.sources import DnaSource, find_source
from modalities.dna.splits import (
    Region,
    load_regions,
    read_bed,
    select,
    split_contigs,
)
from recipes.prepare_genome import write_bed


@pytest.fixture
def genome(tmp_path):
    path = tmp_path / "a.fa"
    path.write_text("".join(f">{name}\n{'ACGT' * size}\n" for name, size in (("chr1", 25), ("chr2", 10), ("chr3", 5))))
    return open_genome(find_source(str(path)))


def regions_of(spec, split=None):
    source = find_source(spec, split)
    return load_regions(source, open_genome(source))


def contigs(sizes):
    none = np.empty((0, 2), np.int64)
    return [Contig(name, size, "a.fa", none) for name, size in sizes.items()]


def test_a_bed_file_as_others_write_it(tmp_path, genome):
    bed = tmp_path / "a.bed"
    bed.write_bytes(
        b"\xef\xbb\xbf# made by hand\r\ntrack name=split\r\nbrowser position chr1\r\n\r\n"
        b"chr1\t0\t60\ttrain\t0\t+\r\nchr1\t60\t100\tvalid\r\nchr2  0  40   test  \r\n"
    )
    regions = read_bed(bed, genome)
    assert regions == (Region("chr1", 0, 60, "train"), Region("chr1", 60, 100, "valid"), Region("chr2", 0, 40, "test"))
    write_bed(regions, tmp_path / "b.bed")
    assert read_bed(tmp_path / "b.bed", genome) == regions
    assert (tmp_path / "b.bed").read_text().splitlines()[0] == "chr1\t0\t60\ttrain"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.bed", "a.fa", "b.bed"]


@pytest.mark.parametrize(
    "rows, message",
    [
        ("chr1\t0\t5", r"line 1: 3 columns, expected 4: contig, start, stop, split"),
        ("# x\nchr1\t0\t5.5\ttrain", r"line 2: start '0' and stop '5\.5' must be whole numbers from 0"),
        ("chr1\t-1\t5\ttrain", r"line 1: start '-1' and stop '5' must be whole numbers"),
        ("chr1\t5\t5\ttrain", r"line 1: start 5 is not below stop 5"),
        ("\n\nchr1\t9\t5\ttrain", r"line 3: start 9 is not below stop 5"),
        ("chr11\t0\t5\ttrain", r"line 1: no contig 'chr11'; did you mean 'chr1'\? there are 3: chr1, chr2, chr3"),
        ("chr2\t0\t41\ttrain", r"line 1: stop 41 is beyond the end of 'chr2', which has 40 bases"),
        ("chr1\t0\t5\ttrian", r"line 1: split 'trian'; did you mean 'train'\? expected one of train, heldout"),
        ("chr1\t0\t5\tHeldout", r"line 1: split 'Heldout'; did you mean 'heldout'\?"),
        (
            "chr1 10 20 train\nchr2 0 40 train\nchr1 19 21 heldout",
            r"line 3: overlaps line 1 on 'chr1' \(heldout and train share bases 19 to 20\)",
        ),
        ("chr1 0 90 train\nchr1 5 10 train\nchr1 50 60 test", r"line 3: overlaps line 1 on 'chr1' .* 50 to 60"),
        ("chr1 50 60 test\nchr1 55 57 valid", r"line 2: overlaps line 1"),
        ("# nothing\n", r"a\.bed: no row for any of the 3 contigs"),
    ],
)
def test_malformed_bed_files(tmp_path, genome, rows, message):
    bed = tmp_path / "a.bed"
    bed.write_text(rows)
    with pytest.raises(ValueError, match=message) as error:
        read_bed(bed, genome)
    assert str(bed) in str(error.value)


def test_named_sources_have_their_own_bed(tmp_path, monkeypatch):
    shipped = regions_of("yeast-chr01")
    assert [region.split for region in shipped] == ["train", "heldout", "train"] and sum(map(len, shipped)) == 230_218

    monkeypatch.setenv("PRIORZOO_DATA", str(tmp_path))
    folder = tmp_path / "genomes"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.fa").write_text(f">{name}1\nACGTACGT\n>{name}2\nACGT\n")
    with pytest.raises(FileNotFoundError, match=r"no BED file .*split\.bed"):
        regions_of("genomes")
    (folder / "split.bed").write_text("a1 0 8 train\na2 0 4 heldout\nb1 0 8 train\nb2 0 4 heldout\n")
    assert len(regions_of("genomes")) == 4
    only = regions_of("genomes:b")
    assert only == (Region("b1", 0, 8, "train"), Region("b2", 0, 4, "heldout"))
    (folder / "split.bed").write_text("a1 0 8 train\na3 0 4 heldout\n")
    with pytest.raises(ValueError, match=r"line 2: no contig 'a3'; there are 4: a1, a2, b1, b2"):
        regions_of("genomes")
    (folder / "split.bed").write_text("a1 0 8 train\na2 0 4 heldout\nb2 0 4 heldout\n")
    with pytest.raises(ValueError, match=r"split\.bed: no row for 'b1' of .*b\.fa; add one"):
        regions_of("genomes:a,b")
    assert regions_of(str(folder / "a.fa")) != only  # by rule, not by that BED


def test_the_split_by_rule():
    sizes = {f"chr{n}": 1000 + 10 * n for n in range(100)}
    regions = split_contigs(contigs(sizes))
    held = {region.contig for region in regions if region.split == "heldout"}
    share = sum(sizes[name] for name in held) / sum(sizes.values())
    assert 0.05 <= share < 0.07
    assert [region.contig for region in regions] == list(sizes) and all(r.start == 0 for r in regions)
    back = split_contigs(contigs(dict(reversed(sizes.items()))))
    assert {region.contig for region in back if region.split == "heldout"} == held  # the files' order does not matter
    assert sorted(held) == ["chr0", "chr17", "chr21", "chr42", "chr73", "chr91"]  # the key is never to change
    more = split_contigs(contigs(sizes), fraction=0.2)
    assert held < {region.contig for region in more if region.split == "heldout"}


def test_a_single_contig_is_cut(genome):
    (one,) = contigs({"a": 230_218})
    assert split_contigs([one]) == (Region("a", 0, 207_197, "train"), Region("a", 207_197, 230_218, "heldout"))
    assert len(split_contigs([one], fraction=0.2)[1]) == 46_043
    empty = Contig("n", 50, "a.fa", np.array([[0, 50]]))
    assert split_contigs([empty, one]) == split_contigs([one])  # what has no known base is not used
    for wrong, message in (([empty], "no contig has a known base"), (contigs({"a": 5}), "has 5 bases: too few")):
        with pytest.raises(ValueError, match=message):
            split_contigs(wrong)
    with pytest.raises(ValueError, match=r"fraction 0\.7 of bases to hold out must be above 0 and below 0\.5"):
        split_contigs([one], fraction=0.7)
    assert load_regions(DnaSource("genome", ()), genome) == split_contigs(genome.contigs)


def test_select():
    regions = [Region("a", 0, 90, "train"), Region("b", 0, 4, "valid"), Region("b", 4, 10, "heldout")]
    assert [region.split for region in select(regions, "heldout")] == ["valid", "heldout"]
    assert select(regions, "valid") == (regions[1],) and select(regions, "train") == (regions[0],)
    assert select(regions, "all") == tuple(regions)
    with pytest.raises(ValueError, match=r"no region is in the split 'test'; there are train, valid, heldout"):
        select(regions, "test")
    with pytest.raises(ValueError, match=r"the split 'vaild'; did you mean 'valid'\? there are train, valid, heldout"):
        select(regions, "vaild")
