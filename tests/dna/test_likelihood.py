"""`bits`: what it averages over which bases, for models of any tokenizer and for baselines."""

import csv
import itertools
import json
import math

import numpy as np
import pytest

from modalities.dna import baselines as markov
from modalities.dna.baselines import MarkovChain
from modalities.dna.evaluators.bits import Bits, BitsSettings
from modalities.dna.scoring import score_windows
from modalities.dna.sources import find_source
from modalities.dna.splits import open_heldout
from modalities.dna.tokenizers import decode
from modalities.evaluation import ModelResult
from tests.dna.models import Composed, bpe_tokenizer, letters, tiny


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Two held-out contigs of different composition and one too short for most lengths; a training contig like the first."""
    folder, rng = tmp_path_factory.mktemp("genome"), np.random.default_rng(0)

    def chain(length, stay):
        codes = rng.integers(0, 4, length).astype(np.uint8)
        for at in range(1, length):
            if rng.random() < stay:
                codes[at] = (codes[at - 1] + 1) % 4  # A C G T A C ...
        return codes

    contigs = {"train": chain(20000, 0.7), "near": chain(6000, 0.7), "far": chain(3000, 0.0), "short": chain(50, 0.0)}
    contigs["near"][2000:2020] = 4
    (folder / "g.fa").write_text("".join(f">{name}\n{decode(codes)}\n" for name, codes in contigs.items()))
    rows = [f"{name}\t0\t{len(c)}\t{'train' if name == 'train' else 'heldout'}\n" for name, c in contigs.items()]
    (folder / "g.bed").write_text("".join(rows))
    return {"source": str(folder / "g.fa"), "split": str(folder / "g.bed")}


@pytest.fixture(autouse=True)
def small_chains(monkeypatch):
    monkeypatch.setattr(markov, "ORDER", 2)
    markov._fitted.cache_clear()


def of(**options):
    return Bits(BitsSettings(**options))


def measure(model, settings, finished=None):
    evaluator = of(**settings)
    values = dict(evaluator.run(model, finished))
    return evaluator.rows(json.loads(json.dumps(values))), values


def test_uniform_is_exactly_two_bits_everywhere(source):
    settings = dict(lengths=(10, 48, 100), samples=5, **source)
    for row in measure(Composed(train_context=16), settings)[0]:
        assert row["bits_per_base"] == 2.0 and row["accuracy"] == 0.25
        assert row["nll"] == pytest.approx(2 * math.log(2), rel=1e-15)


def test_every_length_reads_the_same_bases(source):
    seen = {}
    for lengths, context in (((16, 64, 256), 16), ((16,), 16), ((256, 1024), 64), ((2500,), 16)):  # with room for 2048
        model = Composed(train_context=context)
        bits = of(lengths=lengths, samples=1, **source)
        for cell in bits.cells(model):
            length = cell.data["facts"]["length"]
            windows = bits.windows(model, cell)
            assert all(w.shape[1] == length for w in windows)
            seen.setdefault((lengths, length), []).append(np.concatenate([w.ravel() for w in windows]))
    *others, beyond = (np.concatenate(parts) for parts in seen.values())
    assert len(others[0]) == 2 * 2048 and len(beyond) == 2 * 2500
    assert all(np.array_equal(others[0], other) for other in others)


def test_bits_are_the_mean_over_contigs_of_what_windows_cost(source):
    model = tiny("kmer:2")
    settings = dict(lengths=(16, 40), samples=3, **source, batch_tokens=100)
    rows, _ = measure(model, settings)
    data = open_heldout(find_source(*source.values())).items
    size = of(**settings).stretch(model)
    means, costs = [], []  # by contig: bits per base at each length, and those of its stretches
    for stretches in data.stretches(size, 3, 42).values():
        sums = np.zeros((2, len(stretches), 2))  # length, stretch; bits, bases
        for n, stretch in enumerate(stretches):
            for k, length in enumerate(settings["lengths"]):
                scores = score_windows(model, data.codes(stretch)[: size // length * length].reshape(-1, length))
                sums[k, n] = scores.nll.sum() / math.log(2), scores.bases.sum()
        means.append(np.divide(*sums.sum(1).T))
        costs.append(np.divide(*np.moveaxis(sums, -1, 0)))

    def error(by_contig):  # a contig of one stretch varies as the others do
        spread = [values.var(ddof=1) if len(values) > 1 else math.nan for values in by_contig]
        spread = np.where(np.isnan(spread), np.nanmean(spread), spread)
        return math.sqrt(sum(s2 / len(v) for s2, v in zip(spread, by_contig, strict=True))) / len(by_contig)

    first, second = np.mean(means, axis=0)
    assert rows[0]["bits_per_base"] == pytest.approx(first, rel=1e-5)
    assert rows[0]["bits_per_base_standard_error"] == pytest.approx(error([both[0] for both in costs]), rel=1e-4)
    assert rows[1]["change"] == pytest.approx(second - first, rel=1e-3) and "change" not in rows[0]
    changes = [longer - shorter for shorter, longer in costs]
    assert rows[1]["change_standard_error"] == pytest.approx(error(changes), rel=1e-3)
    assert [row["left_over"] for row in rows] == [size % k * rows[0]["stretches"] for k in (16, 40)]
    assert rows[1]["window_bases"] == 40 and rows[1]["left_over"] > 0 and "accuracy" not in rows[0]


@pytest.mark.parametrize("tokenizer", ["kmer:3", "bpe"])
def test_lengths_are_in_bases_for_every_tokenizer(source, tmp_path, tokenizer):
    """The same bases as single ones are read of, up to k-mers."""
    model = tiny(bpe_tokenizer(tmp_path) if tokenizer == "bpe" else tokenizer, train_context=20)
    bits = of(**source)
    assert bits.points(model)[1] == 2 * bits.trained_at(model) > 50
    chosen = of(lengths=(20, 64), samples=2, **source)
    step = 3 if tokenizer == "kmer:3" else 1
    for cell, other in zip(chosen.cells(model), chosen.cells(tiny()), strict=True):
        assert cell == other and cell.data["stretches"] == other.data["stretches"]
        length = cell.data["facts"]["length"]
        assert {w.shape[1] for w in chosen.windows(model, cell)} == {length // step * step}


def test_lengths_and_stretches_end_where_heldout_contigs_do(source):
    bits = of(**source)
    assert bits.points(Composed(train_context=16)) == (16, 32, 64, 128, 256, 512, 1024)
    assert bits.points(Composed(train_context=100)) == (100, 200, 400, 800, 1600)
    assert bits.points(tiny("kmer:4", train_context=100)) == (400, 800, 1600)
    model = Composed(train_context=16)
    with pytest.raises(ValueError, match="longest region has 6000"):
        of(lengths=(7000,), **source).cells(model)
    stretches = of(lengths=(16, 64), stretch=100, samples=2, **source).cells(model)
    assert {s.stop - s.start for cell in stretches for s in cell.data["stretches"]} == {100}
    for options, message in (
        ({"lengths": (16, 64), "stretch": 50}, "stretches of 50 bases hold no window of 64: at most --lengths 50"),
        ({"lengths": (16,), "stretch": 9000}, "--stretch 9000: the longest held-out region has"),
        ({"lengths": (0,)}, "lengths must be at least 2 bases"),
    ):
        with pytest.raises(ValueError, match=message):
            of(**options, **source).cells(model)


def test_contigs_and_repeats_have_a_table(source, tmp_path):
    settings = dict(lengths=(64, 256), samples=5, repeats=True, **source)
    rows, values = measure(MarkovChain(1, 16), settings)
    result = ModelResult("markov-1", 16, rows, values)
    of(**settings).write([result], tmp_path)
    with (tmp_path / "bits.contigs.csv").open() as file:
        table = {(row["length"], row["contig"], row["part"]): row for row in csv.DictReader(file)}
    truth = -(0.775 * math.log2(0.775) + 0.225 * math.log2(0.075))  # the entropy of the chain that made it
    assert float(table["256", "near", "all"]["bits_per_base"]) == pytest.approx(truth, abs=0.1)
    assert float(table["256", "far", "all"]["bits_per_base"]) > 2
    assert ("64", "near", "unique") not in table
    whole, *split = (
        (int(row["bases"]), float(row["bits_per_base"]))
        for row in (table["256", "near", part] for part in ("all", "unique", "repeats"))
    )
    assert sum(bases for bases, _ in split) == whole[0]
    assert sum(bases * bits for bases, bits in split) == pytest.approx(whole[0] * whole[1])
    zero = measure(MarkovChain(0, 16), settings)[0][-1]
    assert zero["bits_per_base"] == pytest.approx(2, abs=0.01)


def test_a_stopped_run_goes_on_and_cells_are_keyed_by_what_matters(source, monkeypatch):
    monkeypatch.setattr("modalities.dna.evaluators.bits.CELL_BASES", 120)
    model, options = tiny(), dict(lengths=(20, 60), samples=5, **source)
    rows, values = measure(model, options)
    half = dict(itertools.islice(values.items(), len(values) // 2))
    assert len(values) > len(half) and measure(model, options, finished=half)[0] == rows
    changes = ({}, {"seed": 1}, {"samples": 4}, {"lengths": (20, 2500)}, {"strands": "both"})
    keys = [of(**options | change).identity(model) for change in changes]
    keys.append(of(lengths=(20, 60), samples=5).identity(model))
    assert len({json.dumps(key, sort_keys=True) for key in keys}) == len(keys)
    assert of(**options | {"lengths": (60,)}).identity(model) == keys[0] != of(**options).identity(tiny("kmer:2"))
    assert of(**options).identity(tiny(strands="both")) == keys[4]


def test_a_file_unseen_in_training_is_read_whole_and_the_training_source_keeps_its_split(tmp_path):
    fasta = tmp_path / "my.fa"
    fasta.write_text(f">chrA\n{letters(4000)}\n>random\n{letters(1000)}\n")
    settings = BitsSettings(source=str(fasta), lengths=(100,))
    unseen = Bits(settings, {"source": "genomes:elsewhere"})
    assert unseen.contents() == f"all of {fasta}: 5,000 bases of 2 contigs (chrA, random)"
    for spec in (str(fasta), f"{tmp_path}/*.fa"):
        assert len(Bits(settings, {"source": spec}).heldout.items.contigs) == 1
    with pytest.raises(ValueError, match="all of it is held out: give --split BED"):
        list(Bits(settings).run(MarkovChain(2)))
