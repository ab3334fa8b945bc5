"""Evaluators, samples and pictures during training: `evaluate.during` of a recipe.

"generate" continues prompts and "predict" draws images with their classes; any other name is an evaluator's.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from modalities.contract import Modality, Writer
from modalities.evaluation import Evaluator, Listing
from recipes.config import ConfigError, Recipe
from zoo.bounds import LARGEST_SEED, bounded, check_fields
from zoo.model import ZooModel
from zoo.naming import nearest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from recipes.engine import Engine


@dataclass(frozen=True)
class Sample:
    """A prompt and what the model wrote behind it, or why it could not."""

    prompt: str
    text: str
    error: str = ""

    def line(self, width: int = 100) -> str:
        """The end of the prompt and the beginning of what follows, for the console."""
        prompt, text = (" ".join(part.split()) for part in (self.prompt, self.error or self.text))
        start = "…" + prompt[-width // 3 :] if len(prompt) > width // 3 else prompt
        return f"{start} → {text[:width]}{'…' if len(text) > width else ''}"


@dataclass
class Findings:
    """Numbers by name, such as {"passkey/free_generation@512": 0.98}, samples, and figures."""

    numbers: dict[str, float] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    pictures: list[Figure] = field(default_factory=list)

    def page(self) -> str:
        """The samples as text to read: each prompt, and behind an arrow what the model wrote."""
        parts = []
        for number, sample in enumerate(self.samples, 1):
            text = f"(nothing: {sample.error})" if sample.error else sample.text
            parts.append(f"[{number}] {_hanging(sample.prompt)}\n →  {_hanging(text)}\n")
        return "\n".join(parts)


def _hanging(text: str) -> str:
    return textwrap.indent(text, "    ", lambda line: True).removeprefix("    ")


@dataclass(frozen=True)
class Writing:
    """Settings of "generate", as `priorzoo generate` has them.

    prompts: none: the beginnings of the first `count` held-out samples. seed: of the first prompt; the next has the next one.
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
        """Find the prompts. OSError or ValueError for held-out data, a prompt or settings that cannot be used."""
        if not self.prompts and self.modality.prompts is not None:
            self.prompts = tuple(self.modality.prompts(self.recipe.data, self.settings.count))
        for number, prompt in enumerate(self.prompts):
            self._stream(model, prompt, number)

    def measure(self, model: ZooModel, findings: Findings) -> None:
        """Add a sample of every prompt. Sampling has its own generator: the state of training does not move."""
        for number, prompt in enumerate(self.prompts):
            try:
                findings.samples.append(Sample(prompt, "".join(self._stream(model, prompt, number))))
            except ValueError as error:  # such as a position beyond a table's end: no reason to stop training
                findings.samples.append(Sample(prompt, "", str(error)))

    def _stream(self, model: ZooModel, prompt: str, number: int) -> Iterable[str]:
        assert isinstance(model, Writer)
        s = self.settings
        sampling = {"temperature": s.temperature, "top_k": s.top_k, "top_p": s.top_p, "seed": s.seed + number}
        return model.stream_text(prompt, max_new_tokens=s.max_new_tokens, **sampling)


@dataclass(frozen=True)
class Showing:
    """Settings of "predict": how many held-out samples a picture shows."""

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
        """Draw once. OSError or ValueError for what cannot be drawn."""
        from matplotlib import pyplot

        findings = Findings()
        self.measure(model, findings)
        pyplot.close(findings.pictures[0])

    def measure(self, model: ZooModel, findings: Findings) -> None:
        assert self.modality.draw is not None
        findings.pictures.append(self.modality.draw(model, self.recipe.data, self.settings.count))


class Scorer:
    """Runs an evaluator."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = evaluator

    def prepare(self, model: ZooModel) -> None:
        """ValueError for what cannot be measured."""
        self.evaluator.cells(model)

    def measure(self, model: ZooModel, findings: Findings) -> None:
        """Add the finite scores by name and place."""
        evaluator, axis = self.evaluator, self.evaluator.axis
        scores = [score.column for score in evaluator.scores if score.tabled and not score.exception]
        for row in evaluator.rows(dict(evaluator.run(model))):
            for column in scores:
                value = row.get(column)
                if value is not None and math.isfinite(value):
                    findings.numbers[f"{evaluator.name}/{column}@{axis.tick(row[axis.column])}"] = float(value)


Monitor = Scorer | Sampler | Painter
SAMPLERS: dict[str, type[Sampler] | type[Painter]] = {"generate": Sampler, "predict": Painter}


class Monitors:
    """Monitors of a recipe, each with the number of steps between its runs.

    They measure on rank 0 what would be exported at that step, while the other ranks wait: keep their settings small.
    """

    def __init__(self, recipe: Recipe, modality: Modality, model: ZooModel) -> None:
        self.monitors = find_monitors(recipe, modality)
        for _, monitor in self.monitors:  # what cannot be measured is an error now
            monitor.prepare(model)

    def measure(self, engine: Engine, step: int, *, last: bool) -> Findings:
        """Findings that are due after this step, on rank 0; none on others. Every rank must call."""
        due = [monitor for every, monitor in self.monitors if step % every == 0 or last]
        findings = Findings()
        if due:
            if model := engine.exported_model():
                for monitor in due:
                    monitor.measure(model, findings)
            engine.barrier()
        return findings


def find_monitors(recipe: Recipe, modality: Modality) -> list[tuple[int, Monitor]]:
    """(steps between its runs, monitor) of each entry in `evaluate.during`; ConfigError for an entry that is wrong."""
    samplers = {name: kind for name, kind in SAMPLERS.items() if kind.serves(modality)}
    evaluators = {name: kind for name, kind in modality.evaluators.items() if not issubclass(kind, Listing)}
    known: dict[str, Any] = evaluators | samplers
    monitors: list[tuple[int, Monitor]] = []
    for name, entry in recipe.evaluate.during.items():
        if name not in known:
            raise ConfigError(
                f"evaluate.during: no evaluator {name!r} for {modality.name} models; {nearest(name, known)}"
            )
        settings = {**entry} if isinstance(entry, Mapping) else {"every": entry}
        every = settings.pop("every", None)
        if type(every) is not int or every < 1:
            raise ConfigError(
                f"evaluate.during: {name}={entry!r}: expected a number of steps, or settings with 'every'"
            )
        parsers = {option.name: option.metadata.get("parse") for option in fields(known[name].settings_class)}
        try:
            for key, value in settings.items():
                if key not in parsers:
                    raise ValueError(f"{name} has no setting {key!r}; {nearest(key, parsers)}")
                parse = parsers[key]
                if parse is not None and isinstance(value, str | int | float):  # as on the command line
                    value = parse(str(value))
                settings[key] = tuple(value) if isinstance(value, list) else value
            chosen = known[name].settings_class(**settings)
            if name in samplers:
                monitors.append((every, known[name](chosen, recipe, modality)))
            else:
                monitors.append((every, Scorer(known[name](chosen, asdict(recipe.data)))))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"evaluate.during: {name}={entry!r}: {error}") from error
    return monitors
