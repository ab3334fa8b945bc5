"""Measure how fast a genome is parsed and how fast its windows are read.

    python tools/bench_dna_data.py                                # the shipped chromosome, some seconds
    python tools/bench_dna_data.py --source human.fa --tokenizers bases,kmer:6 --workers 0,2

Parsing is into a new store in a temporary folder, whatever is cached: wall time, and what it adds to the process at its peak.
Reading is `build_loader`'s training split: bases of handed-out windows per second and process that reads, after one batch.
`--clock cpu` counts processor time instead of the wall clock, for a machine that is busy with other things: of this process,
or of the workers, with their start and what they read ahead.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a plain `python tools/…` finds the project

from modalities.cost import Meter
from modalities.dna.config import DnaDataConfig
from modalities.dna.data import build_loader
from modalities.dna.genome import open_genome
from modalities.dna.sources import find_source
from tools.bench_attention import write_record


@dataclass(frozen=True)
class Parsed:
    """One parse of a source. extra_mib: the process's peak above what it held before; None where it cannot be read."""

    file_mib: float
    bases: int
    seconds: float
    extra_mib: float | None


@dataclass(frozen=True)
class Reading:
    """Windows of one kind. bases_per_s is for one process; with workers the loader's whole rate is `workers` times it."""

    tokenizer: str
    context: int
    window: int
    workers: int
    soft_mask_weight: float
    batches: int
    bases_per_s: float


def parse(source: str, cache_dir: str, clock: Callable[[], float]) -> Parsed:
    """Parse a source into an empty cache folder. Errors: those of find_source and open_genome."""
    found = find_source(source)
    size = sum(path.stat().st_size for path in found.files)
    begun = clock()
    with Meter("cpu") as meter:
        genome = open_genome(found, cache_dir=cache_dir)
    seconds = clock() - begun
    extra = None if meter.peak_bytes is None else meter.peak_bytes / 2**20
    return Parsed(size / 2**20, genome.bases, seconds, extra)


def read(config: DnaDataConfig, micro_batch: int, seconds: float, clock: Callable[[], float]) -> Reading:
    """Read batches for at least so long, and at least one."""
    loader = build_loader(config, micro_batch=micro_batch)
    batches, count = iter(loader), 0
    in_workers = config.num_workers > 0 and clock is time.process_time
    watch = time.perf_counter if in_workers else clock
    next(batches)
    begun = watch()
    while not count or watch() - begun < seconds:
        next(batches)
        count += 1
    passed = watch() - begun
    if in_workers:
        before = processor_of_ended_children()
        batches.close()  # ends the workers, whose time is known from then on
        passed = processor_of_ended_children() - before
    rate = count * micro_batch * loader.source.rows.window / passed / max(1, config.num_workers)
    return Reading(
        config.tokenizer,
        config.context,
        loader.source.rows.window,
        config.num_workers,
        config.soft_mask_weight,
        count,
        rate,
    )


def processor_of_ended_children() -> float:
    times = os.times()
    return times.children_user + times.children_system


def show(source: str, parsed: Parsed, readings: list[Reading], console: Console) -> None:
    memory = "" if parsed.extra_mib is None else f", {parsed.extra_mib:.0f} MiB at the peak"
    console.print(
        f"{source}: {parsed.file_mib:.1f} MiB, {parsed.bases:,} bases, parsed in {parsed.seconds:.2f} s{memory}"
    )
    table = Table(box=SIMPLE_HEAD, padding=0)
    table.add_column("tokenizer", no_wrap=True)
    for column in ("context", "window", "workers", "soft-mask weight", "Mbases/s each"):
        table.add_column(column, justify="right")
    for r in readings:
        cells = (f"{r.context}", f"{r.window}", f"{r.workers}", f"{r.soft_mask_weight:g}", f"{r.bases_per_s / 1e6:.2f}")
        table.add_row(r.tokenizer, *cells)
    console.print(table)


def main(
    source: str = typer.Option("yeast-chr01", help="What to parse and read: a name, a path or a glob."),
    tokenizers: str = typer.Option("bases", help="Comma-separated: bases, kmer:K or FILE.json."),
    contexts: str = typer.Option("256,1024", help="Comma-separated: tokens a window."),
    workers: str = typer.Option("0", help="Comma-separated: worker processes; 0 reads in this one."),
    soft_mask_weights: str = typer.Option("1,0.1", help="Comma-separated; all but 1 read the soft mask, too."),
    micro_batch: int = typer.Option(32, help="Windows a batch."),
    seconds: float = typer.Option(2.0, help="Seconds of reading for each number."),
    clock: str = typer.Option("wall", help="wall, or cpu: processor time of what reads."),
    out: Path | None = typer.Option(None, help="Write the results as JSON here."),
) -> None:
    """Print both and, with --out, save them."""
    clocks = {"wall": time.perf_counter, "cpu": time.process_time}
    if clock not in clocks:
        raise typer.BadParameter(f"--clock must be one of {', '.join(clocks)}, got {clock!r}")
    console = Console()
    torch.set_num_threads(1)
    try:
        configs = [
            DnaDataConfig(
                source=source,
                tokenizer=tokenizer.strip(),
                context=int(context),
                num_workers=int(number),
                soft_mask_weight=float(weight),
            )
            for tokenizer in tokenizers.split(",")
            for context in contexts.split(",")
            for number in workers.split(",")
            for weight in soft_mask_weights.split(",")
        ]
        with tempfile.TemporaryDirectory() as folder:
            parsed = parse(source, folder, clocks[clock])
            readings = [
                read(config.with_options(cache_dir=folder), micro_batch, seconds, clocks[clock]) for config in configs
            ]
    except (ValueError, FileNotFoundError) as error:
        raise typer.BadParameter(str(error)) from None
    show(source, parsed, readings, console)
    if out is not None:
        record: dict[str, Any] = {
            "source": source, "clock": clock, "micro_batch": micro_batch, "parsed": asdict(parsed),
            "read": [asdict(reading) for reading in readings],
        }  # fmt: skip
        write_record(out, record, console)


if __name__ == "__main__":
    typer.run(main)
