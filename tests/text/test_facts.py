"""Facts in words: what tells them apart, where their values stand, and that the two grammars have nothing in common."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from modalities.text.facts import GRAMMARS, HELDOUT, TRAIN, draw_facts, sentence_ends
from modalities.text.tokenizers import load_tokenizer

TOKENIZERS = {name: load_tokenizer(name) for name in ("bytes", "bpe-1k")}
SEEDS = range(60)
# Every sentence needs some of these; a wording is told from another by its other words.
FUNCTION_WORDS = {"did", "does", "how", "in", "is", "of", "the", "to", "what"}
FUNCTION_WORDS |= {"'s", "a", "about", "can", "that", "this", "was", "which", "with", "you"}


def words_of(*texts: str) -> set[str]:
    plain = (re.sub(r"\{\w+\}", " ", text).lower() for text in texts)
    return {word for text in plain for word in re.findall(r"[a-z']+", text)}


def test_the_grammars_share_nothing():
    """No entry of a list, and no content word of what is stated or asked."""
    for field in ("wordings", "nouns", "openings", "endings", "asks", "asides", "syllables", "words"):
        train, heldout = (set(getattr(grammar, field)) for grammar in (TRAIN, HELDOUT))
        assert train and heldout and not train & heldout, field
    assert not {n for kind in TRAIN.names for n in kind} & {n for kind in HELDOUT.names for n in kind}
    train, heldout = (words_of(*(text for pair in g.wordings for text in pair)) for g in (TRAIN, HELDOUT))
    assert not train & heldout - FUNCTION_WORDS


@pytest.mark.parametrize("name", GRAMMARS)
def test_facts_differ_and_their_pieces_are_whole_words(name):
    """No two are asked or stated alike; a value is cut alike where it is stated and where it is the answer."""
    grammar = GRAMMARS[name]
    for seed in SEEDS:
        count = 1 + seed % 8
        facts = draw_facts(np.random.default_rng(seed), grammar, count, alike=(None, True, False)[seed % 3])
        asked = {re.sub(rf"^ ({'|'.join(map(re.escape, grammar.asks))}) ", " ", f.question).lower() for f in facts}
        stated = {
            re.sub(rf"^ ({'|'.join(map(re.escape, grammar.openings))}) ", " ", f.statement[0]).lower() for f in facts
        }
        assert len(facts) == len(asked) == len(stated) == count
        for fact, tokenizer in zip(facts, [*TOKENIZERS.values()] * 4, strict=False):
            before, value, after = fact.statement
            assert value[0] == " " and value.strip() == value[1:] != "" and after[0] in ".,;) "
            for text in (before + value + after, fact.question + value):
                assert text[0] == " " and "  " not in text and not {"|", "{"} & {*text.replace(before, "")}
            ids = np.concatenate([tokenizer.encode(piece) for piece in fact.statement])
            assert tokenizer.decode(ids) == before + value + after


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("digits", r" \d{5}"), ("number", r" \d{2,8}"), ("letters", " [A-Z]{3,6}"), ("word", f" ({'|'.join(TRAIN.words)})")
    ],
)  # fmt: skip
def test_values_are_of_the_kind_asked_for(kind, form):
    facts = [fact for seed in SEEDS for fact in draw_facts(np.random.default_rng(seed), TRAIN, 2, value=kind)]
    assert all(re.fullmatch(form, fact.value) for fact in facts) and len({fact.value for fact in facts}) > 25


def test_more_facts_than_subjects_are_an_error():
    single = replace(HELDOUT, wordings=(("the {noun} is |.", "The {noun} is"),), nouns=("key", "code", "door"))
    assert len(draw_facts(np.random.default_rng(0), single, 3)) == 3
    with pytest.raises(ValueError, match=r"no 4 facts"):
        draw_facts(np.random.default_rng(0), single, 4)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_sentence_ends_are_where_the_text_before_ends_with_a_mark(kind):
    tokenizer = TOKENIZERS[kind]
    for text in (" Who? Me!  No. It is 3.5 metres", "No end; none, at all", "Wait... What?!\nAll is well."):
        ids = tokenizer.encode(text)
        ends = sentence_ends(ids, tokenizer).tolist()
        marked = [n for n in range(1, len(ids)) if tokenizer.decode(ids[:n])[-1] in ".?!"]
        assert set(ends) >= {0, len(ids), *marked} and ends == sorted(set(ends))
        rest = set(ends) - {0, len(ids), *marked}  # behind the space or line that a token has beside its mark
        assert all(tokenizer.decode(ids[:n]).rstrip()[-1] in ".?!" for n in rest)
