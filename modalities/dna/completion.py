"""What a model writes after held-out DNA, beside what stands there: base by base, by GC content, and by its k-mers."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import nn

from modalities.dna.bases import decode, encode
from modalities.dna.held_out import MAX_UNKNOWN, DnaSource, held_out, unknown_bases
from modalities.dna.likelihood import ENOUGH, window_of
from modalities.dna.settings import DnaEvaluator, DnaSettings
from modalities.dna.tokenizers import DnaTokenizer, load_tokenizer
from modalities.evaluation import Cell, CellValue, ModelResult, batches, standard_error
from modalities.text.generation import stream

WINDOW = 25  # bases of the sliding window that GC content is read in
FACTORS = (1, 4, 16)  # default prompts, in training lengths


def complete(model: nn.Module, prompts: np.ndarray, *, new_bases: int, temperature: float, seed: int) -> np.ndarray:
    """(B, new_bases) base codes after prompts (B, P), by the decoder's KV cache or by a baseline's own ``complete``.

    A prompt begins with BOS. Where it is no whole number of k-mers, its first bases are left out rather than its last.

    Raises:
        ValueError: for a model that has no way to write, such as a compressor.
    """
    _check_writes(model)
    if hasattr(model, "complete"):
        return model.complete(prompts, new_bases=new_bases, temperature=temperature, seed=seed)
    tokenizer = load_tokenizer(model.config.tokenizer)
    rows = [_read(tokenizer, prompt) for prompt in prompts]
    steps, bases = [], np.zeros(len(rows), np.int64)
    for tokens in stream(model, rows, max_new_tokens=new_bases, temperature=temperature, seed=seed):
        steps.append(tokens.cpu().numpy())
        bases += tokenizer.widths[steps[-1]]
        if bases.min() >= new_bases:
            break
    return np.stack([tokenizer.decode(ids)[:new_bases] for ids in np.stack(steps, axis=1)])


def _check_writes(model: nn.Module) -> None:
    if not (hasattr(model, "complete") or hasattr(model, "new_cache")):
        raise ValueError(f"{model.config.position} cannot continue a sequence; leave it out of what is completed")


def _read(tokenizer: DnaTokenizer, prompt: np.ndarray) -> np.ndarray:
    ids = tokenizer.encode(prompt[tokenizer.encode(prompt).left_over :]).ids
    return np.concatenate([[tokenizer.bos_id], ids])


class Continued(DnaEvaluator):
    """Evaluators of what a model writes: ``samples`` continuations (default 64) of ``new_bases`` held-out bases.

    The continuations do not overlap, hold no unknown base, and are equally many in every held-out contig that has room;
    fewer where the source holds out less. They are the same at every prompt length: a prompt is the bases before one,
    and prompts may overlap. Lengths are in tokens. Sampling depends on the settings, ``batch_tokens`` among them.
    """

    default_samples = 64

    @abstractmethod
    def prompt_lengths(self, model: nn.Module, settings: DnaSettings) -> tuple[int, ...]:
        """In tokens, ascending."""

    def temperature(self, settings: DnaSettings) -> float:
        return settings.temperature

    def identity(self, model: nn.Module, settings: DnaSettings) -> dict[str, Any]:
        temperature = self.temperature(settings)
        return {
            "held_out": held_out(settings.source).fingerprint,
            "tokenizer": load_tokenizer(model.config.tokenizer).fingerprint,
            "seed": settings.seed,
            "samples": settings.samples or self.default_samples,
            "longest": max(self.prompt_lengths(model, settings)),
            "new_bases": settings.new_bases,
            "temperature": temperature,
            "batch_tokens": settings.batch_tokens if temperature else None,
        }

    def cells(self, model: nn.Module, settings: DnaSettings) -> list[Cell]:
        _check_writes(model)  # before the models in front of it are measured
        lengths = {length: window_of(model, length) for length in self.prompt_lengths(model, settings)}
        longest, count = max(lengths.values()), settings.samples or self.default_samples
        places = _places(settings.source, longest, settings.new_bases, count, settings.seed)
        return [
            Cell(
                f"length={length}/prompts={part.start}-{part.stop}",
                cost=len(places[part]) * (bases + settings.new_bases),
                data={"length": length, "bases": bases, "first": part.start, "places": places[part]},
            )
            for length, bases in lengths.items()
            for part in batches(len(places), settings.batch_size(length + settings.new_bases))
        ]

    def measure(self, model: nn.Module, cell: Cell, settings: DnaSettings) -> CellValue:
        """The texts themselves: everything else is counted from them."""
        genome, places = held_out(settings.source).genome, cell.data["places"]
        prompts = np.stack([genome.codes(name, at - cell.data["bases"], at) for name, at in places])
        seed = np.random.SeedSequence([settings.seed, cell.data["length"], cell.data["first"]]).generate_state(1)[0]
        written = complete(
            model,
            prompts,
            new_bases=settings.new_bases,
            temperature=self.temperature(settings),
            seed=int(seed),
        )
        return {
            "length": cell.data["length"],
            "places": [f"{name}:{at + 1}-{at + settings.new_bases}" for name, at in places],
            "truth": [decode(genome.codes(name, at, at + settings.new_bases)) for name, at in places],
            "written": [decode(codes) for codes in written],
        }


class Completion(Continued):
    """Continuations beside the true ones: share of bases that agree, and GC content in a sliding window of 25 bases.

    ``chance`` is Σ pᵢ² over the truth's own bases: how often two draws from its composition agree. ``gc_r`` is Pearson's r
    between the GC trajectories of what is written and what is true, the mean over prompts; where one of them is constant
    r is not defined, and the prompt is counted as ``undefined`` instead. ``gc_error`` is their mean absolute difference.
    Prompts are 1, 4 and 16 times the training length, as far as held-out contigs have room, unless ``lengths`` says otherwise.
    """

    name = "completion"
    summary = "what is written after held-out DNA: agreement with the truth beside chance, and Pearson r of GC content"
    headline = ("accuracy", "chance", "gc_r", "gc_error", "undefined")
    exceptions = ("undefined",)

    def prompt_lengths(self, model: nn.Module, settings: DnaSettings) -> tuple[int, ...]:
        if settings.lengths:
            return settings.lengths
        lengths = [self.trained_at(model) * factor for factor in FACTORS]
        most = held_out(settings.source).reaching(ENOUGH) - settings.new_bases
        return tuple(length for length in lengths if window_of(model, length) <= most) or (lengths[0],)

    def points(self, model: nn.Module, settings: DnaSettings) -> tuple[int, ...]:
        return self.prompt_lengths(model, settings)

    def cells(self, model: nn.Module, settings: DnaSettings) -> list[Cell]:
        if settings.new_bases < 2 * WINDOW:
            raise ValueError(
                f"new_bases {settings.new_bases}: GC content in windows of {WINDOW} needs at least {2 * WINDOW} bases"
            )
        return super().cells(model, settings)

    def rows(self, cells: Mapping[str, CellValue]) -> list[dict[str, Any]]:
        rows = []
        for length in sorted({c["length"] for c in cells.values()}):
            truth, written = gathered([c for c in cells.values() if c["length"] == length])
            hits, r = (truth == written).mean(1), gc_correlation(truth, written)
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

    def draw(self, results: list[ModelResult], path: Path) -> None:
        from modalities.dna.plots import completion_figure, completion_text_figure

        completion_figure(results, path)
        completion_text_figure(results, path.with_name(f"{path.stem}_text.png"))

    def show(self, results: list[ModelResult], console: Any) -> None:
        from modalities.dna.terminal import show_completions

        show_completions(results, console)


class Spectrum(Continued):
    """Jensen-Shannon divergence, in bits, between the k-mers a model writes and the true ones, k = 1 to 6.

    The continuations fall into two halves A and B. ``divergence`` is the mean of D(written A, true B) and D(written B,
    true A), ``floor`` is D(true A, true B): for a model that writes like the genome both are the same number in
    expectation, so that what is above the floor (``excess``) is the model's. Sampled at temperature 1, after prompts of the
    training length, or of the shortest of ``lengths``.
    """

    name = "spectrum"
    summary = "Jensen-Shannon divergence (bits) of the k-mers that are written from the true ones, beside its floor"
    headline = ("divergence", "floor")
    axis = "k"
    orders: ClassVar[tuple[int, ...]] = (1, 2, 3, 4, 5, 6)

    def prompt_lengths(self, model: nn.Module, settings: DnaSettings) -> tuple[int, ...]:
        return (settings.lengths or (self.trained_at(model),))[:1]

    def temperature(self, settings: DnaSettings) -> float:
        return 1.0

    def points(self, model: nn.Module, settings: DnaSettings) -> tuple[int, ...]:
        return self.orders

    def cells(self, model: nn.Module, settings: DnaSettings) -> list[Cell]:
        if settings.new_bases < max(self.orders):
            raise ValueError(f"new_bases {settings.new_bases}: k-mers of {max(self.orders)} need at least as many")
        cells = super().cells(model, settings)
        if sum(len(cell.data["places"]) for cell in cells) < 2:
            raise ValueError("two halves need at least two continuations: raise samples, or hold out more")
        return cells

    def rows(self, cells: Mapping[str, CellValue]) -> list[dict[str, Any]]:
        truth, written = gathered(list(cells.values()))
        rows = []
        for k in self.orders:
            true, made = ([kmer_counts(codes[half::2], k) for half in (0, 1)] for codes in (truth, written))
            divergence = (jensen_shannon(made[0], true[1]) + jensen_shannon(made[1], true[0])) / 2
            floor = jensen_shannon(*true)
            row = {"k": k, "divergence": divergence, "floor": floor, "excess": divergence - floor}
            rows.append(row | {"prompts": len(truth)})
        return rows

    def draw(self, results: list[ModelResult], path: Path) -> None:
        from modalities.dna.plots import spectrum_figure

        spectrum_figure(results, path)


def gathered(cells: Sequence[CellValue]) -> tuple[np.ndarray, np.ndarray]:
    """True and written codes (N, new_bases) of cells."""
    truth, written = (
        np.stack([encode(text) for cell in cells for text in cell[name]]) for name in ("truth", "written")
    )
    return truth, written


def gc_trajectory(codes: np.ndarray, window: int = WINDOW) -> np.ndarray:
    """(N, T − window + 1): share of G and C in each window of (N, T) codes."""
    strong = ((codes == 1) | (codes == 2)).astype(np.float64)
    return np.lib.stride_tricks.sliding_window_view(strong, window, axis=1).mean(-1)


def gc_correlation(truth: np.ndarray, written: np.ndarray) -> np.ndarray:
    """(N,) Pearson's r between the GC trajectories of each row; NaN where one of them is constant."""
    pair = [gc_trajectory(codes) for codes in (truth, written)]
    constant = np.any([np.ptp(values, axis=1) < 0.5 / WINDOW for values in pair], axis=0)  # steps are 1 / WINDOW
    x, y = (values - values.mean(1, keepdims=True) for values in pair)
    scale = np.sqrt((x * x).sum(1) * (y * y).sum(1))
    return np.where(constant, np.nan, (x * y).sum(1) / np.where(constant, 1.0, scale))


