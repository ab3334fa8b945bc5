"""The two tasks of counting: common words extraction (cwe) and frequent words extraction (fwe)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from modalities.text.ruler.base import Draw, Material, Prompt
from modalities.text.ruler.words import Words

__all__ = ["CommonWords", "FrequentWords"]

LIST = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\n"
    "Question: What are the 10 most common words in the above list?"
    " Answer: The top 10 words that appear most often in the list are:"
)
CODED = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three "
    "most frequently appeared words in the above coded text?"
    " Answer: According to the coded text above, the three most frequently appeared words are:"
)
SHORT = 4096  # below this length RULER repeats words less often


@dataclass(frozen=True)
class CommonWords:
    """A numbered list in which `common` words occur 30 times each and the others 3 times, behind a solved example.

    The example has 40 words, 10 and 3 times. At lengths below 4,096 RULER has 6 and 1 times, and an example of 20 words, 3 and
    1 times. A piece is a different word. Where a list of words is used up, RULER takes a second one, which no package has;
    here words are then pairs of an adjective and a noun (with `wonderwords` beyond 8,000 words, about 150,000 tokens).
    """

    common: int = 10

    new_tokens: ClassVar[int] = 120

    def draw(self, material: Material, length: int, room: int, rng: np.random.Generator) -> Draw:
        words, short = material.words, length < SHORT
        often, seldom = (6, 1) if short else (30, 3)
        text, answer = self._list(words, *((20, 3, 1) if short else (40, 10, 3)), rng)
        example, seed = f"{text} {_numbered(answer)}\n", int(rng.integers(2**32))

        def build(count: int) -> Prompt:
            text, common = self._list(words, count, often, seldom, np.random.default_rng([seed, count]))
            return Prompt(example + text, common)

        return Draw(build, least=self.common, most=words.num_pairs)

    def _list(self, words: Words, count: int, often: int, seldom: int, rng: np.random.Generator) -> Prompt:
        """`count` different words, the common ones `often` times, the others `seldom` times, shuffled."""
        drawn = words.sample(count, rng)
        common, others = drawn[: self.common], drawn[self.common :]
        listed = common * often + others * seldom
        context = _numbered([listed[k] for k in rng.permutation(len(listed))])
        return Prompt(LIST.format(context=context), tuple(common))


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{k}. {word}" for k, word in enumerate(words, 1))


@dataclass(frozen=True)
class FrequentWords:
    """Words of six random letters, of which the k-th occurs ⌊n·k⁻²/ζ(2)⌋ times; the first is "...", the next three are asked.

    A piece is one of the n. There is a word for every 50 tokens of the prompt's room.
    """

    letters: int = 6
    asked: int = 3

    new_tokens: ClassVar[int] = 50
    least: ClassVar[int] = 53  # from here on the fourth word occurs more often than the fifth

    def draw(self, material: Material, length: int, room: int, rng: np.random.Generator) -> Draw:
        words: dict[str, None] = {"...": None}
        while len(words) < max(room // 50, 5):  # of the least prompt's words five occur
            words["".join(chr(97 + k) for k in rng.integers(26, size=self.letters))] = None
        coded, seed = tuple(words), int(rng.integers(2**32))
        share = np.arange(1, len(coded) + 1) ** -2.0 / (math.pi**2 / 6)

        def build(count: int) -> Prompt:
            times = np.floor(count * share).astype(int)
            text = np.random.default_rng([seed, count]).permutation(np.repeat(np.arange(len(coded)), times))
            return Prompt(CODED.format(context=" ".join(coded[k] for k in text)), coded[1 : self.asked + 1])

        return Draw(build, self.least)
