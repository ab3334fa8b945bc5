"""Facts in words, and questions for them, drawn from a grammar (`assets/grammars.toml` has two that share nothing).

    " The door code of Anna is 48213."      " What is the door code of Anna? The door code of Anna is" → " 48213"

A fact is a subject and a random value. Wordings are of a list, or invented of random words and words of the surrounding text.
"""

from __future__ import annotations

import math
import tomllib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from modalities.loading import fingerprint_of
from modalities.text.tokenizers import Tokenizer

T = TypeVar("T")
Sentence = tuple[str, ...]  # pieces that are tokenised one by one: a value is cut alike wherever it stands
TRIES = 50  # draws of a subject that is not taken yet


def pick(rng: np.random.Generator, options: Sequence[T] | np.ndarray) -> T:
    """One of `options`, all equally likely."""
    return options[int(rng.integers(len(options)))]


@dataclass(frozen=True)
class Fact:
    """One fact in words: the statement is (before, value, after); the question leads up to the value."""

    statement: Sentence
    question: str

    @property
    def value(self) -> str:
        return self.statement[1]


@dataclass(frozen=True)
class Grammar:
    """Wordings, and the words that fill them.

    Attributes:
        wordings: (statement, question) with "{name}", "{noun}" and, in the statement, "|" for the value.
        names: lists of names, a kind each.  nouns: what has a value.  words: values that are words.
        openings, endings, asks: said before a statement, behind it, before a question.
        asides: sentences with a number of no interest at "|".
        codes, syllables: of names made of letters and a number, and of invented names.
        frame_words, frame_marks: of invented wordings, which are a share `invented` of all, and of names.
    """

    wordings: tuple[tuple[str, str], ...]
    names: tuple[tuple[str, ...], ...]
    nouns: tuple[str, ...]
    openings: tuple[str, ...]
    endings: tuple[str, ...]
    asks: tuple[str, ...]
    asides: tuple[str, ...]
    codes: tuple[str, ...]
    syllables: tuple[str, ...]
    words: tuple[str, ...]
    frame_words: tuple[str, ...] = ()
    frame_marks: tuple[str, ...] = ()
    invented: float = 0.0

    def draw_name(self, rng: np.random.Generator, kind: int, text: Sequence[str]) -> str:
        """A name of a list; of the kinds after them an invented one, a code, or two words."""
        if kind < len(self.names):
            return pick(rng, self.names[kind])
        kind -= len(self.names)
        if kind == 0:
            return self.invent(rng, 2, 3).capitalize() + (f" {self.invent(rng, 1, 3)}" if rng.random() < 0.3 else "")
        if kind <= len(self.codes):
            letters, number = draw_letters(rng, int(rng.integers(1, 4))), rng.integers(1, 1000)
            return self.codes[kind - 1].format(letters=letters, number=number)
        return f"{self.draw_word(rng, text)} {self.draw_word(rng, text)}"

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that change with the words and with how facts are drawn from them."""
        text = self.frame_words[:9]
        drawn = (repr(draw_facts(np.random.default_rng(seed), self, 3, text=text)).encode() for seed in range(64))
        return fingerprint_of(drawn)

    @cached_property
    def vocabulary(self) -> frozenset[str]:
        filling = (*(name for kind in self.names for name in kind), *self.nouns, *self.words)
        return frozenset(word for entry in filling for word in entry.lower().split())

    def invent(self, rng: np.random.Generator, least: int, most: int) -> str:
        """A word of so many syllables."""
        return "".join(pick(rng, self.syllables) for _ in range(int(rng.integers(least, most + 1))))

    def subjects(self, wording: tuple[str, str], kind: int) -> float:
        """How many subjects of a kind a wording tells apart; inf where names are invented."""
        if "{name}" not in wording[1]:
            return len(self.nouns)
        return len(self.names[kind]) if kind < len(self.names) else math.inf

    def draw_kind(self, rng: np.random.Generator) -> int:
        """A kind of name: half of them are of no list."""
        listed, codes = len(self.names), len(self.codes)
        if rng.random() < 0.5:
            return int(rng.integers(listed))
        unlisted = [range(1), range(1, 1 + codes), *([range(1 + codes, 2 + codes)] if self.frame_words else [])]
        return listed + pick(rng, pick(rng, unlisted))

    def draw_word(self, rng: np.random.Generator, text: Sequence[str]) -> str:
        """A word of the text, of the list, or an invented one."""
        drawn = rng.random()
        if drawn < 0.25:
            return self.invent(rng, 2, 4)
        return pick(rng, text if len(text) and drawn < 0.7 else self.frame_words)

    def draw_wording(self, rng: np.random.Generator, text: Sequence[str]) -> tuple[str, str]:
        """A wording of the list, or an invented one."""
        invented = bool(self.invented) and rng.random() <= self.invented
        return self.invent_wording(rng, text) if invented else pick(rng, self.wordings)

    def invent_wording(self, rng: np.random.Generator, text: Sequence[str]) -> tuple[str, str]:
        """Random words around the name, repeated by the question."""
        words = [self.draw_word(rng, text) for _ in range(int(rng.integers(1, 5)))]
        words.insert(int(rng.integers(len(words) + 1)), "{name}")
        frame = words[0]
        for word in words[1:]:
            mark = pick(rng, self.frame_marks) if rng.random() < 0.15 else ""
            frame += (pick(rng, (f"{mark} ", f" {mark} ", mark)) if mark else " ") + word
        frame += pick(rng, ("", "", "", ":", " =", " is", ",", f" {pick(rng, self.frame_marks)}"))
        lead = f"{self.draw_word(rng, text)} {self.draw_word(rng, text)} {{name}}? " if rng.random() < 0.3 else ""
        return frame + pick(rng, (" |.", " |,", " |;", f" | {self.draw_word(rng, text)}.")), lead + frame


def _grammar(wordings: list[list[str]], invented: float = 0.0, **lists: str | list[str]) -> Grammar:
    """A grammar of the file, whose names are people, adjectives with things, and places."""
    words: dict[str, Any] = {
        name: tuple(entry.split() if isinstance(entry, str) else entry) for name, entry in lists.items()
    }
    people, adjectives, things, places = (words.pop(name) for name in ("people", "adjectives", "things", "places"))
    phrases = tuple(f"{adjective} {thing}" for adjective in adjectives for thing in things)
    pairs = tuple((statement, question) for statement, question in wordings)
    return Grammar(pairs, (people, phrases, places), **words, invented=invented)


_TABLES = tomllib.loads((Path(__file__).parent / "assets" / "grammars.toml").read_text(encoding="utf-8"))
TRAIN, HELDOUT = (_grammar(**table) for table in _TABLES.values())

# Of prompts; rows of training are drawn from TRAIN itself.
GRAMMARS = {
    "train": replace(TRAIN, invented=0.0),
    "invented": replace(TRAIN, invented=1.0),
    "heldout": HELDOUT,
}


def draw_letters(rng: np.random.Generator, count: int) -> str:
    return "".join(chr(65 + int(letter)) for letter in rng.integers(0, 26, size=count))


def draw_digits(rng: np.random.Generator, count: int = 5) -> str:
    return "".join(str(digit) for digit in rng.integers(0, 10, size=count))


VALUES: dict[str, Callable[[np.random.Generator, Grammar], str]] = {
    "digits": lambda rng, grammar: draw_digits(rng),
    "number": lambda rng, grammar: draw_digits(rng, int(rng.integers(2, 9))),
    "letters": lambda rng, grammar: draw_letters(rng, int(rng.integers(3, 7))),
    "word": lambda rng, grammar: pick(rng, grammar.words),
}


def draw_facts(
    rng: np.random.Generator,
    grammar: Grammar,
    count: int,
    *,
    value: str | None = None,
    alike: bool | None = None,
    text: Sequence[str] = (),
) -> list[Fact]:
    """`count` facts about different subjects.

    Args:
        value: what all values are, of VALUES; drawn where None.
        alike: all in one wording and of one kind of name, so that only names (or nouns) tell them apart; drawn where None.
        text: words that invented wordings and names may have.

    Raises ValueError for more facts than the grammar has subjects.
    """
    alike = bool(rng.random() < 0.75) if alike is None else alike
    by_noun = bool(rng.random() < 0.3) and count <= len(grammar.nouns) // 2  # one name that has several nouns
    draw_value = VALUES[value or pick(rng, ("digits", "number", "number", "letters", "word"))]
    facts: list[Fact] = []
    taken: set[str] = set()  # questions, and statements up to the value: two wordings may state alike
    for _ in range(TRIES * count):
        if not facts or not alike:
            for _ in range(TRIES):
                wording, kind = grammar.draw_wording(rng, text), grammar.draw_kind(rng)
                if not alike or grammar.subjects(wording, kind) >= 2 * count:
                    break
            noun, name = pick(rng, grammar.nouns), grammar.draw_name(rng, kind, text)
            opening, ending, ask = (
                pick(rng, said) if rng.random() < 0.4 else ""
                for said in (grammar.openings, grammar.endings, grammar.asks)
            )
        if "{name}" not in wording[1] or (by_noun and "{noun}" in wording[1]):
            noun = pick(rng, grammar.nouns)
        else:
            name = grammar.draw_name(rng, kind, text)
        stated, question = (words.format(name=name, noun=noun) for words in wording)
        before, after = stated.split("|")
        lead = wording[0].partition("|")[0]
        complete = all(word in lead for word in ("{name}", "{noun}") if word in wording[1])
        subject = before if complete else stated  # what tells the statement from others
        if {question, subject} & taken:
            continue
        taken |= {question, subject}
        statement = (_sentence(opening, before), " " + draw_value(rng, grammar), f"{after} {ending}".rstrip())
        facts.append(Fact(statement, _sentence(ask, question)))
        if len(facts) == count:
            return facts
    raise ValueError(f"the grammar has no {count} facts to tell apart")


def fill_aside(aside: str, rng: np.random.Generator) -> Sentence:
    """An aside with five digits at its "|"."""
    before, after = aside.split("|")
    return " " + before.rstrip(), " " + draw_digits(rng), after


def _sentence(opening: str, words: str) -> str:
    """With a space before it: the opening as it is, or a capital."""
    return (f" {opening} {words}" if opening else f" {words[:1].upper()}{words[1:]}").rstrip()


_ENDS: weakref.WeakKeyDictionary[Tokenizer, np.ndarray] = weakref.WeakKeyDictionary()


def sentence_ends(ids: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """The places n, 0 and the end among them, at which ids[:n] ends with a token that ends a sentence."""
    if tokenizer not in _ENDS:
        texts = (tokenizer.decode([token]).rstrip() for token in range(tokenizer.vocab_size))
        _ENDS[tokenizer] = np.array([text.endswith((".", "?", "!")) for text in texts])
    return np.unique(np.concatenate([[0], np.flatnonzero(_ENDS[tokenizer][ids]) + 1, [len(ids)]]))
