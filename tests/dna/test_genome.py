"""Files, good and malformed, to bases; BED files, the split by rule, held-out stretches."""

from __future__ import annotations

import gzip
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from Bio import bgzf
from Bio.Seq import Seq
from Bio.SeqRecord import SeqRecord

from modalities.dna import genome as genomes
from modalities.dna import sources
from modalities.dna.baselines import fit
from modalities.dna.genome import Contig, open_genome
from modalities.dna.sources import DnaSource, find_source
from modalities.dna.splits import (
    Region,
    joined,
    load_regions,
    open_heldout,
    read_bed,
    split_contigs,
)
from modalities.dna.tokenizers import decode
from tests.dna.models import genome_of, letters, write_fasta
from tests.refusals import refuses

MIXED = {
    "chr1": "ACGTNNacgtnnTTGCA" * 20,
    "chr2": "N" + "gattaca" * 9 + "CATN" + "N" * 70,
    "chr3": "NA",
}


def fasta(sequences, width=13, end="\n"):
    lines = []
    for name, text in sequences.items():
        lines += [f">{name} some words", *(text[i : i + width] for i in range(0, len(text), width))]
    return end.join(lines) + end


def opening(spec="yeast-chr01"):
    return open_genome(find_source(str(spec)))


def written(path: Path, data: str | bytes) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def bgzipped(path: Path, text: str) -> Path:
    with bgzf.open(str(path), "wb") as file:
        file.write(text.encode())
    return path


def sequences_of(opened):
    """The contigs of a genome as letters with their case."""
    sequences = {}
    for contig in opened.contigs:
        letters = np.array(list(decode(opened.codes(contig.name))))
        sequences[contig.name] = "".join(
            np.where(opened.soft_masked(contig.name), np.char.lower(letters), letters)
        )
    return sequences


def test_formats_agree(tmp_path):
    text = fasta(MIXED)
    paths = [
        written(tmp_path / "a.fa", text),
        written(tmp_path / "a.FNA", "\ufeff" + fasta(MIXED, end="\r\n")),
        written(
            tmp_path / "b.fasta", text.replace("\n", "  \n\n").replace(">", "\n>").lstrip().rstrip()
        ),
        written(tmp_path / "a.fa.gz", gzip.compress(text.encode())),
        written(
            tmp_path / "c.fa",
            gzip.compress(text[:200].encode()) + gzip.compress(text[200:].encode()),
        ),
        written(
            tmp_path / "plain.fa.gz", text
        ),  # as a browser leaves it that decompressed on its way
        bgzipped(tmp_path / "d.fa.bgz", text),
    ]
    genomes = [opening(path) for path in paths]
    assert all(sequences_of(opened) == MIXED for opened in genomes)
    assert len({opened.fingerprint for opened in genomes}) == 1
    assert len(genomes[0].fingerprint) == 16

    upper = {name: letters.upper() for name, letters in MIXED.items()}
    hard = opening(written(tmp_path / "upper.fa", fasta(upper)))
    # the soft mask counts
    assert sequences_of(hard) == upper
    assert hard.fingerprint != genomes[0].fingerprint


@pytest.mark.parametrize(("chunk", "end"), [(16, "\r\n"), (17, "\n")])
def test_chunks_may_end_anywhere(tmp_path, monkeypatch, chunk, end):
    monkeypatch.setattr(sources, "_CHUNK", chunk)
    monkeypatch.setattr(genomes, "_PIECE", chunk)
    opened = opening(written(tmp_path / "a.fa", fasta(MIXED, end=end)))
    assert sequences_of(opened) == MIXED
    for contig in opened.contigs:
        unknown = np.array([letter in "Nn" for letter in MIXED[contig.name]])
        edges = np.flatnonzero(np.diff(np.r_[0, unknown, 0])).reshape(-1, 2)
        assert np.array_equal(contig.unknown, edges)
        assert contig.known == int((~unknown).sum())
    refuses(
        r"bad\.fa, line 3: '!'", opening, written(tmp_path / "bad.fa", f">a{end}ACGT{end}AC!T{end}")
    )


