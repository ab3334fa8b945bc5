"""Facts in words, and questions for them, drawn from a grammar.

`assets/grammars.toml` has the grammars: those of training and of evaluation share no wording and no
name. `modalities.text.rows` makes training rows of facts.

    statement   " The door code of Anna is 48213."
    question    " What is the door code of Anna? The door code of Anna is"
    answer      " 48213"

A fact is a subject and a random value. A wording comes from a list, or is invented from random
words and words of the surrounding text. A change in the order of the random draws changes the facts
that recipes and evaluators name by a seed.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from modalities.loading import fingerprint_of
from modalities.tokenizers.encoding import Tokenizer

T = TypeVar("T")
# Pieces that are tokenised one by one, so that a value is cut alike wherever it stands.
Sentence = tuple[str, ...]
# Draws for each fact until its subject differs from those of earlier facts, and draws of a wording.
TRIES = 50


def pick(rng: np.random.Generator, options: Sequence[T] | np.ndarray) -> T:
    """One of `options`, all equally likely."""
    return options[int(rng.integers(len(options)))]


def pick_sometimes(rng: np.random.Generator, options: Sequence[str]) -> str:
    """One of `options` in two of five draws, else an empty text."""
    return pick(rng, options) if rng.random() < 0.4 else ""


class Wording(NamedTuple):
    """A statement, with "|" for its value, and its question; both with "{name}" and "{noun}"."""

    statement: str
    question: str

    @property
    def names_subject_first(self) -> bool:
        """Whether the statement has before its value all that the question names."""
        before = self.statement.partition("|")[0]
        placeholders = [word for word in ("{name}", "{noun}") if word in self.question]
        return all(word in before for word in placeholders)


@dataclass(frozen=True)
class Fact:
    """One fact in words.

    statement: (before, value, after).
    question: the text up to the value.
    wording: statement and question with placeholders in place of names.
    kind: kind of value, one of VALUE_KINDS or a pattern.
    """

    statement: Sentence
    question: str
    # The fingerprint of a grammar hashes what a model reads, which is what repr shows.
    wording: str = field(repr=False)
    kind: str = field(repr=False)

    @property
    def value(self) -> str:
        return self.statement[1]


@dataclass(frozen=True)
class Grammar:
    """Wordings, and the words that fill them.

    names: lists of names, each a kind of name.
    nouns: things that have a value, such as "door code".
    openings: phrases before a statement.
    endings: phrases after a statement.
    asks: phrases before a question.
    asides: sentences with a number at "|", which nothing asks for.
    codes: formats of names that are made of letters and a number.
    syllables: parts of invented names and words.
    words: values that are words.
    patterns: values of further kinds: "9" stands for a digit, "A" for a capital, "f" for a
        hexadecimal digit.
    frame_words: words of invented wordings and of names of two words.
    frame_marks: punctuation of invented wordings.
    invented: share of wordings that are invented.
    reworded: share of invented wordings whose question has other words than the statement.
    """

    wordings: tuple[Wording, ...]
    names: tuple[tuple[str, ...], ...]
    nouns: tuple[str, ...]
    openings: tuple[str, ...]
    endings: tuple[str, ...]
    asks: tuple[str, ...]
    asides: tuple[str, ...]
    codes: tuple[str, ...]
    syllables: tuple[str, ...]
    words: tuple[str, ...]
    patterns: tuple[str, ...] = ()
    frame_words: tuple[str, ...] = ()
    frame_marks: tuple[str, ...] = ()
    invented: float = 0.0
    reworded: float = 0.0

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that change with the words and with how facts are drawn from them."""
        samples = []
        for seed in range(64):
            rng = np.random.default_rng(seed)
            samples.append(draw_facts(rng, self, 3, text=self.frame_words[:9]))
        return fingerprint_of(repr(facts).encode() for facts in samples)

    @cached_property
    def vocabulary(self) -> frozenset[str]:
        """The lower-case words of names, nouns and values."""
        entries = [*self.nouns, *self.words]
        for names in self.names:
            entries += names
        return frozenset(" ".join(entries).lower().split())

    def count_subjects(self, wording: Wording, name_kind: int) -> float:
        """How many subjects a wording tells apart; inf where names are invented."""
        if "{name}" not in wording.question:
            return len(self.nouns)
        if name_kind < len(self.names):
            return len(self.names[name_kind])
        return math.inf

    def draw_name_kind(self, rng: np.random.Generator) -> int:
        """The number of a kind of name; half of the draws are one of the lists `names`.

        Kinds are numbered: the lists of `names`, invented names, each format of `codes`, and two
        words.
        """
        invented = len(self.names)
        if rng.random() < 0.5:
            return int(rng.integers(invented))
        first_code = invented + 1
        two_words = first_code + len(self.codes)
        groups = [range(invented, first_code), range(first_code, two_words)]
        if self.frame_words:
            groups.append(range(two_words, two_words + 1))
        return pick(rng, pick(rng, groups))

    def draw_name(self, rng: np.random.Generator, kind: int, text: Sequence[str]) -> str:
        """A name of a kind, as `draw_name_kind` numbers them."""
        invented = len(self.names)
        if kind < invented:
            return pick(rng, self.names[kind])
        if kind == invented:
            name = self.invent(rng, 2, 3).capitalize()
            if rng.random() < 0.3:
                name += f" {self.invent(rng, 1, 3)}"
            return name
        if kind <= invented + len(self.codes):
            code = self.codes[kind - invented - 1]
            letters = draw_letters(rng, int(rng.integers(1, 4)))
            return code.format(letters=letters, number=rng.integers(1, 1000))
        return f"{self.draw_word(rng, text)} {self.draw_word(rng, text)}"

    def invent(self, rng: np.random.Generator, least: int, most: int) -> str:
        """A word of `least` to `most` syllables."""
        count = int(rng.integers(least, most + 1))
        return "".join(pick(rng, self.syllables) for _ in range(count))

    def draw_word(self, rng: np.random.Generator, text: Sequence[str]) -> str:
        """A word of the text, of `frame_words`, or an invented one."""
        share = rng.random()
        if share < 0.25:
            return self.invent(rng, 2, 4)
        if len(text) and share < 0.7:
            return pick(rng, text)
        return pick(rng, self.frame_words)

    def draw_wording(self, rng: np.random.Generator, text: Sequence[str]) -> Wording:
        """A wording of `wordings`, or an invented one."""
        if not self.invented or rng.random() > self.invented:
            return pick(rng, self.wordings)
        return self.invent_wording(rng, text)

    def invent_wording(self, rng: np.random.Generator, text: Sequence[str]) -> Wording:
        """Random words around the name; the question repeats them or has others."""
        frame = self.draw_frame(rng, text)
        lead = ""
        if rng.random() < 0.3:
            lead = f"{self.draw_word(rng, text)} {self.draw_word(rng, text)} {{name}}? "
        statement = frame + pick(rng, (" |.", " |,", " |;", f" | {self.draw_word(rng, text)}."))
        if not self.reworded or rng.random() > self.reworded:
            return Wording(statement, lead + frame)
        if rng.random() < 0.3:
            statement = f"{self.draw_word(rng, text)} | {frame}."
        question = self.draw_frame(rng, text)
        question += pick(rng, ("", "?", f"? {self.draw_word(rng, text)}"))
        return Wording(statement, question)

    def draw_frame(self, rng: np.random.Generator, text: Sequence[str]) -> str:
        """One to four words and the name, in any order, with marks."""
        words = [self.draw_word(rng, text) for _ in range(int(rng.integers(1, 5)))]
        words.insert(int(rng.integers(len(words) + 1)), "{name}")
        frame = words[0]
        for word in words[1:]:
            between = " "
            if rng.random() < 0.15:
                mark = pick(rng, self.frame_marks)
                between = pick(rng, (f"{mark} ", f" {mark} ", mark))
            frame += between + word
        mark = pick(rng, self.frame_marks)
        return frame + pick(rng, ("", "", "", ":", " =", " is", ",", f" {mark}"))


