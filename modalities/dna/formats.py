"""Files of sequences, parsed once from start to end: FASTA and GenBank, plain or compressed with gzip or bgzip.

Biopython parses GenBank. FASTA is parsed here, a megabyte at a time: an index of FASTA (faidx) needs lines of one length and
bgzip, and readers of whole records (pysam's FastxFile, Biopython) lose line numbers, and text before the first header.
"""

from __future__ import annotations

import gzip
import importlib.util
import io
import re
import sys
import warnings
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from modalities.dna.bases import LETTERS, NOT_A_BASE, invalid_letter

__all__ = ["SUFFIXES", "Start", "is_plain_gzip", "is_sequence_file", "read_codes"]

_WHITE = b"\r\n \t"
_CHUNK = 1 << 20
_BAR_FROM_BYTES = 16 * 2**20  # smaller files take about a second and need no bar
_LONGEST_HEADER = 1 << 20
_LONGEST_LINE = 1 << 20  # of GenBank, in characters
_LONGEST_RECORD = 1 << 30  # the same; a record is read as a whole, at three times its size
_FORMATS = {"FASTA": (".fa", ".fasta", ".fna"), "GenBank": (".gb", ".gbk", ".gbff")}
_COMPRESSED = (".gz", ".bgz")
SUFFIXES = tuple(suffix for suffixes in _FORMATS.values() for suffix in suffixes)
_OTHERS = {b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip"}
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
    name = name.lower()
    for suffix in _COMPRESSED:
        name = name.removesuffix(suffix)
    return next((format for format, suffixes in _FORMATS.items() if name.endswith(suffixes)), None)


def read_codes(path: Path) -> Iterator[Start | bytes]:
    """The sequences of one file, in its order, with a progress bar for a large file on a terminal.

    Yields a `Start` and after it the sequence in pieces of at most a few million letters, a byte each as `bases.LETTERS`
    translates it: code | SOFT, with AMBIGUITY and URACIL for the caller to count. The format follows from the file's suffix,
    compression from its first bytes. ValueError with file, line and reason for a malformed file, or one that is not DNA.
    """
    format = _format_of(path.name)
    if format is None:
        raise ValueError(f"{path}: unknown suffix; expected {', '.join(SUFFIXES)}, with or without .gz or .bgz")
    if format == "GenBank" and importlib.util.find_spec("Bio") is None:
        raise ImportError(f"{path}: GenBank needs the package `biopython`: pip install biopython")
    with _opened(path) as raw:
        start = raw.read(64)
        if not start:
            raise ValueError(f"{path}: the file is empty")
        for magic, name in _OTHERS.items():
            if start.startswith(magic):
                raise ValueError(f"{path}: is compressed with {name}; only gzip and bgzip can be read: decompress it")
        raw.seek(0)
        check_bgzip_end(path)
        stream = _Watched(gzip.GzipFile(fileobj=raw) if start.startswith(b"\x1f\x8b") else io.BufferedReader(raw), path)
        yield from _read_fasta(stream, path) if format == "FASTA" else _read_genbank(stream, path)


def _opened(path: Path) -> AbstractContextManager:
    if path.stat().st_size < _BAR_FROM_BYTES or not sys.stderr.isatty():
        return open(path, "rb")
    from rich.console import Console
    from rich.progress import open as open_with_bar

    return open_with_bar(path, "rb", description="indexing", console=Console(stderr=True), transient=True)


def check_bgzip_end(path: Path) -> None:
    """ValueError for a bgzipped file without the empty block that ends it: gzip does not notice that blocks are missing."""
    with open(path, "rb") as file:
        if not _BGZIP.match(file.read(64)):
            return
        file.seek(max(0, path.stat().st_size - len(_BGZIP_END)))
        if file.read() != _BGZIP_END:
            raise ValueError(f"{path}: truncated: the empty block that ends every bgzip file is missing")


def is_plain_gzip(path: Path) -> bool:
    """Whether a file is compressed with gzip, and not in blocks as bgzip does."""
    with open(path, "rb") as file:
        start = file.read(64)
    return start.startswith(b"\x1f\x8b") and not _BGZIP.match(start)


class _Watched(io.RawIOBase):
    """A stream of decompressed bytes whose errors name the file and the place."""

    def __init__(self, stream: io.BufferedReader | gzip.GzipFile, path: Path) -> None:
        self.stream, self.path = stream, path
        self.place = "at its start"

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:  # for io.TextIOWrapper
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def read(self, size: int = -1) -> bytes:
        try:
            return self.stream.read1(size)  # read() would withhold what precedes an error, and with it the place
        except EOFError as error:
            raise ValueError(f"{self.path}: truncated: the gzip stream ends {self.place}") from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{self.path}: damaged: the gzip stream fails {self.place} ({error})") from error


def _read_fasta(stream: _Watched, path: Path) -> Iterator[Start | bytes]:
    line, begun, at_line_start = 1, False, True
    header: bytes | None = None  # the part read of a header that has not ended yet
    while chunk := stream.read(_CHUNK):
        if line == 1 and not begun and header is None:
            chunk = chunk.removeprefix(b"\xef\xbb\xbf")
        at = 0
        while at < len(chunk):
            if header is not None:
                end = chunk.find(b"\n", at)
                header += chunk[at : end if end >= 0 else len(chunk)]
                if end < 0:
                    if len(header) > _LONGEST_HEADER:
                        raise ValueError(f"{path}, line {line}: a header of more than {_LONGEST_HEADER:,} bytes")
                    break
                start = _start(header, path, line)
                stream.place = f"after line {line}, in sequence {start.name!r}"
                yield start
                header, begun, at_line_start, at, line = None, True, True, end + 1, line + 1
                continue
            stop = chunk.find(b">", at)
            piece = chunk[at : stop if stop >= 0 else len(chunk)]
            codes = piece.translate(LETTERS, _WHITE)
            if codes and not begun:
                raise ValueError(_no_header(path, piece, line))
            if NOT_A_BASE in codes:
                raise _bad_letter(path, piece, line)
            if codes:
                yield codes
            line += piece.count(b"\n")
            at_line_start = piece.endswith(b"\n") if piece else at_line_start
            at += len(piece)
            if stop >= 0:
                if not at_line_start:
                    raise ValueError(f"{path}, line {line}: '>' in the middle of a line")
                header, at = b"", at + 1
    if header is not None:  # a last line without a line feed
        yield _start(header, path, line)


def _start(header: bytes, path: Path, line: int) -> Start:
    try:
        text = header.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = f"byte 0x{header[error.start]:02x}"
        raise ValueError(f"{path}, line {line}: invalid UTF-8 in the header ({byte}); correct the name") from error
    if not text.split():
        raise ValueError(f"{path}, line {line}: '>' without a name")
    if "\r" in text.rstrip():
        raise ValueError(f"{path}, line {line}: lines end in a carriage return alone; expected line feeds")
    return Start(text.split()[0], f"line {line}")


def _bad_letter(path: Path, piece: bytes, line: int) -> ValueError:
    place = next(at for at, byte in enumerate(piece) if LETTERS[byte] == NOT_A_BASE and byte not in _WHITE)
    line += piece.count(b"\n", 0, place)
    return ValueError(f"{path}, line {line}: {invalid_letter(chr(piece[place]))}")


def _no_header(path: Path, piece: bytes, line: int) -> str:
    before = len(piece) - len(piece.lstrip())
    line += piece.count(b"\n", 0, before)
    start = piece.lstrip()[:40].splitlines()[0]
    if start.startswith(b"LOCUS"):
        return f"{path}, line {line}: this is GenBank, not FASTA; rename it {path.stem}.gb"
    if start[:4] in (b"\x43\x27\x41\x1a", b"\x1a\x41\x27\x43"):
        return f"{path}: this is 2bit, not FASTA; convert it with twoBitToFa"
    if not start.decode("latin-1").isprintable() or not start.isascii():
        return f"{path}: expected '>' and a name, found binary data ({start[:8].hex(' ')})"
    return f"{path}, line {line}: expected '>' and a name, found {start.decode('ascii')!r}"


class _Lines:
    """Lines of text for Biopython's scanner, counted so that errors can name them."""

    def __init__(self, stream: _Watched, path: Path) -> None:
        self.text, self.path, self.stream = io.TextIOWrapper(io.BufferedReader(stream), encoding="utf-8"), path, stream
        self.number = self.record = self.sequence = 0  # lines read; the line of the last LOCUS; of the last ORIGIN
        self.characters = 0  # since the last LOCUS

    def readline(self) -> str:
        try:
            line = self.text.readline(_LONGEST_LINE)
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}, after line {self.number}: invalid UTF-8 ({error.reason})") from error
        self.number += 1
        self.stream.place = f"after line {self.number}"
        if len(line) == _LONGEST_LINE:
            raise ValueError(f"{self.path}, line {self.number}: {_LONGEST_LINE:,} characters or more; not GenBank")
        if line.startswith("LOCUS"):
            self.record, self.characters = self.number, 0
        elif line.startswith("ORIGIN"):
            self.sequence = self.number
        self.characters += len(line)
        if self.characters > _LONGEST_RECORD:
            what = f"the record that begins at line {self.record} has more than {_LONGEST_RECORD:,} characters"
            raise ValueError(f"{self.path}, line {self.number}: {what}; convert it to FASTA")
        return line


