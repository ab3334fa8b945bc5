"""Retrieval prompts: a value is stated somewhere in a haystack, and asked for at the end.

    [BOS] hay … statement … hay … other statements … hay … question      → answer

A *template* gives the words, a *haystack* what they stand in. Templates:

    own          "The pass key is 48213. Remember it."; asked "What is the pass key? The pass key is"
    heldout      facts of the held-out grammar of `modalities.text.facts`; training facts have other names and wordings
    train        the same of the training grammar: its names, and wordings of its list
    invented     the same in wordings that are invented on the spot, as three quarters of those in training are
    paraphrased  held-out facts, half of them stated with the value before the subject, asked for by the subject alone;
                 questions of other templates repeat the words before the value
    train_paraphrased  the same of the training grammar's lists; facts without a name are asked as stated
    mohtashami   the passkey prompt of Mohtashami & Jaggi (arXiv 2305.16300): a task description, the key said twice
    bam          the same as BAM's evaluation builds it (arXiv 2505.22842): no BOS, whole repetitions of the filler, a key
                 of six digits without a leading 0, the first of which the prompt gives away

Beside the statement stand `facts` − 1 further facts, which differ from the one asked for in their subject, and `distractors`
sentences with another number. Haystacks: sentences of our "own", the "grass" of the published prompts, "text" of held-out
documents, "file:PATH". Statements stand between sentences; in a file whose hay has too few of them for the depths asked for,
between lines, words or, in scripts without spaces, characters. Hay is cut to the token, so that prompt and answer together
have exactly the length asked for (bam: a prompt of at most that).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path

import numpy as np

from modalities.decoder.generation import BROKEN
from modalities.evaluation import check_choice
from modalities.heldout import fingerprint_of
from modalities.text.facts import (
    GRAMMARS,
    VALUES,
    Grammar,
    Sentence,
    draw_digits,
    draw_facts,
    fill_aside,
    pick,
    sentence_ends,
)
from modalities.text.tokenizers import Tokenizer

__all__ = ["PUBLISHED", "TEMPLATES", "Haystack", "Template", "default_haystack", "open_haystack"]

TEMPLATES = ("own", "heldout", "paraphrased", "train", "train_paraphrased", "invented", "mohtashami", "bam")
PUBLISHED = ("mohtashami", "bam")
HAYSTACKS = ("own", "grass", "text", "file:PATH")

OWN = (
    " The river runs slow. A lamp is lit in the barn. The hills are far away. We walk on and rest at noon. Rain falls on the "
    "old road. The mill wheel turns again."
)
GRASS = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
STATED = re.compile(r"\bpass\s?key\s+is:?\s+\d+", re.IGNORECASE)  # what no filler may say
QUESTION = "What is the pass key? The pass key is"
LONGEST_FILLER = 1 << 26  # bytes of a file
CLOSE = 32  # tokens between places that are close in a stretch of any length
TRIES = 20  # draws of words that fit
OTHER_THINGS = ("gate", "room", "order", "train", "ticket", "house", "page", "flight", "lot", "ward")


@dataclass(frozen=True, eq=False)
class Haystack:
    """What statements are hidden in: tokens of documents, or of one text that repeats (`loop`).

    `any_text`: it may be without sentences, see `places`.
    """

    texts: tuple[np.ndarray, ...]
    loop: bool = False
    any_text: bool = False

    def draw(self, count: int, rng: np.random.Generator, tokenizer: Tokenizer) -> np.ndarray:
        """A random stretch of `count` tokens of one document, else of several; of a loop it begins with a sentence."""
        if self.loop:
            return self.repeat(count, int(pick(rng, sentence_ends(self.texts[0], tokenizer)[:-1])))
        long = [text for text in self.texts if len(text) >= count]
        if long:
            text = pick(rng, long)
            start = int(rng.integers(len(text) - count + 1))
            return text[start : start + count]
        parts: list[np.ndarray] = []
        while sum(map(len, parts)) < count:
            parts.append(pick(rng, self.texts))
        return np.concatenate(parts)[:count]

    @property
    def fingerprint(self) -> str:
        """16 hex digits, equal for equal haystacks."""
        texts = [(len(text).to_bytes(8, "little"), text.astype("<i8").tobytes()) for text in self.texts]
        return fingerprint_of([*chain(*texts), bytes([self.loop + 2 * self.any_text])])

    def places(self, hay: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
        """Where statements may stand in a stretch of it, 0 and its end among them: between sentences.

        In any text also between lines, words and characters, one after the other, as long as two neighbouring places are
        further apart than a tenth of the stretch and `CLOSE` tokens.
        """
        places = sentence_ends(hay, tokenizer)
        for ends in (_line_ends, _word_ends, _character_ends) if self.any_text else ():
            if np.diff(places).max(initial=0) > max(CLOSE, len(hay) / 10):
                places = np.union1d(places, np.array(ends(hay, tokenizer), dtype=np.int64))
        return places

    def repeat(self, count: int, start: int = 0) -> np.ndarray:
        """`count` tokens of a loop from its token `start` on."""
        return self.texts[0][np.arange(start, start + count) % len(self.texts[0])]

    def line(self, count: int, tokenizer: Tokenizer) -> np.ndarray:
        """`count` tokens of a loop from its start, without the space before it."""
        first = tokenizer.encode(tokenizer.decode(self.texts[0]).lstrip())
        return np.concatenate([first, self.repeat(max(0, count - len(first)))])[:count]


def default_haystack(template: str) -> str:
    """The name of the haystack that belongs to a template."""
    return "grass" if template in PUBLISHED else "own" if template == "own" else "text"


def open_haystack(name: str, tokenizer: Tokenizer, documents: Sequence[np.ndarray] = ()) -> Haystack:
    """A haystack by name: "own", "grass", "text" (`documents`, in tokens) or "file:PATH".

    Raises:
        ValueError: for another name, one without text, or a file that is no UTF-8 text or states a pass key itself.
        FileNotFoundError: for a missing file.
    """
    if name in ("own", "grass"):
        return Haystack((tokenizer.encode(OWN if name == "own" else GRASS),), loop=True)
    if name.startswith("file:"):
        path = Path(name.removeprefix("file:"))
        if not path.is_file():
            raise FileNotFoundError(f"filler {name!r}: no file {path}")
        if (size := path.stat().st_size) > LONGEST_FILLER:
            raise ValueError(f"filler {name!r}: {size:,} bytes; at most {LONGEST_FILLER:,}")
        return Haystack((tokenizer.encode(_read_filler(name, path)),), any_text=True)
    check_choice("filler", name, HAYSTACKS)
    if not any(map(len, documents)):
        raise ValueError(f"filler {name!r} has no text")
    return Haystack(tuple(text for text in documents if len(text)))


def _read_filler(name: str, path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        place = f"byte {error.object[error.start]:#04x} at {error.start}"
        raise ValueError(f"filler {name!r}: not UTF-8 text: {place}") from error
    if "\0" in text:
        raise ValueError(f"filler {name!r}: not text: byte 0x00 at {len(text.partition(chr(0))[0].encode())}")
    if not text.strip():
        raise ValueError(f"filler {name!r} has no text")
    if said := STATED.search(text):
        raise ValueError(f"filler {name!r} itself says {' '.join(said[0].split())!r}: expected text without a pass key")
    return text


def _line_ends(ids: np.ndarray, tokenizer: Tokenizer) -> list[int]:
    neighbours = pairwise(_token_texts(ids, tokenizer))
    return [n for n, (left, right) in enumerate(neighbours, 1) if left.endswith("\n") and not right.startswith("\n")]


def _word_ends(ids: np.ndarray, tokenizer: Tokenizer) -> list[int]:
    neighbours = pairwise(_token_texts(ids, tokenizer))
    return [n for n, (left, right) in enumerate(neighbours, 1) if right[:1].isspace() and not left[-1:].isspace()]


def _character_ends(ids: np.ndarray, tokenizer: Tokenizer) -> list[int]:
    """Places at which no character is cut, whose bytes may be several tokens."""
    places = [0]
    for n in range(1, len(ids) + 1):
        if not tokenizer.decode(ids[places[-1] : n]).endswith(BROKEN):
            places.append(n)
    return places


def _token_texts(ids: np.ndarray, tokenizer: Tokenizer) -> list[str]:
    """The text of each token, with the space that some tokenizers leave out at a text's start."""
    anchor = tokenizer.encode("a")[-1:].tolist()
    start = len(tokenizer.decode(anchor))
    texts = {token: tokenizer.decode([*anchor, token])[start:] for token in np.unique(ids).tolist()}
    return [texts[token] for token in ids.tolist()]


