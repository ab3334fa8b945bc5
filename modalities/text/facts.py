"""Facts in words, and questions for them, drawn from a grammar (grammars.py has two that share no name, noun or wording).

    " The door code of Anna is 48213."      " What is the door code of Anna? The door code of Anna is" → " 48213"

A fact is a subject and a random value. The facts of a document are stated in one wording, so that their subjects alone tell
them apart, or each in its own. Three quarters of the wordings of training are invented on the spot out of random words.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from modalities.heldout import fingerprint_of
from modalities.text.tokenizers import Tokenizer

__all__ = ["Fact", "Grammar", "Sentence", "draw_digits", "draw_facts", "pick", "sentence_ends"]

T = TypeVar("T")
Sentence = tuple[str, ...]  # pieces that are tokenised one by one: a value is cut alike wherever it stands
INVENTED = 3 / 4  # of the wordings of training
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
        names: lists of names, of a kind each.  nouns: what has a value.
        openings, endings: said before or behind a statement.  asks: said before a question.
        asides: sentences with a number of no interest at "|".
        code: the shape of names that are made of letters and a number.
        syllables: of invented names.  words: values that are words.
        frame_words: of invented wordings; none where empty.
    """

    wordings: tuple[tuple[str, str], ...]
    names: tuple[tuple[str, ...], ...]
    nouns: tuple[str, ...]
    openings: tuple[str, ...]
    endings: tuple[str, ...]
    asks: tuple[str, ...]
    asides: tuple[str, ...]
    code: str
    syllables: tuple[str, ...]
    words: tuple[str, ...]
    frame_words: tuple[str, ...] = ()

    def draw_name(self, rng: np.random.Generator, kind: int) -> str:
        """A name of one of the lists, or for the two kinds after them an invented one, or letters and a number."""
        if kind < len(self.names):
            return pick(rng, self.names[kind])
        if kind == len(self.names):
            return self.invent(rng, 2, 3).capitalize() + (f" {self.invent(rng, 1, 3)}" if rng.random() < 0.3 else "")
        return self.code.format(letters=draw_letters(rng, int(rng.integers(1, 4))), number=rng.integers(1, 1000))

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that change with the words and with how facts are drawn from them."""
        drawn = (repr(draw_facts(np.random.default_rng(seed), self, 3)).encode() for seed in range(64))
        return fingerprint_of(drawn)

    def invent(self, rng: np.random.Generator, least: int, most: int) -> str:
        """A word of so many syllables."""
        return "".join(pick(rng, self.syllables) for _ in range(int(rng.integers(least, most + 1))))

    def subjects(self, wording: tuple[str, str], kind: int) -> float:
        """How many subjects of a kind a wording tells apart; inf where names are invented."""
        if "{name}" not in wording[1]:
            return len(self.nouns)
        return len(self.names[kind]) if kind < len(self.names) else math.inf

    def draw_kind(self, rng: np.random.Generator) -> int:
        """A kind of name: half of them are invented."""
        listed = len(self.names)
        return int(rng.integers(listed)) if rng.random() < 0.5 else listed + int(rng.integers(2))

    def draw_wording(self, rng: np.random.Generator) -> tuple[str, str]:
        """A wording of the list, or an invented one: random words around the name, repeated by the question."""
        if not self.frame_words or rng.random() > INVENTED:
            return pick(rng, self.wordings)
        words = [
            pick(rng, self.frame_words) if rng.random() < 0.7 else self.invent(rng, 2, 4)
            for _ in range(int(rng.integers(1, 7)))
        ]
        words.insert(int(rng.integers(len(words) + 1)), "{name}")
        frame = " ".join(words) + pick(rng, ("", "", "", ":", " =", " is", ","))
        asked = f"{pick(rng, self.frame_words)} {pick(rng, self.frame_words)} {{name}}? " if rng.random() < 0.3 else ""
        return frame + pick(rng, (" |.", " |,", " |;", f" | {pick(rng, self.frame_words)}.")), asked + frame


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
    rng: np.random.Generator, grammar: Grammar, count: int, *, value: str | None = None, alike: bool | None = None
) -> list[Fact]:
    """`count` facts about different subjects.

    Args:
        rng, grammar: decide all.
        count: of facts.
        value: what all values are, of VALUES; drawn where None.
        alike: all in one wording and of one kind of name, so that only names (or nouns) tell them apart; drawn where None.

    Raises:
        ValueError: for more facts than the grammar has subjects.
    """
    alike = bool(rng.random() < 0.75) if alike is None else alike
    by_noun = bool(rng.random() < 0.3) and count <= len(grammar.nouns) // 2  # one name that has several nouns
    draw_value = VALUES[value or pick(rng, ("digits", "number", "number", "letters", "word"))]
    facts: list[Fact] = []
    taken: set[str] = set()  # questions, and statements up to the value: two wordings may state alike
    for _ in range(TRIES * count):
        if not facts or not alike:
            wording, kind = grammar.draw_wording(rng), grammar.draw_kind(rng)
            for _ in range(TRIES):
                if not alike or grammar.subjects(wording, kind) >= 2 * count:
                    break
                wording, kind = grammar.draw_wording(rng), grammar.draw_kind(rng)
            noun, name = pick(rng, grammar.nouns), grammar.draw_name(rng, kind)
            opening, ending, ask = (
                pick(rng, said) if rng.random() < 0.4 else ""
                for said in (grammar.openings, grammar.endings, grammar.asks)
            )
        if "{name}" not in wording[1] or (by_noun and "{noun}" in wording[1]):
            noun = pick(rng, grammar.nouns)
        else:
            name = grammar.draw_name(rng, kind)
        stated, question = (words.format(name=name, noun=noun) for words in wording)
        before, after = stated.split("|")
        if {question, before} & taken:
            continue
        taken |= {question, before}
        statement = (_sentence(opening, before), " " + draw_value(rng, grammar), f"{after} {ending}".rstrip())
        facts.append(Fact(statement, _sentence(ask, question)))
        if len(facts) == count:
            return facts
    raise ValueError(f"the grammar has no {count} facts to tell apart")


def _sentence(opening: str, words: str) -> str:
    """With a space before it: the opening as it is, or a capital."""
    return (f" {opening} {words}" if opening else f" {words[0].upper()}{words[1:]}").rstrip()


_ENDS: weakref.WeakKeyDictionary[Tokenizer, np.ndarray] = weakref.WeakKeyDictionary()


def sentence_ends(ids: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """The places n, 0 and the end among them, at which ids[:n] ends with a token that ends a sentence."""
    if tokenizer not in _ENDS:
        texts = (tokenizer.decode([token]).rstrip() for token in range(tokenizer.vocab_size))
        _ENDS[tokenizer] = np.array([text.endswith((".", "?", "!")) for text in texts])
    return np.unique(np.concatenate([[0], np.flatnonzero(_ENDS[tokenizer][ids]) + 1, [len(ids)]]))
