"""DNA sources: a spec string, parsed once, to files and a split.

"yeast-chr01"             chromosome I of baker's yeast, which ships with the package (the default)
"genomes"                 everything that `recipes/fetch_data.py dna genomes` fetched into the data folder
"genomes:yeast,ustilago"  those of them
"PATH or GLOB"            .fa .fasta .fna .gb .gbk .gbff, also with .gz or .bgz; several with commas
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from modalities.dna.config import DEFAULT_SOURCE
from modalities.dna.formats import SUFFIXES, is_sequence_file
from modalities.files import data_folder, fetch_command, matching_files, near_file
from zoo.naming import did_you_mean

__all__ = ["DnaSource", "find_source"]

ASSETS = Path(__file__).parent / "assets"


@dataclass(frozen=True)
class DnaSource:
    """Files of one genome and how it is split; `find_source` makes one.

    Attributes:
        name: what tables and files call it: "genomes", or "genome.fa split by genome.bed".
        files: sequence files, in order.
        bed: its split; None for whole contigs by rule.
        subset: rows of `bed` for other contigs are ignored.
        complete: `bed` must have a row for every contig.
    """

    name: str
    files: tuple[Path, ...]
    bed: Path | None = None
    subset: bool = False
    complete: bool = False


def find_source(spec: str = DEFAULT_SOURCE, split: str | os.PathLike[str] | None = None) -> DnaSource:
    """The source of a spec string, split by a BED file `split` where one is given.

    Raises:
        ValueError: for a malformed spec, or a file of another suffix.
        FileNotFoundError: for missing files; it names the nearest, or the command that fetches them.
    """
    if not isinstance(spec, str) or not spec.strip():
        raise ValueError(f"source must be a non-empty string such as {DEFAULT_SOURCE!r}, got {spec!r}")
    name, bed = (spec, None) if split is None else (f"{spec} split by {split}", Path(split))
    if spec == DEFAULT_SOURCE:
        return DnaSource(name, (ASSETS / "yeast_chr01.fa.gz",), bed or ASSETS / "yeast_chr01.bed")
    if spec == "genomes" or spec.startswith("genomes:"):
        files = _fetched(spec)
        if bed is not None:
            return DnaSource(name, files, bed)
        return DnaSource(name, files, data_folder() / "genomes" / "split.bed", subset=":" in spec, complete=True)
    if Path(spec).is_file():  # a name may have a comma in it
        return DnaSource(name, (_sequence_file(spec, Path(spec)),), bed)
    parts = [part.strip() for part in spec.split(",")]
    if not all(parts):
        raise ValueError(f"source {spec!r}: no name before or after a comma")
    return DnaSource(name, tuple(path for part in parts for path in _find_files(spec, part)), bed)


def _fetched(spec: str) -> tuple[Path, ...]:
    """The files of "genomes" or "genomes:a,b"."""
    folder = data_folder() / "genomes"
    there = sorted(path.stem for path in folder.glob("*.fa"))
    fetch = f"to fetch them, {fetch_command('dna genomes')}"
    if not there:
        raise FileNotFoundError(f"source {spec!r}: no *.fa in {folder}; {fetch}")
    names = [name.strip() for name in spec.partition(":")[2].split(",")] if ":" in spec else there
    for name in names:
        if name not in there:
            hint = did_you_mean(name, there)
            raise FileNotFoundError(
                f"source {spec!r}: no genome {name!r} in {folder}; {hint}there are {', '.join(there)}; {fetch}"
            )
    return tuple(folder / f"{name}.fa" for name in names)


def _find_files(spec: str, place: str) -> list[Path]:
    path = Path(place)
    if path.is_file():  # a name may have brackets in it
        return [_sequence_file(spec, path)]
    if any(mark in place for mark in "*?["):
        found = matching_files(place)
        if not found:
            raise FileNotFoundError(f"source {spec!r}: no file matches {place}")
        return [_sequence_file(spec, path) for path in found]
    if path.is_dir():
        example = f"{place.rstrip('/')}/*.fa"
        raise FileNotFoundError(f"source {spec!r}: {place} is a folder; name its files, such as '{example}'")
    names = [DEFAULT_SOURCE, "genomes"]
    hint = near_file(place, is_sequence_file) or did_you_mean(place, names, cutoff=0.4)
    raise FileNotFoundError(
        f"source {spec!r}: no file {place!r}; {hint}expected a file, {', '.join(names)} or genomes:NAME"
    )


def _sequence_file(spec: str, path: Path) -> Path:
    if not is_sequence_file(path.name):
        raise ValueError(f"source {spec!r}: {path} is none of {', '.join(SUFFIXES)}, with or without .gz or .bgz")
    return path
