"""What a model makes of a few held-out samples while it trains: "generate" and "predict" in `evaluate.during` of a recipe."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from modalities.contract import Modality, Writer
from recipes.config import Recipe
from zoo.bounds import LARGEST_SEED, bounded, check_fields
from zoo.model import ZooModel

__all__ = ["SAMPLERS", "Painter", "Sample", "Sampler", "Writing", "sample_page"]


@dataclass(frozen=True)
class Writing:
    """What is written, as `priorzoo generate` has it.

    prompts: of your own; none: the beginnings of the first `count` held-out samples.
    seed: of the first prompt; the next has the next one. The same at every step: what changes is the model.
    """

    prompts: tuple[str, ...] = ()
    count: int = bounded(3, 1, 1024)
    max_new_tokens: int = bounded(64, 1, 2**20)
    temperature: float = bounded(0.8, 0, 1e6)
    top_k: int | None = bounded(None, 1, 2**24)
    top_p: float | None = bounded(0.95, 0, 1)
    seed: int = bounded(0, 0, LARGEST_SEED)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Sample:
    """A prompt and what the model wrote behind it, or why it could not."""

    prompt: str
    written: str
    failed: str = ""

    def line(self, width: int = 100) -> str:
        """The end of the prompt and the beginning of what follows, for the console."""
        prompt, written = (" ".join(text.split()) for text in (self.prompt, self.failed or self.written))
        start = "…" + prompt[-width // 3 :] if len(prompt) > width // 3 else prompt
        return f"{start} → {written[:width]}{'…' if len(written) > width else ''}"


class Sampler:
    """Continues prompts, with models that write."""

    settings_class = Writing

    def __init__(self, settings: Writing, recipe: Recipe, modality: Modality) -> None:
        self.settings, self.recipe, self.modality = settings, recipe, modality
        self.prompts: tuple[str, ...] = settings.prompts

    @staticmethod
    def serves(modality: Modality) -> bool:
        return issubclass(modality.model, Writer) and modality.prompts is not None

    def prepare(self, model: ZooModel) -> None:
        """Find the prompts. Raises ValueError or OSError where the held-out data cannot be read, ValueError for a prompt or
        settings that the model does not take."""
        if not self.prompts and self.modality.prompts is not None:
            self.prompts = tuple(self.modality.prompts(self.recipe.data, self.settings.count))
        for n, prompt in enumerate(self.prompts):
            self._pieces(model, prompt, n)

    def write(self, model: ZooModel) -> list[Sample]:
        """A sample of every prompt. The generator is the sampling's own: the state of training does not move."""
        found = []
        for n, prompt in enumerate(self.prompts):
            try:
                found.append(Sample(prompt, "".join(self._pieces(model, prompt, n))))
            except ValueError as error:  # such as a position beyond a table's end: no reason to stop training
                found.append(Sample(prompt, "", str(error)))
        return found

    def _pieces(self, model: Any, prompt: str, number: int) -> Iterator[str]:
        s = self.settings
        sampling = {"temperature": s.temperature, "top_k": s.top_k, "top_p": s.top_p, "seed": s.seed + number}
        return model.stream_text(prompt, max_new_tokens=s.max_new_tokens, **sampling)


@dataclass(frozen=True)
class Showing:
    """How many held-out samples a picture shows."""

    count: int = bounded(8, 1, 256)

    def __post_init__(self) -> None:
        check_fields(self)


class Painter:
    """Draws held-out samples with what the model makes of them, where a modality has a picture of that."""

    settings_class = Showing

    def __init__(self, settings: Showing, recipe: Recipe, modality: Modality) -> None:
        self.settings, self.recipe, self.modality = settings, recipe, modality

    @staticmethod
    def serves(modality: Modality) -> bool:
        return modality.draw is not None

    def prepare(self, model: ZooModel) -> None:
        """Raises ValueError or OSError for what cannot be drawn: it is, once."""
        from matplotlib import pyplot

        pyplot.close(self.draw(model))

    def draw(self, model: ZooModel) -> Any:
        """A matplotlib figure."""
        assert self.modality.draw is not None
        return self.modality.draw(model, self.recipe.data, self.settings.count)


SAMPLERS: dict[str, type[Sampler] | type[Painter]] = {"generate": Sampler, "predict": Painter}


def sample_page(samples: Sequence[Sample]) -> str:
    """Samples as text to read: each prompt, and behind an arrow what the model wrote."""
    parts = []
    for number, sample in enumerate(samples, 1):
        written = f"(nothing: {sample.failed})" if sample.failed else sample.written
        parts.append(f"[{number}] {_hanging(sample.prompt)}\n →  {_hanging(written)}\n")
    return "\n".join(parts)


def _hanging(text: str) -> str:
    return textwrap.indent(text, "    ", lambda line: True).removeprefix("    ")
