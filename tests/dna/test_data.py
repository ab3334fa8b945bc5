"""Windows of a genome and their loader: places, strands and weights; splits, ranks, workers and
exact resume."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from modalities.dna import data as data_module
from modalities.dna.config import DnaDataConfig
from modalities.dna.data import WindowDataset, build_loader
from modalities.dna.splits import Region
from modalities.dna.tokenizers import UNKNOWN, decode, load_tokenizer, reverse_complement
from tests.dna.models import bpe_tokenizer, genome_of, write_fasta

BASES = load_tokenizer("bases")


def letters(count, seed=0, unknown=(), soft=()):
    """Random bases with runs [start, stop) of N and of lower case."""
    text = np.random.default_rng(seed).choice(list("ACGT"), count)
    for start, stop in unknown:
        text[start:stop] = "N"
    for start, stop in soft:
        text[start:stop] = np.char.lower(text[start:stop])
    return "".join(text)


GENOME = genome_of(
    a=letters(1000, 1, unknown=[(0, 7), (300, 420), (500, 503), (990, 1000)], soft=[(100, 200)]),
    b=letters(37, 2),
    c=letters(641, 3, unknown=[(64, 128)], soft=[(600, 641)]),
)


def dataset(context=32, genome=GENOME, regions=None, one_pass=False, **options):
    regions = regions or [
        Region(contig.name, 0, contig.length, "train") for contig in genome.contigs
    ]
    config = DnaDataConfig(context=context, **{"reverse_complement": 0.0} | options)
    return WindowDataset(genome, regions, config, one_pass=one_pass)


def unknown_shares(data, count):
    return [
        (data.genome.codes("a", s.start, s.stop) == UNKNOWN).mean()
        for s in data.samples(range(count))
    ]


@pytest.mark.parametrize(("spec", "context"), [("bases", 16), ("kmer:3", 64), ("bases", 2000)])
def test_known_bases_targeted_once(spec, context):
    """One pass targets known bases once."""
    tokenizer = load_tokenizer(spec)
    width = int(tokenizer.bases_per_token)
    data = dataset(context, tokenizer=spec, one_pass=True)
    seen = {contig.name: np.zeros(contig.length, int) for contig in GENOME.contigs}
    for row in data:
        sample = data.samples([int(row["sample"])])[0]
        ids = row["tokens"][row["segments"] >= 0].numpy()
        assert ids[0] == tokenizer.bos_id
        assert sample.strand == "+"
        assert (row["tokens"][row["segments"] < 0] == tokenizer.pad_id).all()
        assert np.array_equal(
            ids[1:], tokenizer.encode(GENOME.codes(sample.contig, sample.start, sample.stop)).ids
        )
        counts = row["weights"][1:].numpy()[: len(ids) - 1]
        assert np.array_equal(counts, ids[1:] < tokenizer.num_targets)
        assert not row["weights"][len(ids) :].any()
        seen[sample.contig][sample.start : sample.start + len(counts) * width] += np.repeat(
            counts, width
        ).astype(int)
    for name, times in seen.items():
        known = GENOME.codes(name) != UNKNOWN
        assert times[~known].max(initial=0) == 0
        assert times.max() == 1
        # A k-mer is lost with an unknown base or at a stretch's end: at most two for each run and
        # one more.
        assert (known & (times == 0)).sum() <= (width - 1) * (2 * len(GENOME[name].unknown) + 2)


def test_an_epoch_covers_its_stretches():
    data = dataset(32)
    stretches = {"a": [(7, 300), (420, 990)], "b": [(0, 37)], "c": [(0, 64), (128, 641)]}
    for epoch in range(6):
        times = {contig.name: np.zeros(contig.length, int) for contig in GENOME.contigs}
        for sample in data.samples(
            range(epoch * data.epoch_windows, (epoch + 1) * data.epoch_windows)
        ):
            assert sample.epoch == epoch
            assert sample.stop - sample.start == 32
            assert any(
                start <= sample.start and sample.stop <= stop
                for start, stop in stretches[sample.contig]
            )
            times[sample.contig][sample.start : sample.stop] += 1
        for name, bounds in stretches.items():
            for start, stop in bounds:
                assert (times[name][start:stop] == 0).sum() < 32
                assert (
                    times[name][start:stop].sum() == (stop - start) // 32 * 32
                )  # ⌊n / w⌋ whole windows


def test_unknown_bases_are_reported(monkeypatch):
    """Unknown bases are skipped and reported."""
    genome = genome_of(a=letters(4000, 4, unknown=[(at, at + 3) for at in range(1000, 3000, 10)]))
    for most in (0.0, 0.1, 0.25):
        data = dataset(50, genome, max_unknown=most)
        assert max(unknown_shares(data, 600)) <= most
        starts = [sample.start for sample in data.samples(range(600))]
        assert min(starts) < 900 < 3000 < max(starts)
    assert max(unknown_shares(dataset(50, genome, max_unknown=1), 80)) > 0.25
    assert "40 of 80 windows skipped for more than 10% unknown" in dataset(50, genome).report
    monkeypatch.setattr(data_module, "_MOST_TRIES", 1000)
    with pytest.raises(
        ValueError, match=r"1,000 windows of 50 bases .* more than max_unknown=0\.1"
    ):
        dataset(50, genome, regions=[Region("a", 1000, 3000, "train")])
    with pytest.raises(
        ValueError, match="no stretch of known bases for windows of 50 in their 3 bases"
    ):
        dataset(50, genome, regions=[Region("a", 1000, 1003, "train")])
    assert dataset(32).report.startswith("45 windows of 32 bases; 201 bases left out")


def test_strands_and_weights():
    unknown = [(at, at + 1) for at in range(10, 900, 60)]
    genome = genome_of(a=letters(900, 5, unknown=unknown, soft=[(0, 333), (500, 650)]))
    options = {"genome": genome, "seed": 2, "soft_mask_weight": 0.25}
    plain = dataset(40, **options)
    turned = dataset(40, **options, reverse_complement=1.0)
    for n in range(60):
        here, there, (place,), (other,) = (
            plain[n],
            turned[n],
            plain.samples([n]),
            turned.samples([n]),
        )
        assert (place.strand, other.strand) == ("+", "-")
        assert place.start == other.start
        assert np.array_equal(
            there["tokens"][1:], reverse_complement(here["tokens"][1:].numpy().astype(np.uint8))
        )
        assert torch.equal(there["weights"][1:], here["weights"][1:].flip(0))
        codes, soft = (
            read("a", place.start, place.stop) for read in (genome.codes, genome.soft_masked)
        )
        assert (
            here["weights"][1:].tolist()
            == np.where(codes == UNKNOWN, 0, np.where(soft, 0.25, 1)).tolist()
        )
    half = dataset(40, genome, reverse_complement=0.5)
    samples = half.samples(range(1000))
    assert 440 < sum(sample.strand == "-" for sample in samples) < 560
    assert samples[7] == half.samples([7])[0]
    kmers = {"genome": genome_of(a="acgACGacGAcgACGTac"), "tokenizer": "kmer:3"}
    row = dataset(6, **kmers, soft_mask_weight=0.5, one_pass=True)[0]
    assert row["weights"][1:].tolist() == [
        0.5,
        1,
        0.5,
        0.5,
        1,
        0.5,
    ]  # soft where most bases of a token are


def test_bpe_windows_fit(tmp_path):
    """Bpe windows are cut and padded."""
    genome = genome_of(a=letters(24_000, 6))
    spec = bpe_tokenizer(tmp_path)
    data = dataset(32, genome, tokenizer=spec)
    cut = padded = 0
    for n in range(60):
        row, (sample,) = data[n], data.samples([n])
        codes = genome.codes("a", sample.start, sample.stop)
        read = load_tokenizer(spec).decode(row["tokens"].numpy())
        assert decode(codes).startswith(decode(read))
        assert len(codes) == data.window > 40
        cut += len(read) < len(codes)
        padded += bool((row["segments"] < 0).any())
    assert cut
    assert padded


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Two contigs, one with N; the second is held out in two stretches by a BED."""
    folder = tmp_path_factory.mktemp("genome")
    rng = np.random.default_rng(1)
    one, two = ("".join(rng.choice(list("ACGTacgt"), count)) for count in (5000, 1500))
    one = one[:2000] + "N" * 300 + one[2300:]
    (folder / "g.bed").write_text(
        "one\t0\t5000\ttrain\ntwo\t0\t700\theldout\ntwo\t750\t1500\ttest\n"
    )
    return DnaDataConfig(
        source=write_fasta(folder, one=one, two=two),
        split=str(folder / "g.bed"),
        context=64,
        seed=3,
    )


