"""`bits` and `completion`: what is averaged over which bases, and continuations against writers
whose texts are known."""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections import Counter

import numpy as np
import pytest
import torch

from modalities.dna import baselines as markov
from modalities.dna.baselines import MarkovChain
from modalities.dna.evaluators import completion
from modalities.dna.evaluators.bits import Bits, BitsSettings
from modalities.dna.evaluators.completion import (
    Completion,
    CompletionSettings,
    gc_trajectory,
    write_bases,
)
from modalities.dna.tokenizers import decode, encode, load_tokenizer
from modalities.results import ModelResult
from tests.dna.models import Composed, bpe_tokenizer, letters, split_source, tiny
from tests.refusals import refuses


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Two held-out contigs of different composition and one too short for most lengths; a training
    contig like the first."""
    folder = tmp_path_factory.mktemp("genome")
    rng = np.random.default_rng(0)

    def chain(length, stay):
        codes = rng.integers(0, 4, length).astype(np.uint8)
        for at in range(1, length):
            if rng.random() < stay:
                codes[at] = (codes[at - 1] + 1) % 4  # A C G T A C ...
        return codes

    contigs = {
        "train": chain(20000, 0.7),
        "near": chain(6000, 0.7),
        "far": chain(3000, 0.0),
        "short": chain(50, 0.0),
    }
    contigs["near"][2000:2020] = 4
    return split_source(folder, "train", **{name: decode(codes) for name, codes in contigs.items()})


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


def test_cut_bits_same_bases(source):
    """A model of windows of 16 bases; up to that length the control reads as ever."""
    model = tiny()
    settings = {"lengths": (16, 64), "samples": 1, **source}
    plain, cut = (measure(model, settings | {"control": control})[0] for control in (None, "cut"))
    assert cut[0] == plain[0]
    assert [row["bases"] for row in cut] == [row["bases"] for row in plain]
    assert cut[1]["bits_per_base"] != plain[1]["bits_per_base"]
    assert of(**settings).identity(model) != of(**settings, control="cut").identity(model)


def test_lengths_share_bases(source):
    """Every length reads the same bases."""
    seen = {}
    for lengths, context in (
        ((16, 64, 256), 16),
        ((16,), 16),
        ((256, 1024), 64),
        ((2500,), 16),
    ):  # with room for 2048
        model = Composed(train_context=context)
        bits = of(lengths=lengths, samples=1, **source)
        for cell in bits.cells(model):
            length = cell.data["facts"]["length"]
            windows = bits.windows(model, cell)
            assert all(w.shape[1] == length for w in windows)
            seen.setdefault((lengths, length), []).append(
                np.concatenate([w.ravel() for w in windows])
            )
    *others, beyond = (np.concatenate(parts) for parts in seen.values())
    assert len(others[0]) == 2 * 2048
    assert len(beyond) == 2 * 2500
    assert all(np.array_equal(others[0], other) for other in others)


@pytest.mark.parametrize("tokenizer", ["kmer:3", "bpe"])
def test_lengths_count_bases(source, tmp_path, tokenizer):
    """The same bases as single ones are read of, up to k-mers."""
    model = tiny(bpe_tokenizer(tmp_path) if tokenizer == "bpe" else tokenizer, train_context=20)
    bits = of(**source)
    assert bits.points(model)[1] == 2 * bits.trained_at(model) > 50
    chosen = of(lengths=(20, 64), samples=2, **source)
    step = 3 if tokenizer == "kmer:3" else 1
    for cell, other in zip(chosen.cells(model), chosen.cells(tiny()), strict=True):
        assert cell == other
        assert cell.data["stretches"] == other.data["stretches"]
        assert {w.shape[1] for w in chosen.windows(model, cell)} == {
            cell.data["facts"]["length"] // step * step
        }


def test_lengths_end_with_contigs(source):
    """Lengths and stretches end where heldout contigs do."""
    bits = of(**source)
    assert bits.points(Composed(train_context=16)) == (16, 32, 64, 128, 256, 512, 1024)
    assert bits.points(Composed(train_context=100)) == (100, 200, 400, 800, 1600)
    assert bits.points(tiny("kmer:4", train_context=100)) == (400, 800, 1600)
    model = Composed(train_context=16)
    refuses("longest region has 6000", of(lengths=(7000,), **source).cells, model)
    stretches = of(lengths=(16, 64), stretch=100, samples=2, **source).cells(model)
    assert {s.stop - s.start for cell in stretches for s in cell.data["stretches"]} == {100}
    for options, message in (
        (
            {"lengths": (16, 64), "stretch": 50},
            "stretches of 50 bases hold no window of 64: at most --lengths 50",
        ),
        ({"lengths": (16,), "stretch": 9000}, "--stretch 9000: the longest held-out region has"),
        ({"lengths": (0,)}, "lengths must be at least 2 bases"),
    ):
        with pytest.raises(ValueError, match=message):
            of(**options, **source).cells(model)


def test_contigs_have_a_table(source, tmp_path):
    """Contigs and repeats have a table."""
    settings = dict(lengths=(64, 256), samples=5, repeats=True, **source)
    rows, values = measure(MarkovChain(1, 16), settings)
    of(**settings).write([ModelResult("markov-1", 16, rows, values)], tmp_path)
    with (tmp_path / "bits.contigs.csv").open() as file:
        table = {(row["length"], row["contig"], row["part"]): row for row in csv.DictReader(file)}
    truth = -(
        0.775 * math.log2(0.775) + 0.225 * math.log2(0.075)
    )  # the entropy of the chain that made it
    assert float(table["256", "near", "all"]["bits_per_base"]) == pytest.approx(truth, abs=0.1)
    assert float(table["256", "far", "all"]["bits_per_base"]) > 2
    assert ("64", "near", "unique") not in table
    whole, *split = (
        (int(row["bases"]), float(row["bits_per_base"]))
        for row in (table["256", "near", part] for part in ("all", "unique", "repeats"))
    )
    assert sum(bases for bases, _ in split) == whole[0]
    assert sum(bases * bits for bases, bits in split) == pytest.approx(whole[0] * whole[1])
    assert measure(MarkovChain(0, 16), settings)[0][-1]["bits_per_base"] == pytest.approx(
        2, abs=0.01
    )


def test_stopped_run_goes_on(source, monkeypatch):
    """A stopped run goes on and cells are keyed by what matters."""
    monkeypatch.setattr("modalities.dna.evaluators.bits.CELL_BASES", 120)
    model = tiny()
    options = dict(lengths=(20, 60), samples=5, **source)
    rows, values = measure(model, options)
    half = dict(itertools.islice(values.items(), len(values) // 2))
    assert len(values) > len(half)
    assert measure(model, options, finished=half)[0] == rows
    changes = ({}, {"seed": 1}, {"samples": 4}, {"lengths": (20, 2500)}, {"strands": "both"})
    keys = [of(**options | change).identity(model) for change in changes]
    keys.append(of(lengths=(20, 60), samples=5).identity(model))
    assert len({json.dumps(key, sort_keys=True) for key in keys}) == len(keys)
    assert (
        of(**options | {"lengths": (60,)}).identity(model)
        == keys[0]
        != of(**options).identity(tiny("kmer:2"))
    )
    assert of(**options).identity(tiny(strands="both")) == keys[4]


def test_unseen_file_is_whole(tmp_path):
    """A file unseen in training is read whole and the training source keeps its split."""
    fasta = tmp_path / "my.fa"
    fasta.write_text(f">chrA\n{letters(4000)}\n>random\n{letters(1000)}\n")
    settings = BitsSettings(source=str(fasta), lengths=(100,))
    unseen = Bits(settings, {"source": "genomes:elsewhere"})
    assert unseen.contents() == f"all of {fasta}: 5,000 bases of 2 contigs (chrA, random)"
    for spec in (str(fasta), f"{tmp_path}/*.fa"):
        assert len(Bits(settings, {"source": spec}).heldout.items.contigs) == 1
    refuses("all of it is held out: give --split BED", list, Bits(settings).run(MarkovChain(2)))


NEW = 60


@pytest.fixture(scope="module")
def genomes(tmp_path_factory):
    """Four contigs of 3000 bases, three of them held out, one of these with a gap; the text of
    each."""
    folder = tmp_path_factory.mktemp("genome")
    rng = np.random.default_rng(5)
    texts = {}
    for name in "abcd":
        codes = rng.choice(4, 3000, p=(0.3, 0.2, 0.1, 0.4)).astype(np.uint8)
        if name == "c":
            codes[1000:1050] = 4
        texts[name] = decode(codes)
    return split_source(folder, "a", **texts), texts


def completing(genomes, **options):
    settings = {"new_bases": NEW, "samples": 12, "lengths": (24, 64)} | genomes[0] | options
    return Completion(CompletionSettings(**settings))


@pytest.fixture
def writes(monkeypatch):
    """Makes models write `text(prompt)` after each prompt; returns the prompts."""

    def replace(text):
        prompts = []

        def write(model, codes, *, new_bases, seed):
            prompts.extend(map(decode, codes))
            return np.stack([text(decode(prompt))[:new_bases] for prompt in codes])

        monkeypatch.setattr(completion, "write_bases", write)
        return prompts

    return replace


def after(texts):
    """What stands after a prompt in the genome."""

    def text(prompt):
        (rest,) = [t[t.index(prompt) + len(prompt) :] for t in texts.values() if prompt in t]
        return encode(rest)

    return text


def test_statistics_against_their_definitions():
    rng = np.random.default_rng(0)
    truth, written = (rng.integers(0, 4, (5, 80)).astype(np.uint8) for _ in range(2))
    direct = [
        (np.isin(truth[0, n : n + completion.WINDOW], (1, 2))).mean()
        for n in range(80 - completion.WINDOW + 1)
    ]
    np.testing.assert_allclose(gc_trajectory(truth)[0], direct)
    expected = [
        np.corrcoef(gc_trajectory(t[None])[0], gc_trajectory(w[None])[0])[0, 1]
        for t, w in zip(truth, written, strict=True)
    ]
    np.testing.assert_allclose(completion.gc_correlation(truth, written), expected)
    assert completion.chance(truth)[0] == pytest.approx(
        np.mean([(a == b) for a in truth[0] for b in truth[0]])
    )


@torch.no_grad()
@pytest.mark.parametrize(("tokenizer", "left_out"), [("bases", 0), ("kmer:3", 2)])
def test_greedy_takes_likeliest_token(tokenizer, left_out):
    """Read anew for every token, without a cache. A prompt that is no whole number of k-mers loses
    its first bases."""
    model = tiny(tokenizer, position="goat", num_layers=2)
    every = load_tokenizer(tokenizer)
    prompts = np.random.default_rng(3).integers(0, 4, (3, 20)).astype(np.uint8)
    written = write_bases(model, prompts, new_bases=14, temperature=0, seed=0)
    assert written.shape == (3, 14)
    for prompt, text in zip(prompts, written, strict=True):
        ids = [every.bos_id, *every.encode(prompt[left_out:]).ids]
        for _ in range(14):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        np.testing.assert_array_equal(
            text, every.decode(ids[1 + len(every.encode(prompt).ids) :])[:14]
        )


def test_the_truth_scores_in_full(genomes, writes):
    """Continuations are the same at every length, of held-out contigs alone and equally many of
    each."""
    prompts = writes(after(genomes[1]))
    evaluator = completing(genomes, samples=30)
    cells = dict(evaluator.run(tiny()))
    for row in evaluator.rows(cells):
        assert row["accuracy"] == 1
        assert row["gc_r"] == pytest.approx(1)
        assert row["gc_error"] == 0
        assert row["undefined"] == 0
        assert row["prompts"] == 30
        assert 0.25 < row["chance"] < 0.4
    short, long = ([c for c in cells.values() if c["length"] == n] for n in (24, 64))
    truth = [text for cell in short for text in cell["truth"]]
    contigs = [name for cell in short for name in cell["contigs"]]
    assert truth == [text for cell in long for text in cell["truth"]]
    assert len(set(truth)) == 30
    for text, name, prompt in zip(truth * 2, contigs * 2, prompts, strict=True):
        assert prompt + text in genomes[1][name]
        assert "N" not in text
    assert {len(prompt) for prompt in prompts} == {24, 64}
    assert Counter(contigs) == dict.fromkeys("bcd", 10)


def test_constant_text_has_no_correlation(genomes, writes):
    """A constant text has no correlation."""
    writes(lambda _: np.zeros(NEW, np.uint8))
    cells = dict(completing(genomes).run(tiny()))
    row = completing(genomes).rows(cells)[0]
    result = ModelResult("m", 16, completing(genomes).rows(cells), cells)
    assert "the held-out part: 9,000 bases of 3 contigs (b, c, d)" in completing(genomes).measured(
        [result]
    )
    assert "(of 1000 asked for: no more room)" in completing(genomes, samples=1000).measured(
        [result]
    )
    assert row["undefined"] == 12
    assert math.isnan(row["gc_r"])
    assert math.isnan(row["gc_r_standard_error"])
    truth = [text for cell in cells.values() if cell["length"] == 24 for text in cell["truth"]]
    assert row["accuracy"] == pytest.approx(np.mean([text.count("A") / NEW for text in truth]))
    assert row["gc_error"] == pytest.approx(
        np.mean([gc_trajectory(encode(text)[None]).mean() for text in truth])
    )


def test_continuations_that_cannot_be_written(genomes):
    refuses("at least 50 bases", CompletionSettings, new_bases=49)
    with pytest.raises(
        ValueError,
        match=r"no held-out region .* has 4096 known bases and 60 more .* longest has 3000",
    ):
        completing(genomes, lengths=(24, 4096)).cells(tiny())
    refuses(
        "composed cannot continue a sequence; leave it out", completing(genomes).cells, Composed()
    )
