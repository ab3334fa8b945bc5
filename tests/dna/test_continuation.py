"""Continuations of held-out DNA and their k-mers, against direct computation and writers whose texts are known."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch

from modalities.dna.baselines import BaselineConfig, MarkovChain
from modalities.dna.bases import decode, encode
from modalities.dna.evaluators.completion import (
    WINDOW,
    Completion,
    CompletionSettings,
    chance,
    gc_correlation,
    gc_trajectory,
    write_bases,
)
from modalities.dna.genome import open_genome
from modalities.dna.model import DnaConfig, DnaDecoder
from modalities.dna.sources import find_source
from modalities.dna.splits import load_regions
from modalities.dna.tokenizers import load_tokenizer, train_bpe

NEW = 60


class Writer(MarkovChain):
    """Writes `text(prompt)` after each prompt."""

    def __init__(self, text):
        super().__init__(BaselineConfig("markov-0", train_context=16))
        self.text, self.prompts = text, []

    def write_bases(self, prompts, *, new_bases, temperature, seed):
        self.prompts += [decode(prompt) for prompt in prompts]
        return np.stack([self.text(decode(prompt))[:new_bases] for prompt in prompts])


def tiny(tokenizer="bases", position="goat"):
    torch.manual_seed(2)
    vocabulary = load_tokenizer(tokenizer)
    config = DnaConfig(
        vocab_size=vocabulary.vocab_size,
        num_targets=vocabulary.num_targets,
        dim=32,
        num_layers=2,
        num_heads=2,
        hidden_dim=48,
        train_context=16,
        position=position,
        tokenizer=tokenizer,
    )
    model = DnaDecoder(config).eval()
    with torch.no_grad():
        model.embedding.weight *= 4  # far from uniform
    return model


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Four contigs of 3000 bases, three of them held out, one of these with a gap; the text of each."""
    folder, rng = tmp_path_factory.mktemp("genome"), np.random.default_rng(5)
    texts = {}
    for name in "abcd":
        codes = rng.choice(4, 3000, p=(0.3, 0.2, 0.1, 0.4)).astype(np.uint8)
        if name == "c":
            codes[1000:1050] = 4
        texts[name] = decode(codes)
    (folder / "g.fa").write_text("".join(f">{name}\n{text}\n" for name, text in texts.items()))
    splits = {"a": "train"} | dict.fromkeys("bcd", "heldout")
    (folder / "g.bed").write_text("".join(f"{name}\t0\t3000\t{split}\n" for name, split in splits.items()))
    return {"source": str(folder / "g.fa"), "split": str(folder / "g.bed")}, texts


def completion(source, **options):
    return Completion(
        CompletionSettings(**{"new_bases": NEW, "samples": 12, "lengths": (24, 64)} | source[0] | options)
    )


def after(texts):
    """What stands after a prompt in the genome."""

    def text(prompt):
        found = [t[t.index(prompt) + len(prompt) :] for t in texts.values() if prompt in t]
        assert len(found) == 1
        return encode(found[0])

    return text


def rows_of(evaluator, model):
    return evaluator.rows(dict(evaluator.run(model)))


# --------------------------------------------------------------------------------------------------------------- numbers


def test_statistics_against_their_definitions():
    rng = np.random.default_rng(0)
    truth, written = (rng.integers(0, 4, (5, 80)).astype(np.uint8) for _ in range(2))
    direct = [(np.isin(truth[0, n : n + WINDOW], (1, 2))).mean() for n in range(80 - WINDOW + 1)]
    np.testing.assert_allclose(gc_trajectory(truth)[0], direct)
    expected = [np.corrcoef(gc_trajectory(t[None])[0], gc_trajectory(w[None])[0])[0, 1] for t, w in zip(truth, written)]  # noqa: B905
    np.testing.assert_allclose(gc_correlation(truth, written), expected)
    pairs = [(a == b) for a in truth[0] for b in truth[0]]
    assert chance(truth)[0] == pytest.approx(np.mean(pairs))


# --------------------------------------------------------------------------------------------------------------- writing