def global_batches(config, world=1, micro_batch=4, steps=12, start=None):
    """The rows of all ranks, step by step, in the order of their global numbers, for each name in a
    batch."""
    loaders = [
        build_loader(config, rank=r, world=world, micro_batch=micro_batch) for r in range(world)
    ]
    for loader in loaders if start else ():
        loader.load_state_dict(json.loads(json.dumps(start)))
    parts = [list(itertools.islice(loader, steps)) for loader in loaders]
    return {
        name: torch.cat(
            [
                torch.stack([b[name] for b in step], 1).flatten(0, 1)
                for step in zip(*parts, strict=True)
            ]
        )
        for name in parts[0][0]
    }


def same(left, right):
    return all(
        torch.equal(left[name], right[name]) for name in ("tokens", "segments", "weights", "sample")
    )


def test_training_order_is_kept():
    """The order that weights were trained in."""
    dataset = build_loader(DnaDataConfig(), micro_batch=1).source.rows
    samples = dataset.samples([0, 1, 2, 31_999, 123_456_789])
    assert [(s.start, s.stop, s.strand, s.epoch) for s in samples] == [
        (98871, 99127, "+", 0),
        (61751, 62007, "-", 0),
        (86839, 87095, "-", 0),
        (1582, 1838, "+", 39),
        (207721, 207977, "-", 152793),
    ]


