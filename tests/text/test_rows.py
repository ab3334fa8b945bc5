"""Rows made of plain ones: facts that are asked for, and stretches that come again."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from modalities.text import rows
from modalities.text.data import RowMix
from modalities.text.rows import copies_row, facts_row
from modalities.text.tokenizers import load_tokenizer

TOKENIZERS = {name: load_tokenizer(name) for name in ("bytes", "bpe-1k")}
SENTENCES = (
    " Ships sail on.",
    " Who goes there?",
    " Nothing moved, and nobody spoke!",
    " It is so.",
    " We waited long",
)
WEIGHT = 7.0
both_tokenizers = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


def plain_row(tokenizer, length, seed=0, text_tokens=None, sentences=SENTENCES):
    """A row of `length` + 1 tokens of two documents, the second with its BOS; the rest is padding."""
    rng = np.random.default_rng([seed, 1])
    text = tokenizer.encode("".join(sentences[n] for n in rng.integers(len(sentences), size=length)))
    filled = length if text_tokens is None else text_tokens + 1
    cut = filled // 3
    ids = np.concatenate([text[:cut], [tokenizer.bos_id], text[cut:]])[: filled + (text_tokens is None)]
    tokens = torch.full((length + 1,), tokenizer.pad_id, dtype=torch.int64)
    segments = torch.full_like(tokens, -1)
    tokens[: len(ids)] = torch.from_numpy(ids)
    segments[: len(ids)] = torch.arange(len(ids)) >= cut
    return {"tokens": tokens, "segments": segments}


def runs_of(row, weight):
    """(first token, token ids) of every stretch of tokens that count `weight`."""
    found, at = [], (row["weights"] == weight).int().tolist()
    for n, (before, here) in enumerate(zip([0, *at], at, strict=False)):
        if here and not before:
            end = at.index(0, n) if 0 in at[n:] else len(at)
            found.append((n, row["tokens"][n:end].tolist()))
    return found


@pytest.fixture
def drawn(monkeypatch):
    """The facts of the last row."""
    last, draw = [], rows.draw_facts

    def drawing(*arguments, **options):
        last[:] = draw(*arguments, **options)
        return list(last)

    monkeypatch.setattr(rows, "draw_facts", drawing)
    return last


# ---- facts ----


@both_tokenizers
def test_a_row_of_facts_keeps_form_and_length(tokenizer):
    for seed, length in ((n, (12, 96, 256)[n % 3]) for n in range(30)):
        plain = plain_row(tokenizer, length, seed)
        row = facts_row(plain, np.random.default_rng(seed), tokenizer, WEIGHT)
        assert {name: (len(t), t.dtype) for name, t in row.items()} == {
            "tokens": (length + 1, torch.int64), "segments": (length + 1, torch.int64), "weights": (length + 1, torch.float32)
        }  # fmt: skip
        assert row["tokens"][0] == tokenizer.bos_id and (row["tokens"] == tokenizer.bos_id).sum() == 1
        assert set(row["weights"].tolist()) <= {0.0, 1.0, WEIGHT} and (length > 12 or not runs_of(row, WEIGHT))


@both_tokenizers
def test_values_count_where_they_are_asked_for_and_not_where_they_are_stated(tokenizer, drawn):
    counts = []
    for seed in range(40):
        row = facts_row(plain_row(tokenizer, 256, seed), np.random.default_rng(seed), tokenizer, WEIGHT)
        text = tokenizer.decode(row["tokens"])
        stated = [fact for fact in drawn if "".join(fact.statement) in text]
        assert stated == drawn[: len(stated)]  # as many as fit
        first, answers = runs_of(row, 0.0), runs_of(row, WEIGHT)
        assert len(first) - len(stated) in (0, 1)  # the number of an aside
        for at, ids in answers:
            before = tokenizer.decode(row["tokens"][:at])
            (fact,) = [f for f in stated if f.value == tokenizer.decode(ids) and before.endswith(f.question)]
            assert tokenizer.decode(row["tokens"][at : at + len(ids) + 1]) == f"{fact.value}."
            assert before.count("".join(fact.statement)) == 1 and ids in [value for _, value in first]
        counts.append((len(stated), len(answers)))
    assert {stated for stated, _ in counts} >= {1, 2, 3, 4}
    assert 2 < sum(0 < answers < stated for stated, answers in counts) < 15  # mostly all of them are asked for


def test_wordings_have_words_of_the_text_but_none_that_is_held_out(drawn):
    tokenizer, sentences = TOKENIZERS["bpe-1k"], (" Zebras graze at a falcon in velvet, Helsinki.",)
    said = set()
    for seed in range(60):
        facts_row(plain_row(tokenizer, 256, seed, sentences=sentences), np.random.default_rng(seed), tokenizer, WEIGHT)
        said |= set(re.findall("[a-z]+", " ".join(fact.question + fact.statement[2] for fact in drawn).lower()))
    assert {"zebras", "graze"} <= said and not {"falcon", "velvet", "helsinki"} & said


# ---- copies ----


@both_tokenizers
def test_a_stretch_comes_again_and_again(tokenizer):
    """The row's first tokens, as they are, or in random order, which then count where they come again."""
    shuffled = 0
    for seed in range(40):
        plain = plain_row(tokenizer, 256, seed, sentences="abcdefghijklmnopqrstuvwxyz")
        text = [n for n in plain["tokens"].tolist() if n != tokenizer.bos_id]
        row = copies_row(plain, np.random.default_rng(seed), tokenizer)
        ids, first = row["tokens"].tolist(), runs_of(row, 0.0)
        assert len(ids) == 257 and ids[0] == tokenizer.bos_id and (row["segments"] == 0).all()
        stretch = first[0][1] if first else text[:8]
        assert sorted(stretch) == sorted(text[: len(stretch)]) and ids[1 : 1 + len(stretch)] == stretch
        copies = sum(ids[n : n + len(stretch)] == stretch for n in range(2, 257))
        assert 8 <= len(stretch) <= 64 and copies >= 1
        shuffled += len(first)
    assert 10 < shuffled < 30


# ---- the mix ----


def test_rows_are_mixed_in_at_their_shares_and_others_left_alone():
    tokenizer, mix = TOKENIZERS["bpe-1k"], RowMix(facts=0.3, copies=0.2, weight=WEIGHT)
    counts = {"facts": 0, "copies": 0, "plain": 0}
    for index in range(300):
        plain = plain_row(tokenizer, 96, index)
        row = mix(plain, [0, 2, index], tokenizer)
        again = mix(plain, [0, 2, index], tokenizer)
        assert all(torch.equal(row[name], again[name]) for name in row)
        kind = "plain" if row is plain else "facts" if (row["weights"] == WEIGHT).any() else "copies"
        counts[kind] += 1
    assert 65 < counts["facts"] < 115 and 40 < counts["copies"] < 80, counts
    assert RowMix()(plain, [0], tokenizer) is plain
    assert (RowMix(copies=1.0)(plain, [0], tokenizer)["weights"] <= 1).all()
