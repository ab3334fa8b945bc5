"""Continuations of held-out DNA compared with the true ones: agreement base by base, and GC content
along the way."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from modalities.decoder.generation import stream
from modalities.decoder.model import Decoder
from modalities.dna.evaluation import BASES_LENGTH, DnaEvaluator, DnaLengthSettings, whole_kmers
from modalities.dna.genome import RunCounter
from modalities.dna.splits import MAX_UNKNOWN, GenomeSplit
from modalities.dna.tokenizers import decode, encode, load_tokenizer
from modalities.evaluation import Cell
from modalities.results import CellValue, ModelResult, Row, Score
from modalities.settings import option
from modalities.statistics import standard_error
from zoo.model import ZooModel
from zoo.positions import slices

WINDOW = 25  # bases of the sliding window of GC content


@dataclass(frozen=True)
class CompletionSettings(DnaLengthSettings):
    """Lengths of prompts, and of what is written."""

    samples: int = option(64, "continuations")
    new_bases: int = option(200, "length of a continuation")

    factors: ClassVar[tuple[int, ...]] = (1, 4, 16)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.new_bases < 2 * WINDOW:
            raise ValueError(
                f"new_bases {self.new_bases}: windows of {WINDOW} need at least {2 * WINDOW} bases"
            )


class Completion(DnaEvaluator[CompletionSettings]):
    """Share of bases equal to the truth, and GC content in a sliding window of 25 bases.

    `chance` is Σ pᵢ² over the truth's composition: the expected agreement of two draws from it.
    `gc_r` is Pearson's r between the GC trajectories of written and true sequence, averaged over
    prompts; where one is constant r is not defined, and the prompt counts as `undefined`.
    `gc_error` is their mean absolute difference. Prompts are 1, 4 and 16 times the training length,
    as far as held-out contigs have room, unless `lengths` are given.

    `samples` continuations (default 64) of `new_bases` held-out bases do not overlap, have no
    unknown base, and are equally many in every held-out contig with room; fewer where the source
    holds out less. They are the same at every prompt length: a prompt is the bases before one, and
    prompts may overlap. Lengths are in bases, rounded down to whole k-mers. Bases are drawn from
    the model's distribution; the draws depend on the settings, `batch_tokens` among them.
    """

    name = "completion"
    version = 2  # 1 had other fields in its cells
    summary = "continuations of held-out DNA: agreement with the truth beside chance, and Pearson r of GC content"
    scores = (
        *map(Score, ("accuracy", "chance", "gc_r", "gc_error")),
        Score("undefined", exception=True),
    )
    axis = BASES_LENGTH

    def prompt_lengths(self, model: ZooModel) -> tuple[int, ...]:
        """In bases, ascending."""
        lengths = self.lengths_for(model)
        return (
            lengths if self.settings.lengths else self.with_room(lengths, self.settings.new_bases)
        )

    def identity(self, model: ZooModel) -> Row:
        return {
            "heldout": self.heldout.fingerprint,
            "tokenizer": load_tokenizer(model.config.tokenizer).fingerprint,
            "seed": self.settings.seed,
            "samples": self.settings.samples,
            "longest": max(self.prompt_lengths(model)),
            "new_bases": self.settings.new_bases,
            "batch_tokens": self.settings.batch_tokens,
        }

    def cells(self, model: ZooModel) -> list[Cell]:
        if not isinstance(model, Decoder):  # before other models are measured
            raise ValueError(f"{model.config.position} cannot continue a sequence; leave it out")
        new = self.settings.new_bases
        bases = load_tokenizer(model.config.tokenizer).bases_per_token
        lengths = {length: whole_kmers(model, length) for length in self.prompt_lengths(model)}
        places = _places(
            self.heldout.items,
            max(lengths.values()),
            new,
            self.settings.samples,
            self.settings.seed,
        )
        return [
            Cell(
                f"length={length}/prompts={part.start}-{part.stop}",
                cost=(window + new) * (part.stop - part.start),
                data={
                    "length": length,
                    "prompt": window,
                    "places": places[part],
                    "first": part.start,
                },
            )
            for length, window in lengths.items()
            for part in slices(
                len(places), self.settings.batch_size(math.ceil((length + new) / bases))
            )
        ]

    def measure(self, model: ZooModel, cell: Cell) -> CellValue:
        assert isinstance(model, Decoder)
        genome = self.heldout.items.genome
        window = cell.data["prompt"]
        places = cell.data["places"]
        new = self.settings.new_bases
        length = cell.data["length"]
        seed = np.random.SeedSequence(
            [self.settings.seed, length, cell.data["first"]]
        ).generate_state(1)[0]
        prompts = np.stack([genome.codes(name, at - window, at) for name, at in places])
        written = write_bases(model, prompts, new_bases=new, seed=int(seed))
        return {
            "length": length,
            "contigs": [name for name, _ in places],
            "truth": [decode(genome.codes(name, at, at + new)) for name, at in places],
            "written": [decode(codes) for codes in written],
        }

    def rows(self, cells: Mapping[str, CellValue]) -> list[Row]:
        rows = []
        for length in sorted({cell["length"] for cell in cells.values()}):
            here = [cell for cell in cells.values() if cell["length"] == length]
            truth, written = (
                np.stack([encode(t) for c in here for t in c[name]])
                for name in ("truth", "written")
            )
            hits = (truth == written).mean(1)
            r = gc_correlation(truth, written)
            defined = r[np.isfinite(r)]
            rows.append(
                {
                    "length": length,
                    "accuracy": float(hits.mean()),
                    "accuracy_standard_error": standard_error(hits),
                    "chance": float(chance(truth).mean()),
                    "gc_r": float(defined.mean()) if len(defined) else math.nan,
                    "gc_r_standard_error": standard_error(defined),
                    "gc_error": float(np.abs(gc_trajectory(truth) - gc_trajectory(written)).mean()),
                    "undefined": len(r) - len(defined),
                    "prompts": len(r),
                }
            )
        return rows

    def measured(self, results: list[ModelResult]) -> str:
        contigs = {name for cell in results[0].cells.values() for name in cell["contigs"]}
        count = results[0].rows[-1]["prompts"]
        new = self.settings.new_bases
        fewer = (
            f" (of {self.settings.samples} asked for: no more room)"
            if count < self.settings.samples
            else ""
        )
        without = len(self.heldout.items.contigs) - len(contigs)
        left_out = f"; {without} contigs have no room or no turn" if without else ""
        return f"completion: {count} continuations of {new} bases{fewer} in {self.contents()}{left_out}"

    def draw(self, results: list[ModelResult], path: Path) -> None:
        """No figure: the table says it."""


def gc_trajectory(codes: np.ndarray, window: int = WINDOW) -> np.ndarray:
    """(N, T − window + 1): share of G and C in each window of (N, T) codes."""
    strong = ((codes == 1) | (codes == 2)).astype(np.float64)
    return np.lib.stride_tricks.sliding_window_view(strong, window, axis=1).mean(-1)


def gc_correlation(truth: np.ndarray, written: np.ndarray) -> np.ndarray:
    """(N,) Pearson's r between the GC trajectories of each row; NaN where one of them is
    constant."""
    pair = [gc_trajectory(codes) for codes in (truth, written)]
    constant = np.any(
        [np.ptp(values, axis=1) < 0.5 / WINDOW for values in pair], axis=0
    )  # steps are 1 / WINDOW
    x, y = (values - values.mean(1, keepdims=True) for values in pair)
    scale = np.sqrt((x * x).sum(1) * (y * y).sum(1))
    return np.where(constant, np.nan, (x * y).sum(1) / np.where(constant, 1.0, scale))


def chance(truth: np.ndarray) -> np.ndarray:
    """(N,) Σ pᵢ² over the base composition of each row."""
    return np.square([(truth == base).mean(1) for base in range(4)]).sum(0)


def write_bases(
    model: Decoder, prompts: np.ndarray, *, new_bases: int, seed: int, temperature: float = 1.0
) -> np.ndarray:
    """(B, new_bases) base codes drawn after prompts (B, P), which begin with BOS. Where a prompt is
    not a whole number of k-mers, its first bases are left out."""
    tokenizer = load_tokenizer(model.config.tokenizer)
    rows: list[np.ndarray] = []
    for prompt in prompts:
        ids = tokenizer.encode(prompt[tokenizer.encode(prompt).left_over :]).ids
        rows.append(np.concatenate([[tokenizer.bos_id], ids]))
    steps = []
    bases = np.zeros(len(rows), np.int64)
    for tokens in stream(model, rows, max_new_tokens=new_bases, temperature=temperature, seed=seed):
        steps.append(tokens.cpu().numpy())
        bases += tokenizer.widths[steps[-1]]
        if bases.min() >= new_bases:
            break
    return np.stack([tokenizer.decode(ids)[:new_bases] for ids in np.stack(steps, axis=1)])


def _places(
    data: GenomeSplit, prompt: int, new: int, count: int, seed: int
) -> tuple[tuple[str, int], ...]:
    """(contig, first base of a continuation) with `prompt` bases of the same held-out region before
    it; in random order."""
    rng = np.random.default_rng([seed, prompt, new])
    by_contig: dict[str, np.ndarray] = {}
    for name, regions in data.contigs.items():
        starts = np.concatenate(
            [np.arange(r.start + prompt, r.stop - new + 1, new) for r in regions]
        )
        unknown = RunCounter(data.genome[name].unknown)
        good = unknown.count(starts, starts + new) == 0
        good &= unknown.count(starts - prompt, starts) <= MAX_UNKNOWN * prompt
        if good.any():
            by_contig[name] = rng.permutation(starts[good])
    if not by_contig:
        room = f"{prompt} known bases and {new} more to be written; the longest has {data.longest}"
        raise ValueError(f"no held-out region of {data.name!r} has {room}: choose shorter lengths")
    names = [list(by_contig)[n] for n in rng.permutation(len(by_contig))]
    rounds = max(map(len, by_contig.values()))
    turns = [
        (name, int(by_contig[name][n]))
        for n in range(rounds)
        for name in names
        if n < len(by_contig[name])
    ]
    return tuple(turns[n] for n in rng.permutation(min(count, len(turns))))
