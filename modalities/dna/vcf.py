"""Variants from files: the fixed columns of VCF, or a table with a header. Plain or gzipped; read line by line.

A record with several alternative alleles becomes a `Variant` for each. Alleles that are not two sequences (symbolic alleles,
breakends, missing alleles) become a `Variant` with a reason, so that no record disappears.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from modalities.files import opened
from zoo.naming import did_you_mean

__all__ = ["Variant", "read_variants"]

COLUMNS = ("chrom", "pos", "ref", "alt")
_LONGEST_LINE = 1 << 26  # characters; genotypes of a million people are a few million
_LARGEST = 18  # digits of a position


@dataclass(frozen=True, slots=True)
class Variant:
    """One alternative allele. Positions count from 1, as in VCF; alleles are upper case; `line` is that of the file."""

    chrom: str
    pos: int
    id: str
    ref: str
    alt: str
    line: int
    reason: str = ""  # why it cannot be scored

    @property
    def kind(self) -> str:
        """snv, mnv (equal lengths above 1), insertion or deletion (by the lengths), or "" where it cannot be scored."""
        if self.reason:
            return ""
        if len(self.ref) == len(self.alt):
            return "snv" if len(self.ref) == 1 else "mnv"
        return "insertion" if len(self.alt) > len(self.ref) else "deletion"


def read_variants(path: str | Path) -> Iterator[Variant]:
    """Every alternative allele of a VCF (first line `##…` or `#CHROM`) or of a TSV or CSV with a header of chrom, pos, ref,
    alt and optionally id.

    Raises:
        FileNotFoundError: for a missing file.
        ValueError: with file, line and reason: no header, too few columns, a position that is not a number, a file that is
            truncated or not text.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"no file of variants {str(path)!r}; expected a VCF, or a table of {', '.join(COLUMNS)}"
        )
    try:
        with opened(Path(path)) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file:
            lines = _lines(file, path)
            first = next(lines, "")
            vcf = first.startswith(("##", "#CHROM"))
            yield from _vcf(lines, path) if vcf else _table(lines, first, path)
    except csv.Error as error:
        raise ValueError(f"{path}: not a table: {error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text: convert BCF with `bcftools view -Ov`") from error


def _lines(file: TextIO, path: str | Path) -> Iterator[str]:
    number = 0
    while line := file.readline(_LONGEST_LINE + 1):
        number += 1
        if len(line) > _LONGEST_LINE:
            raise ValueError(f"{path} line {number}: more than {_LONGEST_LINE:,} characters, the most of a line")
        yield line


def _vcf(lines: Iterator[str], path: str | Path) -> Iterator[Variant]:
    for number, line in enumerate(lines, start=2):
        if line.startswith("#") or not line.strip():
            continue
        columns = line.rstrip("\r\n").split("\t")
        if len(columns) < 5:
            raise ValueError(
                f"{path} line {number}: {len(columns)} tab-separated columns; expected CHROM, POS, ID, REF, ALT"
            )
        chrom, pos, name, ref, alts = columns[:5]
        yield from _alleles(chrom, pos, name, ref, alts, f"{path} line {number}", number)


def _table(lines: Iterator[str], header: str, path: str | Path) -> Iterator[Variant]:
    separator = "\t" if "\t" in header else ","
    names = [name.strip().lower().lstrip("#\ufeff") for name in header.split(separator)]
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
    for alt in alts.upper().split(","):
        yield Variant(
            sys.intern(chrom), int(pos), name, ref.upper(), alt, line, _unscorable(int(pos), ref.upper(), alt)
        )


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
    if not ref or set(ref + alt) - set("ACGT"):
        return f"alleles that are not all A, C, G, T: {ref or 'none'}, {alt}"
    return "ALT equal to REF" if ref == alt else ""
