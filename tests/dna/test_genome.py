"""Files of every format to the same bases; files that are malformed, each with its place; the store and its keys."""

from __future__ import annotations

import gzip
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
from Bio import bgzf

from modalities.dna import genome, sources
from modalities.dna.genome import open_genome
from modalities.dna.sources import find_source
from modalities.dna.tokenizers import decode

MIXED = {"chr1": "ACGTNNacgtnnTTGCA" * 20, "chr2": "N" + "gattaca" * 9 + "CATN" + "N" * 70, "chr3": "NA"}


def fasta(sequences, width=13, end="\n"):
    lines = []
    for name, letters in sequences.items():
        lines += [f">{name} some words", *(letters[i : i + width] for i in range(0, len(letters), width))]
    return end.join(lines) + end


def opening(spec="yeast-chr01", **options):
    return open_genome(find_source(str(spec)), **options)


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
        masked = opened.soft_masked(contig.name)
        sequences[contig.name] = "".join(np.where(masked, np.char.lower(letters), letters))
    return sequences


def test_formats_agree(tmp_path):
    text = fasta(MIXED)
    paths = [
        written(tmp_path / "a.fa", text),
        written(tmp_path / "a.FNA", "\ufeff" + fasta(MIXED, end="\r\n")),
        written(tmp_path / "b.fasta", text.replace("\n", "  \n\n").replace(">", "\n>").lstrip().rstrip()),
        written(tmp_path / "a.fa.gz", gzip.compress(text.encode())),
        written(tmp_path / "c.fa", gzip.compress(text[:200].encode()) + gzip.compress(text[200:].encode())),
        written(tmp_path / "plain.fa.gz", text),  # as a browser leaves it that decompressed on its way
        bgzipped(tmp_path / "d.fa.bgz", text),
    ]
    genomes = [opening(path) for path in paths]
    assert all(sequences_of(opened) == MIXED for opened in genomes)
    assert len({opened.fingerprint for opened in genomes}) == 1 and len(genomes[0].fingerprint) == 16

    upper = {name: letters.upper() for name, letters in MIXED.items()}
    hard = opening(written(tmp_path / "upper.fa", fasta(upper)))
    assert sequences_of(hard) == upper and hard.fingerprint != genomes[0].fingerprint  # the soft mask counts


@pytest.mark.parametrize(("chunk", "end"), [(16, "\r\n"), (17, "\n")])
def test_chunks_may_end_anywhere(tmp_path, monkeypatch, chunk, end):
    monkeypatch.setattr(sources, "_CHUNK", chunk)
    monkeypatch.setattr(genome, "_PIECE", chunk)
    opened = opening(written(tmp_path / "a.fa", fasta(MIXED, end=end)))
    assert sequences_of(opened) == MIXED
    for contig in opened.contigs:
        unknown = np.array([letter in "Nn" for letter in MIXED[contig.name]])
        edges = np.flatnonzero(np.diff(np.r_[0, unknown, 0])).reshape(-1, 2)
        assert np.array_equal(contig.unknown, edges) and contig.known == int((~unknown).sum())
    with pytest.raises(ValueError, match=r"bad\.fa, line 3: '!'"):
        opening(written(tmp_path / "bad.fa", f">a{end}ACGT{end}AC!T{end}"))


def test_reads_at_edges(tmp_path):
    opened = opening(written(tmp_path / "a.fa", ">a\nACGURYn\nuuN\n>b\nTTTTNacgt\n"))
    assert sequences_of(opened) == {"a": "ACGTNNnttN", "b": "TTTTNacgt"} and opened.known == 14
    assert opened["a"].unknown.tolist() == [[4, 7], [9, 10]]
    assert decode(opened.codes("a", 8)) == "TN" and decode(opened.codes("b", 0, 2)) == "TT"
    assert opened.soft_masked("b", 4, 6).tolist() == [False, True] and len(opened.codes("b", 9)) == 0
    for start, stop in ((0, 11), (-1, 3), (5, 4)):
        with pytest.raises(ValueError, match=rf"bases \[{start}, {stop}\) are outside contig 'a', which has 10"):
            opened.codes("a", start, stop)
    with pytest.raises(ValueError, match=r"no contig 'B'; .*there are 2: a, b"):
        opened["B"]


BAD_FASTA = {
    "empty": ("", r"the file is empty"),
    "no header": ("\nACGT\n>a\nACGT\n", r", line 2: expected '>' and a name, as of FASTA, found 'ACGT'"),
    "binary": (b"\x00\x01\xff" * 9, r", line 1: expected '>' and a name, as of FASTA, found '\\x00\\x01"),
    "protein": (">p\nMKV\nMKVLAAGIVGL\n", r", line 3: 'L' .*protein"),
    "empty contig": (">a\nACGT\n>b\n\n>c\nA\n", r", line 3: contig 'b' is empty"),
    "twice": (">a\nA\n>b\nC\n>a x\nG\n", r"bad\.fa, line 5: a second contig 'a'; the first is in .*bad\.fa, line 1"),
    "no name": (">a\nACGT\n>  \nACGT\n", r", line 3: '>' without a name"),
    "header bytes": (b">a\nACGT\n>\xe9t\xe9\nA\n", r", line 3: invalid UTF-8 in the header \(byte 0xe9\)"),
    "endless header": (b">" + b"x" * (1 << 21), r", line 1: a header of more than 1,048,576 bytes"),
}


