"""Variants from VCF, BCF or a table with a header; and VCF and BCF written back with INFO fields.

VCF and tables may be plain, gzipped or bgzipped, and are read line by line. pysam reads BCF, which is handled as the lines of
VCF that it stands for; `line` counts these. A record with several alternative alleles becomes a `Variant` for each. Alleles
that are not two sequences (symbolic alleles, breakends, missing alleles) become a `Variant` with a reason, so that no record
disappears.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TextIO

from modalities.dna.alleles import trimmed
from modalities.dna.formats import check_bgzip_end
from modalities.files import near_file, opened
from zoo.files import replacing, replacing_path
from zoo.naming import did_you_mean

__all__ = ["InfoField", "Variant", "annotated_suffix", "check_annotation", "read_variants", "write_annotated"]

COLUMNS = ("chrom", "pos", "ref", "alt")
_LONGEST_LINE = 1 << 26  # characters; genotypes of a million people are a few million
_LARGEST = 18  # digits of a position
_BCF = b"BCF"
_INFO_COLUMN = 7
_RENAME = "choose another name, or remove it (bcftools annotate -x INFO/{})"


@dataclass(frozen=True, slots=True)
class Variant:
    """One alternative allele. Positions count from 1, as in VCF; sequences are upper case; `line` is that of the file."""

    chrom: str
    pos: int
    id: str
    ref: str
    alt: str
    line: int
    reason: str = ""  # why it cannot be scored


def read_variants(path: str | Path) -> Iterator[Variant]:
    """Every alternative allele of a VCF (first line `##…` or `#CHROM`), of a BCF, or of a TSV or CSV with a header of chrom,
    pos, ref, alt and optionally id.

    Raises:
        FileNotFoundError: for a missing file.
        ValueError: with file, line and reason: no header, other columns than it has, a position that is not a number, a file
            that is truncated or not text.
        ImportError: for BCF without pysam.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"no file of variants {str(path)!r}; {near_file(path)}expected a VCF or BCF, or a table of {', '.join(COLUMNS)}"
        )
    if _is_bcf(path):
        yield from _vcf(_lines_of_bcf(path), path)
        return
    try:
        with opened(Path(path)) as raw, _text_of(raw) as file:
            lines = _lines(file, path)
            first = next(lines, "")
            vcf = first.startswith(("##", "#CHROM"))
            yield from _vcf(itertools.chain([first], lines), path) if vcf else _table(lines, first, path)
    except csv.Error as error:
        raise ValueError(f"{path}: not a table: {error}") from error


def _text_of(raw: IO[bytes]) -> TextIO:
    """UTF-8; what is not becomes surrogates, which `_lines` finds, so that its line can be named."""
    return io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline="")


def _is_bcf(path: str | Path) -> bool:
    """By content. ValueError for a bgzipped file whose last block is missing."""
    check_bgzip_end(Path(path))
    with opened(Path(path)) as file:
        return file.read(len(_BCF)) == _BCF


def _pysam(purpose: str) -> Any:
    try:
        import pysam
    except ImportError as error:
        raise ImportError(f"{purpose} needs the package `pysam`: pip install pysam") from error
    return pysam


@contextlib.contextmanager
def _opened_bcf(path: str | Path) -> Iterator[Any]:
    """A `pysam.VariantFile`; htslib says nothing on standard error meanwhile."""
    pysam = _pysam(f"{path}: BCF")
    before = pysam.set_verbosity(0)
    try:
        with _naming_damage(path):
            file = pysam.VariantFile(str(path))
        try:
            yield file
        except BaseException:
            with contextlib.suppress(OSError):  # what failed before fails again
                file.close()
            raise
        with _naming_damage(path):
            file.close()
    finally:
        pysam.set_verbosity(before)


def _records(path: str | Path, file: Any) -> Iterator[tuple[Any, str]]:
    """Each record of a `pysam.VariantFile`, and as a line of VCF."""
    while True:
        with _naming_damage(path):
            record = next(file, None)
            if record is None:
                return
            line = str(record)
        yield record, line


@contextlib.contextmanager
def _naming_damage(path: str | Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, NotImplementedError) as error:
        raise ValueError(f"{path}: truncated or damaged BCF ({error})") from error


def _lines_of_bcf(path: str | Path) -> Iterator[str]:
    with _opened_bcf(path) as file:
        yield from str(file.header).splitlines(keepends=True)
        for _, line in _records(path, file):
            yield line


