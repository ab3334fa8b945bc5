"""Variants of a VCF or BCF, read by pysam; and VCF written with more INFO fields.

A record with several alternative alleles becomes a `Variant` for each. Alleles that are not two sequences (symbolic alleles,
breakends, missing alleles) become a `Variant` with a reason, so that no record disappears.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from modalities.dna.alleles import trimmed
from zoo.files import near_file, replacing_path

if TYPE_CHECKING:
    import pysam

__all__ = ["InfoField", "Variant", "check_annotation", "read_variants", "write_annotated"]


@dataclass(frozen=True, slots=True)
class Variant:
    """One alternative allele. Positions count from 1, as in VCF; sequences are upper case.

    place: in the file, "record 3". reason: why it cannot be scored, or "".
    """

    chrom: str
    pos: int
    id: str
    ref: str
    alt: str
    place: str
    reason: str = ""


def read_variants(path: str | Path) -> Iterator[Variant]:
    """Every alternative allele of a VCF or BCF. FileNotFoundError for a missing file; ValueError with file, place and reason
    for another format and for a file that is malformed or truncated; ImportError without pysam."""
    with _opened(path) as file:
        for number, record in enumerate(_records(path, file), start=1):
            ref, place = (record.ref or "").upper(), f"record {number}"
            for alt in _alleles(record):
                reason = _unscorable(record.pos, ref, alt)
                yield Variant(sys.intern(record.chrom), record.pos, record.id or ".", ref, alt, place, reason)


def _unscorable(pos: int, ref: str, alt: str) -> str:
    """Why two alleles are not two sequences; "" where they are."""
    if pos == 0:
        return "position 0: positions count from 1"
    if not alt.isalpha():
        return f"a symbolic allele: {alt or 'none'}"
    _, old, new = trimmed(ref, alt)  # a common base may be an N before a deletion
    if not ref or set(old + new) - set("ACGT"):
        return f"alleles that are not all A, C, G, T: {ref or 'none'}, {alt}"
    return "ALT equal to REF" if ref == alt else ""


@contextlib.contextmanager
def _opened(path: str | Path) -> Iterator[pysam.VariantFile]:
    """A file by pysam; htslib says nothing on standard error meanwhile."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no file of variants {str(path)!r}; {near_file(path)}expected a VCF or BCF")
    try:
        import pysam
    except ImportError as error:
        raise ImportError(f"{path}: VCF and BCF need the package `pysam`: pip install pysam") from error
    before = pysam.set_verbosity(0)
    try:
        with _named(path, "the header"):
            file = pysam.VariantFile(str(path))
        try:
            yield file
        finally:
            with contextlib.suppress(OSError, ValueError):  # what failed before fails again
                file.close()
    finally:
        pysam.set_verbosity(before)


def _records(path: str | Path, file: pysam.VariantFile) -> Iterator[pysam.VariantRecord]:
    for number in itertools.count(1):
        with _named(path, f"record {number}"):
            record = next(file, None)
            if record is None:
                return
            str(record)  # raises for bytes that are no text
        yield record


@contextlib.contextmanager
def _named(path: str | Path, place: str) -> Iterator[None]:
    """Errors of pysam with file and place."""
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, NotImplementedError) as error:
        what = "truncated, damaged or malformed VCF or BCF, or compressed with gzip and not with bgzip"
        raise ValueError(f"{path}, {place}: {what} ({error})") from error


def _alleles(record: pysam.VariantRecord) -> list[str]:
    """Upper case; symbolic alleles and breakends, which name contigs, as they are."""
    return [alt.upper() if alt.isalpha() else alt for alt in record.alts or (".",)]


@dataclass(frozen=True)
class InfoField:
    """An INFO field that is added: a number for each alternative allele (Number=A, Type=Float), "." where there is none."""

    id: str
    description: str

    def __post_init__(self) -> None:
        if not re.fullmatch("[A-Za-z_][0-9A-Za-z_.]*", self.id):
            raise ValueError(f"INFO field {self.id!r}: expected letters, digits, _ and ., such as LLR")

    @property
    def header(self) -> str:
        text = self.description.replace("\\", "\\\\").replace('"', '\\"')
        return f'##INFO=<ID={self.id},Number=A,Type=Float,Description="{text}">'


def _info(rows: Sequence[Mapping[str, object]], column: str) -> str:
    """A record's values of a column, as htslib writes floats; "" where all are missing."""
    values = [float(str(row[column])) for row in rows]
    return "" if all(map(math.isnan, values)) else ",".join("." if math.isnan(v) else f"{v + 0.0:g}" for v in values)


def check_annotation(path: str | Path, fields: Iterable[InfoField]) -> pysam.VariantHeader:
    """The header of a VCF or BCF with INFO fields added, with what its records use and do not declare. ValueError for a file
    that has one of the fields."""
    with _opened(path) as file:
        for _ in _records(path, file):
            pass
        header = file.header.copy()
    for field in fields:
        if field.id in header.info:
            raise ValueError(
                f"{path} has an INFO field {field.id} already: choose another name, or remove it "
                f"(bcftools annotate -x INFO/{field.id})"
            )
        header.add_line(field.header)
    return header


def write_annotated(
    path: str | Path, out: Path, fields: Mapping[str, InfoField], rows: Iterable[Mapping[str, object]]
) -> None:
    """A VCF or BCF as VCF text `out`, bgzipped if its name ends in .gz, with INFO fields behind those that records have: by the
    column of `rows` that has their values, NaN where there is none.

    Every record and field is kept; numbers are written as htslib does ("9.50" as 9.5). rows: chrom, pos, ref, alt and those
    columns of every alternative allele, in the order of `read_variants`; a ValueError where they are of another file.
    """
    header = check_annotation(path, fields.values())
    rest = iter(rows)
    with replacing_path(out) as temporary, _opened(path) as source:
        import pysam

        # As lines: pysam's writer of records drops INFO/END beside alleles of bases, and adds it beside symbolic ones.
        zipped = out.suffix == ".gz"
        with pysam.BGZFile(str(temporary), "wb", None) if zipped else open(temporary, "wb") as target:
            target.write(str(header).encode())
            for number, record in enumerate(_records(path, source), start=1):
                alleles = _alleles(record)
                group = list(itertools.islice(rest, len(alleles)))
                places = [tuple(row[column] for column in ("chrom", "pos", "ref", "alt")) for row in group]
                if places != [(record.chrom, record.pos, (record.ref or "").upper(), alt) for alt in alleles]:
                    raise ValueError(f"{path}, record {number}, has changed since it was read; measure again")
                columns = str(record).rstrip("\n").split("\t")
                added = [f"{field.id}={text}" for name, field in fields.items() if (text := _info(group, name))]
                columns[7] = ";".join([*([] if columns[7] == "." else [columns[7]]), *added]) or "."
                target.write(("\t".join(columns) + "\n").encode())
        if next(rest, None) is not None:
            raise ValueError(f"{path} has changed since it was read: it has fewer records; measure again")