def test_malformed_fasta(tmp_path):
    for content, message in BAD_FASTA.values():
        path = written(tmp_path / "bad.fa", content)
        with pytest.raises(ValueError, match=message) as error:
            opening(path, cache_dir=tmp_path / "cache")
        assert str(path) in str(error.value) and list((tmp_path / "cache").iterdir()) == []


def test_cut_bgzip(tmp_path):
    """Other damage of compressed files: tests/durability."""
    path = bgzipped(tmp_path / "b.fa.bgz", fasta(MIXED))
    path.write_bytes(path.read_bytes()[:-28])
    with pytest.raises(ValueError, match="truncated: the empty block that ends every bgzip file is missing"):
        opening(path)


def test_specs(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIORZOO_DATA", str(tmp_path))
    assert [(contig.name, contig.length) for contig in opening().contigs] == [("yeast_chr01", 230_218)]
    with pytest.raises(FileNotFoundError, match=r"no \*\.fa in .*genomes; .*fetch-data dna genomes`"):
        opening("genomes")
    there = tmp_path / "genomes"
    there.mkdir()
    fly, worm, yeast = (str(written(there / f"{name}.fa", f">{name}\nA\n")) for name in ("fly", "worm", "yeast"))
    assert opening("genomes").files == (fly, worm, yeast) and opening("genomes:yeast,fly").files == (yeast, fly)
    assert opening(f"{worm}, {there}/f*.fa").files == (worm, fly)
    for name in ("a[1].fa", "a,b.fa"):  # names that look like patterns and lists
        assert opening(written(tmp_path / name, ">c\nA\n")).files == (str(tmp_path / name),)
    for spec, error, message in (
        ("genomes:yaest", FileNotFoundError, r"no genome 'yaest' in .*did you mean 'yeast'\? there are fly, worm"),
        (f"{there}/wrm.fa", FileNotFoundError, r"no file .*wrm\.fa'.*did you mean '.*worm\.fa'"),
        (str(there), FileNotFoundError, r"is a folder; name its files, such as '.*genomes/\*\.fa'"),
        (f"{there}/*.fna", FileNotFoundError, r"no file matches"),
        (str(written(tmp_path / "a.txt", ">a\nA\n")), ValueError, r"a\.txt is none of \.fa, \.fasta, \.fna"),
        ("", ValueError, "source must be a non-empty string"),
        (f"{there}/worm.fa,", ValueError, r"worm\.fa,': no name before or after a comma"),
    ):
        with pytest.raises(error, match=message):
            opening(spec)


def test_store_follows_file(tmp_path):
    path, cache = written(tmp_path / "a.fa", ">a\nACGT\n"), tmp_path / "cache"
    first = opening(path, cache_dir=cache)
    (folder,) = cache.iterdir()
    assert opening(path, cache_dir=cache) is first
    genome._open.cache_clear()
    os.utime(folder / "bases.u8", (1, 1))
    assert opening(path, cache_dir=cache).fingerprint == first.fingerprint
    assert (folder / "bases.u8").stat().st_mtime == 1  # it was read again, not written again

    written(path, ">a\nTTTT\n")  # the same size
    os.utime(path, ns=(1, 1))
    assert sequences_of(opening(path, cache_dir=cache)) == {"a": "TTTT"} and sequences_of(first) == {"a": "ACGT"}
    (folder,) = cache.iterdir()  # the store of what the file was is gone
    for name in ("bases.u8", "contigs.json"):  # damaged: written again
        whole = (folder / name).read_bytes()
        flips = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(whole))]
        for content in (b"", b"{", *flips):
            written(folder / name, content)
            genome._open.cache_clear()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert sequences_of(opening(path, cache_dir=cache)) == {"a": "TTTT"}
            said = [str(warning.message) for warning in caught]
            assert said == [f"{folder} is damaged: the files of the genome are read again"]
    with pytest.raises(OSError, match=rf"bases of {path}: {path} cannot be written .*; set cache_dir or"):
        opening(path, cache_dir=path)


def test_file_that_grows_meanwhile(tmp_path, monkeypatch):
    path = written(tmp_path / "a.fa", ">a\nACGT\n")
    read = genome.read_codes

    def and_grow(path):
        yield from read(path)
        written(path, ">a\nACGTACGT\n")

    monkeypatch.setattr(genome, "read_codes", and_grow)
    with pytest.raises(ValueError, match=r"a\.fa: changed while it was being read"):
        opening(path, cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
