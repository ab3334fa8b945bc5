"""Facts in words, and questions for them, drawn from a grammar (`assets/grammars.toml` has two that
share nothing); training rows made out of plain ones, from which models learn to retrieve: facts
asked for, and text that comes again.

    " The door code of Anna is 48213."      " What is the door code of Anna? The door code of Anna
    is" → " 48213"

A fact is a subject and a random value. Wordings are of a list, or invented of random words and
words of the surrounding text.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from modalities.loading import Batch, fingerprint_of
from modalities.text.tokenizers import Tokenizer

T = TypeVar("T")
Sentence = tuple[
    str, ...
]  # pieces that are tokenised one by one: a value is cut alike wherever it stands
TRIES = 50  # draws of a subject that is not taken yet


def pick(rng: np.random.Generator, options: Sequence[T] | np.ndarray) -> T:
    """One of `options`, all equally likely."""
    return options[int(rng.integers(len(options)))]


@dataclass(frozen=True)
class Fact:
    """One fact in words: the statement is (before, value, after); the question leads up to the
    value.

    wording: statement and question without names.  kind: of value, one of VALUES or a pattern.
    """

    statement: Sentence
    question: str
    wording: str = field(repr=False)  # a fingerprint is of what is read
    kind: str = field(repr=False)

    @property
    def value(self) -> str:
        return self.statement[1]


@dataclass(frozen=True)
class Grammar:
    """Wordings, and the words that fill them.

    wordings: (statement, question) with "{name}", "{noun}" and, in the statement, "|" for the
    value.
    names: lists of names, a kind each.  nouns: what has a value.  words: values that are words.
    openings, endings, asks: said before a statement, behind it, before a question.  asides:
    sentences with a number at "|".
    patterns: values of further kinds: "9" stands for a digit, "A" for a capital, "f" for a
    hexadecimal digit.
    codes, syllables: of names made of letters and a number, and of invented names.
    frame_words, frame_marks: of invented wordings, which are a share `invented` of all, and of
    names.
    reworded: share of invented wordings whose question has other words than the statement.
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
    patterns: tuple[str, ...] = ()
    frame_words: tuple[str, ...] = ()
    frame_marks: tuple[str, ...] = ()
    invented: float = 0.0
    reworded: float = 0.0

    def draw_name(self, rng: np.random.Generator, kind: int, text: Sequence[str]) -> str:
        """A name of a list; of the kinds after them an invented one, a code, or two words."""
        if kind < len(self.names):
            return pick(rng, self.names[kind])
        kind -= len(self.names)
        if kind == 0:
            return self.invent(rng, 2, 3).capitalize() + (
                f" {self.invent(rng, 1, 3)}" if rng.random() < 0.3 else ""
            )
        if kind <= len(self.codes):
            letters = draw_letters(rng, int(rng.integers(1, 4)))
            number = rng.integers(1, 1000)
            return self.codes[kind - 1].format(letters=letters, number=number)
        return f"{self.draw_word(rng, text)} {self.draw_word(rng, text)}"

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that change with the words and with how facts are drawn from them."""
        text = self.frame_words[:9]
        drawn = (
            repr(draw_facts(np.random.default_rng(seed), self, 3, text=text)).encode()
            for seed in range(64)
        )
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
        listed = len(self.names)
        codes = len(self.codes)
        if rng.random() < 0.5:
            return int(rng.integers(listed))
        unlisted = [
            range(1),
            range(1, 1 + codes),
            *([range(1 + codes, 2 + codes)] if self.frame_words else []),
        ]
        return listed + pick(rng, pick(rng, unlisted))

    def draw_word(self, rng: np.random.Generator, text: Sequence[str]) -> str:
        """A word of the text, of the list, or an invented one."""
        drawn = rng.random()
        if drawn < 0.25:
            return self.invent(rng, 2, 4)
        return pick(rng, text if len(text) and drawn < 0.7 else self.frame_words)

    def draw_wording(self, rng: np.random.Generator, text: Sequence[str]) -> tuple[str, str]:
        """A wording of the list, or random words around the name, which the question repeats or has
        others for."""
        if not self.invented or rng.random() > self.invented:
            return pick(rng, self.wordings)
        frame = self.draw_frame(rng, text)
        lead = (
            f"{self.draw_word(rng, text)} {self.draw_word(rng, text)} {{name}}? "
            if rng.random() < 0.3
            else ""
        )
        statement = frame + pick(rng, (" |.", " |,", " |;", f" | {self.draw_word(rng, text)}."))
        if not self.reworded or rng.random() > self.reworded:
            return statement, lead + frame
        if rng.random() < 0.3:
            statement = f"{self.draw_word(rng, text)} | {frame}."
        return statement, self.draw_frame(rng, text) + pick(
            rng, ("", "?", f"? {self.draw_word(rng, text)}")
        )

    def draw_frame(self, rng: np.random.Generator, text: Sequence[str]) -> str:
        """One to four words and the name, in any order, with marks."""
        words = [self.draw_word(rng, text) for _ in range(int(rng.integers(1, 5)))]
        words.insert(int(rng.integers(len(words) + 1)), "{name}")
        frame = words[0]
        for word in words[1:]:
            mark = pick(rng, self.frame_marks) if rng.random() < 0.15 else ""
            frame += (pick(rng, (f"{mark} ", f" {mark} ", mark)) if mark else " ") + word
        return frame + pick(
            rng, ("", "", "", ":", " =", " is", ",", f" {pick(rng, self.frame_marks)}")
        )


def _grammar(
    wordings: list[list[str]],
    invented: float = 0.0,
    reworded: float = 0.0,
    **lists: str | list[str],
) -> Grammar:
    """A grammar of the file, whose names are people, adjectives with things, and places."""
    words: dict[str, Any] = {
        key: tuple(x.split() if isinstance(x, str) else x) for key, x in lists.items()
    }
    people, adjectives, things, places = (
        words.pop(name) for name in ("people", "adjectives", "things", "places")
    )
    phrases = tuple(f"{adjective} {thing}" for adjective in adjectives for thing in things)
    pairs = tuple((statement, question) for statement, question in wordings)
    return Grammar(pairs, (people, phrases, places), **words, invented=invented, reworded=reworded)


_TABLES = tomllib.loads(
    (Path(__file__).parent / "assets" / "grammars.toml").read_text(encoding="utf-8")
)
TRAIN, HELDOUT = (_grammar(**_TABLES[name]) for name in ("train", "heldout"))
_MORE = _TABLES["train"]["wordings"] + _TABLES["wide"]["wordings"]
WIDE = _grammar(**_TABLES["train"] | _TABLES["wide"] | {"wordings": _MORE})
OTHER = _grammar(**_TABLES["heldout"] | _TABLES["other"])

# TRAINING has the values of `data.facts_wordings`, GRAMMARS the templates of prompts.
TRAINING = {"train": TRAIN, "wide": WIDE}
GRAMMARS = {
    "train": replace(TRAIN, invented=0.0),
    "heldout": HELDOUT,
    "wide": replace(WIDE, invented=0.0),
    "other": OTHER,
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
FILLED = {"9": "0123456789", "A": "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "f": "0123456789abcdef"}


def draw_facts(
    rng: np.random.Generator,
    grammar: Grammar,
    count: int,
    *,
    value: str | None = None,
    alike: bool | None = None,
    text: Sequence[str] = (),
) -> list[Fact]:
    """`count` facts about different subjects; ValueError for more than the grammar has.

    value: the kind of all values; drawn where None.  text: words that invented wordings and names
    may have.
    alike: all in one wording and of one kind of name, so that only names (or nouns) tell them
    apart; drawn where None.
    """
    alike = bool(rng.random() < 0.75) if alike is None else alike
    by_noun = (
        bool(rng.random() < 0.3) and count <= len(grammar.nouns) // 2
    )  # one name that has several nouns
    if value is None:
        patterned = bool(grammar.patterns) and rng.random() < 0.5
        value = pick(
            rng,
            grammar.patterns if patterned else ("digits", "number", "number", "letters", "word"),
        )
    facts: list[Fact] = []
    taken: set[str] = (
        set()
    )  # questions, and statements up to the value: two wordings may state alike
    for _ in range(TRIES * count):
        if not facts or not alike:
            for _ in range(TRIES):
                wording = grammar.draw_wording(rng, text)
                kind = grammar.draw_kind(rng)
                if not alike or grammar.subjects(wording, kind) >= 2 * count:
                    break
            noun = pick(rng, grammar.nouns)
            name = grammar.draw_name(rng, kind, text)
            opening, ending, ask = (
                pick(rng, texts) if rng.random() < 0.4 else ""
                for texts in (grammar.openings, grammar.endings, grammar.asks)
            )
        if "{name}" not in wording[1] or (by_noun and "{noun}" in wording[1]):
            noun = pick(rng, grammar.nouns)
        else:
            name = grammar.draw_name(rng, kind, text)
        stated, question = (words.format(name=name, noun=noun) for words in wording)
        before, after = stated.split("|")
        complete = all(
            word in wording[0].partition("|")[0]
            for word in ("{name}", "{noun}")
            if word in wording[1]
        )
        subject = before if complete else stated  # what tells the statement from others
        if {question, subject} & taken:
            continue
        taken |= {question, subject}
        marks = (pick(rng, FILLED[mark]) if mark in FILLED else mark for mark in value)
        drawn = VALUES[value](rng, grammar) if value in VALUES else "".join(marks)
        statement = (_sentence(opening, before), " " + drawn, f"{after} {ending}".rstrip())
        facts.append(Fact(statement, _sentence(ask, question), " ".join(wording), value))
        if len(facts) == count:
            return facts
    raise ValueError(f"the grammar has no {count} facts to tell apart")


def _sentence(opening: str, words: str) -> str:
    """With a space before it: the opening as it is, or a capital."""
    return (f" {opening} {words}" if opening else f" {words[:1].upper()}{words[1:]}").rstrip()


@lru_cache(maxsize=4)
def _ends(tokenizer: Tokenizer) -> np.ndarray:
    """(V,) which tokens end a sentence."""
    texts = (tokenizer.decode([token]).rstrip() for token in range(tokenizer.vocab_size))
    return np.array([text.endswith((".", "?", "!")) for text in texts])


def sentence_ends(ids: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """The places n, 0 and the end among them, at which ids[:n] ends with a token that ends a
    sentence."""
    return np.unique(np.concatenate([[0], np.flatnonzero(_ends(tokenizer)[ids]) + 1, [len(ids)]]))


def insert(text: np.ndarray, parts: Sequence[tuple[int, np.ndarray]]) -> list[np.ndarray]:
    """Pieces of `text` (…, N), around each part at its place; places ascend."""
    first, *rest = np.split(text, [place for place, _ in parts], axis=-1)
    return [
        first,
        *(piece for (_, part), piece in zip(parts, rest, strict=True) for piece in (part, piece)),
    ]


MOST_FACTS = 10
FULL = 0.6  # share of the rows with that many, or as many as fit
COPIED = (8, 64)  # tokens that come again, least and most
BETWEEN = 40  # most tokens between two copies
WORD = re.compile("[A-Za-z]{2,}")


def tokens_of_a_fact(tokenizer: Tokenizer, grammar: Grammar = TRAIN) -> int:
    """The most tokens of a fact with its question, of twenty drawn."""
    rng = np.random.default_rng(0)
    return max(
        _ask(fact, tokenizer, 1.0)[2] for _ in range(20) for fact in draw_facts(rng, grammar, 1)
    )


def facts_row(
    row: Batch,
    rng: np.random.Generator,
    tokenizer: Tokenizer,
    weight: float,
    grammar: Grammar = TRAIN,
) -> Batch:
    """Facts in the text of a plain row: the same keys and length, and "weights" float32 (L+1,).

    One to ten facts, as many as fit, stand between sentences; all or some are asked for at the end.
    Values count 0 in the loss where they are stated, `weight` in answers; all else counts 1.
    """
    room = len(row["tokens"]) - 1  # BOS
    statements = []
    answers = []
    words = [
        word
        for word in WORD.findall(tokenizer.decode(row["tokens"]))
        if word.lower() not in HELDOUT.vocabulary
    ]
    count = MOST_FACTS if rng.random() < FULL else int(rng.integers(1, MOST_FACTS + 1))
    for fact in draw_facts(rng, grammar, count, text=words):
        statement, answer, size = _ask(fact, tokenizer, weight)
        if size > room:
            break
        room -= size
        statements.append(statement)
        answers.append(answer)
    if rng.random() < 0.3:
        before, after = pick(rng, TRAIN.asides).split("|")
        aside = _encode((" " + before.rstrip(), " " + draw_digits(rng), after), tokenizer, 0.0)
        if aside.shape[1] <= room:
            statements.append(aside)
            rng.shuffle(statements)
    rng.shuffle(answers)
    if len(answers) > 1 and rng.random() < 0.2:
        answers = answers[: int(rng.integers(1, len(answers) + 1))]
    spare = len(row["tokens"]) - 1 - sum(part.shape[1] for part in (*statements, *answers))
    text = _plain(row, tokenizer)[:, :spare]
    places = np.sort(
        rng.choice(sentence_ends(text[0].astype(np.int64), tokenizer), size=len(statements))
    )
    pieces = insert(text, list(zip(places.tolist(), statements, strict=True)))
    return _row(np.concatenate([*pieces, *answers], axis=1), row, tokenizer)


def copies_row(row: Batch, rng: np.random.Generator, tokenizer: Tokenizer) -> Batch:
    """A row in which a stretch comes again and again between other text; keys as in `facts_row`.

    The stretch is the row's first tokens, as they are or in random order, which then count 0 where
    they come first.
    """
    length = len(row["tokens"])
    text = _plain(row, tokenizer)
    stretch = text[:, : int(rng.integers(COPIED[0], COPIED[1] + 1))]
    if not stretch.shape[1]:
        return row
    done = stretch.shape[1]
    first = stretch
    if rng.random() < 0.5:
        stretch = stretch[:, rng.permutation(done)]
        first = stretch * [[1], [0]]
    pieces = [first]
    total = 1 + done
    while total < length:
        between = text[:, done : done + int(rng.integers(0, BETWEEN + 1))]
        pieces += [between, stretch]
        done += between.shape[1]
        total += between.shape[1] + stretch.shape[1]
    return _row(np.concatenate(pieces, axis=1)[:, : length - 1], row, tokenizer)


# Pieces of rows are (2, N): token ids, and what each counts in the loss.


def _encode(sentence: Sentence, tokenizer: Tokenizer, weight: float) -> np.ndarray:
    """Of (before, value, after), whose value counts `weight`."""
    parts = [tokenizer.encode(piece) for piece in sentence]
    weights = [np.full(len(part), weight if n == 1 else 1.0) for n, part in enumerate(parts)]
    return np.stack([np.concatenate(parts), np.concatenate(weights)])


def _ask(fact: Fact, tokenizer: Tokenizer, weight: float) -> tuple[np.ndarray, np.ndarray, int]:
    """(statement, question and answer, tokens of both)."""
    statement = _encode(fact.statement, tokenizer, 0.0)
    answer = _encode((fact.question, fact.value, "."), tokenizer, weight)
    return statement, answer, statement.shape[1] + answer.shape[1]


def _plain(row: Batch, tokenizer: Tokenizer) -> np.ndarray:
    """The text of a row, without BOS and padding."""
    tokens = row["tokens"][(row["segments"] >= 0) & (row["tokens"] != tokenizer.bos_id)].numpy()
    return np.stack([tokens, np.ones(len(tokens))])


def _row(pieces: np.ndarray, like: Batch, tokenizer: Tokenizer) -> Batch:
    """One document of BOS and the pieces, padded to the length of `like`."""
    pieces = np.concatenate([[[tokenizer.bos_id], [1.0]], pieces], axis=1)
    count = pieces.shape[1]
    tokens = torch.full_like(like["tokens"], tokenizer.pad_id)
    segments = torch.full_like(like["segments"], -1)
    weights = torch.zeros(len(tokens))
    tokens[:count] = torch.from_numpy(pieces[0].astype(np.int64))
    segments[:count] = 0
    weights[:count] = torch.from_numpy(pieces[1].astype(np.float32))
    return {"tokens": tokens, "segments": segments, "weights": weights}
