"""The loader of DNA: splits, ranks, workers, exact resume, and batches that the decoder's loss takes."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("Bio")

from modalities.decoder.model import target_weights
from modalities.dna.bases import decode
from modalities.dna.config import DnaDataConfig
from modalities.dna.data import build_loader
from modalities.dna.genome import open_genome
from modalities.dna.sources import find_source
from modalities.dna.splits import load_regions, select


def take(iterable, count):
    return list(itertools.islice(iterable, count))


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Two contigs, one with N; the second is held out in two stretches by a BED."""
    folder = tmp_path_factory.mktemp("genome")
    rng = np.random.default_rng(0)
    one, two = ("".join(rng.choice(list("ACGTacgt"), count)) for count in (5000, 1500))
    one = one[:2000] + "N" * 300 + one[2300:]
    (folder / "g.fa").write_text(f">one\n{one}\n>two\n{two}\n")
    (folder / "g.bed").write_text("one\t0\t5000\ttrain\ntwo\t0\t700\theldout\ntwo\t750\t1500\ttest\n")
    return DnaDataConfig(source=str(folder / "g.fa"), split=str(folder / "g.bed"), context=64, seed=3)


def global_batches(config, world=1, micro_batch=4, steps=12, start=None, **options):
    """The rows of all ranks, step by step, in the order of their global numbers, for each name in a batch."""
    loaders = [build_loader(config, rank=r, world=world, micro_batch=micro_batch, **options) for r in range(world)]
    for loader in loaders:
        if start is not None:
            loader.load_state_dict(json.loads(json.dumps(start)))
    parts = [take(loader, steps) for loader in loaders]
    return {
        name: torch.cat([torch.stack([b[name] for b in step], 1).flatten(0, 1) for step in zip(*parts, strict=True)])
        for name in parts[0][0]
    }


def same(left, right):
    return all(torch.equal(left[name], right[name]) for name in ("tokens", "segments", "weights", "sample"))


def test_the_order_that_weights_were_trained_in():
    dataset = build_loader(DnaDataConfig(), micro_batch=1).source.rows
    assert [(s.start, s.stop, s.strand, s.epoch) for s in dataset.samples([0, 1, 2, 31_999, 123_456_789])] == [
        (98871, 99127, "+", 0), (61751, 62007, "-", 0), (86839, 87095, "-", 0), (1582, 1838, "+", 39),
        (207721, 207977, "-", 152793),
    ]  # fmt: skip


def test_the_global_order_does_not_depend_on_ranks_batches_or_workers(config):
    whole = global_batches(config)
    assert whole["sample"].tolist() == list(range(48))
    assert same(whole, global_batches(config, world=2, micro_batch=2))
    assert same(whole, global_batches(config, world=4, micro_batch=1))
    assert same(whole, global_batches(config, micro_batch=2, steps=24))
    assert same(whole, global_batches(replace(config, num_workers=2), world=2, micro_batch=2))
    assert not torch.equal(whole["tokens"], global_batches(replace(config, seed=4))["tokens"])


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_is_exact_to_the_sample(config, workers):
    loader = build_loader(replace(config, num_workers=workers), micro_batch=4)
    take(loader, 7)  # workers have fetched ahead; the state counts what was handed out
    state = loader.state_dict()
    assert state["next_sample"] == 28 and state["kind"] == "windows"
    whole = {name: rows[28:] for name, rows in global_batches(config).items()}
    assert same(whole, global_batches(replace(config, num_workers=workers), steps=5, start=state))
    assert same(whole, global_batches(config, world=2, micro_batch=2, steps=5, start=state))


