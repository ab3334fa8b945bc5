"""Files of every format to the same bases; files that are malformed, each with its place; the store and its keys."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("Bio")

from Bio import bgzf
from Bio.Seq import Seq
from Bio.SeqRecord import SeqRecord

from modalities.dna import formats, genome
from modalities.dna.bases import decode
from modalities.dna.genome import open_genome
from modalities.dna.sources import find_source

MIXED = {"chr1": "ACGTNNacgtnnTTGCA" * 20, "chr2": "N" + "gattaca" * 9 + "CATN" + "N" * 70, "chr3": "A"}


def fasta(sequences, width=13, end="\n"):
    lines = []
    for name, letters in sequences.items():
        lines += [f">{name} some words", *(letters[i : i + width] for i in range(0, len(letters), width))]
    return end.join(lines) + end


def genbank(sequences):
    records = [
        SeqRecord(Seq(letters), id=name, name=name, annotations={"molecule_type": "DNA"})
        for name, letters in sequences.items()
    ]
    return "".join(record.format("genbank") for record in records)


def bgzipped(path: Path, data: bytes) -> Path:
    with bgzf.open(str(path), "wb") as file:
        file.write(data)
    return path


def opening(spec="yeast-chr01", **options):
    return open_genome(find_source(spec), **options)


def written(path: Path, data: str | bytes) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def sequences_of(opened):
    """What a genome holds, as letters with their case."""
    found = {}
    for contig in opened.contigs:
        letters = np.array(list(decode(opened.codes(contig.name))))
        masked = opened.soft_masked(contig.name)
        found[contig.name] = "".join(np.where(masked, np.char.lower(letters), letters))
    return found


def test_every_format_gives_the_same_genome(tmp_path):
    text = fasta(MIXED)
    paths = [
        written(tmp_path / "a.fa", text),
        written(tmp_path / "a.fasta", fasta(MIXED, width=1000)),
        written(tmp_path / "a.FNA", "\ufeff" + fasta(MIXED, end="\r\n")),
        written(tmp_path / "b.fa", text.replace("\n", "  \n\n").replace(">", "\n>").lstrip().rstrip()),
        written(tmp_path / "a.fa.gz", gzip.compress(text.encode())),
        written(tmp_path / "c.fa", gzip.compress(text[:200].encode()) + gzip.compress(text[200:].encode())),
        written(tmp_path / "plain.fa.gz", text),  # as a browser leaves it that decompressed on its way
        bgzipped(tmp_path / "d.fa.gz", text.encode()),
        bgzipped(tmp_path / "d.fa.bgz", text.encode()),
    ]
    genomes = {path.name: opening(str(path)) for path in paths}
    for name, opened in genomes.items():
        assert sequences_of(opened) == MIXED, name
    assert len({opened.fingerprint for opened in genomes.values()}) == 1
    assert all(len(opened.fingerprint) == 16 and opened.report == "" for opened in genomes.values())

    upper = {name: letters.upper() for name, letters in MIXED.items()}
    hard = opening(str(written(tmp_path / "upper.fa", fasta(upper))))
    for name in ("a.gb", "a.gbk.gz", "a.gbff"):
        data = genbank(MIXED).encode()
        opened = opening(str(written(tmp_path / name, gzip.compress(data) if name.endswith("gz") else data)))
        assert sequences_of(opened) == upper and opened.fingerprint == hard.fingerprint
    assert hard.fingerprint != genomes["a.fa"].fingerprint  # the soft mask counts


@pytest.mark.parametrize(("chunk", "end"), [(1, "\r\n"), (2, "\n"), (7, "\r\n")])
def test_chunks_may_end_anywhere(tmp_path, monkeypatch, chunk, end):
    monkeypatch.setattr(formats, "_CHUNK", chunk)
    opened = opening(str(written(tmp_path / "a.fa", fasta(MIXED, end=end))))
    assert sequences_of(opened) == MIXED
    for contig in opened.contigs:
        unknown = np.array([letter in "Nn" for letter in MIXED[contig.name]])
        edges = np.flatnonzero(np.diff(np.r_[0, unknown, 0])).reshape(-1, 2)
        assert np.array_equal(contig.unknown, edges) and contig.unknown.dtype == np.int64
        assert contig.known == int((~unknown).sum())
    written(tmp_path / "bad.fa", f">a{end}ACGT{end}AC!T{end}")
    with pytest.raises(ValueError, match=r"bad\.fa, line 3: '!'"):
        opening(str(tmp_path / "bad.fa"))


def test_reads_at_the_edges_of_contigs(tmp_path):
    opened = opening(str(written(tmp_path / "a.fa", fasta({"a": "ACGTacgt", "b": "TTTTN"}))))
    assert decode(opened.codes("a", 6)) == "GT" and decode(opened.codes("b", 0, 2)) == "TT"
    assert decode(opened.codes("a", 2, 5)) == "GTA" and opened.soft_masked("a", 2, 5).tolist() == [False, False, True]
    assert len(opened.codes("b", 5)) == 0 == len(opened.codes("a", 0, 0))
    assert opened.codes("a").dtype == np.uint8 and opened.soft_masked("a").dtype == bool
    assert (opened.bases, opened.known) == (13, 12)
    for start, stop in ((0, 9), (-1, 3), (5, 4)):
        with pytest.raises(ValueError, match=rf"bases \[{start}, {stop}\) are outside contig 'a', which has 8"):
            opened.codes("a", start, stop)
    with pytest.raises(ValueError, match=r"no contig 'B'; .*there are 2: a, b"):
        opened["B"]
    with pytest.raises(ValueError, match="no contig 'c'"):
        opened.codes("c")
    assert "a" in opened and "c" not in opened


def test_conversions_are_reported(tmp_path):
    opened = opening(str(written(tmp_path / "rna.fa", ">a\nACGURYn\nuuN\n")))
    assert sequences_of(opened) == {"a": "ACGTNNnttN"} and opened.report == "2 IUPAC codes read as N, 3 U as T"
    assert opened["a"].unknown.tolist() == [[4, 7], [9, 10]]


BAD_FASTA = {
    "empty": ("", r"the file is empty"),
    "no header": ("\nACGT\n>a\nACGT\n", r", line 2: expected '>' and a name, found 'ACGT'"),
    "GenBank": ("LOCUS       x 10 bp\n", r", line 1: this is GenBank, not FASTA; rename it bad\.gb"),
    "2bit": (b"\x43\x27\x41\x1a" + bytes(12), r"this is 2bit, not FASTA; convert it with twoBitToFa"),
    "binary": (b"\x00\x01\xff" * 9, r"found binary data \(00 01 ff"),
    "protein": (">p\nMKV\nMKVLAAGIVGL\n", r", line 3: 'L' .*protein"),
    "gap -": (">a\nACGT\n\nAC-GT\n", r", line 4: '-' .*gap"),
    "empty contig": (">a\nACGT\n>b\n\n>c\nA\n", r", line 3: contig 'b' is empty"),
    "twice": (">a\nA\n>b\nC\n>a x\nG\n", r"bad\.fa, line 5: a second contig 'a'; the first is in .*bad\.fa, line 1"),
    "no name": (">a\nACGT\n>  \nACGT\n", r", line 3: '>' without a name"),
    "header bytes": (b">a\nACGT\n>\xe9t\xe9\nA\n", r", line 3: invalid UTF-8 in the header \(byte 0xe9\)"),
    "mid-line": (">a\nACGT>b\nACGT\n", r", line 2: '>' in the middle of a line"),
    "carriage returns": (">a\rACGT\r>b\rACGT\r", r", line 1: lines end in a carriage return"),
    "endless header": (b">" + b"x" * (1 << 21), r", line 1: a header of more than 1,048,576 bytes"),
    "bzip2": (b"BZh91AY&SY", r"is compressed with bzip2; only gzip and bgzip"),
}


@pytest.mark.parametrize("case", BAD_FASTA)
def test_malformed_fasta(tmp_path, case):
    content, message = BAD_FASTA[case]
    path = written(tmp_path / "bad.fa", content)
    with pytest.raises(ValueError, match=message) as error:
        opening(str(path), cache_dir=tmp_path / "cache")
    assert str(path) in str(error.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_same_name_in_two_files(tmp_path):
    written(tmp_path / "1.fa", ">x\nA\n>same\nACGT\n")
    written(tmp_path / "2.fa.gz", gzip.compress(b">same\nACGT\n"))
    with pytest.raises(ValueError, match=r"2\.fa\.gz, line 1: a second contig 'same'; .* .*1\.fa, line 3"):
        opening(f"{tmp_path}/*.fa*")


def test_truncated_and_damaged_compression(tmp_path):
    letters = "".join(np.random.default_rng(0).choice(list("ACGT"), 200_000))
    data = fasta({"first": "ACGT", "second": letters}).encode()
    whole = gzip.compress(data)
    cut = written(tmp_path / "cut.fa.gz", whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cut\.fa\.gz: truncated: the gzip stream ends after line 3, in .*second"):
        opening(str(cut))
    with pytest.raises(ValueError, match=r"truncated: .* ends at its start"):
        opening(str(written(tmp_path / "stub.fa.gz", whole[:8])))
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    with pytest.raises(ValueError, match=r"hit\.fa\.gz: damaged: the gzip stream fails"):
        opening(str(written(tmp_path / "hit.fa.gz", bytes(damaged))))
    blocks = bgzipped(tmp_path / "b.fa.bgz", data).read_bytes()
    assert opening(str(tmp_path / "b.fa.bgz")).bases == 200_004
    with pytest.raises(ValueError, match=r"truncated: the empty block that ends every bgzip file is missing"):
        opening(str(written(tmp_path / "no_end.fa.bgz", blocks[:-28])))
    with pytest.raises(ValueError, match=r"the file is empty"):
        opening(str(written(tmp_path / "zero.fa.gz", b"")))


def test_malformed_genbank(tmp_path):
    whole = genbank({"a": "acgt" * 50, "b": "gattaca" * 30})

    def reading(text):
        opening(str(written(tmp_path / "x.gb", text)))

    with pytest.raises(ValueError, match=r"x\.gb: .*no line begins with LOCUS"):
        reading(">a\nACGT\n")
    with pytest.raises(ValueError, match=r"x\.gb, line \d+, in the record that begins at line \d+: Premature end"):
        reading(whole[:-60])
    start, line = whole.index("LOCUS", 5), whole.index("  61 ", whole.index("LOCUS", 5))
    bad = whole[: line + 8] + "z" + whole[line + 9 :]
    with pytest.raises(ValueError, match=rf"x\.gb, line {whole.count(chr(10), 0, line) + 1} \(record 'b'\): 'Z'"):
        reading(bad)
    origin = whole.index("ORIGIN", start)
    with pytest.raises(ValueError, match=rf"line {whole.count(chr(10), 0, start) + 1}: record 'b' has no sequence"):
        reading(whole[:origin] + "CONTIG      join(x:1..9)\n//\n")
    with pytest.raises(ValueError, match=r"a second contig 'a'; the first is in .*x\.gb, line 1"):
        reading(whole + whole)
    with pytest.raises(ValueError, match=r"x\.gb, after line \d+: invalid UTF-8"):
        opening(str(written(tmp_path / "x.gb", whole.replace("UNK", "\xe9").encode("latin-1"))))
    with pytest.raises(ValueError, match=r"x\.gb\.gz: truncated: the gzip stream ends"):
        opening(str(written(tmp_path / "x.gb.gz", gzip.compress(whole.encode())[:-20])))


def test_specs(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIORZOO_DATA", str(tmp_path))
    assert [contig.name for contig in opening().contigs] == ["yeast_chr01"] and opening().bases == 230_218
    with pytest.raises(
        FileNotFoundError,
        match=r"no \*\.fa in .*genomes; .*`python recipes/fetch_data.py dna genomes`",
    ):
        opening("genomes")
    (tmp_path / "genomes").mkdir()
    for name in ("yeast", "worm", "fly"):
        written(tmp_path / f"genomes/{name}.fa", f">{name}_1\nACGT\n")
    assert [contig.name for contig in opening("genomes").contigs] == ["fly_1", "worm_1", "yeast_1"]
    assert [contig.name for contig in opening("genomes:yeast,fly").contigs] == ["yeast_1", "fly_1"]
    with pytest.raises(FileNotFoundError, match=r"no genome 'yaest' in .*did you mean 'yeast'\? there are fly, worm"):
        opening("genomes:yaest")
    there = tmp_path / "genomes"
    assert opening(f"{there}/worm.fa, {there}/f*.fa").files == (f"{there}/worm.fa", f"{there}/fly.fa")
    bracket = written(tmp_path / "a[1].fa", ">c\nA\n")
    assert opening(f"{bracket},{there}/f*.fa").files == (str(bracket), f"{there}/fly.fa")
    comma = written(tmp_path / "a,b.fa", ">c\nA\n")
    assert opening(str(comma)).files == (str(comma),)
    for spec, error, message in (
        (f"{there}/wrm.fa", FileNotFoundError, r"no file .*wrm\.fa'.*did you mean '.*worm\.fa'"),
        ("yeast-chr1", FileNotFoundError, r"did you mean 'yeast-chr01'"),
        (str(there), FileNotFoundError, r"is a folder; name its files, such as '.*genomes/\*\.fa'"),
        (f"{there}/*.fna", FileNotFoundError, r"no file matches"),
        (str(written(tmp_path / "a.txt", ">a\nA\n")), ValueError, r"a\.txt is none of \.fa, \.fasta, \.fna, \.gb"),
        ("", ValueError, "source must be a non-empty string"),
        (f"{there}/worm.fa,", ValueError, r"worm\.fa,': no name before or after a comma"),
    ):
        with pytest.raises(error, match=message):
            opening(spec)


def test_the_store_follows_the_file(tmp_path):
    path, cache = written(tmp_path / "a.fa", ">a\nACGT\n"), tmp_path / "cache"
    first = opening(str(path), cache_dir=cache)
    (folder,) = cache.iterdir()
    assert sorted(p.name for p in folder.iterdir()) == ["bases.u8", "contigs.json", "unknown.npy"]
    assert opening(str(path), cache_dir=cache) is first
    genome._open.cache_clear()
    os.utime(folder / "bases.u8", (1, 1))
    assert opening(str(path), cache_dir=cache).fingerprint == first.fingerprint
    assert (folder / "bases.u8").stat().st_mtime == 1  # it was read again, not written again

    written(path, ">a\nTTTT\n")  # the same size
    os.utime(path, ns=(1, 1))
    changed = opening(str(path), cache_dir=cache)
    assert sequences_of(changed) == {"a": "TTTT"} and sequences_of(first) == {"a": "ACGT"}
    assert len(list(cache.iterdir())) == 1  # the store of what the file was is gone
    written(path, ">a\nTTTTT\n")
    os.utime(path, ns=(1, 1))
    assert opening(str(path), cache_dir=cache).bases == 5


def test_a_cache_that_cannot_be_written(tmp_path):
    path, cache = written(tmp_path / "a.fa", fasta(MIXED)), written(tmp_path / "file", "")
    for place in (cache, cache / "below"):
        with pytest.raises(OSError, match=rf"bases of {path}: {place} cannot be written .*; set cache_dir or"):
            opening(str(path), cache_dir=place)


def test_a_damaged_store_and_leftovers_are_replaced(tmp_path):
    path, cache = written(tmp_path / "a.fa", fasta(MIXED)), tmp_path / "cache"
    opening(str(path), cache_dir=cache)
    (folder,) = cache.iterdir()
    left = cache / f".{folder.name}-killed"
    left.mkdir()
    for name, content in (("bases.u8", b"\0"), ("contigs.json", b"{"), ("unknown.npy", b"")):
        written(folder / name, content)
        genome._open.cache_clear()
        assert sequences_of(opening(str(path), cache_dir=cache)) == MIXED
        assert json.loads((folder / "contigs.json").read_text())["contigs"]
    assert left.is_dir()


def test_a_file_that_grows_while_it_is_read(tmp_path, monkeypatch):
    path = written(tmp_path / "a.fa", ">a\nACGT\n")
    read = genome.read_codes

    def and_grow(path):
        yield from read(path)
        with open(path, "a") as file:
            file.write("ACGT")

    monkeypatch.setattr(genome, "read_codes", and_grow)
    with pytest.raises(ValueError, match=r"a\.fa: changed while it was being read"):
        opening(str(path), cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