def chance(truth: np.ndarray) -> np.ndarray:
    """(N,) Σ pᵢ² over the base composition of each row: the expected agreement of two draws from it."""
    shares = np.stack([(truth == base).mean(1) for base in range(4)])
    return (shares**2).sum(0)


def kmer_counts(codes: np.ndarray, k: int) -> np.ndarray:
    """(4^k,) how often each k-mer stands in rows (N, T) of known bases."""
    words = np.lib.stride_tricks.sliding_window_view(codes.astype(np.int64), k, axis=1)
    return np.bincount((words @ 4 ** np.arange(k)[::-1]).ravel(), minlength=4**k)


def jensen_shannon(a: np.ndarray, b: np.ndarray) -> float:
    """H((p + q) / 2) − (H(p) + H(q)) / 2 in bits, of two arrays of counts; from 0 (equal) to 1 (nothing in common)."""
    p, q = a / a.sum(), b / b.sum()
    return max(0.0, _entropy((p + q) / 2) - (_entropy(p) + _entropy(q)) / 2)


def _entropy(p: np.ndarray) -> float:
    p = p[p > 0]
    return float(-(p * np.log2(p)).sum())


@lru_cache(maxsize=8)
def _places(
    source: str | DnaSource | None, prompt: int, new: int, count: int, seed: int
) -> tuple[tuple[str, int], ...]:
    """(contig, first base of a continuation) with ``prompt`` bases of the same held-out region before it; in random order.

    Raises ValueError where there is none.
    """
    held = held_out(source)
    rng = np.random.default_rng([seed, prompt, new])
    found: dict[str, np.ndarray] = {}
    for name, regions in held.contigs.items():
        starts = np.concatenate([np.arange(r.start + prompt, r.stop - new + 1, new) for r in regions])
        unknown = held.genome[name].unknown
        good = unknown_bases(unknown, starts, new) == 0
        good &= unknown_bases(unknown, starts - prompt, prompt) <= MAX_UNKNOWN * prompt
        if good.any():
            found[name] = rng.permutation(starts[good])
    if not found:
        longest = max(r.stop - r.start for regions in held.contigs.values() for r in regions)
        raise ValueError(
            f"no held-out region of {held.name!r} has {prompt} known bases and {new} more to be written; the longest has "
            f"{longest}: choose shorter lengths, or a source that holds out more"
        )
    names = [list(found)[n] for n in rng.permutation(len(found))]
    rounds = max(map(len, found.values()))
    turns = [(name, int(found[name][n])) for n in range(rounds) for name in names if n < len(found[name])]
    return tuple(turns[n] for n in rng.permutation(min(count, len(turns))))  # halves must not differ in their contigs