def _grammar(table: Mapping[str, Any]) -> Grammar:
    """The grammar of a table; its names are people, things with an adjective, and places."""
    lists: dict[str, tuple[str, ...]] = {}
    for key, entry in table.items():
        if key not in ("wordings", "invented", "reworded"):
            lists[key] = tuple(entry.split() if isinstance(entry, str) else entry)
    people = lists.pop("people")
    adjectives = lists.pop("adjectives")
    things = lists.pop("things")
    places = lists.pop("places")
    phrases = tuple(" ".join(pair) for pair in product(adjectives, things))
    return Grammar(
        wordings=tuple(Wording(*pair) for pair in table["wordings"]),
        names=(people, phrases, places),
        invented=table.get("invented", 0.0),
        reworded=table.get("reworded", 0.0),
        **lists,
    )


_FILE = Path(__file__).parent / "assets" / "grammars.toml"
_TABLES = tomllib.loads(_FILE.read_text(encoding="utf-8"))
# "wide" adds wordings to "train"; entries of "other" replace those of "heldout".
_WIDE_WORDINGS = _TABLES["train"]["wordings"] + _TABLES["wide"]["wordings"]
TRAIN = _grammar(_TABLES["train"])
HELDOUT = _grammar(_TABLES["heldout"])
WIDE = _grammar({**_TABLES["train"], **_TABLES["wide"], "wordings": _WIDE_WORDINGS})
OTHER = _grammar(_TABLES["heldout"] | _TABLES["other"])

