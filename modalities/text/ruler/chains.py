"""Variable tracking (vt): a value handed from variable to variable, all of which are asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np

from modalities.text.ruler.base import NOISE, Draw, Material, Prompt, largest

__all__ = ["VariableTracking"]

TEMPLATE = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {value} in the text above."
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned"
    " the value {value}, they are: "
)
EXAMPLE_TOKENS = 500  # at most, in RULER; where its shortest has more, that


@dataclass(frozen=True)
class VariableTracking:
    """One chain "VAR A = 12345", "VAR B = VAR A ", … of `hops` hops in lines of noise, behind a solved example of 500 tokens.

    Names are five capitals, in the example three. RULER lays all its examples out alike; here each is drawn anew.
    """

    hops: int = 4

    new_tokens: ClassVar[int] = 30

    def draw(self, material: Material, length: int, room: int, rng: np.random.Generator) -> Draw:
        least = self.hops + 1  # lines of noise, no two assignments between the same two
        shown = self._chain(3, rng)
        lines = largest(lambda n: material.size(shown(n).text), EXAMPLE_TOKENS, least) or least
        text, names = shown(lines)
        example = f"{text} {' '.join(names)}\n\n"
        asked = self._chain(5, rng)
        return Draw(lambda lines: Prompt(example + asked(lines).text, asked(lines).references), least)

    def _chain(self, letters: int, rng: np.random.Generator) -> Callable[[int], Prompt]:
        """A function from a number of lines of noise to the question, with the chain's assignments in order among them."""
        names: dict[str, None] = {}
        while len(names) <= self.hops:
            names["".join(chr(65 + k) for k in rng.integers(26, size=letters))] = None
        variables = tuple(names)
        value, seed = str(rng.integers(10000, 99999)), int(rng.integers(2**32))
        chain = [f"VAR {variables[0]} = {value}"]
        chain += [f"VAR {new} = VAR {old} " for old, new in pairwise(variables)]

        def build(count: int) -> Prompt:
            lines = [NOISE] * count
            places = np.sort(np.random.default_rng([seed, count]).choice(count, len(chain), replace=False))
            for k, (place, assignment) in enumerate(zip(places, chain, strict=True)):
                lines.insert(place + k, assignment)
            return Prompt(TEMPLATE.format(context="\n".join(lines), value=value, count=len(chain)), variables)

        return build
