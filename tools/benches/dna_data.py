"""How fast a genome is indexed and how fast its windows are read."""

from __future__ import annotations

import itertools
import tempfile
import time
from typing import Annotated

import torch

from modalities.cost import Meter
from modalities.dna.config import DnaDataConfig
from modalities.dna.data import build_loader
from modalities.dna.genome import open_genome
from modalities.dna.sources import find_source
from tools.benches.harness import Commit, Out, Record, Row, Seconds, text_of, words
from tools.benches.screen import BadParameter, Option

MICRO_BATCH = 32  # windows


def main(
    source: Annotated[str, Option(help="what is indexed and read: a name, a path or a glob")] = "yeast-chr01",
    tokenizers: Annotated[str, Option(help="comma-separated: bases, kmer:K or FILE.json")] = "bases",
    lengths: Annotated[str, Option("--lengths", "--contexts", help="tokens a window")] = "256,1024",
    seconds: Seconds = 2.0,
    out: Out = None,
    commit: Commit = "",
) -> None:
    """Index a genome into a temporary folder, whatever is cached, and read its training windows in this process.

    Memory is what indexing adds to the process at its peak; bases per second are of windows, after one batch.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as cache:
        try:
            configs = [
                DnaDataConfig(source=source, tokenizer=name, context=int(context), num_workers=0, cache_dir=cache)
                for name, context in itertools.product(words(tokenizers), words(lengths))
            ]
            found = find_source(source)
            with Meter("cpu") as meter:
                bases = open_genome(found, cache_dir=cache).bases
            mib = None if meter.peak_bytes is None else meter.peak_bytes / 2**20
            parsed = {"bases": bases, "seconds": meter.seconds, "extra_mib": mib}
            record = Record({"source": source, "parsed": parsed}, out=out, commit=commit)
            record.measure([(f"{c.tokenizer} {c.context}", "reads", lambda c=c: read(c, seconds)) for c in configs])
        except (ValueError, FileNotFoundError) as error:
            raise BadParameter(str(error)) from None
    columns = {name: text_of(name) for name in ("tokenizer", "context", "window")}
    columns["Mbases/s"] = text_of("bases_per_s", ".2f", 1e6)
    title = f"{source}: {bases:,} bases indexed in {meter.seconds:.2f} s, {mib or 0:.0f} MiB at the peak"
    record.show(title, columns, section=lambda row: "windows")


def read(config: DnaDataConfig, seconds: float) -> list[Row]:
    """Read batches for at least so many seconds, and at least one."""
    loader = build_loader(config, micro_batch=MICRO_BATCH)
    batches, window, count = iter(loader), loader.source.rows.window, 0
    next(batches)
    begun = time.perf_counter()
    while not count or time.perf_counter() - begun < seconds:
        next(batches)
        count += 1
    rate = count * MICRO_BATCH * window / (time.perf_counter() - begun)
    return [{"tokenizer": config.tokenizer, "context": config.context, "window": window, "bases_per_s": rate}]