def _lines(file: TextIO, path: str | Path) -> Iterator[str]:
    number = 0
    while line := file.readline(_LONGEST_LINE + 1):
        number += 1
        if len(line) > _LONGEST_LINE:
            raise ValueError(f"{path} line {number}: more than {_LONGEST_LINE:,} characters, the most of a line")
        if not line.isascii() and (wrong := re.search("[\udc80-\udcff]", line)):
            raise ValueError(
                f"{path} line {number}: byte {ord(wrong[0]) - 0xDC00:#x} is not UTF-8; expected a VCF or BCF, or a table of "
                f"{', '.join(COLUMNS)}"
            )
        yield line


def _vcf(lines: Iterator[str], path: str | Path) -> Iterator[Variant]:
    named = 0  # columns of the line of #CHROM
    for number, line in enumerate(lines, start=1):
        if line.startswith("#") or not line.strip():
            named = line.rstrip("\r\n").count("\t") + 1 if line.startswith("#CHROM\t") else named
            continue
        columns = line.rstrip("\r\n").split("\t")
        if len(columns) < 5:
            raise ValueError(
                f"{path} line {number}: {len(columns)} tab-separated columns; expected CHROM, POS, ID, REF, ALT"
            )
        if named and len(columns) != named:
            raise ValueError(
                f"{path} line {number}: {len(columns)} tab-separated columns; the line of #CHROM has {named}"
            )
        chrom, pos, name, ref, alts = columns[:5]
        yield from _alleles(chrom, pos, name, ref, alts, f"{path} line {number}", number)


def _table(lines: Iterator[str], header: str, path: str | Path) -> Iterator[Variant]:
    separator = "\t" if "\t" in header else ","
    names = [name.strip().lower().lstrip("#\ufeff") for name in next(csv.reader([header], delimiter=separator), [])]
    for wanted in COLUMNS:
        if wanted not in names:
            raise ValueError(
                f"{path} line 1: no column {wanted!r} in {header.strip()[:80]!r}; {did_you_mean(wanted, names)}"
                f"expected a VCF, whose first line is '##fileformat=VCFv4…', or a header with {', '.join(COLUMNS)}"
            )
    reader = csv.reader(lines, delimiter=separator)
    for columns in reader:
        number = reader.line_num + 1  # the header is line 1
        if not any(columns):
            continue
        if len(columns) < len(names):
            raise ValueError(f"{path} line {number}: {len(columns)} columns; the header has {len(names)}")
        row = {name: column.strip() for name, column in zip(names, columns, strict=False)}
        alleles = (row["chrom"], row["pos"], row.get("id") or ".", row["ref"], row["alt"])
        yield from _alleles(*alleles, f"{path} line {number}", number)


def _alleles(chrom: str, pos: str, name: str, ref: str, alts: str, where: str, line: int) -> Iterator[Variant]:
    if not (pos.isascii() and pos.isdigit() and len(pos) <= _LARGEST):
        raise ValueError(f"{where}: position {pos[:40]!r} is not a whole number")
    for alt in _split(alts):
        yield Variant(
            sys.intern(chrom), int(pos), name, ref.upper(), alt, line, _unscorable(int(pos), ref.upper(), alt)
        )


def _split(alts: str) -> list[str]:
    """Alternative alleles: sequences in upper case; symbolic alleles and breakends, which name contigs, as they are."""
    return [alt if set("<>[]") & set(alt) else alt.upper() for alt in alts.split(",")]


def _unscorable(pos: int, ref: str, alt: str) -> str:
    """Why two alleles are not two sequences; "" where they are."""
    if pos == 0:
        return "position 0: positions count from 1"
    if alt in ("", "."):
        return "no alternative allele"
    if alt == "*":
        return "an allele missing due to a deletion upstream (*)"
    if alt.startswith("<"):
        return f"a symbolic allele: {alt}"
    if "[" in alt or "]" in alt or alt.startswith(".") or alt.endswith("."):
        return f"a breakend: {alt}"
    _, old, new = trimmed(ref, alt)  # a common base may be an N before a deletion
    if not ref or set(old + new) - set("ACGT"):
        return f"alleles that are not all A, C, G, T: {ref or 'none'}, {alt}"
    return "ALT equal to REF" if ref == alt else ""


