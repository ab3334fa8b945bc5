"""Facts in words: what tells them apart, where their values stand, and that the two grammars have nothing in common."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from modalities.text.facts import GRAMMARS, HELDOUT, TRAIN, Grammar, draw_facts, sentence_ends
from modalities.text.tokenizers import load_tokenizer

TOKENIZERS = {name: load_tokenizer(name) for name in ("bytes", "bpe-1k")}
SEEDS = range(150)
# Every sentence needs some of these; a wording is told from another by its other words.
FUNCTION_WORDS = {"did", "does", "how", "in", "is", "of", "the", "to", "what"}


def words_of(*texts: str) -> set[str]:
    plain = (re.sub(r"\{\w+\}", " ", text).lower() for text in texts)
    return {word for text in plain for word in re.findall(r"[a-z']+", text)}


def names(grammar: Grammar) -> list[str]:
    return [name for kind in grammar.names for name in kind]


# ---- the grammars ----


def test_the_grammars_share_no_entry():
    invented = {name: grammar.invented for name, grammar in GRAMMARS.items()}
    assert invented == {"train": 0, "invented": 1, "heldout": 0, "paraphrased": 0, "train_paraphrased": 0}
    listed = {replace(grammar, invented=0, paraphrased=0) for grammar in GRAMMARS.values()}
    assert listed == {replace(TRAIN, invented=0), HELDOUT}
    assert not set(names(TRAIN)) & set(names(HELDOUT))
    for field in (
        "wordings", "nouns", "openings", "endings", "asks", "asides", "syllables", "words", "questions", "turned"
    ):  # fmt: skip
        both = [getattr(grammar, field) for grammar in (TRAIN, HELDOUT)]
        assert not set(both[0]) & set(both[1]), field
        assert all(len(set(entries)) == len(entries) > 0 for entries in both), field


def test_the_grammars_wordings_share_no_content_word():
    first, second = ({text for pair in grammar.wordings for text in pair} for grammar in (TRAIN, HELDOUT))
    assert words_of(*first) & words_of(*second) <= FUNCTION_WORDS
    assert len(words_of(*second) - FUNCTION_WORDS) > 15


def test_held_out_questions_share_no_content_word_with_what_training_says():
    said = words_of(*(text for pair in TRAIN.wordings for text in pair), *TRAIN.questions, *TRAIN.turned)
    said |= words_of(*TRAIN.openings, *TRAIN.endings, *TRAIN.asks, *TRAIN.asides)
    asked = words_of(*HELDOUT.questions, *HELDOUT.turned)
    assert said & asked <= FUNCTION_WORDS | {"'s", "a", "about", "can", "that", "this", "was", "which", "with", "you"}
    assert len(asked - said) > 25
    assert not words_of(*TRAIN.questions, *TRAIN.turned) & words_of(*names(HELDOUT), *HELDOUT.nouns, *HELDOUT.words)


def test_a_paraphrased_question_repeats_the_subject_alone():
    grammar, first, turned = GRAMMARS["paraphrased"], 0, 0
    stems = {word for pair in HELDOUT.wordings for word in words_of(pair[0])}
    for seed in SEEDS:
        for fact in draw_facts(np.random.default_rng(seed), grammar, 3, alike=True):
            asked = words_of(fact.question) & stems - FUNCTION_WORDS - words_of(*HELDOUT.nouns, *names(HELDOUT))
            assert asked <= {"s", "'s", "that", "you", "your", "with", "must"}, fact
            turned += not re.search(r"\w", fact.statement[0]) or fact.statement[2].count(" ") > 2
            first += 1
    assert 0.3 < turned / first < 0.8


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_question_leads_up_to_the_value_as_its_statement_does(name):
    for statement, question in GRAMMARS[name].wordings:
        before, _ = statement.split("|")
        short = question.endswith(("? Answer:", "? It is"))
        assert short or question.lower().endswith(before.rstrip().lower()), (statement, question)
        assert set(re.findall(r"\{\w+\}", question)) <= set(re.findall(r"\{\w+\}", statement))
        assert "{name}" in question or "{noun}" in question
    assert all(aside.count("|") == 1 for aside in GRAMMARS[name].asides)


# ---- facts ----


@pytest.mark.parametrize("alike", [None, True, False])
@pytest.mark.parametrize("name", GRAMMARS)
def test_no_two_facts_are_asked_or_stated_alike(name, alike):
    grammar = GRAMMARS[name]
    for seed in SEEDS:
        count = 1 + seed % 8
        facts = draw_facts(np.random.default_rng(seed), grammar, count, alike=alike)
        asked = {re.sub(rf"^ ({'|'.join(map(re.escape, grammar.asks))}) ", " ", f.question).lower() for f in facts}
        stated = {
            re.sub(rf"^ ({'|'.join(map(re.escape, grammar.openings))}) ", " ", f.statement[0]).lower()
            + (f.statement[2] if grammar.paraphrased else "")
            for f in facts
        }
        assert len(facts) == len(asked) == len(stated) == count


@pytest.mark.parametrize("name", [name for name in GRAMMARS if not GRAMMARS[name].paraphrased])
def test_facts_alike_differ_in_their_subject_alone(name):
    grammar = GRAMMARS[name]
    for seed in SEEDS:
        facts = draw_facts(np.random.default_rng(seed), grammar, 4, alike=True)
        assert len({fact.statement[2] for fact in facts}) == 1
        leads = [fact.statement[0] for fact in facts]
        ends = [any(fact.question.endswith(end) for end in ("Answer:", "It is")) for fact in facts]
        assert len(set(ends)) == 1
        subjects = words_of(*names(grammar), *grammar.nouns, *grammar.frame_words)
        invented = rf"({'|'.join(grammar.syllables)}){{1,4}}|[a-z]{{1,3}}"
        for lead in leads[1:]:
            apart = words_of(lead) ^ words_of(leads[0])
            for word in (word.removesuffix("'s") for word in apart):
                assert word in subjects or re.fullmatch(invented, word), (leads, word)
    mixed = [draw_facts(np.random.default_rng(seed), grammar, 4, alike=False) for seed in SEEDS]
    assert any(len({fact.statement[2] for fact in facts}) > 1 for facts in mixed)


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@pytest.mark.parametrize("name", GRAMMARS)
def test_pieces_are_whole_words_behind_a_space(name, tokenizer):
    for seed in SEEDS:
        for fact in draw_facts(np.random.default_rng(seed), GRAMMARS[name], 3):
            before, value, after = fact.statement
            assert fact.value == value and value[0] == " " and value.strip() == value[1:] != ""
            for said in filter(None, (before, fact.question)):
                assert said[0] == " " and said[1] != " " and not said[-1].isspace() and not {"|", "{"} & {*said}
            assert after[0] in ".,;) " and after == after.rstrip()
            for text in (before + value + after, fact.question + value):
                assert "  " not in text
            ids = np.concatenate([tokenizer.encode(piece) for piece in (before, value, after)])
            assert tokenizer.decode(ids) == before + value + after
            assert tokenizer.decode(tokenizer.encode(value)) == value


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("digits", r" \d{5}"), ("number", r" \d{2,8}"), ("letters", " [A-Z]{3,6}"), ("word", f" ({'|'.join(TRAIN.words)})")
    ],
)  # fmt: skip
def test_values_are_of_the_kind_asked_for(kind, form):
    facts = [fact for seed in SEEDS for fact in draw_facts(np.random.default_rng(seed), TRAIN, 2, value=kind)]
    assert all(re.fullmatch(form, fact.value) for fact in facts)
    assert len({fact.value for fact in facts}) > 25
    if kind == "digits":
        assert any(fact.value.startswith(" 0") for fact in facts)


def test_invented_wordings_are_of_training_alone():
    def listed(grammar, fact):
        subject = r"[\w -]+"
        forms = (re.escape(s).replace(r"\{name\}", subject).replace(r"\{noun\}", subject) for s, _ in grammar.wordings)
        return any(re.search(form.split(r"\|")[0].rstrip("\\ "), fact.statement[0], re.I) for form in forms)

    for grammar, least, most in ((TRAIN, len(SEEDS) // 2, len(SEEDS) - 10), (HELDOUT, 0, 0)):
        facts = [draw_facts(np.random.default_rng(seed), grammar, 1)[0] for seed in SEEDS]
        frames = set(grammar.frame_words)
        invented = [fact for fact in facts if frames and not listed(grammar, fact)]
        assert least <= len(invented) <= most
        for fact in invented:  # a question repeats the words around the name
            opening = max((o for o in grammar.openings if fact.statement[0].startswith(f" {o}")), key=len, default="")
            lead = fact.statement[0].removeprefix(f" {opening}").strip().lower()
            assert fact.question.lower().endswith(lead)
        assert not invented or sum(bool(frames & words_of(fact.statement[0].lower())) for fact in invented) >= least


def test_more_facts_than_subjects_are_an_error():
    single = replace(HELDOUT, wordings=(("the {noun} is |.", "The {noun} is"),), nouns=("key", "code", "door"))
    for alike in (True, False):
        assert len(draw_facts(np.random.default_rng(0), single, 3, alike=alike)) == 3
        with pytest.raises(ValueError, match=r"no 4 facts"):
            draw_facts(np.random.default_rng(0), single, 4, alike=alike)


# ---- where sentences end ----


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@pytest.mark.parametrize(
    "text", [" Who? Me!  No. It is 3.5 metres", "No end; none, at all", "Wait... What?!\nAll is well."]
)
def test_sentence_ends_are_where_the_text_before_ends_with_a_mark(tokenizer, text):
    ids = tokenizer.encode(text)
    found = sentence_ends(ids, tokenizer).tolist()
    marked = [n for n in range(1, len(ids)) if tokenizer.decode(ids[:n])[-1] in ".?!"]
    assert set(found) >= {0, len(ids), *marked} and found == sorted(set(found))
    rest = set(found) - {0, len(ids), *marked}  # behind the space or line that a token has beside its mark
    assert all(tokenizer.decode(ids[:n]).rstrip()[-1] in ".?!" for n in rest)