def test_reads_at_edges(tmp_path):
    opened = opening(written(tmp_path / "a.fa", ">a\nACGURYn\nuuN\n>b\nTTTTNacgt\n"))
    assert sequences_of(opened) == {"a": "ACGTNNnttN", "b": "TTTTNacgt"}
    assert opened.known == 14
    assert opened["a"].unknown.tolist() == [[4, 7], [9, 10]]
    assert decode(opened.codes("a", 8)) == "TN"
    assert decode(opened.codes("b", 0, 2)) == "TT"
    assert opened.soft_masked("b", 4, 6).tolist() == [False, True]
    assert len(opened.codes("b", 9)) == 0
    for start, stop in ((0, 11), (-1, 3), (5, 4)):
        refuses(
            rf"bases \[{start}, {stop}\) are outside contig 'a', which has 10",
            opened.codes,
            "a",
            start,
            stop,
        )
    with pytest.raises(ValueError, match=r"no contig 'B'; .*there are 2: a, b"):
        opened["B"]


def test_malformed_fasta(tmp_path):
    for content, message in (
        ("", r"the file is empty"),
        ("\nACGT\n>a\nACGT\n", r", line 2: expected '>' and a name, as of FASTA, found 'ACGT'"),
        (b"\x00\x01\xff" * 9, r", line 1: expected '>' and a name, as of FASTA, found '\\x00\\x01"),
        (">p\nMKV\nMKVLAAGIVGL\n", r", line 3: 'L' .*protein"),
        (">a\nACGT\n>b\n\n>c\nA\n", r", line 3: contig 'b' is empty"),
        (
            ">a\nA\n>b\nC\n>a x\nG\n",
            r"bad\.fa, line 5: a second contig 'a'; the first is in .*bad\.fa, line 1",
        ),
        (">a\nACGT\n>  \nACGT\n", r", line 3: '>' without a name"),
        (b">a\nACGT\n>\xe9t\xe9\nA\n", r", line 3: invalid UTF-8 in the header \(byte 0xe9\)"),
        (b">" + b"x" * (1 << 21), r", line 1: a header of more than 1,048,576 bytes"),
    ):
        path = written(tmp_path / "bad.fa", content)
        assert str(path) in refuses(message, opening, path)


def test_genbank(tmp_path):
    """Read by Biopython as FASTA is, without a soft mask; malformed records are named."""
    sequences = {"a": "ACGT" * 50, "b": "GATTACAN" * 30}
    records = [
        SeqRecord(Seq(s.lower()), id=n, name=n, annotations={"molecule_type": "DNA"})
        for n, s in sequences.items()
    ]
    text = "".join(record.format("genbank") for record in records)
    for path in (
        written(tmp_path / "a.gb", text),
        written(tmp_path / "b.gbk.gz", gzip.compress(text.encode())),
    ):
        assert sequences_of(opening(path)) == sequences
    for content, words in (
        (text[:-60], r"x\.gb, record 2: Premature end"),
        (text.replace("gattacan", "gattacaz"), r"x\.gb, record 2, base 8: 'Z'"),
        (text + text, r"record 3: a second contig 'a'; the first is in .*record 1"),
        (">a\nACGT\n", r"x\.gb: no sequence in it"),
    ):
        refuses(words, opening, written(tmp_path / "x.gb", content))


def test_cut_bgzip(tmp_path):
    """Other damage of compressed files: tests/durability."""
    path = bgzipped(tmp_path / "b.fa.bgz", fasta(MIXED))
    path.write_bytes(path.read_bytes()[:-28])
    refuses("truncated: the empty block that ends every bgzip file is missing", opening, path)