# ------------------------------------------------------------------------------------------------ written back


@dataclass(frozen=True)
class InfoField:
    """An INFO field that is added: a number for each alternative allele (Number=A, Type=Float), "." where there is none."""

    id: str
    description: str

    def __post_init__(self) -> None:
        if not re.fullmatch("[A-Za-z_][0-9A-Za-z_.]*", self.id):
            raise ValueError(
                f"INFO field {self.id!r}: expected letters, digits, _ and ., the first a letter, such as LLR"
            )

    @property
    def header(self) -> str:
        text = self.description.replace("\\", "\\\\").replace('"', '\\"')
        return f'##INFO=<ID={self.id},Number=A,Type=Float,Description="{text}">'


def annotated_suffix(path: str | Path) -> str:
    """Of what `write_annotated` makes of a file: ".bcf", ".vcf.gz" (bgzipped), or ".vcf"."""
    if _is_bcf(path):
        return ".bcf"
    with open(path, "rb") as file:
        return ".vcf.gz" if file.read(2) == b"\x1f\x8b" else ".vcf"


def check_annotation(path: str | Path, fields: Sequence[InfoField]) -> None:
    """Whether these INFO fields can be added to all of a file.

    Raises:
        ValueError: for a file that is no VCF or BCF, has no INFO column, in its header or in a line, or has one of the fields.
        ImportError: where writing it needs pysam, which is not installed.
    """
    _check_header(path, fields)
    if not _is_bcf(path):
        with opened(Path(path)) as file:
            for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE + 1), b""), start=1):
                if not line.startswith((b"#", b"\xef\xbb\xbf#")) and line.strip():
                    where = f"{path} line {number}"
                    info = _info(where, line.split(b"\t", _INFO_COLUMN + 1)).decode("utf-8", "replace").strip()
                    there = {entry.partition("=")[0] for entry in info.split(";")}
                    if taken := [field.id for field in fields if field.id in there]:  # and no line of the header
                        raise ValueError(f"{where} has an INFO field {taken[0]} already: {_RENAME.format(taken[0])}")


def _info(where: str, columns: Sequence[bytes]) -> bytes:
    if len(columns) <= _INFO_COLUMN:
        raise ValueError(f"{where}: {len(columns)} tab-separated columns; INFO is the {_INFO_COLUMN + 1}th")
    return columns[_INFO_COLUMN]


def _check_header(path: str | Path, fields: Sequence[InfoField]) -> None:
    if annotated_suffix(path) == ".vcf":
        header: Iterable[str] = _vcf_header(path)
    else:
        _pysam(f"{path}: writing BCF or bgzipped VCF")
        header = _lines_of_bcf(path) if _is_bcf(path) else _vcf_header(path)
    for line in itertools.takewhile(lambda line: line.startswith("##"), header):
        for field in fields:
            # ID may stand behind others, and not inside a quoted text.
            if re.match(rf'##INFO=<(?:[^"]|"(?:[^"\\]|\\.)*")*?(?<=[<,])ID={re.escape(field.id)}[,>]', line):
                raise ValueError(f"{path} has an INFO field {field.id} already: {_RENAME.format(field.id)}")


def _vcf_header(path: str | Path) -> Iterator[str]:
    """Lines up to that of #CHROM."""
    with opened(Path(path)) as file:
        while line := file.readline(_LONGEST_LINE):
            text = line.decode("utf-8", "replace").removeprefix("\ufeff")
            if not text.startswith(("##", "#CHROM")):
                break
            if text.startswith("#CHROM") and text.rstrip("\r\n").count("\t") < _INFO_COLUMN:
                raise ValueError(f"{path}: no INFO column in the line of #CHROM; INFO fields have no place")
            yield text
            if text.startswith("#CHROM"):
                return
    raise ValueError(f"{path}: no line of #CHROM; INFO fields can be added to VCF and BCF alone")


