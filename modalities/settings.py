"""The settings of evaluators: dataclasses whose fields are options of the evaluate command."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from zoo.errors import LARGEST_SEED, did_you_mean

# Bounds of a setting that is a whole number: of tokens, samples, pixels of a side or whatever else.
MOST = 2**27
LEAST = {"samples": 1, "batch_tokens": 1, "seed": 0}


def option(default: object, help: str, *, parse: Callable[[str], object] | None = None) -> Any:
    """A dataclass field that is also an option of the evaluate command: `--sizes` for `sizes`.
    parse: text to value."""
    return field(default=default, metadata={"help": help, "parse": parse})


def counts(text: str) -> tuple[int, ...]:
    """ "128,512,4k" to (128, 512, 4096)."""
    factors = {"k": 2**10, "m": 2**20}
    numbers = []
    for part in text.lower().split(","):
        part = part.strip()
        if not part:
            continue
        number = part
        factor = 1
        if part[-1] in factors:
            number = part[:-1]
            factor = factors[part[-1]]
        if not number.isdigit():
            raise ValueError(f"{part!r} is not a count; expected numbers such as 128,512,4k")
        numbers.append(int(number) * factor)
    return tuple(numbers)


def check_choice(name: str, value: str | None, choices: Sequence[str]) -> None:
    """ValueError for a value that is neither None nor one of `choices`; it names the nearest."""
    if value is not None and value not in choices:
        suggestion = did_you_mean(str(value), choices)
        raise ValueError(f"{name} {value!r}; {suggestion}expected {' or '.join(choices)}")


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Every field is an option of the evaluate command; raises ValueError for values that cannot work.
    """

    samples: int | None = option(
        None, "per cell, or in all, as the evaluator says; default: the evaluator's own"
    )
    source: str | None = option(
        None, "where held-out data comes from, as in a recipe; default: what training held out"
    )
    batch_tokens: int = option(16384, "most tokens in one forward pass")

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            most = LARGEST_SEED if name == "seed" else MOST
            least = LEAST.get(name, -MOST)
            if name in LEAST and not isinstance(value, int | None):
                raise ValueError(f"{name} {value!r}: expected a whole number")
            entries = value if isinstance(value, tuple) else (value,)
            for number in entries:
                if not isinstance(number, int):
                    continue
                if number > most:
                    raise ValueError(f"{name} {number:,}: expected at most {most:,}")
                if number < least:
                    raise ValueError(f"{name} must be at least {least}, got {number}")

    def batch_size(self, tokens: int) -> int:
        return max(1, self.batch_tokens // tokens)


@dataclass(frozen=True)
class LengthSettings(Settings):
    """Settings of evaluators along a line of tokens."""

    lengths: tuple[int, ...] | None = option(
        None, "tokens, as 512,4k; default: by the training length", parse=counts
    )
    seed: int = option(42, "of every random draw")

    # Default lengths, in training lengths.
    factors: ClassVar[tuple[int, ...]] = (1, 2, 4, 8, 16, 32)
    # What lengths count.
    counted: ClassVar[str] = "tokens"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lengths is not None:
            if not self.lengths or min(self.lengths) < 2:
                raise ValueError(
                    f"lengths must be at least 2 {self.counted}, got {list(self.lengths)}"
                )
            object.__setattr__(self, "lengths", tuple(sorted(set(self.lengths))))

    def resolved_lengths(self, train_context: int) -> tuple[int, ...]:
        """Ascending; by default `factors` times the training length."""
        return self.lengths or tuple(train_context * factor for factor in self.factors)


@dataclass(frozen=True)
class CutSettings(LengthSettings):
    """Settings of evaluators that can also read a part of a text alone."""

    controls: ClassVar[tuple[str, ...]] = ("cut",)
    control: str | None = option(
        None,
        "cut: only as much as training had is read at once; cut-bos (perplexity): so, and each "
        "window begins with BOS",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("control", self.control, self.controls)
