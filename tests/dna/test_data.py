"""The loader of DNA: splits, ranks, workers, exact resume, and batches that the decoder's loss takes."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("Bio")

from modalities.dna.data import DnaDataConfig, build_loader


def take(iterable, count):
    return list(itertools.islice(iterable, count))


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Two contigs, one with N; the second is held out in two stretches by a BED."""
    folder, rng = tmp_path_factory.mktemp("genome"), np.random.default_rng(1)
    one, two = ("".join(rng.choice(list("ACGTacgt"), count)) for count in (5000, 1500))
    one = one[:2000] + "N" * 300 + one[2300:]
    (folder / "g.fa").write_text(f">one\n{one}\n>two\n{two}\n")
    (folder / "g.bed").write_text("one\t0\t5000\ttrain\ntwo\t0\t700\theldout\ntwo\t750\t1500\ttest\n")
    return DnaDataConfig(source=str(folder / "g.fa"), split=str(folder / "g.bed"), context=64, seed=3)


def global_batches(config, world=1, micro_batch=4, steps=12, start=None):
    """The rows of all ranks, step by step, in the order of their global numbers, for each name in a batch."""
    loaders = [build_loader(config, rank=r, world=world, micro_batch=micro_batch) for r in range(world)]
    for loader in loaders if start else ():
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


def test_order_and_resume(config):
    """The global order does not depend on ranks, batches or workers; a state counts what was handed out."""
    whole, workers = global_batches(config), replace(config, num_workers=2)
    assert whole["sample"].tolist() == list(range(48))
    assert same(whole, global_batches(config, world=4, micro_batch=1))
    assert same(whole, global_batches(workers, world=2, micro_batch=2))
    assert not torch.equal(whole["tokens"], global_batches(replace(config, seed=4))["tokens"])
    loader = build_loader(workers, micro_batch=4)
    assert {where.contig for where in loader.source.rows.samples(whole["sample"])} == {"one"}  # the training split
    assert {where.strand for where in loader.source.rows.samples(whole["sample"])} == {"+", "-"}
    take(loader, 7)
    state, rest = loader.state_dict(), {name: rows[28:] for name, rows in whole.items()}
    assert state["next_sample"] == 28 and state["kind"] == "windows"
    assert same(rest, global_batches(config, world=2, micro_batch=2, steps=5, start=state))
    for name, value in (
        ("seed", 1), ("context", 32), ("tokenizer", "kmer:2"), ("reverse_complement", 0.0), ("max_unknown", 0.2),
        ("soft_mask_weight", 0.5), ("source", "yeast-chr01"),
    ):  # fmt: skip
        other = replace(config, **{name: value} | ({"split": None} if name == "source" else {}))
        with pytest.raises(ValueError, match=r"data state has \w+=.*samples would differ"):
            build_loader(other, micro_batch=2).load_state_dict(state)


def test_wrong_settings_are_refused():
    for name, value in {
        "context": 0, "reverse_complement": 2.0, "max_unknown": -1.0, "soft_mask_weight": -0.5, "num_workers": 100_000
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=rf"{name}={value}: expected a (whole )?number"):
            DnaDataConfig(**{name: value})
