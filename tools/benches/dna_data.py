"""How fast a genome is parsed and how fast its windows are read."""

from __future__ import annotations

import itertools
import os
import tempfile
from dataclasses import dataclass
from typing import Annotated

import torch
import typer

from modalities.cost import Meter
from modalities.dna.config import DnaDataConfig
from modalities.dna.data import build_loader
from modalities.dna.genome import open_genome
from modalities.dna.sources import find_source
from tools.benches import harness
from tools.benches.harness import Cell, Column, Row, Settings, option

SECONDS = 2.0


@dataclass(frozen=True)
class DnaDataSettings(Settings):
    source: Annotated[str, option("what is parsed and read: a name, a path or a glob")] = "yeast-chr01"
    tokenizers: Annotated[str, option("comma-separated: bases, kmer:K or FILE.json")] = "bases"
    lengths: Annotated[str, typer.Option("--lengths", "--contexts", help="comma-separated: tokens a window")] = (
        "256,1024"
    )
    workers: Annotated[str, option("comma-separated: worker processes; 0 reads in this one")] = "0"
    soft_mask_weights: Annotated[str, option("comma-separated; all but 1 read the soft mask too")] = "1,0.1"
    micro_batch: Annotated[int, option("windows a batch")] = 32
    clock: Annotated[str, option("wall, or cpu: processor time of the process that reads")] = "wall"


def parse(source: str, cache_dir: str, clock: str) -> Row:
    """Parse a source into an empty cache folder. Errors: those of open_genome."""
    found, begun = find_source(source), harness.CLOCKS[clock]()
    size = sum(path.stat().st_size for path in found.files)
    with Meter("cpu") as meter:
        genome = open_genome(found, cache_dir=cache_dir)
    extra = None if meter.peak_bytes is None else meter.peak_bytes / 2**20
    return {
        "file_mib": size / 2**20,
        "bases": genome.bases,
        "seconds": harness.CLOCKS[clock]() - begun,
        "extra_mib": extra,
    }


def read(config: DnaDataConfig, micro_batch: int, seconds: float, clock: str) -> Row:
    """Read batches for at least so long, and at least one. bases_per_s is of one process: with workers, of each."""
    loader = build_loader(config, micro_batch=micro_batch)
    batches, count = iter(loader), 0
    in_workers = config.num_workers > 0 and clock == "cpu"
    watch = harness.CLOCKS["wall" if in_workers else clock]
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
    window = loader.source.rows.window
    return {
        "tokenizer": config.tokenizer, "context": config.context, "window": window, "workers": config.num_workers,
        "soft_mask_weight": config.soft_mask_weight, "batches": count,
        "bases_per_s": count * micro_batch * window / passed / max(1, config.num_workers),
    }  # fmt: skip


def processor_of_ended_children() -> float:
    times = os.times()
    return times.children_user + times.children_system


class DnaData(harness.Benchmark):
    """How fast a genome is parsed and its windows are read.

    Parsing is into a new store in a temporary folder, whatever is cached: time, and what it adds to the process at its peak.
    Reading is `build_loader`'s training split: bases of windows per second and process that reads, after one batch. --clock
    cpu counts processor time: of this process, or of the workers, with their start and what they read ahead.
    """

    Settings = DnaDataSettings
    chooses = ("tokenizers", "lengths", "workers", "soft_mask_weights")

    def __init__(self, settings: DnaDataSettings) -> None:
        super().__init__(settings)
        harness.one_of("clock", settings.clock, harness.CLOCKS)
        kinds = (settings.tokenizers, settings.lengths, settings.workers, settings.soft_mask_weights)
        try:
            self.configs = [
                DnaDataConfig(
                    source=settings.source, tokenizer=tokenizer, context=int(context), num_workers=int(number),
                    soft_mask_weight=float(weight),
                )
                for tokenizer, context, number, weight in itertools.product(*map(harness.words, kinds))
            ]  # fmt: skip
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    def about(self) -> Row:
        if not self.settings.threads:
            torch.set_num_threads(1)
        self.folder = tempfile.TemporaryDirectory()
        try:
            self.parsed = parse(self.settings.source, self.folder.name, self.settings.clock)
        except (ValueError, FileNotFoundError) as error:
            raise typer.BadParameter(str(error)) from None
        s = self.settings
        return {
            "source": s.source, "clock": s.clock, "micro_batch": s.micro_batch, "parsed": self.parsed,
            "threads": torch.get_num_threads(),
        }  # fmt: skip

    def cells(self) -> list[Cell]:
        return [
            Cell(f"{c.tokenizer} {c.context} {c.num_workers} workers, soft mask {c.soft_mask_weight:g}", "reads", c)
            for c in self.configs
        ]

    def measure(self, cell: Cell) -> list[Row]:
        s, config = self.settings, cell.value.with_options(cache_dir=self.folder.name)
        try:
            return [read(config, s.micro_batch, s.seconds or SECONDS, s.clock)]
        except (ValueError, FileNotFoundError) as error:
            raise typer.BadParameter(str(error)) from None

    def finish(self) -> None:
        self.folder.cleanup()

    def title(self, record: Row) -> str:
        parsed = record["parsed"]
        memory = "" if parsed["extra_mib"] is None else f", {parsed['extra_mib']:.0f} MiB at the peak"
        return (
            f"{record['source']}: {parsed['file_mib']:.1f} MiB, {parsed['bases']:,} bases, "
            f"parsed in {parsed['seconds']:.2f} s{memory}"
        )

    def columns(self) -> list[Column]:
        return [
            Column("tokenizer", lambda row: row["tokenizer"]),
            Column("context", harness.text_of("context", ",.0f")),
            Column("window", harness.text_of("window", ",.0f")),
            Column("workers", harness.text_of("workers", ",.0f")),
            Column("soft-mask weight", harness.text_of("soft_mask_weight", "g")),
            Column("Mbases/s each", harness.text_of("bases_per_s", ".2f", 1e6)),
        ]
