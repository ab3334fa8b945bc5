"""Continuations of held-out DNA, compared with the true ones.

Two comparisons: agreement base by base, and GC content in a sliding window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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

# Bases of the sliding window of GC content.
WINDOW = 25


@dataclass(frozen=True)
class CompletionSettings(DnaLengthSettings):
    """Lengths of prompts and of continuations."""

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

    There are `samples` continuations (default 64) of `new_bases` held-out bases, or fewer where the
    source holds out less. They do not overlap, have no unknown base, and are spread evenly over the
    held-out contigs with room. They are the same at every prompt length: a prompt is the bases
    before a continuation, and prompts may overlap. Lengths are in bases, rounded down to whole
    k-mers. Bases are drawn from the model's distribution; the draws depend on the settings,
    `batch_tokens` among them.
    """

    name = "completion"
    version = 2
    summary = (
        "continuations of held-out DNA: agreement with the truth beside chance, "
        "and Pearson r of GC content"
    )
    scores = (
        Score("accuracy"),
        Score("chance"),
        Score("gc_r"),
        Score("gc_error"),
        Score("undefined", exception=True),
    )
    axis = BASES_LENGTH

    def prompt_lengths(self, model: ZooModel) -> tuple[int, ...]:
        """Lengths of prompts in bases, ascending."""
        lengths = self.lengths_for(model)
        if self.settings.lengths:
            return lengths
        return self.with_room(lengths, self.settings.new_bases)

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
        # Raised here, before other models are measured.
        if not isinstance(model, Decoder):
            raise ValueError(f"{model.config.position} cannot continue a sequence; leave it out")
        new_bases = self.settings.new_bases
        bases_per_token = load_tokenizer(model.config.tokenizer).bases_per_token
        lengths = self.prompt_lengths(model)
        places = _places(
            self.heldout.items,
            whole_kmers(model, lengths[-1]),
            new_bases,
            self.settings.samples,
            self.settings.seed,
        )
        cells = []
        for length in lengths:
            prompt = whole_kmers(model, length)
            tokens = math.ceil((length + new_bases) / bases_per_token)
            for part in slices(len(places), self.settings.batch_size(tokens)):
                name = f"length={length}/prompts={part.start}-{part.stop}"
                cost = (prompt + new_bases) * (part.stop - part.start)
                data = {
                    "length": length,
                    "prompt": prompt,
                    "places": places[part],
                    "first": part.start,
                }
                cells.append(Cell(name, cost, data))
        return cells

    def measure(self, model: ZooModel, cell: Cell) -> CellValue:
        assert isinstance(model, Decoder)
        genome = self.heldout.items.genome
        length = cell.data["length"]
        new_bases = self.settings.new_bases
        prompts = []
        truth = []
        for contig, start in cell.data["places"]:
            prompts.append(genome.codes(contig, start - cell.data["prompt"], start))
            truth.append(decode(genome.codes(contig, start, start + new_bases)))
        sequence = np.random.SeedSequence([self.settings.seed, length, cell.data["first"]])
        seed = int(sequence.generate_state(1)[0])
        written = write_bases(model, np.stack(prompts), new_bases=new_bases, seed=seed)
        return {
            "length": length,
            "contigs": [contig for contig, _ in cell.data["places"]],
            "truth": truth,
            "written": [decode(codes) for codes in written],
        }

    def rows(self, cells: Mapping[str, CellValue]) -> list[Row]:
        rows = []
        for length in sorted({cell["length"] for cell in cells.values()}):
            cells_of_length = [cell for cell in cells.values() if cell["length"] == length]
            truth = _codes(cells_of_length, "truth")
            written = _codes(cells_of_length, "written")
            accuracies = (truth == written).mean(1)
            r = gc_correlation(truth, written)
            defined = r[np.isfinite(r)]
            gc_errors = np.abs(gc_trajectory(truth) - gc_trajectory(written))
            rows.append(
                {
                    "length": length,
                    "accuracy": float(accuracies.mean()),
                    "accuracy_standard_error": standard_error(accuracies),
                    "chance": float(chance(truth).mean()),
                    "gc_r": float(defined.mean()) if len(defined) else math.nan,
                    "gc_r_standard_error": standard_error(defined),
                    "gc_error": float(gc_errors.mean()),
                    "undefined": len(r) - len(defined),
                    "prompts": len(r),
                }
            )
        return rows

    def measured(self, results: list[ModelResult]) -> str:
        contigs = {name for cell in results[0].cells.values() for name in cell["contigs"]}
        count = results[0].rows[-1]["prompts"]
        text = f"completion: {count} continuations of {self.settings.new_bases} bases"
        if count < self.settings.samples:
            text += f" (of {self.settings.samples} asked for: no more room)"
        text += f" in {self.contents()}"
        unused = len(self.heldout.items.contigs) - len(contigs)
        if unused:
            text += f"; {unused} contigs have no room or were not drawn"
        return text

    def draw(self, results: list[ModelResult], path: Path) -> None:
        """Draw nothing: the table says it."""


