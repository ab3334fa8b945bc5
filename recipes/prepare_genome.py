"""Make a genome ready to train on: index it, split it, count what it is made of, and print the command that trains on it.

    priorzoo prepare-genome hg38.fa.gz --out data/human --primary --hold-out chr20,chr21
    priorzoo prepare-genome genome.fa --out data/mine --fraction 0.1 --bpe 4096

writes DIR/split.bed (what trains and what is held out, whole contigs), DIR/statistics.json and, with --bpe, DIR/bpe.json.
FASTA and GenBank are read, compressed or not (modalities/dna/formats.py). Without --bed and --hold-out, contigs are held
out in an order fixed by their names, until they hold --fraction of the known bases.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

if __name__ == "__main__":  # import `recipes` from this checkout, and none of this folder's files as top-level modules
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import typer
from rich.progress import track

from modalities.dna.composition import contig_statistics, total
from modalities.dna.genome import Genome, open_genome
from modalities.dna.sources import find_source
from modalities.dna.splits import HELDOUT_FRACTION, Region, read_bed, select, split_contigs
from modalities.files import command_name
from recipes.commands import call
from recipes.console import Console
from zoo.files import write_json, write_text
from zoo.naming import did_you_mean

RECIPE = "dna.human_125m"
# Unplaced, alternative and decoy sequences as UCSC, NCBI and Ensembl name them in human assemblies. NC_ are chromosomes, but
# NC_007605 is Epstein-Barr virus.
NOT_PRIMARY = re.compile(r"^(?!NC_).*_|^NC_007605|^(KI|GL)\d|^(chrUn|HLA|hs37d5)|random|alt|decoy|EBV", re.IGNORECASE)

console = Console()


def prepare_command(
    files: Annotated[list[str], typer.Argument(help="FASTA or GenBank files, also compressed; together one genome")],
    out: Annotated[Path, typer.Option(help="folder for split.bed, statistics.json, bpe.json")],
    bed: Annotated[Path | None, typer.Option(help="take this split (contig, start, stop, train|heldout)")] = None,
    hold_out: Annotated[str | None, typer.Option(help="contigs to hold out, with commas: chr20,chr21")] = None,
    fraction: Annotated[float | None, typer.Option(help="share of known bases to hold out; default 0.05")] = None,
    primary: Annotated[bool, typer.Option("--primary", help="leave unplaced, alternative, decoy contigs out")] = False,
    bpe: Annotated[int | None, typer.Option(help="train a BPE tokenizer with this many ids")] = None,
    force: Annotated[bool, typer.Option("--force", help="replace a different split.bed")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="show what would be written; read and write nothing")
    ] = False,
) -> None:
    if sum(option is not None for option in (bed, hold_out, fraction)) > 1:
        raise typer.BadParameter("give one of --bed, --hold-out and --fraction")
    if bed is not None and primary:
        raise typer.BadParameter("--bed itself says which contigs are used; leave --primary out")
    data = find_source(source := ",".join(files))
    names = ["split.bed", "statistics.json", *(["bpe.json"] if bpe is not None else [])]
    if dry_run:
        size = sum(path.stat().st_size for path in data.files) / 1e6
        _say(f"would index {len(data.files)} file(s), {size:,.1f} MB: {', '.join(map(str, data.files))}")
        for name in names:
            _say(f"would write {out / name}" + " (replacing the one there)" * (out / name).exists())
        return
    genome = open_genome(data)
    regions = (
        read_bed(bed, genome)
        if bed
        else _split(genome, hold_out, HELDOUT_FRACTION if fraction is None else fraction, primary)
    )
    train = select(regions, "train")
    select(regions, "heldout")
    if not force and (out / "split.bed").exists():
        try:  # models may have been trained with the one that is there
            same, why = read_bed(out / "split.bed", genome) == regions, ""
        except ValueError as error:  # of another genome
            same, why = False, f" ({error})"
        if not same:
            problem = f"{out / 'split.bed'} holds another split{why}"
            raise ValueError(f"{problem}; --force replaces it, another --out keeps both")
    if bpe is not None:
        from modalities.dna.tokenizers import train_bpe

        train_bpe(genome, train, bpe, out / "bpe.json")
    write_bed(regions, out / "split.bed")
    parts = [contig_statistics(genome, contig) for contig in track(genome.contigs, "counting", transient=True)]
    whole, split = total(parts), describe(regions)
    facts = {"source": source, "fingerprint": genome.fingerprint, "converted": genome.report, "split": split}
    counts = {"total": whole.as_dict(), "contigs": [part.as_dict() for part in parts]}
    write_json(out / "statistics.json", facts | counts)
    gc = "–" if whole.gc is None else f"{whole.gc:.1%}"
    _say(
        f"{len(parts):,} contigs, {whole.length:,} bases, {whole.known / whole.length:.1%} known, "
        f"GC {gc}, masked {whole.soft_masked_share:.1%}"
    )
    _say("\n".join(filter(None, [genome.report, split])))
    _say(f"written: {', '.join(names)} in {out}")
    settings = [f"data.source={source}", f"data.split={out / 'split.bed'}"]
    settings += [f"data.tokenizer={out / 'bpe.json'}"] if bpe is not None else []
    options = " ".join(f"--set {shlex.quote(setting)}" for setting in settings)
    _say(f"train on it: {command_name('train')} {RECIPE} {options}")


def _say(text: str) -> None:
    console.print(text, soft_wrap=True)


def _split(genome: Genome, hold_out: str | None, fraction: float, primary: bool) -> tuple[Region, ...]:
    """Whole contigs: those named, or by rule.

    Raises:
        ValueError: for a name that is no contig in use, or where nothing would be left to train on.
    """
    contigs = [c for c in genome.contigs if not (primary and NOT_PRIMARY.search(c.name))]
    if not contigs:
        raise ValueError(f"--primary leaves none of {len(genome.contigs)} contigs, such as {genome.contigs[0].name!r}")
    if hold_out is None:
        return split_contigs(contigs, fraction)
    names = [contig.name for contig in contigs]
    wanted = {name.strip() for name in hold_out.split(",") if name.strip()}
    for name in sorted(wanted - set(names)):
        why = "--primary leaves it out" if name in genome else f"there are {len(names)}: {', '.join(names[:5])}, …"
        raise ValueError(f"--hold-out: no contig {name!r}; {did_you_mean(name, names)}{why}")
    if not 0 < len(wanted) < len(names):
        raise ValueError(f"--hold-out {hold_out!r} holds out {len(wanted)} of {len(names)} contigs")
    return tuple(Region(c.name, 0, c.length, "heldout" if c.name in wanted else "train") for c in contigs)


def describe(regions: Sequence[Region]) -> str:
    """Regions, contigs and bases of each split, in the order in which the splits appear."""
    bases, parts = sum(map(len, regions)), []
    for split in dict.fromkeys(region.split for region in regions):
        chosen = [region for region in regions if region.split == split]
        contigs, size = len({region.contig for region in chosen}), sum(map(len, chosen))
        parts.append(f"{split}: regions {len(chosen):,}, contigs {contigs:,}, bases {size:,} ({size / bases:.2%})")
    return "; ".join(parts)


def write_bed(regions: Iterable[Region], path: Path) -> None:
    """Four columns with tabs; the file is complete or absent."""
    write_text(path, "".join(f"{r.contig}\t{r.start}\t{r.stop}\t{r.split}\n" for r in regions))


def main(argv: Sequence[str] | None = None, *, prog: str = "recipes/prepare_genome.py") -> int:
    return call(prepare_command, argv, prog=prog)


if __name__ == "__main__":
    sys.exit(main())
