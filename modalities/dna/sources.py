"""DNA sources: a spec string, parsed once, to files and a split.

"yeast-chr01"             chromosome I of baker's yeast, which ships with the package (the default)
"genomes"                 everything that `priorzoo fetch-data dna genomes` fetched into the data folder
"genomes:yeast,ustilago"  those of them
"PATH or GLOB"            .fa .fasta .fna .gb .gbk .gbff, also with .gz or .bgz; several with commas
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from modalities.dna.config import DEFAULT_SOURCE
from modalities.dna.formats import SUFFIXES, is_sequence_file
from zoo.errors import did_you_mean
from zoo.files import data_folder, matching_files, near_file

__all__ = ["DnaSource", "find_source"]

ASSETS = Path(__file__).parent / "assets"


@dataclass(frozen=True)
class DnaSource:
    """Files of one genome and how it is split; `find_source` makes one."""

    name: str  # in tables and files: "genomes", or "genome.fa split by genome.bed"
    files: tuple[Path, ...]
    bed: Path | None = None  # its split; None for whole contigs by rule
    subset: bool = False  # rows of `bed` for contigs of other files are ignored
    whole: bool = False  # all is held out, as from a model that was not trained on it


def find_source(spec: str = DEFAULT_SOURCE, split: str | os.PathLike[str] | None = None) -> DnaSource:
    """The source of a spec string, split by a BED file `split` if it is not None. ValueError for a malformed spec, or a file of
    another suffix; FileNotFoundError, which names the nearest file, or the command that fetches it."""
    if not isinstance(spec, str) or not spec.strip():
        raise ValueError(f"source must be a non-empty string such as {DEFAULT_SOURCE!r}, got {spec!r}")
    name, bed = (spec, None) if split is None else (f"{spec} split by {split}", Path(split))
    if spec == DEFAULT_SOURCE:
        return DnaSource(name, (ASSETS / "yeast_chr01.fa.gz",), bed or ASSETS / "yeast_chr01.bed")
    if spec == "genomes" or spec.startswith("genomes:"):
        return DnaSource(name, _fetched(spec), bed or data_folder() / "genomes" / "split.bed", subset=not bed)
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
    fetch = "to fetch them, `priorzoo fetch-data dna genomes`"
    if not there:
        raise FileNotFoundError(f"source {spec!r}: no *.fa in {folder}; {fetch}")
    names = [name.strip() for name in spec.partition(":")[2].split(",")] if ":" in spec else there
    for name in names:
        if name not in there:
            hint = f"{did_you_mean(name, there)}there are {', '.join(there)}; {fetch}"
            raise FileNotFoundError(f"source {spec!r}: no genome {name!r} in {folder}; {hint}")
    return tuple(folder / f"{name}.fa" for name in names)


def _find_files(spec: str, place: str) -> list[Path]:
    path = Path(place)
    if path.is_file():  # a name may have brackets in it
        return [_sequence_file(spec, path)]
    if any(mark in place for mark in "*?["):
        paths = matching_files(place)
        if not paths:
            raise FileNotFoundError(f"source {spec!r}: no file matches {place}")
        return [_sequence_file(spec, path) for path in paths]
    if path.is_dir():
        example = f"{place.rstrip('/')}/*.fa"
        raise FileNotFoundError(f"source {spec!r}: {place} is a folder; name its files, such as '{example}'")
    hint = near_file(place, is_sequence_file) or did_you_mean(place, [DEFAULT_SOURCE, "genomes"], cutoff=0.4)
    expected = f"expected a file, {DEFAULT_SOURCE}, genomes or genomes:NAME"
    raise FileNotFoundError(f"source {spec!r}: no file {place!r}; {hint}{expected}")


def _sequence_file(spec: str, path: Path) -> Path:
    if not is_sequence_file(path.name):
        raise ValueError(f"source {spec!r}: {path} is none of {', '.join(SUFFIXES)}, with or without .gz or .bgz")
    return path