def test_a_state_of_other_data_is_refused(config):
    state = build_loader(config, micro_batch=2).state_dict()
    for name, value in (
        ("seed", 1), ("context", 32), ("tokenizer", "kmer:2"), ("reverse_complement", 0.0), ("max_unknown", 0.2),
        ("soft_mask_weight", 0.5), ("source", "yeast-chr01"),
    ):  # fmt: skip
        other = replace(config, **{name: value} | ({"split": None} if name == "source" else {}))
        with pytest.raises(ValueError, match=r"data state has \w+=.*samples would differ"):
            build_loader(other, micro_batch=2).load_state_dict(state)
    with pytest.raises(ValueError, match=r"one_pass|regions"):
        build_loader(config, split="heldout", micro_batch=2).load_state_dict(state)


@pytest.mark.parametrize("world", [1, 3])
def test_every_heldout_base_is_a_target_once_on_any_number_of_ranks(config, world):
    genome = open_genome(find_source(config.source))
    seen = np.zeros(1500, int)
    counts = set()
    for rank in range(world):
        loader = build_loader(config, split="heldout", rank=rank, world=world, micro_batch=5)
        batches = list(loader)
        counts.add(len(batches))
        assert len(loader) == len(batches) == len(list(loader))  # a second pass starts over
        for batch in batches:
            for row, number in enumerate(batch["sample"].tolist()):
                weights = target_weights(batch)[row]
                if number < 0:
                    assert weights.sum() == 0 and (batch["tokens"][row] == 6).all()
                    continue
                (where,) = loader.source.rows.samples([number])
                ids = batch["tokens"][row, 1:][weights > 0].numpy()
                assert where.strand == "+" and np.array_equal(ids, genome.codes(where.contig, where.start, where.stop))
                seen[where.start : where.stop] += 1
    assert counts == {len(loader)} and (seen[:700] == 1).all() and (seen[750:] == 1).all() and not seen[700:750].any()


def test_training_reads_the_training_split_alone_and_says_where_from(config):
    loader = build_loader(config, micro_batch=8)
    genome = open_genome(find_source(config.source))
    (region,) = select(load_regions(find_source(config.source, config.split), genome), "train")
    strands = set()
    for batch in take(loader, 30):
        for row, where in enumerate(loader.source.rows.samples(batch["sample"])):
            assert where.contig == region.contig
            letters = decode(genome.codes(where.contig, where.start, where.stop))
            read = decode(batch["tokens"][row, 1:].numpy().astype(np.uint8))
            if where.strand == "-":
                letters = letters[::-1].translate(str.maketrans("ACGT", "TGCA"))
            assert letters == read
            strands.add(where.strand)
    assert strands == {"+", "-"}
    assert "300 bases left out" in loader.report


def test_weights_of_soft_masked_bases_reach_the_loss(config):
    genome = open_genome(find_source(config.source))
    loader = build_loader(replace(config, soft_mask_weight=0.25, reverse_complement=0.0), micro_batch=8)
    batch = next(iter(loader))
    for row, where in enumerate(loader.source.rows.samples(batch["sample"])):
        soft = genome.soft_masked(where.contig, where.start, where.stop)
        assert target_weights(batch)[row].tolist() == np.where(soft, 0.25, 1).tolist() and 0 < soft.sum() < 64


def test_wrong_settings_are_refused():
    for options, message in (
        ({"context": 0}, "context=0: expected a whole number from 1 to 16,777,216"),
        ({"reverse_complement": 2.0}, r"reverse_complement=2\.0: expected a number from 0 to 1"),
        ({"max_unknown": -1.0}, r"max_unknown=-1\.0: expected a number from 0 to 1"),
        ({"soft_mask_weight": -0.5}, r"soft_mask_weight=-0\.5: expected a number, at least 0"),
        ({"num_workers": 100_000}, "num_workers=100000: expected a whole number from 0 to 1,024"),
    ):
        with pytest.raises(ValueError, match=message):
            DnaDataConfig(**options)
    with pytest.raises(ValueError, match="micro_batch 0"):
        build_loader(DnaDataConfig(), micro_batch=0)
    with pytest.raises(ValueError, match=r"rank 2 is outside 0\.\.1"):
        build_loader(DnaDataConfig(), micro_batch=1, rank=2, world=2)