def _codes(cells: Sequence[CellValue], name: str) -> np.ndarray:
    """(N, T) base codes of the sequences that cells have under `name`."""
    codes = []
    for cell in cells:
        codes += [encode(text) for text in cell[name]]
    return np.stack(codes)


def gc_trajectory(codes: np.ndarray, window: int = WINDOW) -> np.ndarray:
    """(N, T − window + 1): share of G and C in each window of (N, T) codes."""
    # The codes of A, C, G, T are 0, 1, 2, 3.
    strong = ((codes == 1) | (codes == 2)).astype(np.float64)
    return np.lib.stride_tricks.sliding_window_view(strong, window, axis=1).mean(-1)


def gc_correlation(truth: np.ndarray, written: np.ndarray) -> np.ndarray:
    """(N,) Pearson's r between the GC trajectories of each row; NaN where one is constant."""
    x = gc_trajectory(truth)
    y = gc_trajectory(written)
    # Steps of a trajectory are 1 / WINDOW; a range below half a step is rounding.
    constant = np.minimum(np.ptp(x, axis=1), np.ptp(y, axis=1)) < 0.5 / WINDOW
    x = x - x.mean(1, keepdims=True)
    y = y - y.mean(1, keepdims=True)
    scale = np.sqrt((x * x).sum(1) * (y * y).sum(1))
    return np.where(constant, np.nan, (x * y).sum(1) / np.where(constant, 1.0, scale))


def chance(truth: np.ndarray) -> np.ndarray:
    """(N,) Σ pᵢ² over the base composition of each row."""
    shares = np.array([(truth == base).mean(1) for base in range(4)])
    return np.square(shares).sum(0)


def write_bases(
    model: Decoder, prompts: np.ndarray, *, new_bases: int, seed: int, temperature: float = 1.0
) -> np.ndarray:
    """(B, new_bases) base codes that the model draws after BOS and the base codes `prompts` (B, P).

    Where a prompt is not a whole number of k-mers, its first bases are left out.
    """
    tokenizer = load_tokenizer(model.config.tokenizer)
    prompt_ids: list[np.ndarray] = []
    for prompt in prompts:
        left_over = tokenizer.encode(prompt).left_over
        ids = tokenizer.encode(prompt[left_over:]).ids
        prompt_ids.append(np.concatenate([[tokenizer.bos_id], ids]))
    steps = []
    # Bases of each row so far: a token has one to k of them.
    bases = np.zeros(len(prompts), np.int64)
    tokens_by_step = stream(
        model,
        prompt_ids,
        max_new_tokens=new_bases,
        temperature=temperature,
        seed=seed,
    )
    for tokens in tokens_by_step:
        ids = tokens.cpu().numpy()
        steps.append(ids)
        bases += tokenizer.widths[ids]
        if bases.min() >= new_bases:
            break
    written = np.stack(steps, axis=1)
    return np.stack([tokenizer.decode(ids)[:new_bases] for ids in written])


def _places(
    data: GenomeSplit, prompt: int, new_bases: int, count: int, seed: int
) -> tuple[tuple[str, int], ...]:
    """(contig, first base) of up to `count` continuations, in random order.

    Each has `prompt` bases of its held-out region before it.
    """
    rng = np.random.default_rng([seed, prompt, new_bases])
    by_contig: dict[str, np.ndarray] = {}
    for name, regions in data.contigs.items():
        # Steps of a continuation's length, so that none overlaps another.
        grids = []
        for region in regions:
            last = region.stop - new_bases
            grids.append(np.arange(region.start + prompt, last + 1, new_bases))
        starts = np.concatenate(grids)
        unknown = RunCounter(data.genome[name].unknown)
        usable = unknown.count(starts, starts + new_bases) == 0
        usable &= unknown.count(starts - prompt, starts) <= MAX_UNKNOWN * prompt
        if usable.any():
            by_contig[name] = rng.permutation(starts[usable])
    if not by_contig:
        raise ValueError(
            f"no held-out region of {data.name!r} has {prompt} known bases and {new_bases} more to "
            f"be written; the longest has {data.longest}: choose shorter lengths"
        )
    contigs = list(by_contig)
    names = [contigs[n] for n in rng.permutation(len(contigs))]
    # Contigs take turns while they have places.
    places = []
    for turn in range(max(map(len, by_contig.values()))):
        for name in names:
            if turn < len(by_contig[name]):
                places.append((name, int(by_contig[name][turn])))
    return tuple(places[n] for n in rng.permutation(min(count, len(places))))
