"""Windows of a genome: where they lie, what is left out, strands, weights, and that nothing grows with their number."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from modalities.dna import windows
from modalities.dna.bases import UNKNOWN, decode, encode, reverse_complement
from modalities.dna.splits import Region
from modalities.dna.tokenizers import load_tokenizer, train_bpe
from modalities.dna.windows import Sample, WindowDataset

BASES = load_tokenizer("bases")


@dataclass(frozen=True)
class FakeContig:
    name: str
    length: int
    unknown: np.ndarray


class FakeGenome:
    """A genome from letters; lower case is soft-masked."""

    fingerprint, report = "0123456789abcdef", "2 IUPAC codes read as N"

    def __init__(self, **sequences: str) -> None:
        self.letters = sequences
        found = []
        for name, letters in sequences.items():
            edges = np.flatnonzero(np.diff(np.pad(encode(letters) == UNKNOWN, 1).astype(int)))
            found.append(FakeContig(name, len(letters), edges.reshape(-1, 2)))
        self.contigs = tuple(found)

    def __getitem__(self, name):
        return next(contig for contig in self.contigs if contig.name == name)

    def codes(self, name, start=0, stop=None):
        return encode(self.letters[name][start:stop])

    def soft_masked(self, name, start=0, stop=None):
        return np.array([letter.islower() for letter in self.letters[name][start:stop]], dtype=bool)

    def regions(self):
        return tuple(Region(contig.name, 0, contig.length, "train") for contig in self.contigs)


def letters(count, seed=0, unknown=(), soft=()):
    """Random bases with runs [start, stop) of N and of lower case."""
    made = np.random.default_rng(seed).choice(list("ACGT"), count)
    for start, stop in unknown:
        made[start:stop] = "N"
    for start, stop in soft:
        made[start:stop] = np.char.lower(made[start:stop])
    return "".join(made)


GENOME = FakeGenome(
    a=letters(1000, 1, unknown=[(0, 7), (300, 420), (500, 503), (990, 1000)], soft=[(100, 200)]),
    b=letters(37, 2),
    c=letters(641, 3, unknown=[(64, 128)], soft=[(600, 641)]),
)


def dataset(context=32, genome=GENOME, tokenizer=BASES, regions=None, **options):
    return WindowDataset(genome, regions or genome.regions(), context, tokenizer, **options)


def epoch_of(data, epoch=0):
    return data.samples(range(epoch * data.epoch_windows, (epoch + 1) * data.epoch_windows))


# ---- one pass ----


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "context"), [("bases", 16), ("kmer:3", 64), ("bases", 2000)])
def test_one_pass_has_every_known_base_as_a_target_once(spec, context):
    tokenizer = load_tokenizer(spec)
    width = int(tokenizer.bases_per_token)
    data = dataset(context, tokenizer=tokenizer, one_pass=True)
    seen = {contig.name: np.zeros(contig.length, int) for contig in GENOME.contigs}
    for row in data:
        sample = data.samples([int(row["sample"])])[0]
        ids = row["tokens"][row["segments"] >= 0].numpy()
        assert ids[0] == tokenizer.bos_id and sample.strand == "+"
        assert (row["tokens"][row["segments"] < 0] == tokenizer.pad_id).all()
        codes = GENOME.codes(sample.contig, sample.start, sample.stop)
        assert np.array_equal(ids[1:], tokenizer.encode(codes).ids)
        counts = row["weights"][1:].numpy()[: len(ids) - 1]
        assert np.array_equal(counts, ids[1:] < tokenizer.num_targets) and not row["weights"][len(ids) :].any()
        assert len(counts) and (counts.any() or width > 1)  # no row without a target, but for k-mers with an N
        seen[sample.contig][sample.start : sample.start + len(counts) * width] += np.repeat(counts, width).astype(int)
    for name, times in seen.items():
        known = GENOME.codes(name) != UNKNOWN
        assert times[~known].max(initial=0) == 0 and times.max() == 1
        if width == 1:
            assert (times == known).all()
        else:  # a k-mer is lost with an unknown base or at a stretch's end: at most two for each run and one more
            assert (known & (times == 0)).sum() <= (width - 1) * (2 * len(GENOME[name].unknown) + 2)


# ---- training windows ----


def test_windows_stay_inside_their_stretch_and_few_bases_are_left_out():
    data = dataset(32)
    stretches = {"a": [(7, 300), (420, 990)], "b": [(0, 37)], "c": [(0, 64), (128, 641)]}
    for epoch in range(6):
        times = {contig.name: np.zeros(contig.length, int) for contig in GENOME.contigs}
        for sample in epoch_of(data, epoch):
            assert sample.epoch == epoch and sample.stop - sample.start == 32
            assert any(start <= sample.start and sample.stop <= stop for start, stop in stretches[sample.contig])
            times[sample.contig][sample.start : sample.stop] += 1
        for name, bounds in stretches.items():
            for start, stop in bounds:
                assert (times[name][start:stop] == 0).sum() < 32
                assert times[name][start:stop].sum() == (stop - start) // 32 * 32  # ⌊n / w⌋ whole windows
                assert (times[name][start:stop] > 1).sum() < 32


def test_a_sample_follows_from_seed_and_number():
    first, same, other = dataset(seed=5), dataset(seed=5), dataset(seed=6)
    numbers = [0, 3, 40, 1_000_003, 10**12]
    assert first.samples(numbers) == [same.samples([n])[0] for n in numbers] != other.samples(numbers)
    # Pinned: a change here would make a run that is resumed see other windows than it would have seen.
    assert dataset(32, seed=1, reverse_complement=0.5).samples([0, 1, 10**9]) == PINNED


PINNED = [
    Sample("a", 744, 776, "+", 0),
    Sample("c", 128, 160, "+", 0),
    Sample("c", 386, 418, "+", 22222222),
]


def test_regions_shorter_than_a_window_are_one_padded_row():
    data = dataset(64, regions=[Region("b", 0, 37, "train")])
    assert data.epoch_windows == 1
    for index in (0, 1, 9):
        row = data[index]
        assert row["tokens"].tolist() == [BASES.bos_id, *GENOME.codes("b").tolist(), *[BASES.pad_id] * 27]
        assert row["segments"].tolist() == [0] * 38 + [-1] * 27 and not row["weights"][38:].any()
    padding = data.padding_row()
    assert {name: (t.shape, t.dtype) for name, t in padding.items()} == {
        name: (t.shape, t.dtype) for name, t in row.items()
    }
    assert not padding["weights"].any() and (padding["segments"] == -1).all() and padding["sample"] == -1


# ---- unknown bases ----


def test_windows_with_too_many_unknown_bases_are_skipped(monkeypatch):
    genome = FakeGenome(a=letters(4000, 4, unknown=[(at, at + 3) for at in range(1000, 3000, 10)]))
    for most in (0.0, 0.1, 0.25):
        data = dataset(50, genome=genome, max_unknown=most)
        shares = [(genome.codes("a", s.start, s.stop) == UNKNOWN).mean() for s in data.samples(range(600))]
        assert max(shares) <= most
        assert (
            min(s.start for s in data.samples(range(600))) < 900 < 3000 < max(s.stop for s in data.samples(range(600)))
        )
    assert (
        max(
            (genome.codes("a", s.start, s.stop) == UNKNOWN).mean()
            for s in epoch_of(dataset(50, genome=genome, max_unknown=1))
        )
        > 0.25
    )
    assert "40 of 80 windows skipped for more than 10% unknown" in dataset(50, genome=genome).report
    monkeypatch.setattr(windows, "_MOST_TRIES", 1000)
    with pytest.raises(ValueError, match=r"1,000 windows of 50 bases .* more than max_unknown=0\.1"):
        dataset(50, genome=genome, regions=[Region("a", 1000, 3000, "train")])
    with pytest.raises(ValueError, match="no stretch of known bases for windows of 50 in their 3 bases"):
        dataset(50, genome=genome, regions=[Region("a", 1000, 1003, "train")])


def test_the_report_says_what_is_left_out():
    report = dataset(32).report
    assert report.startswith("2 IUPAC codes read as N; ")
    assert "45 windows of 32 bases; 201 bases left out" in report
    short = FakeGenome(a="ACGT" * 20 + "N" * 40 + "ACGTA" + "N" * 40 + "ACGT" * 20)
    assert "; 85 bases left out" in dataset(32, genome=short).report
    assert "; 80 bases left out" in dataset(32, genome=short, one_pass=True).report


# ---- strands and weights ----


def test_the_other_strand_turns_tokens_and_weights():
    genome = FakeGenome(
        a=letters(900, 5, unknown=[(at, at + 1) for at in range(10, 900, 60)], soft=[(0, 333), (500, 650)])
    )
    plain = dataset(40, genome=genome, seed=2, soft_mask_weight=0.25)
    turned = dataset(40, genome=genome, seed=2, soft_mask_weight=0.25, reverse_complement=1.0)
    for n in range(60):
        here, there = plain[n], turned[n]
        assert plain.samples([n])[0].strand == "+" and turned.samples([n])[0].strand == "-"
        assert (plain.samples([n])[0].start, plain.samples([n])[0].stop) == (
            turned.samples([n])[0].start,
            turned.samples([n])[0].stop,
        )
        assert np.array_equal(there["tokens"][1:], reverse_complement(here["tokens"][1:].numpy().astype(np.uint8)))
        assert torch.equal(there["weights"][1:], here["weights"][1:].flip(0))
        codes = genome.codes("a", plain.samples([n])[0].start, plain.samples([n])[0].stop)
        soft = genome.soft_masked("a", plain.samples([n])[0].start, plain.samples([n])[0].stop)
        assert here["weights"][1:].tolist() == np.where(codes == UNKNOWN, 0, np.where(soft, 0.25, 1)).tolist()
    half = dataset(40, genome=genome, reverse_complement=0.5)
    minus = sum(s.strand == "-" for s in half.samples(range(1000)))
    assert 440 < minus < 560
    # The same window comes on either strand in different epochs.
    assert len({s.strand for s in half.samples(range(0, 40 * half.epoch_windows, half.epoch_windows))}) == 2


def test_a_token_counts_as_soft_masked_when_most_of_its_bases_are():
    genome = FakeGenome(a="acgACGacGAcgACGTac")
    tokenizer = load_tokenizer("kmer:3")
    options = {"genome": genome, "tokenizer": tokenizer, "soft_mask_weight": 0.5, "one_pass": True}
    assert dataset(6, **options)[0]["weights"][1:].tolist() == [0.5, 1, 0.5, 0.5, 1, 0.5]
    assert dataset(6, **options, reverse_complement=1.0)[0]["weights"][1:].tolist() == [0.5, 1, 0.5, 0.5, 1, 0.5][::-1]


def test_bpe_windows_are_cut_and_padded(tmp_path):
    pytest.importorskip("tokenizers")
    genome = FakeGenome(a=letters(24_000, 6))
    train_bpe(genome, genome.regions(), 64, tmp_path / "bpe.json")
    tokenizer = load_tokenizer(str(tmp_path / "bpe.json"))
    data = dataset(32, genome=genome, tokenizer=tokenizer, reverse_complement=0.5)
    assert data.window == round(32 * tokenizer.bases_per_token) > 64
    cut = padded = 0
    for n in range(100):
        row, sample = data[n], data.samples([n])[0]
        codes = genome.codes("a", sample.start, sample.stop)
        codes = reverse_complement(codes) if sample.strand == "-" else codes
        read = tokenizer.decode(row["tokens"].numpy())
        assert decode(codes).startswith(decode(read))
        cut += len(read) < len(codes)
        padded += bool((row["segments"] < 0).any())
        assert row["weights"][1:].sum() == (row["segments"][1:] == 0).sum()
    assert cut and padded


# ---- order without a list ----