@dataclass(frozen=True)
class _Tokens:
    """A prompt without hay, whose first statements `asked` asks for, and how many tokens of hay there is room for."""

    head: np.ndarray
    statements: list[np.ndarray]
    asked: list[tuple[np.ndarray, np.ndarray]]
    room: int

    def amid(self, hay: np.ndarray, places: Sequence[int], rng: np.random.Generator) -> np.ndarray:
        """Head and hay with each statement at its place; those at one place in any order."""
        order = sorted(range(len(places)), key=lambda n: (places[n], rng.random()))
        parts, done = [self.head], 0
        for n in order:
            parts += [hay[done : places[n]], self.statements[n]]
            done = places[n]
        return np.concatenate([*parts, hay[done:]])


@dataclass(frozen=True)
class Template:
    """What is stated and asked.

    Attributes:
        name: of TEMPLATES.
        facts: facts stated, one of which is asked for. Only the grammars have more than one.
        distractors: sentences with another number of five digits.
        given: digits of the key at the prompt's end; the answer has five more (published templates only).
        values: of VALUES, what facts say: "digits" are five. Only the grammars have others.
    """

    name: str = "own"
    facts: int = 1
    distractors: int = 0
    given: int = 0
    values: str = "digits"

    def __post_init__(self) -> None:
        check_choice("template", self.name, TEMPLATES)
        check_choice("values", self.values, list(VALUES))
        for name, least in (("facts", 1), ("distractors", 0), ("given", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        template, grammars = f"template {self.name!r}", ", ".join(GRAMMARS)
        if self.facts > 1 and self.grammar is None:
            raise ValueError(f"{template} states one fact, got facts={self.facts}: {grammars} state several")
        if self.values != "digits" and self.distractors:
            raise ValueError(f"distractors are numbers of five digits: expected values='digits', got {self.values!r}")
        if self.values != "digits" and self.grammar is None:
            raise ValueError(f"{template} hides digits, got values={self.values!r}: {grammars} have others")
        if self.given and self.name not in PUBLISHED:
            raise ValueError(f"{template} gives no digit away, got prefix_digits={self.given}: mohtashami and bam do")

    @property
    def grammar(self) -> Grammar | None:
        return GRAMMARS.get(self.name)

    def draw(
        self, length: int, depth: float, rng: np.random.Generator, tokenizer: Tokenizer, haystack: Haystack
    ) -> tuple[np.ndarray, np.ndarray]:
        """(prompt, answer) in tokens, int64; ValueError where the words alone take more than `length` tokens.

        depth: share of the hay before the statement, to the nearest sentence's end (mohtashami: exactly).
        """
        tokens = self._draw_tokens(length, rng, tokenizer, 1)
        hay, place, free = self._lay_hay(tokens.room, depth, rng, tokenizer, haystack)
        places = [place, *(int(pick(rng, free)) for _ in tokens.statements[1:])]
        text, (question, answer) = tokens.amid(hay, places, rng), tokens.asked[0]
        return np.concatenate([text, question]).astype(np.int64), answer.astype(np.int64)

    def draw_all(
        self, length: int, rng: np.random.Generator, tokenizer: Tokenizer, haystack: Haystack
    ) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
        """(text, [(question, answer), …]) in tokens, int64: every fact is asked for after the same text.

        Facts stand at even depths from the start of the hay to its end; text, any question and its answer together have at most
        `length` tokens. ValueError where the words alone take more, or for a template of one fact.
        """
        if self.grammar is None:
            raise ValueError(f"template {self.name!r} states one fact: {', '.join(GRAMMARS)} state several")
        tokens = self._draw_tokens(length, rng, tokenizer, self.facts)
        hay = haystack.draw(tokens.room, rng, tokenizer)
        ends = haystack.places(hay, tokenizer)
        depths = np.linspace(0, len(hay), self.facts)
        places = [int(ends[np.abs(ends - depth).argmin()]) for depth in depths]
        places += [int(pick(rng, ends)) for _ in tokens.statements[self.facts :]]
        pairs = [(question.astype(np.int64), answer.astype(np.int64)) for question, answer in tokens.asked]
        return tokens.amid(hay, places, rng).astype(np.int64), pairs

    def _draw_tokens(self, length: int, rng: np.random.Generator, tokenizer: Tokenizer, asked: int) -> _Tokens:
        """Words that leave room for each of the first `asked` questions and its answer."""
        least = None
        for _ in range(TRIES):  # some words are long, others fit
            words, sentences, questions = self._draw_words(rng)
            head = tokenizer.encode(words)
            if self.name != "bam":
                head = np.concatenate([[tokenizer.bos_id], head])
            pairs = [(_encode(question, tokenizer), tokenizer.encode(answer)) for question, answer in questions]
            statements = [_encode(sentence, tokenizer) for sentence in sentences]
            behind = (len(q) + (0 if self.name == "bam" else len(answer)) for q, answer in pairs[:asked])
            taken = sum(map(len, [head, *statements])) + max(behind)
            least = taken if least is None else min(least, taken)
            if taken <= length:
                return _Tokens(head, statements, pairs, length - taken)
        condition = f"template {self.name!r} with facts={self.facts}, distractors={self.distractors}"
        raise ValueError(f"length {length} is too short for {condition}: its words take {least} tokens")

    def _lay_hay(
        self, count: int, depth: float, rng: np.random.Generator, tokenizer: Tokenizer, haystack: Haystack
    ) -> tuple[np.ndarray, int, np.ndarray]:
        """Hay of `count` tokens (bam: at most), where in it the statement stands, and where others may stand."""
        if haystack.loop and self.name == "bam":
            unit = len(haystack.texts[0])
            times = count // unit
            return haystack.repeat(times * unit), int(depth * times) * unit, np.arange(times + 1) * unit
        if haystack.loop and self.name == "mohtashami":  # the filler begins again behind the statement
            place = round(depth * count)
            hay = np.concatenate([haystack.line(n, tokenizer) for n in (place, count - place)])
            ends = sentence_ends(hay, tokenizer)
            return hay, place, ends[(ends == count) | ((ends > 0) & (ends != place))]  # not where a line begins
        hay = haystack.draw(count, rng, tokenizer)
        ends = haystack.places(hay, tokenizer)
        return hay, int(ends[np.abs(ends - depth * count).argmin()]), ends

    def _draw_words(self, rng: np.random.Generator) -> tuple[str, list[Sentence], list[tuple[Sentence, str]]]:
        """(what comes first, statements, (question, answer) of the first of them)."""
        if self.grammar is not None:
            facts = draw_facts(rng, self.grammar, self.facts, value=self.values, alike=True)
            asides = [pick(rng, self.grammar.asides) for _ in range(self.distractors)]
            others = [fill_aside(aside, rng) for aside in asides]
            statements = [*(fact.statement for fact in facts), *others]
            return "", statements, [((fact.question,), fact.value) for fact in facts]
        others = [
            (f" The {pick(rng, OTHER_THINGS)} number is", " " + draw_digits(rng), ". Note it.")
            for _ in range(self.distractors)
        ]
        if self.name == "own":
            key = " " + draw_digits(rng)
            return "", [(" The pass key is", key, ". Remember it."), *others], [((" " + QUESTION,), key)]
        between = "" if self.name == "bam" else "\n"
        digits = 5 + self.given
        least, beyond = (1, 50001) if self.name == "mohtashami" and not self.given else (10 ** (digits - 1), 10**digits)
        key = str(rng.integers(least, beyond))
        lead = between or " "  # tokenizers of BAM's kind put the space themselves
        said = f"{lead}The pass key is {key}. Remember it. {key} is the pass key.{between}"
        shown = f" {key[: self.given]}" if self.given else ""
        answer = key[self.given :] if self.given else f" {key}"
        return TASK + between, [(said,), *others], [((lead + QUESTION, shown), answer)]


def _encode(sentence: Sentence, tokenizer: Tokenizer) -> np.ndarray:
    return np.concatenate([tokenizer.encode(piece) for piece in sentence])
