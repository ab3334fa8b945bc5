"""DNA data: a config to a resumable loader of batches, a source to its held-out part.

    sources.py     spec → files and split            genome.py, formats.py  files → contigs
    bases.py       letters ↔ codes                   splits.py      regions for training and held out
    tokenizers.py  codes → ids                       windows.py     rows of a genome, their order

A sample is a row of L+1 tokens, the start first: inputs are tokens[:-1], targets tokens[1:], so the first base is predicted
too. A batch also has segments (0, padding −1), the weight of each target, and its sample numbers, whose origin is
`loader.source.rows.samples(batch["sample"])`.
"""

from __future__ import annotations

from functools import lru_cache

from modalities.dna.config import DnaDataConfig
from modalities.dna.genome import open_genome
from modalities.dna.sources import DnaSource, find_source
from modalities.dna.splits import GenomeSplit, load_regions, select, split_fingerprint
from modalities.dna.tokenizers import load_tokenizer
from modalities.dna.windows import WindowDataset
from modalities.loading import Heldout, IndexedLoader, RowBatches

__all__ = ["build_loader", "open_heldout"]


def build_loader(
    config: DnaDataConfig, *, split: str = "train", rank: int = 0, world: int = 1, micro_batch: int
) -> IndexedLoader:
    """The loader of one split for one rank: iterable of {"tokens", "segments", "weights", "sample"}, (B, L+1) and (B,).

    "train" is endless and shuffled; "heldout" one pass on the + strand, shuffled by one seed, so that the first batches
    represent all regions and runs compare.
    """
    source, train = find_source(config.source, config.split), split == "train"
    genome = open_genome(source, cache_dir=config.cache_dir)
    rows = WindowDataset(
        genome,
        select(load_regions(source, genome), split),
        config.context,
        load_tokenizer(config.tokenizer),
        seed=config.seed if train else 0,
        reverse_complement=config.reverse_complement if train else 0.0,
        soft_mask_weight=config.soft_mask_weight,
        max_unknown=config.max_unknown,
        one_pass=not train,
    )
    return IndexedLoader(RowBatches(rows), micro_batch, rank=rank, world=world, num_workers=config.num_workers)


@lru_cache(maxsize=2)
def open_heldout(source: DnaSource) -> Heldout[GenomeSplit]:
    """The split genome of a source, opened once per process. Raises as `open_genome` and `load_regions` do."""
    genome = open_genome(source)
    regions = load_regions(source, genome)
    return Heldout(source.name, split_fingerprint(genome, regions), GenomeSplit(source.name, genome, regions))
