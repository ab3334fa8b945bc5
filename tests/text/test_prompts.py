"""Prompts: exact lengths, the statement where it belongs, the published texts to the letter, and
what errors name."""

from __future__ import annotations

import hashlib
import re

import numpy as np
import pytest

from modalities.text.data import open_heldout
from modalities.text.facts import GRAMMARS
from modalities.text.prompts import TEMPLATES, Template, open_haystack, state_facts
from modalities.text.tokenizers import load_tokenizer
from tests.refusals import refuses

TOKENIZERS = {name: load_tokenizer(name) for name in ("bytes", "bpe-1k")}


def opened(name, tokenizer):
    if name == "text":
        return open_haystack(
            "text",
            tokenizer,
            [d.tokens for d in open_heldout("sotu-excerpt", tokenizer.name).items],
        )
    return open_haystack(name, tokenizer)


def draw(template, length, depth, seed, tokenizer, haystack):
    return template.draw(length, depth, np.random.default_rng(seed), tokenizer, haystack)[:2]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_facts_fill_length(kind):
    """At even depths, in their order, between the text's own tokens; the longest question and its
    answer fill the length."""
    tokenizer = TOKENIZERS[kind]
    hay = opened("text", TOKENIZERS[kind]).texts[0]
    text, own, facts = state_facts(hay, 2500, 4, np.random.default_rng(4), tokenizer)
    assert len(text) + max(len(fact.question) + len(fact.answer) for fact in facts) == 2500
    assert text[0] == tokenizer.bos_id
    assert text[own].tolist() == hay[: own.sum()].tolist()
    for number, fact in enumerate(facts):
        before = tokenizer.decode(text[: fact.end])
        assert tokenizer.decode(fact.answer).strip() in before[-60:]
        assert len(tokenizer.decode(fact.question)) > 9
        assert fact.end / len(text) == pytest.approx(number / 3, abs=0.12)
    with pytest.raises(
        ValueError, match=r"length 60 is too short for 4 facts: their words take \d+ tokens"
    ):
        state_facts(hay, 60, 4, np.random.default_rng(4), tokenizer)


def test_passage_holds_statement():
    """A passage holds the statement and the question."""
    tokenizer = TOKENIZERS["bpe-1k"]
    for depth in (0.0, 0.3, 1.0):
        prompt = Template("heldout", 5).draw(
            3000, depth, np.random.default_rng(3), tokenizer, opened("text", tokenizer)
        )
        passage = prompt.passage(256)
        size = prompt.question_length
        assert len(passage.tokens) + len(passage.answer) == 256
        assert prompt.passage(4000) is prompt
        assert passage.tokens[0] == tokenizer.bos_id
        assert (passage.tokens[-size:] == prompt.tokens[-size:]).all()
        assert tokenizer.decode(prompt.answer) in tokenizer.decode(passage.tokens[1:-size])
    refuses("length 32 is too short for a passage", prompt.passage, 32)


PINNED = {
    "own": "d1150092",
    "heldout": "eca50586",
    "train": "f54b4eb8",
    "wide": "e2622e1e",
    "other": "822d5694",
}
PINNED |= {"bam": "8bd9da99"}


def test_prompts_are_pinned():
    """A change here is a new version of the evaluators that use prompts."""
    digests = {}
    tokenizer = TOKENIZERS["bytes"]
    for name in TEMPLATES:
        template = Template(name, 3 if name in GRAMMARS else 1)
        digest = hashlib.blake2b(digest_size=4)
        for hay in ("own", "grass"):
            for side in draw(template, 700, 0.4, 7, tokenizer, opened(hay, tokenizer)):
                digest.update(side.tobytes())
        digests[name] = digest.hexdigest()
    assert digests == PINNED


@pytest.mark.parametrize(("name", "facts"), [("own", 1), ("heldout", 5), ("bam", 1)])
def test_short_length_names_need(name, facts):
    """Too short a length names what is needed."""
    tokenizer = TOKENIZERS["bpe-1k"]
    template = Template(name, facts)
    haystack = opened("own", tokenizer)
    words = rf"length 10 .*'{name}'.*facts={facts}: .*\d+ tokens"
    least = int(
        re.search(
            r"take (\d+) tokens", refuses(words, draw, template, 10, 0.5, 1, tokenizer, haystack)
        )[1]
    )
    prompt, answer = draw(
        template, least, 0.5, 1, tokenizer, haystack
    )  # what the error says is enough
    assert len(prompt) + (0 if name == "bam" else len(answer)) == least


def test_haystacks_that_cannot_be_opened():
    tokenizer = TOKENIZERS["bytes"]
    refuses(r"'gras'.*'grass'", open_haystack, "gras", tokenizer)
    refuses("'text' has no text", open_haystack, "text", tokenizer, [tokenizer.encode("")])
