"""Files of sequences, parsed once from start to end: FASTA and GenBank, plain or compressed with gzip or bgzip.

Biopython parses GenBank. FASTA is parsed here, a megabyte at a time: an index of FASTA (faidx) needs lines of one length and
bgzip, and readers of whole records (pysam's FastxFile, Biopython) lose line numbers, and text before the first header.
"""

from __future__ import annotations

import importlib.util
import io
import re
import warnings
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import IO, NamedTuple

from modalities.dna.bases import LETTERS, NOT_A_BASE, invalid_letter
from zoo.files import opened

__all__ = ["SUFFIXES", "Start", "is_sequence_file", "read_codes"]

_WHITE = b"\r\n \t"
_CHUNK = 1 << 20  # bytes read at once
_LONGEST_HEADER = 1 << 20
_FORMATS = {"FASTA": (".fa", ".fasta", ".fna"), "GenBank": (".gb", ".gbk", ".gbff")}
SUFFIXES = tuple(suffix for suffixes in _FORMATS.values() for suffix in suffixes)
_BGZIP_END = bytes.fromhex("1f8b08040000000000ff0600424302001b0003000000000000000000")  # an empty block: SAM, 4.1.2
_BGZIP = re.compile(rb"\x1f\x8b\x08\x04.{6}..BC\x02\x00", re.DOTALL)


class Start(NamedTuple):
    """The start of a sequence: its name and its place in the file ("line 12")."""

    name: str
    place: str


def is_sequence_file(name: str) -> bool:
    """Whether a file name has the suffix of a known format, with or without .gz or .bgz."""
    return _format_of(name) is not None


def _format_of(name: str) -> str | None:
    name = name.lower().removesuffix(".bgz").removesuffix(".gz")
    return next((format for format, suffixes in _FORMATS.items() if name.endswith(suffixes)), None)


def read_codes(path: Path) -> Iterator[Start | bytes]:
    """The sequences of one file, in its order.

    Yields a `Start` and after it the sequence in pieces, a byte each letter as `bases.LETTERS` translates it: code | SOFT, with
    AMBIGUITY and URACIL for the caller to count. The format follows from the file's suffix, compression from its first bytes.
    ValueError with file, place and reason for a malformed file, or one that is not DNA.
    """
    format = _format_of(path.name)
    if format is None:
        raise ValueError(f"{path}: unknown suffix; expected {', '.join(SUFFIXES)}, with or without .gz or .bgz")
    if format == "GenBank" and importlib.util.find_spec("Bio") is None:
        raise ImportError(f"{path}: GenBank needs the package `biopython`: pip install biopython")
    if not path.stat().st_size:
        raise ValueError(f"{path}: the file is empty")
    with open(path, "rb") as file:
        if _BGZIP.match(file.read(64)):  # gzip does not notice that blocks are missing
            file.seek(max(0, path.stat().st_size - len(_BGZIP_END)))
            if file.read() != _BGZIP_END:
                raise ValueError(f"{path}: truncated: the empty block that ends every bgzip file is missing")
    with opened(path) as stream:
        yield from _read_fasta(stream, path) if format == "FASTA" else _read_genbank(stream, path)


def _read_fasta(stream: IO[bytes], path: Path) -> Iterator[Start | bytes]:
    number, begun = 0, False  # lines read
    while chunk := stream.read(_CHUNK):
        chunk += stream.readline(_CHUNK)  # to the end of a line, unless that is long
        chunk = chunk if number else chunk.removeprefix(b"\xef\xbb\xbf")
        for is_header, group in groupby(chunk.splitlines(keepends=True), key=lambda line: line.startswith(b">")):
            lines = list(group)
            for n, line in enumerate(lines if is_header else (), start=number + 1):
                yield _start(line[1:], path, n)
                begun = True
            piece = b"" if is_header else b"".join(lines)
            codes = piece.translate(LETTERS, _WHITE)
            if codes and (not begun or NOT_A_BASE in codes):
                raise ValueError(_problem(path, piece, number + 1, begun))
            if codes:
                yield codes
            number += len(lines)


def _start(header: bytes, path: Path, line: int) -> Start:
    if len(header) > _LONGEST_HEADER:
        raise ValueError(f"{path}, line {line}: a header of more than {_LONGEST_HEADER:,} bytes")
    try:
        words = header.decode("utf-8").split()
    except UnicodeDecodeError as error:
        byte = f"byte 0x{header[error.start]:02x}"
        raise ValueError(f"{path}, line {line}: invalid UTF-8 in the header ({byte}); correct the name") from error
    if not words:
        raise ValueError(f"{path}, line {line}: '>' without a name")
    return Start(words[0], f"line {line}")


def _problem(path: Path, piece: bytes, line: int, begun: bool) -> str:
    """What is wrong with lines from `line` on that are no sequence."""
    if begun:
        place = next(at for at, byte in enumerate(piece) if LETTERS[byte] == NOT_A_BASE and byte not in _WHITE)
        line += piece.count(b"\n", 0, place)
        return f"{path}, line {line}: {invalid_letter(chr(piece[place]))}"
    start = piece.lstrip()[:40].splitlines()[0]
    line += piece[: len(piece) - len(piece.lstrip())].count(b"\n")
    if start.startswith(b"LOCUS"):
        return f"{path}, line {line}: this is GenBank, not FASTA; rename it {path.stem}.gb"
    if not start.decode("latin-1").isprintable() or not start.isascii():
        return f"{path}: expected '>' and a name, found binary data ({start[:8].hex(' ')})"
    return f"{path}, line {line}: expected '>' and a name, found {start.decode('ascii')!r}"


def _read_genbank(stream: IO[bytes], path: Path) -> Iterator[Start | bytes]:
    """One record of a file at a time in memory."""
    from Bio.GenBank.Scanner import GenBankScanner
    from Bio.Seq import UndefinedSequenceError

    # SeqIO's own parser; features, which take most time, are left out.
    records, number = GenBankScanner().parse_records(io.TextIOWrapper(stream, encoding="utf-8"), do_features=False), 0
    while True:
        number += 1
        with warnings.catch_warnings():
            # Dates and LOCUS lines out of column, which annotators write, are fine; missing bases are not.
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", "Premature end|Expected sequence length")
            try:
                record = next(records, None)
            except (OSError, EOFError, MemoryError):
                raise
            except Exception as error:  # of any kind: the scanner checks little of a damaged record
                raise ValueError(f"{path}, record {number}: {error or 'not GenBank'}") from error
        if record is None:
            return
        name = record.name if record.id in ("", "<unknown id>", ".") else record.id
        yield Start(name, f"record {number}")
        try:
            letters = bytes(record.seq)
        except UndefinedSequenceError as error:
            hint = "fetch it with its sequence ('gbwithparts' at the NCBI)"
            raise ValueError(f"{path}, record {number}: {name!r} has no sequence (no ORIGIN); {hint}") from error
        codes = letters.upper().translate(LETTERS)  # GenBank has every base in lower case: no soft mask
        if (place := codes.find(NOT_A_BASE)) >= 0:
            raise ValueError(f"{path}, record {number}, base {place + 1}: {invalid_letter(chr(letters[place]))}")
        yield codes
