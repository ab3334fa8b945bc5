"""The eight needle tasks: "special magic" values hidden in a haystack, asked for by their keys."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from modalities.text.ruler.base import NOISE, Draw, Material, Prompt
from modalities.text.ruler.words import Words

__all__ = ["Needles"]

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
HEAD = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n"
)
TAIL = (
    "\nWhat are all the special magic {kind} for {query} mentioned in the provided text?"
    " The special magic {kind} for {query} mentioned in the provided text are"
)
DEPTHS = np.linspace(0, 100, 40).round().astype(int)  # per cent of the sentences, as in RULER


@dataclass(frozen=True)
class Needles:
    """haystack: "noise" lines, "essay" text or other "needles"; key, value: "words", "numbers" or "uuids".

    A piece of the haystack is a word of an essay, else a line.
    """

    haystack: str
    key: str
    value: str
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1

    new_tokens: ClassVar[int] = 128

    def draw(self, material: Material, length: int, room: int, rng: np.random.Generator) -> Draw:
        words = material.words
        keys = _distinct(self.key, self.num_keys, words, rng)
        values = [_distinct(self.value, self.num_values, words, rng) for _ in keys]
        kind = self.value
        needles = [NEEDLE.format(kind=kind, key=k, value=v) for k, vs in zip(keys, values, strict=True) for v in vs]
        needles = [needles[i] for i in rng.permutation(len(needles))]
        queried = rng.permutation(self.num_keys)[: self.num_queries]
        query = ", ".join(keys[i] for i in queried[:-1]) + ", and " * (len(queried) > 1) + keys[queried[-1]]
        references = tuple(value for i in queried for value in values[i])
        head, tail = HEAD, TAIL
        if len(references) == 1:  # RULER's own grammar for one answer
            kind = kind[:-1]
            head, tail = (t.replace("Some", "A").replace("are all", "is").replace("are", "is") for t in (head, tail))
        head, tail = head.format(kind=kind), tail.format(kind=kind, query=query)
        build = self._haystack(needles, material, rng)
        return Draw(lambda pieces: Prompt(head + build(pieces) + tail, references))

    def _haystack(self, needles: list[str], material: Material, rng: np.random.Generator) -> Callable[[int], str]:
        """A function from a number of pieces to the context, needles in place."""
        if self.haystack == "essay":
            essay = material.essay
            first = int(rng.integers(len(essay)))
            depths = np.sort(rng.choice(DEPTHS, size=len(needles), replace=False))

            def build(count: int) -> str:
                sentences = _sentences(essay[(first + k) % len(essay)] for k in range(count))
                places = [len(sentences) * int(depth) // 100 for depth in depths]
                for place, needle in zip(places[::-1], needles[::-1], strict=True):  # from the back: places stay valid
                    sentences.insert(place, needle)
                return " ".join(sentences)

            return build

        taken = {_key_of(needle) for needle in needles}
        fillers: list[str] = []
        stream = rng.spawn(1)[0]  # its own stream: how many fillers are drawn must not change the next sample

        def filler(k: int) -> str:
            if self.haystack == "noise":
                return NOISE
            while len(fillers) <= k:
                key = _distinct(self.key, 1, material.words, stream, avoid=taken)[0]
                value = _random(self.value, material.words, stream)
                fillers.append(NEEDLE.format(kind=self.value, key=key, value=value))
            return fillers[k]

        # As in RULER's own code, lines of noise and of needles take the needles anywhere; only essays use the 40 depths.
        places = np.sort(rng.random(len(needles)))

        def build_lines(count: int) -> str:
            lines = [filler(k) for k in range(count)]
            for place, needle in zip(places[::-1], needles[::-1], strict=True):
                lines.insert(int(place * count), needle)
            return "\n".join(lines)

        return build_lines


def _key_of(needle: str) -> str:
    return needle.split(" for ", 1)[1].split(" is: ", 1)[0]


def _random(kind: str, words: Words, rng: np.random.Generator) -> str:
    if kind == "words":
        return words.pair(rng)
    if kind == "numbers":
        return str(int(rng.integers(1_000_000, 10_000_000)))
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))


def _distinct(
    kind: str, count: int, words: Words, rng: np.random.Generator, avoid: set[str] | None = None
) -> list[str]:
    """`count` different draws outside `avoid`; of over ten thousand possible values, so the bound is never met."""
    found: dict[str, None] = {}
    for _ in range(100 * count):
        if (drawn := _random(kind, words, rng)) not in (avoid or ()):
            found[drawn] = None
        if len(found) == count:
            return list(found)
    raise RuntimeError(f"could not draw {count} different {kind}")


def _sentences(words: Iterable[str]) -> list[str]:
    """Words joined up to each that ends a sentence; the last may be cut short."""
    sentences: list[list[str]] = [[]]
    for word in words:
        sentences[-1].append(word)
        if word.rstrip("\"')").endswith((".", "!", "?")):
            sentences.append([])
    return [" ".join(sentence) for sentence in sentences if sentence]
