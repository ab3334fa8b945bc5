"""Genomes of eight eukaryotes as FASTA with one split: where they come from, and how they are named
and checked.

The shipped weights were trained and measured on the bytes that the digests of genomes.toml name.
The public addresses have the same assemblies; each species whose bytes differ is reported.
"""

from __future__ import annotations

import io
import json
import os
import re
import tomllib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from zipfile import BadZipFile

from Bio.SeqIO.FastaIO import SimpleFastaParser

from recipes.fetchers.common import Corpus, FetchError, download, tracked
from zoo.files import file_sha256, open_decompressed

# Letters to a line of FASTA.
LINE = 80
# Whole; every other contig trains.
HELDOUT = ("human_chr20", "yeast_chr04", "zymoseptoria_chr01")
NUMERALS = [
    "I",
    "II",
    "III",
    "IV",
    "V",
    "VI",
    "VII",
    "VIII",
    "IX",
    "X",
    "XI",
    "XII",
    "XIII",
    "XIV",
    "XV",
    "XVI",
]


@dataclass(frozen=True)
class Genome:
    """One species; the fields are explained in genomes.toml."""

    title: str
    urls: Sequence[str]
    pattern: str
    sha256: str
    soft_masked: bool = False
    first: dict[str, int] = field(default_factory=dict)


with Path(__file__).with_name("genomes.toml").open("rb") as file:
    GENOMES = {species: Genome(**facts) for species, facts in tomllib.load(file).items()}

# Files of raw material by their origin: a URL, or a package with version and path.
Sources = Mapping[str, Path]
# Names of contigs and their letters.
Contigs = Iterator[tuple[str, str]]


def fetch_genomes(data: Path, folder: Path) -> str:
    """Genomes from where they are published."""
    sources: dict[str, Sources] = {}
    for species, genome in GENOMES.items():
        (folder / species).mkdir()
        sources[species] = {url: download(url, folder / species) for url in genome.urls}
    return write_genomes(data, folder, sources)


def read_fasta(path: Path) -> Contigs:
    """Contigs of FASTA, gzip or plain; a name ends at the first white space."""
    with open_decompressed(path) as stream:
        for title, sequence in SimpleFastaParser(io.TextIOWrapper(stream, encoding="ascii")):
            words = title.split()
            yield words[0] if words else "", sequence


def write_genomes(
    data: Path,
    folder: Path,
    sources: Mapping[str, Sources],
    read: Callable[[Path], Contigs] = read_fasta,
    *,
    exact: bool = False,
) -> str:
    """Write SPECIES.fa of every genome, split.bed with every contig whole, and genomes.json with
    the origin of each; returns a line about them.

    exact: FetchError where the bytes of a species differ from those of the weights' data.
    """
    new = folder / "genomes"
    new.mkdir()
    entries: dict[str, dict[str, object]] = {}
    splits: list[str] = []
    different: list[str] = []
    for species in tracked(GENOMES, "writing genomes", len(GENOMES)):
        genome = GENOMES[species]
        lengths = _write_genome(new, species, sources[species], read)
        for name, length in lengths.items():
            split = "heldout" if name in HELDOUT else "train"
            splits.append(f"{name}\t0\t{length}\t{split}\n")
        sha256 = file_sha256(new / f"{species}.fa")
        origins = list(sources[species])
        entries[species] = {"title": genome.title, "sources": origins, "sha256": sha256}
        if sha256 == genome.sha256:
            continue
        different.append(species)
        if exact:
            raise FetchError(
                f"{species} from {', '.join(origins)} has SHA-256 {sha256}; "
                f"expected is {genome.sha256}: nothing was kept"
            )
    (new / "split.bed").write_text("".join(splits), encoding="utf-8")
    index = json.dumps({"genomes": entries}, indent=1) + "\n"
    (new / "genomes.json").write_text(index, encoding="utf-8")
    place = data / "genomes"
    place.mkdir(parents=True, exist_ok=True)
    # Each by itself, since other files in that folder are the user's; genomes.json, which says
    # what is there, last.
    for path in sorted(new.iterdir(), key=lambda path: path.name == "genomes.json"):
        os.replace(path, place / path.name)
    line = f"{place}: {len(entries)} species; held out: {', '.join(HELDOUT)}"
    if different:
        line += ". OTHER bytes than the shipped weights' data (another assembly or masking): "
        line += ", ".join(different)
    return line


def _write_genome(
    folder: Path, species: str, sources: Sources, read: Callable[[Path], Contigs]
) -> dict[str, int]:
    """Write one species; returns {contig: letters}."""
    genome = GENOMES[species]
    lengths: dict[str, int] = {}
    with open(folder / f"{species}.fa", "wb") as stream:
        for origin, path in sources.items():
            try:
                for contig, sequence in read(path):
                    name = contig_name(species, contig)
                    if name in lengths:
                        raise FetchError(f"{species}: two contigs would be called {name!r}")
                    if not genome.soft_masked:
                        sequence = sequence.upper()
                    letters = sequence.encode()[: genome.first.get(name)]
                    stream.write(b">%b\n" % name.encode())
                    for start in range(0, len(letters), LINE):
                        stream.write(letters[start : start + LINE] + b"\n")
                    lengths[name] = len(letters)
            except (ValueError, EOFError, zlib.error, BadZipFile) as error:
                raise FetchError(f"{origin} cannot be read: {error}") from error
    return lengths


def contig_name(species: str, contig: str) -> str:
    """ "yeast_chr04" for yeast's "chr4" or "chrIV": unique among all genomes."""
    pattern = GENOMES[species].pattern
    match = re.fullmatch(pattern, contig)
    if match is None:
        raise FetchError(
            f"{species}: a contig is called {contig!r}, which does not match {pattern}"
        )
    groups = match.groupdict()
    if numeral := groups.get("roman"):
        return f"{species}_chr{NUMERALS.index(numeral) + 1:02d}"
    if chromosome := groups.get("chr"):
        return f"{species}_chr{chromosome.zfill(2) if chromosome.isdigit() else chromosome}"
    name = next(text for text in groups.values() if text)
    return f"{species}_{name}"


FILES = ("split.bed", "genomes.json", *(f"{species}.fa" for species in GENOMES))
CORPORA = {
    "genomes": Corpus(
        "285M bases of eight eukaryotes",
        tuple(f"genomes/{name}" for name in FILES),
        "150 MB",
        fetch_genomes,
    )
}
