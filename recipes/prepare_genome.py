"""Split a genome into contigs for training and held-out ones, and print the command that trains on it.

    priorzoo prepare-genome hg38.fa.gz --out data/human --primary --hold-out chr20,chr21

writes DIR/split.bed, whole contigs. FASTA and GenBank are read, compressed or not. Without --hold-out, contigs are held out in
an order fixed by their names, until they hold a twentieth of the known bases; a split of other regions is a BED file of your
own, as `data.split`.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

if __name__ == "__main__":  # import `recipes` from this checkout, and none of this folder's files as top-level modules
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import typer

from modalities.dna.genome import Genome, open_genome
from modalities.dna.sources import find_source
from modalities.dna.splits import Region, read_bed, split_contigs
from recipes.commands import call
from zoo.errors import did_you_mean
from zoo.files import write_text

RECIPE = "dna.human_125m"
# Unplaced, alternative and decoy sequences as UCSC, NCBI and Ensembl name them in human assemblies. NC_ are chromosomes, but
# NC_007605 is Epstein-Barr virus.
NOT_PRIMARY = re.compile(r"^(?!NC_).*_|^NC_007605|^(KI|GL)\d|^(chrUn|HLA|hs37d5)|random|alt|decoy|EBV", re.IGNORECASE)


def prepare_command(
    files: Annotated[list[str], typer.Argument(help="FASTA or GenBank files, also compressed; together one genome")],
    out: Annotated[Path, typer.Option(help="folder for split.bed")],
    hold_out: Annotated[str | None, typer.Option(help="contigs to hold out, with commas: chr20,chr21")] = None,
    primary: Annotated[bool, typer.Option("--primary", help="leave unplaced, alternative, decoy contigs out")] = False,
) -> None:
    genome, bed = open_genome(find_source(source := ",".join(files))), out / "split.bed"
    regions = _split(genome, hold_out, primary)
    if bed.exists() and read_bed(bed, genome) != regions:  # which models may have been trained with
        raise ValueError(f"{bed} holds another split: remove it, or name another --out")
    write_text(bed, "".join(f"{r.contig}\t{r.start}\t{r.stop}\t{r.split}\n" for r in regions))
    for split in ("train", "heldout"):
        sizes = [len(region) for region in regions if region.split == split]
        typer.echo(f"{split}: {len(sizes):,} regions, {sum(sizes):,} bases")
    report = f"; {genome.report}" if genome.report else ""
    typer.echo(f"{len(genome.contigs):,} contigs, {genome.known:,} known bases{report}")
    options = " ".join(f"--set {shlex.quote(setting)}" for setting in (f"data.source={source}", f"data.split={bed}"))
    typer.echo(f"train on it: priorzoo train {RECIPE} {options}")


def _split(genome: Genome, hold_out: str | None, primary: bool) -> tuple[Region, ...]:
    """Whole contigs: those named, or by rule."""
    contigs = [c for c in genome.contigs if not (primary and NOT_PRIMARY.search(c.name))]
    if not contigs:
        raise ValueError(f"--primary leaves none of {len(genome.contigs)} contigs, such as {genome.contigs[0].name!r}")
    if hold_out is None:
        return split_contigs(contigs)
    names = [contig.name for contig in contigs]
    wanted = {name.strip() for name in hold_out.split(",") if name.strip()}
    for name in sorted(wanted - set(names)):
        why = "--primary leaves it out" if name in genome else f"there are {len(names)}: {', '.join(names[:5])}, …"
        raise ValueError(f"--hold-out: no contig {name!r}; {did_you_mean(name, names)}{why}")
    if not 0 < len(wanted) < len(names):
        raise ValueError(f"--hold-out {hold_out!r} holds out {len(wanted)} of {len(names)} contigs")
    return tuple(Region(c.name, 0, c.length, "heldout" if c.name in wanted else "train") for c in contigs)


def main(argv: Sequence[str] | None = None, *, prog: str = "priorzoo prepare-genome") -> int:
    return call(prepare_command, argv, prog=prog)


if __name__ == "__main__":
    sys.exit(main())
