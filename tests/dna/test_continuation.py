"""Continuations of held-out DNA, against direct computation and writers whose texts are known."""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest
import torch

from modalities.dna.evaluators import completion
from modalities.dna.evaluators.completion import (
    WINDOW,
    Completion,
    CompletionSettings,
    chance,
    gc_correlation,
    gc_trajectory,
    write_bases,
)
from modalities.dna.tokenizers import decode, encode, load_tokenizer
from modalities.evaluation import ModelResult
from tests.dna.models import Composed, tiny

NEW = 60


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


def of(source, **options):
    return Completion(
        CompletionSettings(**{"new_bases": NEW, "samples": 12, "lengths": (24, 64)} | source[0] | options)
    )


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
    direct = [(np.isin(truth[0, n : n + WINDOW], (1, 2))).mean() for n in range(80 - WINDOW + 1)]
    np.testing.assert_allclose(gc_trajectory(truth)[0], direct)
    expected = [np.corrcoef(gc_trajectory(t[None])[0], gc_trajectory(w[None])[0])[0, 1] for t, w in zip(truth, written)]  # noqa: B905
    np.testing.assert_allclose(gc_correlation(truth, written), expected)
    pairs = [(a == b) for a in truth[0] for b in truth[0]]
    assert chance(truth)[0] == pytest.approx(np.mean(pairs))


@torch.no_grad()
@pytest.mark.parametrize(("tokenizer", "left_out"), [("bases", 0), ("kmer:3", 2)])
def test_greedy_text_is_the_likeliest_token_each_time(tokenizer, left_out):
    """Read anew for every token, without a cache. A prompt that is no whole number of k-mers loses its first bases."""
    model, every = tiny(tokenizer, position="goat", num_layers=2), load_tokenizer(tokenizer)
    prompts = np.random.default_rng(3).integers(0, 4, (3, 20)).astype(np.uint8)
    written = write_bases(model, prompts, new_bases=14, temperature=0, seed=0)
    assert written.shape == (3, 14)
    for prompt, text in zip(prompts, written, strict=True):
        ids = [every.bos_id, *every.encode(prompt[left_out:]).ids]
        for _ in range(14):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        np.testing.assert_array_equal(text, every.decode(ids[1 + len(every.encode(prompt).ids) :])[:14])


def test_the_truth_scores_in_full(source, writes):
    """Continuations are the same at every length, of held-out contigs alone and equally many of each."""
    prompts, evaluator = writes(after(source[1])), of(source, samples=30)
    cells = dict(evaluator.run(tiny()))
    for row in evaluator.rows(cells):
        assert row["accuracy"] == 1 and row["gc_r"] == pytest.approx(1) and row["gc_error"] == 0
        assert row["undefined"] == 0 and row["prompts"] == 30 and 0.25 < row["chance"] < 0.4
    short, long = ([c for c in cells.values() if c["length"] == n] for n in (24, 64))
    truth = [text for cell in short for text in cell["truth"]]
    contigs = [name for cell in short for name in cell["contigs"]]
    assert truth == [text for cell in long for text in cell["truth"]] and len(set(truth)) == 30
    for text, name, prompt in zip(truth * 2, contigs * 2, prompts, strict=True):
        assert prompt + text in source[1][name] and "N" not in text
    assert {len(prompt) for prompt in prompts} == {24, 64} and Counter(contigs) == dict.fromkeys("bcd", 10)


def test_a_constant_text_has_no_correlation(source, writes):
    writes(lambda _: np.zeros(NEW, np.uint8))
    cells = dict(of(source).run(tiny()))
    row, result = of(source).rows(cells)[0], ModelResult("m", 16, of(source).rows(cells), cells)
    assert "the held-out part: 9,000 bases of 3 contigs (b, c, d)" in of(source).measured([result])
    assert "(of 1000 asked for: there is no more room)" in of(source, samples=1000).measured([result])
    assert row["undefined"] == 12 and math.isnan(row["gc_r"]) and math.isnan(row["gc_r_standard_error"])
    truth = [text for cell in cells.values() if cell["length"] == 24 for text in cell["truth"]]
    assert row["accuracy"] == pytest.approx(np.mean([text.count("A") / NEW for text in truth]))
    strong = np.mean([gc_trajectory(encode(text)[None]).mean() for text in truth])
    assert row["gc_error"] == pytest.approx(strong)


def test_sampling_follows_the_seed_alone(source):
    model = tiny()
    first, again, other = (dict(of(source, samples=4, **o).run(model)) for o in ({}, {}, {"seed": 7}))
    assert first == again and first != other
    stored = json.loads(json.dumps(first))
    name = next(iter(stored))
    resumed = dict(of(source, samples=4).run(model, {name: stored[name]}))
    assert Completion().rows(resumed) == Completion().rows(first)


def test_requests_that_cannot_be_served(source):
    with pytest.raises(ValueError, match="at least 50 bases"):
        CompletionSettings(new_bases=49)
    with pytest.raises(ValueError, match=r"no held-out region .* has 4096 known bases and 60 more .* longest has 3000"):
        of(source, lengths=(24, 4096)).cells(tiny())
    with pytest.raises(ValueError, match="composed cannot continue a sequence; leave it out"):
        of(source).cells(Composed())
