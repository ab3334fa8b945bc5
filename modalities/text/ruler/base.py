"""What RULER's tasks share: what a task is, and a prompt as long as its length allows.

A task draws the content of a sample and leaves its size open: `Draw.build(n)` is the prompt with n pieces of haystack.
`make_sample` takes the largest that fits, found by bisection over n: a length too short is an error, and nothing loops until
something fits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from modalities.text.ruler.words import Words
from modalities.text.tokenizers import Tokenizer

__all__ = ["BUDGETS", "NOISE", "Draw", "Material", "Prompt", "Task", "largest", "least_length", "make_sample", "room"]

BUDGETS = ("ruler", "prompt")
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


@dataclass(frozen=True)
class Material:
    """What prompts are made from. essay: the words of held-out text, one after the other."""

    tokenizer: Tokenizer
    essay: tuple[str, ...]
    words: Words

    def size(self, text: str) -> int:
        """In tokens, without BOS."""
        return len(self.tokenizer.encode(text))


class Prompt(NamedTuple):
    text: str
    references: tuple[str, ...]


@dataclass(frozen=True)
class Draw:
    """A sample whose size is open: from `least` to `most` pieces of haystack; None: any number."""

    build: Callable[[int], Prompt]
    least: int = 0
    most: int | None = None


class Task(Protocol):
    """One of RULER's tasks. A score is the share of references in at most `new_tokens` generated tokens."""

    @property
    def new_tokens(self) -> int: ...

    def draw(self, material: Material, length: int, room: int, rng: np.random.Generator) -> Draw:
        """length: L, by which RULER chooses some settings; room: most tokens of the prompt, without BOS."""
        ...


def room(task: Task, length: int, budget: str) -> int:
    """Most tokens of a prompt, without BOS.

    "ruler": prompt and generated tokens are at most L, BOS not counted; "prompt": the prompt with BOS is.
    """
    return length - (task.new_tokens if budget == "ruler" else 1)


def largest(size: Callable[[int], int], room: int, least: int, most: int | None = None) -> int | None:
    """The largest n from `least` to `most` with size(n) ≤ room, for a size that grows with n; None where there is none."""
    if size(least) > room:
        return None
    low, high = least, 2 * least or 1
    while (most is None or high <= most) and size(high) <= room:  # ends: every piece is at least one token
        low, high = high, 2 * high
    high = high if most is None else min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) <= room else (low, middle)
    return low


def make_sample(
    task: Task, length: int, material: Material, rng: np.random.Generator, *, budget: str = "ruler"
) -> tuple[np.ndarray, tuple[str, ...]]:
    """The ids of one prompt, with BOS, and the references it asks for.

    Raises ValueError, with the least length, where the template does not fit with the smallest haystack; and where the
    material is used up before the length is.
    """
    tokenizer, space = material.tokenizer, room(task, length, budget)
    drawn = task.draw(material, length, space, rng)
    pieces = largest(lambda n: material.size(drawn.build(n).text), space, drawn.least, drawn.most)
    if pieces is None:
        needed = length - space + material.size(drawn.build(drawn.least).text)
        raise ValueError(
            f"length {length} is too short for this RULER task: with budget {budget!r} its shortest prompt takes "
            f"{needed} tokens of tokenizer {tokenizer.name!r}"
        )
    if pieces == drawn.most:
        raise ValueError(f"length {length} is too long for this RULER task: there are only {pieces} different words")
    text, references = drawn.build(pieces)
    return np.concatenate([[tokenizer.bos_id], tokenizer.encode(text)]), references


def least_length(task: Task, length: int, material: Material, budget: str) -> int:
    """Tokens that nearly every sample fits in when settings are those of `length`: the longest of some, and 5% more."""
    rng, space = np.random.default_rng(0), room(task, length, budget)
    drawn = (task.draw(material, length, space, rng) for _ in range(20))
    return length - space + round(1.05 * max(material.size(draw.build(draw.least).text) for draw in drawn))
