"""Retrieval prompts: a value is stated somewhere in a haystack, and asked for at the end.

    [BOS] hay … statement … hay … other statements … hay … question      → answer

A *template* gives the words, a *haystack* what they stand in. Templates:

    own      "The pass key is 48213. Remember it."; asked "What is the pass key? The pass key is"
    heldout  facts of the held-out grammar of `modalities.text.facts`; training facts have other
             names and wordings
    train    the same of the training grammar: its names, and wordings of its list
    wide     wordings of the wide training grammar; half of the values are prices, times, dates,
             codes and the like
    other    the same in twenty other wordings, and other kinds of value; nine do not end in the
             words before the value
    bam      the passkey prompt as BAM's evaluation builds it (arXiv 2505.22842): no BOS, whole
             repetitions of the filler, a key of six digits without a leading 0, the first of which
             the prompt gives away

With the statement stand `facts` − 1 further facts, which differ from the one asked for in their
subject. Haystacks: sentences of our "own", the "grass" of the published prompts, "text" of held-out
documents. Statements stand between sentences. Hay is cut to the token, so that prompt and answer
together have exactly the length asked for (bam: a prompt of at most that).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from modalities.loading import fingerprint_of
from modalities.settings import check_choice
from modalities.text.facts import (
    GRAMMARS,
    Grammar,
    Sentence,
    draw_digits,
    draw_facts,
    insert,
    pick,
    sentence_ends,
)
from modalities.tokenizers.encoding import Tokenizer

TEMPLATES = ("own", "heldout", "train", "wide", "other", "bam")
HAYSTACKS = ("own", "grass", "text")

OWN = (
    " The river runs slow. A lamp is lit in the barn. The hills are far away. We walk on and rest "
    "at noon. Rain falls on the old road. The mill wheel turns again."
)
GRASS = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
QUESTION = "What is the pass key? The pass key is"
# Draws of words that fit.
TRIES = 20
# Trigrams of tokens in the middle of a passage.
NEAR = 30


@dataclass(frozen=True, eq=False)
class Haystack:
    """What statements are hidden in: tokens of documents, or of one text that repeats (`loop`)."""

    texts: tuple[np.ndarray, ...]
    loop: bool = False

    def draw(self, count: int, rng: np.random.Generator, tokenizer: Tokenizer) -> np.ndarray:
        """A random stretch of `count` tokens of one document, else of several; of a loop it begins
        with a sentence."""
        if self.loop:
            starts = sentence_ends(self.texts[0], tokenizer)[:-1]
            return self.repeat(count, int(pick(rng, starts)))
        long_texts = [text for text in self.texts if len(text) >= count]
        if long_texts:
            text = pick(rng, long_texts)
            start = int(rng.integers(len(text) - count + 1))
            return text[start : start + count]
        parts: list[np.ndarray] = []
        while sum(map(len, parts)) < count:
            parts.append(pick(rng, self.texts))
        return np.concatenate(parts)[:count]

    @property
    def fingerprint(self) -> str:
        content = []
        for text in self.texts:
            content.append(len(text).to_bytes(8, "little"))
            content.append(text.astype("<i8").tobytes())
        content.append(bytes([self.loop]))
        return fingerprint_of(content)

    def repeat(self, count: int, start: int = 0) -> np.ndarray:
        """`count` tokens of a loop from its token `start` on."""
        return self.texts[0][np.arange(start, start + count) % len(self.texts[0])]


def default_haystack(template: str) -> str:
    """The name of the haystack that belongs to a template."""
    return {"bam": "grass", "own": "own"}.get(template, "text")


def open_haystack(
    name: str, tokenizer: Tokenizer, documents: Sequence[np.ndarray] = ()
) -> Haystack:
    """A haystack by name: "own", "grass" or "text" (`documents`, in tokens).

    ValueError for another, or without text.
    """
    check_choice("filler", name, HAYSTACKS)
    if name != "text":
        sentences = OWN if name == "own" else GRASS
        return Haystack((tokenizer.encode(sentences),), loop=True)
    texts = tuple(text for text in documents if len(text))
    if not texts:
        raise ValueError(f"filler {name!r} has no text")
    return Haystack(texts)


class Prompt(NamedTuple):
    """Tokens, int64, of a prompt and its answer.

    wording, value_kind: as in `Fact`; "" where a template has one.
    question_length: tokens of the question, at the prompt's end.
    """

    tokens: np.ndarray
    answer: np.ndarray
    wording: str
    value_kind: str
    question_length: int

    def passage(self, length: int) -> Self:
        """The prompt of `length` tokens with its answer: its first token, a passage, the question.

        The passage surrounds the `NEAR` trigrams with the greatest Σ 1/count over those of the
        question. Raises ValueError for a length without room.
        """
        text = self.tokens[1 : -self.question_length]
        question = self.tokens[-self.question_length :]
        room = length - 1 - len(question) - len(self.answer)
        if len(text) <= room:
            return self
        if room < NEAR + 2:
            raise ValueError(
                f"length {length} is too short for a passage: all else takes {length - room} tokens"
            )
        trigrams = _trigrams(text)
        _, kinds, counts = np.unique(trigrams, return_inverse=True, return_counts=True)
        rarity = np.isin(trigrams, _trigrams(question)) / counts[kinds]
        middle = int(np.convolve(rarity, np.ones(NEAR), "valid").argmax()) + NEAR // 2
        start = min(max(middle - room // 2, 0), len(text) - room)
        passage = text[start : start + room]
        return self._replace(tokens=np.concatenate([self.tokens[:1], passage, question]))


def _trigrams(ids: np.ndarray) -> np.ndarray:
    """(N − 2,) a number for each three tokens in a row; ids have at most 20 bits."""
    return sliding_window_view(ids, 3) @ (1 << np.array([40, 20, 0]))


@dataclass(frozen=True)
class Template:
    """What is stated and asked.

    facts: how many are stated, one of which is asked for; only the grammars have more than one.
    """

    name: str = "own"
    facts: int = 1

    def __post_init__(self) -> None:
        check_choice("template", self.name, TEMPLATES)
        if self.facts < 1:
            raise ValueError(f"facts must be at least 1, got {self.facts}")
        template = f"template {self.name!r}"
        grammars = ", ".join(GRAMMARS)
        if self.facts > 1 and self.grammar is None:
            raise ValueError(
                f"{template} states one fact, got facts={self.facts}: {grammars} state several"
            )

    @property
    def grammar(self) -> Grammar | None:
        return GRAMMARS.get(self.name)

    def draw(
        self,
        length: int,
        depth: float,
        rng: np.random.Generator,
        tokenizer: Tokenizer,
        haystack: Haystack,
    ) -> Prompt:
        """A prompt of `length` tokens with its answer; ValueError where the words alone take more.

        depth: share of the hay before the statement, to the nearest sentence's end.
        """
        first = tokenizer.encode(TASK) if self.name == "bam" else np.array([tokenizer.bos_id])
        least = math.inf
        for _ in range(TRIES):
            sentences, question_parts, kinds = self._draw_words(rng)
            statements = [_encode(sentence, tokenizer) for sentence in sentences]
            question = _encode(question_parts[:-1], tokenizer)
            answer = tokenizer.encode(question_parts[-1])
            word_tokens = sum(map(len, [first, *statements, question]))
            if self.name != "bam":
                word_tokens += len(answer)
            if word_tokens <= length:
                break
            least = min(least, word_tokens)
        else:
            words = f"template {self.name!r} with facts={self.facts}"
            raise ValueError(
                f"length {length} is too short for {words}: its words take {least} tokens"
            )
        hay, place, free = self._lay_hay(length - word_tokens, depth, rng, tokenizer, haystack)
        places = [place] + [int(pick(rng, free)) for _ in statements[1:]]
        parts = list(zip(places, statements, strict=True))
        # At one place statements stand in random order.
        parts.sort(key=lambda part: (part[0], rng.random()))
        prompt = np.concatenate([first, *insert(hay, parts), question])
        return Prompt(prompt.astype(np.int64), answer.astype(np.int64), *kinds, len(question))

    def _lay_hay(
        self,
        count: int,
        depth: float,
        rng: np.random.Generator,
        tokenizer: Tokenizer,
        haystack: Haystack,
    ) -> tuple[np.ndarray, int, np.ndarray]:
        """Hay of `count` tokens (bam: at most), where in it the statement stands, and where others
        may stand."""
        if haystack.loop and self.name == "bam":
            unit = len(haystack.texts[0])
            repetitions = count // unit
            hay = haystack.repeat(repetitions * unit)
            return hay, int(depth * repetitions) * unit, np.arange(repetitions + 1) * unit
        hay = haystack.draw(count, rng, tokenizer)
        ends = sentence_ends(hay, tokenizer)
        return hay, _nearest(ends, depth * count), ends

    def _draw_words(
        self, rng: np.random.Generator
    ) -> tuple[list[Sentence], Sentence, tuple[str, str]]:
        """(statements, the question for the first of them with its answer, its wording and kind of
        value)."""
        if self.grammar is not None:
            value_kind = "digits"
            if self.grammar.patterns and rng.random() < 0.5:
                value_kind = pick(rng, self.grammar.patterns)
            facts = draw_facts(rng, self.grammar, self.facts, value_kind=value_kind, alike=True)
            statements = [fact.statement for fact in facts]
            target = facts[0]
            return statements, (target.question, target.value), (target.wording, value_kind)
        if self.name == "own":
            key = " " + draw_digits(rng)
            return [(" The pass key is", key, ". Remember it.")], (" " + QUESTION, key), ("", "")
        # Tokenizers of BAM's kind put the space themselves.
        key = str(rng.integers(100000, 1000000))
        statement = f" The pass key is {key}. Remember it. {key} is the pass key."
        return [(statement,)], (" " + QUESTION, f" {key[0]}", key[1:]), ("", "")


@dataclass(frozen=True)
class StatedFact:
    """A fact in a text, which has `end` tokens up to the end of its statement; the answer does not
    begin with a space alone."""

    end: int
    question: np.ndarray
    answer: np.ndarray


def state_facts(
    text: np.ndarray, length: int, count: int, rng: np.random.Generator, tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray, list[StatedFact]]:
    """(BOS and the first tokens of `text`, int64, in which `count` facts stand; which tokens are
    the text's; the facts).

    Facts are of the held-out grammar, alike, at even depths from the start to the end, between
    sentences. All this, any question and its answer have `length` tokens; ValueError where words
    alone take as many.
    """
    facts = draw_facts(rng, GRAMMARS["heldout"], count, value_kind="digits", alike=True)
    statements = [_encode(fact.statement, tokenizer) for fact in facts]
    pairs = []
    for fact in facts:
        question = tokenizer.encode(fact.question)
        answer = tokenizer.encode(fact.value)
        # A token that is a space alone belongs to the question.
        spaces = 0 if tokenizer.decode(answer[:1]).strip() else 1
        pairs.append((np.concatenate([question, answer[:spaces]]), answer[spaces:]))
    longest_pair = max(len(question) + len(answer) for question, answer in pairs)
    # With BOS.
    word_tokens = 1 + sum(map(len, statements)) + longest_pair
    if word_tokens >= length:
        raise ValueError(
            f"length {length} is too short for {count} facts: their words take {word_tokens} tokens"
        )
    hay = text[: length - word_tokens]
    ends = sentence_ends(hay, tokenizer)
    places = [_nearest(ends, depth) for depth in np.linspace(0, len(hay), count)]
    # BOS, then hay and statements by turns.
    pieces = [np.array([tokenizer.bos_id])]
    pieces += insert(hay, list(zip(places, statements, strict=True)))
    is_hay = [np.full(len(piece), n % 2 == 1) for n, piece in enumerate(pieces)]
    statement_ends = np.cumsum([len(piece) for piece in pieces])[2::2].tolist()
    stated_facts = [StatedFact(end, *pair) for end, pair in zip(statement_ends, pairs, strict=True)]
    return np.concatenate(pieces).astype(np.int64), np.concatenate(is_hay), stated_facts


def _nearest(places: np.ndarray, place: float) -> int:
    """The one of `places` that is nearest to a place; the first of two."""
    return int(places[np.abs(places - place).argmin()])


def _encode(sentence: Sentence, tokenizer: Tokenizer) -> np.ndarray:
    return np.concatenate([tokenizer.encode(piece) for piece in sentence])
