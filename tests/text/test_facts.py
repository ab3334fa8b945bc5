"""Facts in words, whose two grammars share nothing; rows made of plain ones: facts asked for,
stretches that come again."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from modalities.text import rows
from modalities.text.facts import GRAMMARS, HELDOUT, OTHER, TRAIN, WIDE, draw_facts
from modalities.text.rows import RowMix, facts_row
from modalities.text.tokenizers import load_tokenizer

TOKENIZERS = {name: load_tokenizer(name) for name in ("bytes", "bpe-1k")}
SEEDS = range(60)
# Every sentence needs some of these; a wording is told from another by its other words.
COMMON = "a about and as by can did does for has how in is of on one that the there this to was we what where which with"
FUNCTION_WORDS = {"'s", "you", "your", *re.findall("[a-z]+", COMMON)}


@pytest.mark.parametrize("pair", [(TRAIN, HELDOUT), (WIDE, OTHER)], ids=["facts", "more words"])
def test_the_grammars_share_nothing(pair):
    """No entry of a list, and no content word of what is stated or asked."""
    for field in (
        "wordings",
        "nouns",
        "openings",
        "endings",
        "asks",
        "asides",
        "syllables",
        "words",
        "patterns",
    ):
        train, heldout = (set(getattr(grammar, field)) for grammar in pair)
        assert not train & heldout, field
        assert (train and heldout) or field == "patterns", field
    assert not {n for kind in pair[0].names for n in kind} & {
        n for kind in pair[1].names for n in kind
    }
    plain = (
        (re.sub(r"\{\w+\}", " ", text).lower() for words in g.wordings for text in words)
        for g in pair
    )
    train, heldout = (
        {word for text in texts for word in re.findall(r"[a-z']+", text)} for texts in plain
    )
    assert not train & heldout - FUNCTION_WORDS


@pytest.mark.parametrize("name", GRAMMARS)
def test_facts_are_whole_words(name):
    """No two are asked or stated alike; a value is cut alike where it is stated and where it is the
    answer."""
    grammar = GRAMMARS[name]
    for seed in SEEDS:
        count = 1 + seed % 8
        group = draw_facts(
            np.random.default_rng(seed), grammar, count, alike=(None, True, False)[seed % 3]
        )
        asked = {
            re.sub(rf"^ ({'|'.join(map(re.escape, grammar.asks))}) ", " ", f.question).lower()
            for f in group
        }
        openings, endings = (
            "|".join(map(re.escape, words)) for words in (grammar.openings, grammar.endings)
        )
        bare = (f.statement[0] + re.sub(rf" ({endings})$", "", f.statement[2]) for f in group)
        stated = {re.sub(rf"^ ({openings}) ", " ", words).lower() for words in bare}
        assert len(group) == len(asked) == len(stated) == count
        for fact, tokenizer in zip(group, [*TOKENIZERS.values()] * 4, strict=False):
            before, value, after = fact.statement
            assert value[0] == " "
            assert value.strip() == value[1:] != ""
            assert after[0] in ".,;) "
            for text in (before + value + after, fact.question + value):
                assert text[0] == " "
                assert "  " not in text
                assert not {"|", "{"} & {*text.replace(before, "")}
            ids = np.concatenate([tokenizer.encode(piece) for piece in fact.statement])
            assert tokenizer.decode(ids) == before + value + after


SENTENCES = (
    " Ships sail on.",
    " Who goes there?",
    " Nothing moved, and nobody spoke!",
    " It is so.",
    " We waited long",
)
WEIGHT = 7.0
both_tokenizers = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


def plain_row(tokenizer, length, seed=0, sentences=SENTENCES):
    """A row of `length` + 1 tokens of two documents, the second with its BOS."""
    rng = np.random.default_rng([seed, 1])
    text = tokenizer.encode(
        "".join(sentences[n] for n in rng.integers(len(sentences), size=2 * length))
    )
    cut = length // 3
    tokens = torch.from_numpy(
        np.concatenate([text[:cut], [tokenizer.bos_id], text[cut:]])[: length + 1]
    )
    return {"tokens": tokens, "segments": (torch.arange(length + 1) >= cut).long()}


def runs_of(row, weight):
    """(first token, token ids) of every stretch of tokens that count `weight`."""
    found = []
    at = (row["weights"] == weight).int().tolist()
    for n, (before, here) in enumerate(zip([0, *at], at, strict=False)):
        if here and not before:
            end = at.index(0, n) if 0 in at[n:] else len(at)
            found.append((n, row["tokens"][n:end].tolist()))
    return found


@pytest.fixture
def drawn(monkeypatch):
    """The facts of the last row."""
    last = []
    draw = rows.draw_facts

    def drawing(*arguments, **options):
        last[:] = draw(*arguments, **options)
        return list(last)

    monkeypatch.setattr(rows, "draw_facts", drawing)
    return last


@both_tokenizers
def test_only_answers_count(tokenizer, drawn):
    """Values count where they are asked for and not where they are stated."""
    counts = []
    for seed in range(40):
        row = facts_row(
            plain_row(tokenizer, 256, seed), np.random.default_rng(seed), tokenizer, WEIGHT
        )
        stated = [
            fact for fact in drawn if "".join(fact.statement) in tokenizer.decode(row["tokens"])
        ]
        assert stated == drawn[: len(stated)]  # as many as fit
        first = runs_of(row, 0.0)
        answers = runs_of(row, WEIGHT)
        assert len(first) - len(stated) in (0, 1)  # the number of an aside
        for at, ids in answers:
            before = tokenizer.decode(row["tokens"][:at])
            (fact,) = [
                f
                for f in stated
                if f.value == tokenizer.decode(ids) and before.endswith(f.question)
            ]
            assert tokenizer.decode(row["tokens"][at : at + len(ids) + 1]) == f"{fact.value}."
            assert before.count("".join(fact.statement)) == 1
            assert ids in [value for _, value in first]
        counts.append((len(stated), len(answers)))
    assert {stated for stated, _ in counts} >= {1, 2, 3, 4}
    assert (
        2 < sum(0 < answers < stated for stated, answers in counts) < 15
    )  # mostly all of them are asked for


@pytest.mark.slow
def test_rows_are_mixed_in():
    """Rows are mixed in at their shares and others left alone."""
    tokenizer = TOKENIZERS["bpe-1k"]
    mix = RowMix(facts=0.3, copies=0.2, weight=WEIGHT)
    counts = {"facts": 0, "copies": 0, "plain": 0}
    for index in range(300):
        plain = plain_row(tokenizer, 96, index)
        row = mix(plain, [0, 2, index], tokenizer)
        again = mix(plain, [0, 2, index], tokenizer)
        assert all(torch.equal(row[name], again[name]) for name in row)
        counts[
            "plain" if row is plain else "facts" if (row["weights"] == WEIGHT).any() else "copies"
        ] += 1
    assert 65 < counts["facts"] < 115, counts
    assert 40 < counts["copies"] < 80, counts
    assert RowMix()(plain, [0], tokenizer) is plain
    assert (RowMix(copies=1.0)(plain, [0], tokenizer)["weights"] <= 1).all()
