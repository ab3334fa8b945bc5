"""The words that RULER's keys and lists are made of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.resources import files

import numpy as np

from modalities.heldout import fingerprint_of
from modalities.text.needle_words import ADJECTIVES, NOUNS

__all__ = ["WORD_LISTS", "Words", "load_words"]

WORD_LISTS = ("wonderwords", "own")


@dataclass(frozen=True)
class Words:
    """A list of words by their kind, in a fixed order."""

    name: str
    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    verbs: tuple[str, ...] = ()

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint_of("\n".join(words).encode() + b"\0" for words in (self.adjectives, self.nouns, self.verbs))

    @cached_property
    def listed(self) -> tuple[str, ...]:
        """Every word once, of any kind."""
        return tuple(sorted({*self.adjectives, *self.nouns, *self.verbs}))

    @property
    def num_pairs(self) -> int:
        return len(self.adjectives) * len(self.nouns)

    def pair(self, rng: np.random.Generator) -> str:
        """ "amber-lantern": an adjective and a noun."""
        adjective = self.adjectives[rng.integers(len(self.adjectives))]
        return f"{adjective}-{self.nouns[rng.integers(len(self.nouns))]}"

    def sample(self, count: int, rng: np.random.Generator) -> list[str]:
        """`count` different words; pairs where the list has fewer words."""
        if count <= len(self.listed):
            return [self.listed[k] for k in rng.choice(len(self.listed), count, replace=False)]
        places = (divmod(int(k), len(self.nouns)) for k in rng.choice(self.num_pairs, count, replace=False))
        return [f"{self.adjectives[a]}-{self.nouns[n]}" for a, n in places]


@lru_cache
def load_words(name: str) -> Words:
    """ "wonderwords": the 910 adjectives, 6,782 nouns and 1,041 verbs of that package, which RULER takes; "own": 111 and 116.

    Raises ImportError where the package is not installed.
    """
    if name == "own":
        return Words(name, ADJECTIVES, NOUNS)
    try:
        folder = files("wonderwords") / "assets"
    except ImportError as error:
        raise ImportError(
            "RULER's words are those of the package `wonderwords`: pip install wonderwords, or choose --keys own, "
            "with which scores do not compare with RULER's"
        ) from error
    texts = ((folder / f"{kind}list.txt").read_text(encoding="utf-8") for kind in ("adjective", "noun", "verb"))
    kinds = (dict.fromkeys(line.rstrip() for line in text.splitlines() if line.strip()) for text in texts)
    return Words(name, *map(tuple, kinds))