# Keys of TRAINING are the values of `data.facts_wordings`, keys of GRAMMARS templates of prompts.
TRAINING = {"train": TRAIN, "wide": WIDE}
GRAMMARS = {
    "train": replace(TRAIN, invented=0.0),
    "heldout": HELDOUT,
    "wide": replace(WIDE, invented=0.0),
    "other": OTHER,
}

VALUE_KINDS = ("digits", "number", "letters", "word")
# What the marks of a pattern stand for; other characters stand for themselves.
ALPHABETS = {"9": "0123456789", "A": "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "f": "0123456789abcdef"}


def draw_letters(rng: np.random.Generator, count: int) -> str:
    return "".join(chr(65 + int(letter)) for letter in rng.integers(0, 26, size=count))


def draw_digits(rng: np.random.Generator, count: int = 5) -> str:
    return "".join(str(digit) for digit in rng.integers(0, 10, size=count))


def draw_value_kind(rng: np.random.Generator, grammar: Grammar) -> str:
    """A pattern of the grammar, or one of VALUE_KINDS, "number" twice as often."""
    if grammar.patterns and rng.random() < 0.5:
        return pick(rng, grammar.patterns)
    return pick(rng, ("digits", "number", "number", "letters", "word"))


def draw_value(rng: np.random.Generator, grammar: Grammar, kind: str) -> str:
    """A value of a kind, which is one of VALUE_KINDS or a pattern."""
    if kind == "digits":
        return draw_digits(rng)
    if kind == "number":
        return draw_digits(rng, int(rng.integers(2, 9)))
    if kind == "letters":
        return draw_letters(rng, int(rng.integers(3, 7)))
    if kind == "word":
        return pick(rng, grammar.words)
    value = ""
    for mark in kind:
        value += pick(rng, ALPHABETS[mark]) if mark in ALPHABETS else mark
    return value


def draw_facts(
    rng: np.random.Generator,
    grammar: Grammar,
    count: int,
    *,
    value_kind: str | None = None,
    alike: bool | None = None,
    text: Sequence[str] = (),
) -> list[Fact]:
    """`count` facts about different subjects; ValueError for more than the grammar has.

    value_kind: the kind of all values; drawn where None.
    alike: all in one wording and of one kind of name, so that only names (or nouns) tell them
        apart; drawn where None.
    text: words that invented wordings and names may use.
    """
    if alike is None:
        alike = bool(rng.random() < 0.75)
    # Whether facts that are alike share the name and differ in the noun.
    by_noun = bool(rng.random() < 0.3) and count <= len(grammar.nouns) // 2
    if value_kind is None:
        value_kind = draw_value_kind(rng, grammar)
    facts: list[Fact] = []
    # Questions and subjects of the facts so far. Both are compared: two wordings with different
    # questions may make the same statement.
    earlier: set[str] = set()
    for _ in range(TRIES * count):
        if not facts or not alike:
            # Twice as many subjects as facts, so that few draws of a subject repeat one.
            least = 2 * count if alike else 0
            wording, name_kind = _draw_wording(rng, grammar, text, least)
            noun = pick(rng, grammar.nouns)
            name = grammar.draw_name(rng, name_kind, text)
            opening = pick_sometimes(rng, grammar.openings)
            ending = pick_sometimes(rng, grammar.endings)
            ask = pick_sometimes(rng, grammar.asks)
        if "{name}" not in wording.question or (by_noun and "{noun}" in wording.question):
            noun = pick(rng, grammar.nouns)
        else:
            name = grammar.draw_name(rng, name_kind, text)
        statement = wording.statement.format(name=name, noun=noun)
        question = wording.question.format(name=name, noun=noun)
        before, after = statement.split("|")
        subject = before if wording.names_subject_first else statement
        if question in earlier or subject in earlier:
            continue
        earlier.update((question, subject))
        sentence = (
            _sentence(opening, before),
            " " + draw_value(rng, grammar, value_kind),
            f"{after} {ending}".rstrip(),
        )
        fact = Fact(sentence, _sentence(ask, question), " ".join(wording), value_kind)
        facts.append(fact)
        if len(facts) == count:
            return facts
    raise ValueError(f"the grammar has no {count} facts to tell apart")


def _draw_wording(
    rng: np.random.Generator, grammar: Grammar, text: Sequence[str], least: int
) -> tuple[Wording, int]:
    """A wording and a kind of name with at least `least` subjects.

    Where none of `TRIES` draws has so many, the last draw.
    """
    for _ in range(TRIES):
        wording = grammar.draw_wording(rng, text)
        name_kind = grammar.draw_name_kind(rng)
        if grammar.count_subjects(wording, name_kind) >= least:
            break
    return wording, name_kind


def _sentence(opening: str, words: str) -> str:
    """The words after a space and the opening; without an opening they get a capital."""
    if opening:
        return f" {opening} {words}".rstrip()
    return f" {words[:1].upper()}{words[1:]}".rstrip()


@lru_cache(maxsize=4)
def _ends(tokenizer: Tokenizer) -> np.ndarray:
    """(V,) bool: which tokens end a sentence."""
    texts = (tokenizer.decode([token]).rstrip() for token in range(tokenizer.vocab_size))
    return np.array([text.endswith((".", "?", "!")) for text in texts])


def sentence_ends(ids: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """The places n at which ids[:n] ends with a sentence, with 0 and the end; ascending."""
    inner = np.flatnonzero(_ends(tokenizer)[ids]) + 1
    return np.unique(np.concatenate([[0], inner, [len(ids)]]))


def insert(text: np.ndarray, parts: Sequence[tuple[int, np.ndarray]]) -> list[np.ndarray]:
    """`text` (…, N) as pieces, with each part at its place between them; places ascend."""
    first, *others = np.split(text, [place for place, _ in parts], axis=-1)
    pieces = [first]
    for (_, part), piece in zip(parts, others, strict=True):
        pieces += [part, piece]
    return pieces