def _read_genbank(stream: _Watched, path: Path) -> Iterator[Start | bytes]:
    """One record of a file at a time in memory."""
    from Bio.Seq import UndefinedSequenceError

    lines = _Lines(stream, path)
    for record, line in _records(lines, path):
        name = record.name if record.id in ("", "<unknown id>", ".") else record.id
        yield Start(name, f"line {line}")
        try:
            letters = bytes(record.seq)
        except UndefinedSequenceError as error:
            hint = "fetch it with its sequence ('gbwithparts' at the NCBI)"
            raise ValueError(f"{path}, line {line}: record {name!r} has no sequence (no ORIGIN); {hint}") from error
        codes = letters.upper().translate(LETTERS)  # GenBank has every base in lower case: no soft mask
        if (place := codes.find(NOT_A_BASE)) >= 0:  # 60 letters a line
            line = lines.sequence + 1 + place // 60
            raise ValueError(f"{path}, line {line} (record {name!r}): {invalid_letter(chr(letters[place]))}")
        yield codes


def _records(lines: _Lines, path: Path) -> Iterator[tuple[Any, int]]:
    """Biopython's records, and the line where each begins."""
    from Bio.GenBank.Scanner import GenBankScanner

    records = GenBankScanner().parse_records(lines, do_features=False)  # SeqIO's own parser; features take most time
    while True:
        with warnings.catch_warnings():
            # Dates and LOCUS lines out of column, which annotators write, are fine; missing bases are not.
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", "Premature end|Expected sequence length")
            try:
                record = next(records, None)
            except (OSError, MemoryError):
                raise
            except Exception as error:  # of any kind: the scanner checks little of a damaged record
                if str(error).startswith(str(path)):
                    raise
                where = f"line {lines.number}, in the record that begins at line {lines.record}"
                raise ValueError(f"{path}, {where}: {error or 'not GenBank'}") from error
        if record is None:
            break
        yield record, lines.record
    if not lines.record:
        raise ValueError(f"{path}: not a GenBank file: no line begins with LOCUS")