@torch.no_grad()
@pytest.mark.parametrize(("tokenizer", "left_out"), [("bases", 0), ("kmer:3", 2)])
def test_greedy_text_is_the_likeliest_token_each_time(tokenizer, left_out):
    """Read anew for every token, without a cache. A prompt that is no whole number of k-mers loses its first bases."""
    model, every = tiny(tokenizer), load_tokenizer(tokenizer)
    prompts = np.random.default_rng(3).integers(0, 4, (3, 20)).astype(np.uint8)
    written = write_bases(model, prompts, new_bases=14, temperature=0, seed=0)
    assert written.shape == (3, 14)
    for prompt, text in zip(prompts, written, strict=True):
        ids = [every.bos_id, *every.encode(prompt[left_out:]).ids]
        for _ in range(14):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        np.testing.assert_array_equal(text, every.decode(ids[1 + len(every.encode(prompt).ids) :])[:14])


def test_bpe_writes_as_many_bases_as_asked(tmp_path, source):
    found = find_source(*source[0].values())
    genome = open_genome(found)
    train_bpe(genome, load_regions(found, genome), 24, tmp_path / "bpe.json")
    model = tiny(str(tmp_path / "bpe.json"))
    prompts = np.stack([encode(text[:40]) for text in source[1].values()])  # of different numbers of tokens
    written = write_bases(model, prompts, new_bases=33, temperature=1.0, seed=4)
    assert written.shape == (4, 33) and written.max() < 4
    alone = write_bases(model, prompts[1:2], new_bases=33, temperature=0, seed=4)
    np.testing.assert_array_equal(write_bases(model, prompts, new_bases=33, temperature=0, seed=4)[1], alone[0])


# ------------------------------------------------------------------------------------------------------------ completion


def test_the_truth_scores_in_full(source):
    for row in rows_of(completion(source), Writer(after(source[1]))):
        assert row["accuracy"] == 1 and row["gc_r"] == pytest.approx(1) and row["gc_error"] == 0
        assert row["undefined"] == 0 and row["prompts"] == 12 and 0.25 < row["chance"] < 0.4


def test_a_constant_text_has_no_correlation(source):
    writer = Writer(lambda _: np.zeros(NEW, np.uint8))
    row = rows_of(completion(source), writer)[0]
    assert row["undefined"] == 12 and math.isnan(row["gc_r"]) and math.isnan(row["gc_r_standard_error"])
    cells = dict(completion(source).run(writer))
    truth = [text for cell in cells.values() if cell["length"] == 24 for text in cell["truth"]]
    assert row["accuracy"] == pytest.approx(np.mean([text.count("A") / NEW for text in truth]))
    strong = np.mean([gc_trajectory(encode(text)[None]).mean() for text in truth])
    assert row["gc_error"] == pytest.approx(strong)


def test_continuations_are_the_same_at_every_length(source):
    writer = Writer(after(source[1]))
    cells = dict(completion(source, samples=30).run(writer))
    by_length = {n: [c for c in cells.values() if c["length"] == n] for n in (24, 64)}
    truth, places = (
        {n: list(chain.from_iterable(c[key] for c in part)) for n, part in by_length.items()}
        for key in ("truth", "places")
    )
    assert truth[24] == truth[64] and places[24] == places[64] and len(set(places[24])) == 30
    for text, place, prompt in zip(truth[24] * 2, places[24] * 2, writer.prompts, strict=True):
        contig, span = place.split(":")
        start, stop = map(int, span.split("-"))
        assert source[1][contig][start - 1 : stop] == text and "N" not in text
        assert source[1][contig][: start - 1].endswith(prompt)
    assert {len(prompt) for prompt in writer.prompts} == {24, 64}
    assert Counter(place[0] for place in places[24]) == dict.fromkeys(
        "bcd", 10
    )  # equally many, none that was trained on


@pytest.mark.slow
def test_sampling_follows_the_seed_alone(source):
    model, found = tiny(), {}
    for key, options in {"a": {}, "b": {}, "c": {"seed": 7}, "greedy": {"temperature": 0.0}}.items():
        found[key] = dict(completion(source, samples=4, **options).run(model))
    assert found["a"] == found["b"] and found["a"] != found["c"] and found["a"] != found["greedy"]
    stored = json.loads(json.dumps(found["a"]))
    first = next(iter(stored))
    resumed = dict(completion(source, samples=4).run(model, {first: stored[first]}))
    assert Completion().rows(resumed) == Completion().rows(found["a"])


def test_requests_that_cannot_be_served(source):
    with pytest.raises(ValueError, match="at least 50 bases"):
        CompletionSettings(new_bases=49)
    with pytest.raises(ValueError, match=r"no held-out region .* has 4096 known bases and 60 more .* longest has 3000"):
        completion(source, lengths=(24, 4096)).cells(tiny())


# -------------------------------------------------------------------------------------------------------------- spectrum
