"""BED: rows of regions, 0-based and half-open, plain or gzipped; read line by line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from modalities.dna.genome import Genome
from zoo.files import near_file, opened

__all__ = ["BedRow", "bed_rows", "merged", "whole_contigs"]

_LONGEST_LINE = 1 << 20
_MOST_ROWS = 1 << 22


@dataclass(frozen=True)
class BedRow:
    """Bases [start, stop) of a contig; `more` is the fourth column, where there is one, `line` that of the file.

    strand: "-" where the sixth column says so: the row means the reverse complement; else "+".
    """

    contig: str
    start: int
    stop: int
    more: tuple[str, ...] = ()
    line: int = 0
    strand: str = "+"

    @property
    def name(self) -> str:
        """The fourth column, or CONTIG:FIRST-LAST, both from 1."""
        return self.more[0] if self.more and self.more[0] else f"{self.contig}:{self.start + 1}-{self.stop}"


def bed_rows(path: Path, genome: Genome, *, others: bool = False, columns: str = "contig, start, stop") -> list[BedRow]:
    """The rows of a BED file, in its order; comments (#), `track`, `browser` and blank lines are ignored.

    Columns are separated by tabs, where a line has them, so that names may have spaces, else by spaces. others: ignore rows of
    contigs that the genome does not have. columns: those that a row must have. FileNotFoundError for a missing file;
    ValueError with file, line and reason for malformed rows, a contig that the genome lacks, or no row at all.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no BED file {path}; {near_file(path)}".rstrip("; "))
    rows, number = [], 0
    with opened(path) as file:
        while line := file.readline(_LONGEST_LINE):
            number += 1
            try:
                row = _row(line, genome, others, columns, number)
            except ValueError as error:
                reason = "not plain text" if isinstance(error, UnicodeDecodeError) else error
                raise ValueError(f"{path}, line {number}: {reason}") from error
            if row is not None:
                rows.append(row)
            if len(rows) > _MOST_ROWS:
                raise ValueError(f"{path}, line {number}: more than {_MOST_ROWS:,} rows, the most that are read")
    if not rows:
        raise ValueError(f"{path}: no row for any of the {len(genome.contigs)} contigs")
    return rows


def _row(raw: bytes, genome: Genome, others: bool, columns: str, number: int) -> BedRow | None:
    if len(raw) == _LONGEST_LINE:
        raise ValueError(f"{_LONGEST_LINE:,} bytes or more; not BED")
    line = raw.decode("utf-8-sig").strip()
    words = [word.strip() for word in line.split("\t")] if "\t" in line else line.split()
    if not words or words[0].startswith("#") or words[0].split()[:1] in (["track"], ["browser"]):
        return None
    if others and words[0] not in genome:
        return None
    least = columns.count(",") + 1
    if len(words) < least:
        raise ValueError(f"{len(words)} columns, expected {least}: {columns}")
    name, *bounds = words[:3]
    contig = genome[name]
    if not all(bound.isascii() and bound.isdigit() and len(bound) <= 18 for bound in bounds):
        raise ValueError(f"start {bounds[0][:40]!r} and stop {bounds[1][:40]!r} must be whole numbers from 0")
    start, stop = map(int, bounds)
    if start >= stop:
        raise ValueError(f"start {start} is not below stop {stop}: the region is empty")
    if stop > contig.length:
        raise ValueError(f"stop {stop:,} is beyond the end of {name!r}, which has {contig.length:,} bases")
    return BedRow(name, start, stop, tuple(words[3:4]), number, "-" if words[5:6] == ["-"] else "+")


def whole_contigs(genome: Genome) -> list[BedRow]:
    """Every contig as a row of its name."""
    return [BedRow(contig.name, 0, contig.length, (contig.name,)) for contig in genome.contigs]


def merged(rows: Sequence[BedRow], genome: Genome) -> list[BedRow]:
    """Rows that share bases or touch joined into one, whatever their strands, in the order of the genome."""
    order = {contig.name: n for n, contig in enumerate(genome.contigs)}
    union: list[BedRow] = []
    for row in sorted(rows, key=lambda row: (order[row.contig], row.start)):
        if union and union[-1].contig == row.contig and row.start <= union[-1].stop:
            union[-1] = BedRow(row.contig, union[-1].start, max(union[-1].stop, row.stop))
        else:
            union.append(BedRow(row.contig, row.start, row.stop))
    return union