def test_specs(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIORZOO_DATA", str(tmp_path))
    assert [(contig.name, contig.length) for contig in opening().contigs] == [
        ("yeast_chr01", 230_218)
    ]
    refuses(
        r"no \*\.fa in .*genomes; .*fetch-data dna genomes`",
        opening,
        "genomes",
        error=FileNotFoundError,
    )
    there = tmp_path / "genomes"
    there.mkdir()
    fly, worm, yeast = (
        str(written(there / f"{name}.fa", f">{name}\nA\n")) for name in ("fly", "worm", "yeast")
    )
    assert opening("genomes").files == (fly, worm, yeast)
    assert opening("genomes:yeast,fly").files == (yeast, fly)
    assert opening(f"{worm}, {there}/f*.fa").files == (worm, fly)
    for name in ("a[1].fa", "a,b.fa"):  # names that look like patterns and lists
        assert opening(written(tmp_path / name, ">c\nA\n")).files == (str(tmp_path / name),)
    for spec, error, message in (
        (
            "genomes:yaest",
            FileNotFoundError,
            r"no genome 'yaest' in .*did you mean 'yeast'\? there are fly, worm",
        ),
        (f"{there}/wrm.fa", FileNotFoundError, r"no file .*wrm\.fa'.*did you mean '.*worm\.fa'"),
        (str(there), FileNotFoundError, r"is a folder; name its files, such as '.*genomes/\*\.fa'"),
        (f"{there}/*.fna", FileNotFoundError, r"no file matches"),
        (
            str(written(tmp_path / "a.txt", ">a\nA\n")),
            ValueError,
            r"a\.txt is none of \.fa, \.fasta, \.fna",
        ),
        ("", ValueError, "source must be a non-empty string"),
        (f"{there}/worm.fa,", ValueError, r"worm\.fa,': no name before or after a comma"),
    ):
        refuses(message, opening, spec, error=error)


def test_files_that_change(tmp_path, monkeypatch):
    path = written(tmp_path / "a.fa", ">a\nACGT\n")
    first = opening(path)
    assert opening(path) is first
    written(path, ">a\nTTTT\n")  # the same size
    os.utime(path, ns=(1, 1))
    assert sequences_of(opening(path)) == {"a": "TTTT"}
    assert sequences_of(first) == {"a": "ACGT"}
    read = genomes.read_codes
    monkeypatch.setattr(
        genomes,
        "read_codes",
        lambda path: [*read(path), *read(written(path, ">a\nACGTACGT\n"))][:2],
    )
    os.utime(path, ns=(2, 2))
    refuses(r"a\.fa: changed while it was being read", opening, path)


def write(folder, contigs, rows=""):
    """A FASTA and a BED in `folder`, as a source."""
    folder.mkdir(exist_ok=True)
    (folder / "g.bed").write_text(rows)
    return find_source(write_fasta(folder, **contigs), folder / "g.bed")


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
    bed.write_bytes(
        gzip.compress(
            b"chr1\t3\t9\tgene one\t0\t-\nchr1 3 9 two 0 +\nchr1\t3\t9\t\t0\t.\nchr2\t3\t9\n"
        )
    )
    names = [(row.name, row.strand) for row in read_bed(bed, genome)]
    assert names == [("gene one", "-"), ("two", "+"), ("chr1:4-9", "+"), ("chr2:4-9", "+")]
    bed.write_text("chr1 3 9 one 0 -1\n")
    refuses("line 1: strand '-1', expected", read_bed, bed, genome)


def test_malformed_bed_files(tmp_path, genome):
    bed = tmp_path / "a.bed"
    for rows, message in (
        ("chr1\t0\t5", r"line 1: 3 columns, expected 4: contig, start, stop, split"),
        (
            "chr1\t0\t5\tTrian",
            r"line 1: split 'Trian'; did you mean 'train'\? expected one of train, heldout",
        ),
        (
            "chr1 10 20 train\nchr2 0 40 train\nchr1 19 21 heldout",
            r"share bases 19 to 20 of 'chr1'",
        ),
        ("chr1 0 90 train\nchr1 5 10 train\nchr1 50 60 test", r"share bases 50 to 60 of 'chr1'"),
        ("chr1\t3\t9\ttrain\nchrb\t3\t9\ttrain\n", "line 2: no contig 'chrb'"),
        ("chr1\t9\t3\ttrain\n", "line 1: start 9 is not below stop 3"),
        ("chr1\t0\t101\ttrain\n", "line 1: stop 101 is beyond the end of 'chr1', which has 100"),
        ("chr1\t-1\t3\ttrain\n", "must be whole numbers from 0"),
        ("# none\n", "no row for any of the 3 contigs"),
        ("x" * (1 << 20 | 1), "line 1: 1,048,576 bytes or more"),
    ):
        bed.write_text(rows)
        assert str(bed) in refuses(message, load_regions, DnaSource("g", (), bed), genome)


def test_named_sources(tmp_path, monkeypatch):
    def regions_of(spec):
        return load_regions(find_source(spec), open_genome(find_source(spec)))

    assert [region.label for region in regions_of("yeast-chr01")] == ["train", "heldout", "train"]
    monkeypatch.setenv("PRIORZOO_DATA", str(tmp_path))
    (tmp_path / "genomes").mkdir()
    for name in ("a", "b"):
        written(tmp_path / f"genomes/{name}.fa", f">{name}1\nACGTACGT\n>{name}2\nACGT\n")
    refuses(r"no BED file .*split\.bed", regions_of, "genomes", error=FileNotFoundError)
    written(
        tmp_path / "genomes/split.bed",
        "a1 0 8 train\na2 0 4 heldout\nb1 0 8 train\nb2 0 4 heldout\n",
    )
    assert regions_of("genomes:b") == (Region("b1", 0, 8, "train"), Region("b2", 0, 4, "heldout"))


def test_split_by_rule():
    def contig(name, length):
        return Contig(name, length, "a.fa", np.empty((0, 2), np.int64))

    contigs = [contig(f"chr{n}", 1000 + 10 * n) for n in range(100)]
    for order in (contigs, contigs[::-1]):
        held = [region.contig for region in split_contigs(order) if region.label == "heldout"]
        assert sorted(held) == [
            "chr0",
            "chr17",
            "chr21",
            "chr42",
            "chr73",
            "chr91",
        ]  # the key is never to change
    one = contig("a", 230_218)
    empty = Contig("n", 50, "a.fa", np.array([[0, 50]]))
    assert split_contigs([empty, one]) == (
        Region("a", 0, 207_197, "train"),
        Region("a", 207_197, 230_218, "heldout"),
    )
    for few, message in (
        ([empty], "no contig has a known base"),
        ([contig("a", 5)], "has 5 bases: too few"),
    ):
        refuses(message, split_contigs, few)


SPLIT = "a 0 1000 train\na 1000 3000 heldout\na 3100 4000 test\nb 0 900 heldout\n"


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
    # spread over all regions
    assert min(starts) < 1500
    assert max(starts) > 3100
    assert stretches == open_heldout.__wrapped__(source).items.stretches(50, 12, seed=1)
    assert stretches != data.stretches(50, 12, seed=4)
    alone = write(tmp_path / "alone", {"b": letters(900, 1)}, "b 0 900 heldout\n")
    assert open_heldout(alone).items.stretches(50, 12, seed=1)["b"] == stretches["b"]
    assert open_heldout(alone).fingerprint != open_heldout(source).fingerprint

    assert list(data.stretches(800, 5, seed=0)) == ["a", "b"]
    (stretch,) = data.stretches(900, 5, seed=0)["a"]  # 1000 to 3000 has no 900 bases beside its gap
    assert (stretch.start, stretch.stop) == (3100, 4000)
    assert (data.reaching(0.5), data.reaching(0.9)) == (
        2000,
        900,
    )  # a has 2900 of 3800 bases, in 2000 and 900
    refuses(
        r"has 2001 bases in one piece.* longest region has 2000", data.stretches, 2001, 1, seed=0
    )
    refuses("at most 10% of them unknown", data.stretches, 2000, 1, seed=0)


def test_shared_bases_count_once():
    genome = genome_of(a=letters(6000, 3))
    bounds = ((0, 2000), (1000, 3000), (3500, 5000), (3000, 6000))
    shared = [Region("a", *pair, "heldout" if pair[1] <= 3000 else "train") for pair in bounds]
    plain = (Region("a", 0, 3000, "heldout"), Region("a", 3000, 6000, "train"))
    assert joined(shared) == plain
    assert joined(plain) is not shared
    np.testing.assert_array_equal(
        *(fit(genome, regions, 2).tables[-1] for regions in (plain, shared))
    )