def write_annotated(
    path: str | Path, out: Path, fields: Mapping[str, InfoField], rows: Iterable[Mapping[str, Any]]
) -> None:
    """A VCF or BCF again, as `out`, with INFO fields: header lines before #CHROM, values at the end of each record's INFO.

    Everything else stays as it is: of VCF every byte of every line but semicolons at the end of INFO, of BCF every field. A
    record none of whose alleles has a value is not changed. VCF that is compressed becomes bgzipped, whatever it was.

    Args:
        fields: by the column of `rows` that has their values; NaN is a missing one.
        rows: chrom, pos, ref, alt and those columns of every alternative allele, in the order of `read_variants`.

    Raises:
        ValueError: where the file is not the one that the rows are of, and as `read_variants` and `check_annotation` do.
    """
    _check_header(path, list(fields.values()))
    rest = iter(rows)
    if (suffix := annotated_suffix(path)) == ".bcf":
        _write_bcf(path, out, fields, rest)
    else:
        with opened(Path(path)) as source, _replacing_vcf(out, compress=suffix == ".vcf.gz") as target:
            _write_vcf(path, source, target, fields, rest)


@contextlib.contextmanager
def _replacing_vcf(out: Path, *, compress: bool) -> Iterator[IO[bytes]]:
    if not compress:
        with replacing(out, "wb") as file:
            yield file
        return
    with replacing_path(out) as temporary:
        file = _pysam(f"{out}: bgzip").BGZFile(str(temporary), "wb")
        with contextlib.closing(file):
            yield file


def _write_vcf(
    path: str | Path, source: IO[bytes], target: IO[bytes], fields: Mapping[str, InfoField], rows: Iterator[Any]
) -> None:
    number = 0
    while line := source.readline(_LONGEST_LINE + 1):
        number += 1
        body = line.rstrip(b"\r\n")
        end = line[len(body) :] or b"\n"
        if body.startswith(b"#CHROM"):
            target.write(b"".join(field.header.encode() + end for field in fields.values()))
        if not body.strip() or body.removeprefix(b"\xef\xbb\xbf").startswith(b"#"):
            target.write(line)
            continue
        columns = body.split(b"\t")
        where = f"{path} line {number}"
        info = _info(where, columns).rstrip(b";")
        chrom, pos, _, ref, alts = (column.decode("utf-8", "replace") for column in columns[:5])
        values = _values(where, fields, chrom, pos, ref, alts, rows)
        if values:
            found = ";".join(f"{name}={','.join(map(_text, numbers))}" for name, numbers in values.items()).encode()
            columns[_INFO_COLUMN] = found if info in (b".", b"") else info + b";" + found
            line = b"\t".join(columns) + line[len(body) :]
        target.write(line)
    if next(rows, None) is not None:
        raise ValueError(f"{path} has changed since it was read: it has fewer records; measure again")


def _write_bcf(path: str | Path, out: Path, fields: Mapping[str, InfoField], rows: Iterator[Any]) -> None:
    pysam = _pysam(f"{path}: BCF")
    with replacing_path(out) as temporary, _opened_bcf(path) as source:
        for field in fields.values():
            source.header.add_line(field.header)
        with pysam.VariantFile(str(temporary), "wb", header=source.header) as target:
            for number, (record, line) in enumerate(_records(path, source), start=1):
                columns = line.split("\t", 5)
                chrom, pos, _, ref, alts = columns[:5]
                values = _values(f"{path} record {number}", fields, chrom, pos, ref, alts, rows)
                for name, numbers in values.items():
                    record.info[name] = tuple(None if math.isnan(value) else value for value in numbers)
                target.write(record)
        if next(rows, None) is not None:
            raise ValueError(f"{path} has changed since it was read: it has fewer records; measure again")


def _values(
    where: str, fields: Mapping[str, InfoField], chrom: str, pos: str, ref: str, alts: str, rows: Iterator[Any]
) -> dict[str, list[float]]:
    """The values of a record's alternative alleles by INFO field, from the next rows; none where all are missing."""
    alleles = _split(alts)
    mine = list(itertools.islice(rows, len(alleles)))
    same = [(row["chrom"], str(row["pos"]), row["ref"], row["alt"]) for row in mine]
    if same != [(chrom, str(int(pos)), ref.upper(), alt) for alt in alleles]:
        raise ValueError(f"{where} has changed since it was read: {chrom}:{pos} {ref[:20]}>{alts[:20]}; measure again")
    found = {field.id: [float(row[column]) for row in mine] for column, field in fields.items()}
    return {} if all(math.isnan(value) for numbers in found.values() for value in numbers) else found


def _text(value: float) -> str:
    return "." if math.isnan(value) else f"{value + 0.0:.6g}"  # −0 is 0