def test_order_and_resume(config):
    """The global order does not depend on ranks, batches or workers; a state counts what was handed
    out."""
    whole = global_batches(config)
    workers = replace(config, num_workers=2)
    assert whole["sample"].tolist() == list(range(48))
    assert same(whole, global_batches(config, world=4, micro_batch=1))
    assert same(whole, global_batches(workers, world=2, micro_batch=2))
    assert not torch.equal(whole["tokens"], global_batches(replace(config, seed=4))["tokens"])
    loader = build_loader(workers, micro_batch=4)
    assert {where.contig for where in loader.source.rows.samples(whole["sample"])} == {
        "one"
    }  # the training split
    assert {where.strand for where in loader.source.rows.samples(whole["sample"])} == {"+", "-"}
    list(itertools.islice(loader, 7))
    state = loader.state_dict()
    rest = {name: rows[28:] for name, rows in whole.items()}
    assert state["next_sample"] == 28
    assert state["kind"] == "windows"
    assert same(rest, global_batches(config, world=2, micro_batch=2, steps=5, start=state))
    for change in (
        {"seed": 1},
        {"context": 32},
        {"tokenizer": "kmer:2"},
        {"reverse_complement": 0.0},
        {"max_unknown": 0.2},
        {"soft_mask_weight": 0.5},
        {"source": "yeast-chr01", "split": None},
    ):
        other = replace(config, **change)
        with pytest.raises(ValueError, match=r"data state has \w+=.*samples would differ"):
            build_loader(other, micro_batch=2).load_state_dict(state)
