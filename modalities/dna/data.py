"""DNA data, read from here outwards: a config in, a resumable loader of batches out.

    bases.py       letters <-> codes                 genome.py, formats.py  files -> contigs with random access
    splits.py      what is held out                  tokenizers.py          codes -> ids
    windows.py     rows of a genome, their order     ../rows.py             the loader: ranks, workers, resume

A sample is a row of L+1 tokens, the start first: inputs are tokens[:-1], targets tokens[1:], so the first base is predicted,
too. A batch also has segments (0, padding −1), the weight of each target, and the numbers of its samples, for which
`loader.dataset.samples(batch["sample"])` says where they are from.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from modalities.dna.genome import Genome, open_genome
from modalities.dna.splits import Region, load_regions, select
from modalities.dna.tokenizers import DnaTokenizer, load_tokenizer
from modalities.dna.windows import Sample, WindowDataset, check_settings
from modalities.rows import RowLoader
from zoo.naming import did_you_mean

__all__ = [
    "DnaDataConfig",
    "DnaTokenizer",
    "Genome",
    "Region",
    "Sample",
    "WindowDataset",
    "build_loader",
    "load_regions",
    "load_tokenizer",
    "open_genome",
]


@dataclass(frozen=True)
class DnaDataConfig:
    """What to train on.

    source, tokenizer: spec strings (genome.py, tokenizers.py).
    split: a BED file whose fourth column says "train" or "heldout"; None: the source's own, or whole contigs by rule.
    context: L, tokens a model sees at once.
    reverse_complement: probability that a training window is read on the other strand.
    soft_mask_weight: what a target counts that is soft-masked (lower-case: repeats, by convention); 0 leaves them out.
    max_unknown: training windows with a larger share of unknown bases are passed over.
    cache_dir: where the bases of large files are kept once parsed; None: <data folder>/cache.
    """

    source: str = "yeast-chr01"
    split: str | None = None
    tokenizer: str = "bases"
    context: int = 256
    seed: int = 0
    reverse_complement: float = 0.5
    soft_mask_weight: float = 1.0
    max_unknown: float = 0.1
    cache_dir: str | None = None
    num_workers: int = 0

    def __post_init__(self) -> None:
        check_settings(self.context, self.reverse_complement, self.soft_mask_weight, self.max_unknown)
        if self.num_workers < 0:
            raise ValueError(f"num_workers {self.num_workers} is negative")

    def with_options(self, **options: Any) -> DnaDataConfig:
        """A copy with some values changed; an unknown name is an error that says which one is near."""
        names = [field.name for field in fields(self)]
        for name in options:
            if name not in names:
                raise ValueError(
                    f"DNA data has no option {name!r}; {did_you_mean(name, names)}there are {', '.join(names)}"
                )
        return replace(self, **options)


def build_loader(
    config: DnaDataConfig, *, split: str = "train", rank: int = 0, world: int = 1, micro_batch: int
) -> RowLoader:
    """The loader of one split for one rank: iterable of {"tokens", "segments", "weights", "sample"}, (B, L+1) and (B,).

    "train" is endless and shuffled. Any other is one pass over that split ("heldout", or a name of the BED's), in a mixed
    order that is the same for every seed, on the + strand, with equally many batches on every rank. `loader.report` says
    what was converted and what is left out.

    Errors: those of open_genome, load_regions and load_tokenizer; ValueError for a split that is not there.
    """
    genome = open_genome(config.source, cache_dir=config.cache_dir)
    regions = select(load_regions(config.source, genome, config.split), split)
    options: dict[str, Any] = {"soft_mask_weight": config.soft_mask_weight, "max_unknown": config.max_unknown}
    if split == "train":
        options |= {"seed": config.seed, "reverse_complement": config.reverse_complement}
    else:
        # Shuffled, so that the first few batches stand for all regions; always alike, so that runs compare.
        options |= {"seed": 0, "epochs": 1}
    dataset = WindowDataset(genome, regions, config.context, load_tokenizer(config.tokenizer), **options)
    return RowLoader(dataset, micro_batch, rank=rank, world=world, num_workers=config.num_workers)
