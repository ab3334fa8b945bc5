"""Continuations of held-out DNA, by a decoder's KV cache or by a baseline of its own means; what their evaluators share."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from modalities.decoder.generation import stream
from modalities.decoder.model import Decoder
from modalities.dna.baselines.base import SequenceWriter
from modalities.dna.bases import decode, encode
from modalities.dna.data import open_heldout
from modalities.dna.evaluation import BASES_LENGTH, DnaEvaluator, DnaLengthSettings, whole_kmers
from modalities.dna.genome import RunCounter
from modalities.dna.sources import DnaSource
from modalities.dna.splits import MAX_UNKNOWN
from modalities.dna.tokenizers import load_tokenizer
from modalities.evaluation import Cell, CellValue, option
from zoo.model import ZooModel
from zoo.slices import slices

__all__ = ["Continuation", "ContinuationSettings", "texts_of", "write_bases"]


@dataclass(frozen=True)
class ContinuationSettings(DnaLengthSettings):
    """Lengths of prompts, and of what is written."""

    new_bases: int = option(200, "length of a continuation")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.new_bases < 1:
            raise ValueError(f"new_bases must be at least 1, got {self.new_bases}")


class Continuation(DnaEvaluator):
    """Evaluators of `samples` continuations (default 64) of `new_bases` held-out bases.

    Continuations do not overlap, have no unknown base, and are equally many in every held-out contig with room; fewer where
    the source holds out less. They are the same at every prompt length: a prompt is the bases before one, and prompts may
    overlap. Lengths are in bases, rounded down to whole k-mers. Sampling depends on the settings, `batch_tokens` among them.
    """

    settings_class = ContinuationSettings
    axis = BASES_LENGTH
    default_samples = 64

    @abstractmethod
    def prompt_lengths(self, model: ZooModel) -> tuple[int, ...]:
        """In bases, ascending."""

    @property
    @abstractmethod
    def temperature(self) -> float:
        """Of sampling; 0 takes the likeliest base."""

    def identity(self, model: ZooModel) -> dict[str, Any]:
        return {
            "heldout": self.heldout.fingerprint,
            "tokenizer": load_tokenizer(model.config.tokenizer).fingerprint,
            "seed": self.settings.seed,
            "samples": self.settings.samples or self.default_samples,
            "longest": max(self.prompt_lengths(model)),
            "new_bases": self.settings.new_bases,
            "temperature": self.temperature,
            "batch_tokens": self.settings.batch_tokens if self.temperature else None,
            **self.length_unit(model),
        }

    def cells(self, model: ZooModel) -> list[Cell]:
        check_writer(model)  # before other models are measured
        new, bases = self.settings.new_bases, load_tokenizer(model.config.tokenizer).bases_per_token
        lengths = {length: whole_kmers(model, length) for length in self.prompt_lengths(model)}
        longest, count = max(lengths.values()), self.settings.samples or self.default_samples
        places = _places(self.source, longest, new, count, self.settings.seed)
        return [
            Cell(
                f"length={length}/prompts={part.start}-{part.stop}",
                cost=(window + new) * (part.stop - part.start),
                data={"length": length, "prompt": window, "places": places[part], "first": part.start},
            )
            for length, window in lengths.items()
            for part in slices(len(places), self.settings.batch_size(math.ceil((length + new) / bases)))
        ]

    def measure(self, model: ZooModel, cell: Cell) -> CellValue:
        genome, window, places = self.heldout.items.genome, cell.data["prompt"], cell.data["places"]
        new = self.settings.new_bases
        seed = np.random.SeedSequence([self.settings.seed, cell.data["length"], cell.data["first"]]).generate_state(1)[
            0
        ]
        written = write_bases(
            model,
            np.stack([genome.codes(name, at - window, at) for name, at in places]),
            new_bases=new,
            temperature=self.temperature,
            seed=int(seed),
        )
        return {
            "length": cell.data["length"],
            "places": [f"{name}:{at + 1}-{at + new}" for name, at in places],
            "truth": [decode(genome.codes(name, at, at + new)) for name, at in places],
            "written": [decode(codes) for codes in written],
        }


def texts_of(cells: Sequence[CellValue]) -> tuple[np.ndarray, np.ndarray]:
    """True and written codes (N, new_bases) of cells."""
    truth, written = (
        np.stack([encode(text) for cell in cells for text in cell[name]]) for name in ("truth", "written")
    )
    return truth, written


def write_bases(model: Any, prompts: np.ndarray, *, new_bases: int, temperature: float, seed: int) -> np.ndarray:
    """(B, new_bases) base codes after prompts (B, P), which begin with BOS.

    Where a prompt is not a whole number of k-mers, its first bases are left out.

    Raises:
        ValueError: for a model that cannot continue a sequence, such as the uniform baseline.
    """
    check_writer(model)
    if isinstance(model, SequenceWriter):
        return model.write_bases(prompts, new_bases=new_bases, temperature=temperature, seed=seed)
    tokenizer = load_tokenizer(model.config.tokenizer)
    rows: list[Any] = []
    for prompt in prompts:
        ids = tokenizer.encode(prompt[tokenizer.encode(prompt).left_over :]).ids
        rows.append(np.concatenate([[tokenizer.bos_id], ids]))
    steps, bases = [], np.zeros(len(rows), np.int64)
    for tokens in stream(model, rows, max_new_tokens=new_bases, temperature=temperature, seed=seed):
        steps.append(tokens.cpu().numpy())
        bases += tokenizer.widths[steps[-1]]
        if bases.min() >= new_bases:
            break
    return np.stack([tokenizer.decode(ids)[:new_bases] for ids in np.stack(steps, axis=1)])


def check_writer(model: Any) -> None:
    """Raises ValueError for a model that cannot continue a sequence."""
    if not isinstance(model, SequenceWriter | Decoder):
        raise ValueError(f"{model.config.position} cannot continue a sequence; leave it out")


@lru_cache(maxsize=8)
def _places(source: DnaSource, prompt: int, new: int, count: int, seed: int) -> tuple[tuple[str, int], ...]:
    """(contig, first base of a continuation) with `prompt` bases of the same held-out region before it; in random order.

    Raises:
        ValueError: where there is none.
    """
    data = open_heldout(source).items
    rng = np.random.default_rng([seed, prompt, new])
    found: dict[str, np.ndarray] = {}
    for name, regions in data.contigs.items():
        starts = np.concatenate([np.arange(r.start + prompt, r.stop - new + 1, new) for r in regions])
        unknown = RunCounter(data.genome[name].unknown)
        good = unknown.count(starts, starts + new) == 0
        good &= unknown.count(starts - prompt, starts) <= MAX_UNKNOWN * prompt
        if good.any():
            found[name] = rng.permutation(starts[good])
    if not found:
        longest = max(len(data.longest(name)) for name in data.contigs)
        raise ValueError(
            f"no held-out region of {data.name!r} has {prompt} known bases and {new} more to be written; the longest has "
            f"{longest}: choose shorter lengths, or a source that holds out more"
        )
    names = [list(found)[n] for n in rng.permutation(len(found))]
    rounds = max(map(len, found.values()))
    turns = [(name, int(found[name][n])) for n in range(rounds) for name in names if n < len(found[name])]
    return tuple(turns[n] for n in rng.permutation(min(count, len(turns))))  # halves must not differ in their contigs
