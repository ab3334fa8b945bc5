"""DNA sources: a spec string, parsed once, to files and a split; and the sequences of a FASTA or
GenBank file.

    "yeast-chr01"             chromosome I of baker's yeast, which ships with the package; the
                              default
    "genomes"                 what `priorzoo fetch-data dna genomes` fetched into the data folder
    "genomes:yeast,ustilago"  those of them
    "PATH or GLOB"            .fa .fasta .fna or GenBank's .gb .gbk .gbff, also with .gz or .bgz;
                              several with commas

Biopython reads GenBank. FASTA is parsed here, a megabyte at a time: an index of FASTA (faidx) needs
lines of one length and bgzip, and readers of whole records (pysam's FastxFile, Biopython) lose line
numbers, and text before the first header.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from modalities.dna.tokenizers import LETTERS, NOT_A_BASE, invalid_letter
from modalities.sources import find_files, has_suffix
from zoo.errors import did_you_mean
from zoo.files import data_folder, open_decompressed

__all__ = ["DEFAULT_SOURCE", "DnaSource", "find_source", "read_codes"]

# Ships with the package.
DEFAULT_SOURCE = "yeast-chr01"
ASSETS = Path(__file__).parent / "assets"
GENBANK = (".gb", ".gbk", ".gbff")
SUFFIXES = (".fa", ".fasta", ".fna", *GENBANK)
_WHITE = b"\r\n \t"
# Bytes read at once.
_CHUNK = 1 << 20
_LONGEST_HEADER = 1 << 20
# The empty block that ends a bgzip file: SAM, 4.1.2.
_BGZIP_END = bytes.fromhex("1f8b08040000000000ff0600424302001b0003000000000000000000")
_BGZIP = re.compile(rb"\x1f\x8b\x08\x04.{6}..BC\x02\x00", re.DOTALL)


@dataclass(frozen=True)
class DnaSource:
    """Files of one genome and how it is split; `find_source` makes one.

    Attributes:
        name: in tables and files, "genomes", or "genome.fa split by genome.bed".
        bed: the file of the split; None for whole contigs by rule.
        subset: rows of `bed` for contigs of other files are ignored.
        whole: all is held out, as from a model that was not trained on it.
    """

    name: str
    files: tuple[Path, ...]
    bed: Path | None = None
    subset: bool = False
    whole: bool = False


def find_source(
    spec: str = DEFAULT_SOURCE, split: str | os.PathLike[str] | None = None
) -> DnaSource:
    """The source of a spec string, split by a BED file `split` if it is not None.

    ValueError for a malformed spec, or a file of another suffix; FileNotFoundError, which names the
    nearest file, or the command that fetches it.
    """
    if not isinstance(spec, str) or not spec.strip():
        raise ValueError(
            f"source must be a non-empty string such as {DEFAULT_SOURCE!r}, got {spec!r}"
        )
    name = spec
    bed = None
    if split is not None:
        name = f"{spec} split by {split}"
        bed = Path(split)
    if spec == DEFAULT_SOURCE:
        return DnaSource(name, (ASSETS / "yeast_chr01.fa.gz",), bed or ASSETS / "yeast_chr01.bed")
    if spec == "genomes" or spec.startswith("genomes:"):
        shared_bed = data_folder() / "genomes" / "split.bed"
        return DnaSource(name, _fetched_genomes(spec), bed or shared_bed, subset=bed is None)
    # A name may have a comma in it.
    parts = [spec] if Path(spec).is_file() else [part.strip() for part in spec.split(",")]
    if not all(parts):
        raise ValueError(f"source {spec!r}: no name before or after a comma")
    files: list[Path] = []
    for part in parts:
        files += find_files(spec, part, SUFFIXES, (DEFAULT_SOURCE, "genomes", "genomes:NAME"))
    return DnaSource(name, tuple(files), bed)


def _fetched_genomes(spec: str) -> tuple[Path, ...]:
    """The files of "genomes" or "genomes:a,b"."""
    folder = data_folder() / "genomes"
    fetched = sorted(path.stem for path in folder.glob("*.fa"))
    fetch = "to fetch them, `priorzoo fetch-data dna genomes`"
    if not fetched:
        raise FileNotFoundError(f"source {spec!r}: no *.fa in {folder}; {fetch}")
    _, colon, names_text = spec.partition(":")
    names = [name.strip() for name in names_text.split(",")] if colon else fetched
    for name in names:
        if name not in fetched:
            hint = f"{did_you_mean(name, fetched)}there are {', '.join(fetched)}; {fetch}"
            raise FileNotFoundError(f"source {spec!r}: no genome {name!r} in {folder}; {hint}")
    return tuple(folder / f"{name}.fa" for name in names)


def read_codes(path: Path) -> Iterator[tuple[str, str] | bytes]:
    """The sequences of a file, plain or compressed, in its order: a name and its place ("line 12"),
    and after it pieces of the sequence, a byte each letter as LETTERS translates it. ValueError
    with file, place and reason for a malformed file, or one that is not DNA."""
    if not path.stat().st_size:
        raise ValueError(f"{path}: the file is empty")
    _check_bgzip(path)
    if has_suffix(path.name, GENBANK):
        yield from _read_genbank(path)
    else:
        yield from _read_fasta(path)


def _check_bgzip(path: Path) -> None:
    """ValueError for a bgzip file without its last block: gzip does not notice missing blocks."""
    with open(path, "rb") as file:
        if not _BGZIP.match(file.read(64)):
            return
        file.seek(max(0, path.stat().st_size - len(_BGZIP_END)))
        if file.read() != _BGZIP_END:
            raise ValueError(
                f"{path}: truncated: the empty block that ends every bgzip file is missing"
            )


def _read_fasta(path: Path) -> Iterator[tuple[str, str] | bytes]:
    lines_read = 0
    begun = False
    with open_decompressed(path) as stream:
        while chunk := stream.read(_CHUNK):
            # To the end of a line, unless that is long.
            chunk += stream.readline(_CHUNK)
            if lines_read == 0:
                chunk = chunk.removeprefix(b"\xef\xbb\xbf")
            lines = chunk.splitlines(keepends=True) if b">" in chunk else [chunk]
            for is_header, group in groupby(lines, key=lambda line: line.startswith(b">")):
                if is_header:
                    headers = list(group)
                    for number, header in enumerate(headers, start=lines_read + 1):
                        yield _name(header[1:], path, number), f"line {number}"
                        begun = True
                    lines_read += b"".join(headers).count(b"\n")
                    continue
                piece = b"".join(group)
                codes = piece.translate(LETTERS, _WHITE)
                if codes and (not begun or NOT_A_BASE in codes):
                    raise ValueError(_problem(path, piece, lines_read + 1, begun))
                if codes:
                    yield codes
                lines_read += piece.count(b"\n")


def _read_genbank(path: Path) -> Iterator[tuple[str, str] | bytes]:
    """One record in memory at a time.

    Lower case, which GenBank writes throughout, is no soft mask.
    """
    from Bio import SeqIO

    with open_decompressed(path) as stream:
        records = iter(SeqIO.parse(io.TextIOWrapper(stream, encoding="utf-8"), "genbank"))
        for number in itertools.count(1):
            place = f"record {number}"
            try:
                with warnings.catch_warnings():
                    # Dates and columns out of form are fine; missing bases are not.
                    warnings.simplefilter("ignore")
                    warnings.filterwarnings("error", "Premature end|Expected sequence length")
                    record = next(records, None)
                if record is None:
                    return
                letters = bytes(record.seq).upper()
            except (OSError, EOFError, MemoryError):
                raise
            # Of any kind: the parser checks little of a damaged record.
            except Exception as error:
                raise ValueError(f"{path}, {place}: {error or 'not GenBank'}") from error
            codes = letters.translate(LETTERS)
            wrong = codes.find(NOT_A_BASE)
            if wrong >= 0:
                reason = invalid_letter(chr(letters[wrong]))
                raise ValueError(f"{path}, {place}, base {wrong + 1}: {reason}")
            unnamed = record.id in ("", "<unknown id>", ".")
            yield (record.name if unnamed else record.id), place
            yield codes


def _name(header: bytes, path: Path, line: int) -> str:
    if len(header) > _LONGEST_HEADER:
        raise ValueError(f"{path}, line {line}: a header of more than {_LONGEST_HEADER:,} bytes")
    try:
        words = header.decode("utf-8").split()
    except UnicodeDecodeError as error:
        reason = f"invalid UTF-8 in the header (byte 0x{header[error.start]:02x})"
        raise ValueError(f"{path}, line {line}: {reason}; correct the name") from error
    if not words:
        raise ValueError(f"{path}, line {line}: '>' without a name")
    return words[0]


def _problem(path: Path, piece: bytes, line: int, begun: bool) -> str:
    """What is wrong with lines from `line` on that are no sequence."""
    if begun:
        for place, byte in enumerate(piece):
            if LETTERS[byte] == NOT_A_BASE and byte not in _WHITE:
                line += piece.count(b"\n", 0, place)
                return f"{path}, line {line}: {invalid_letter(chr(byte))}"
    text = piece.lstrip()
    line += piece[: len(piece) - len(text)].count(b"\n")
    start = text[:40].splitlines()[0].decode("latin-1")
    return f"{path}, line {line}: expected '>' and a name, as of FASTA, found {start!r}"
