"""What heads look at where a fact of a text is asked for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from modalities.attention import Heads, Probe
from modalities.decoder.model import Decoder
from modalities.decoder.scoring import device_of
from modalities.evaluation import Cell, Settings, check_choice, counts, option
from modalities.text.prompts import TEMPLATES, Template, default_haystack
from modalities.text.retrieval import HaystackEvaluator
from modalities.text.tokenizers import load_tokenizer

__all__ = ["HeadSettings", "TextHeads"]


@dataclass(frozen=True)
class HeadSettings(Settings):
    """`samples` counts prompts, at depths drawn alike over the text."""

    template: str = option("own", f"{', '.join(TEMPLATES)}")
    facts: tuple[int, ...] = option((1,), "facts in the text, one of which is asked for", parse=counts)
    length: int | None = option(None, "tokens of a prompt and its answer; default: the training length", parse=int)
    filler: str | None = option(None, "own, grass, text or file:PATH; default: what belongs to the template")
    seed: int = option(42, "of every random draw")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("template", self.template, TEMPLATES)
        if len(self.facts) != 1:
            raise ValueError(f"heads reads texts with one number of facts, got facts={list(self.facts)}")


class TextHeads(Heads, HaystackEvaluator):
    __doc__ = Heads.__doc__

    settings_class = HeadSettings

    @property
    def filler(self) -> str:
        return self.settings.filler or default_haystack(self.settings.template)

    def identity(self, model: Decoder) -> dict[str, object]:
        grammar = Template(self.settings.template).grammar
        key = super().identity(model) | {"hay": self.haystack(model).fingerprint}
        return key | ({"grammar": grammar.fingerprint} if grammar else {})

    def cells(self, model: Decoder) -> list[Cell]:
        self.describe_hay(model, self.settings.length or model.config.train_context)
        return super().cells(model)

    def probe(self, model: Decoder, index: int) -> Probe:
        """A prompt: its last query, which writes the answer's first token, and the answer's tokens wherever they stand."""
        settings, tokenizer = self.settings, load_tokenizer(model.config.tokenizer)
        length = settings.length or model.config.train_context
        rng = np.random.default_rng([settings.seed, length, index, *settings.facts])
        template = Template(settings.template, settings.facts[0], 0, 1 if settings.template == "bam" else 0)
        try:
            prompt, answer = template.draw(length, rng.random(), rng, tokenizer, self.haystack(model))
        except ValueError as error:
            raise ValueError(
                f"heads: {error}; give --length" if settings.length is None else f"heads: {error}"
            ) from error
        windows = np.lib.stride_tricks.sliding_window_view(prompt, len(answer))
        starts = np.flatnonzero((windows == answer).all(1)).tolist()
        if not starts:
            raise ValueError(f"template {settings.template!r}: the answer is cut into other tokens where it is stated")
        spans = [(start, start + len(answer)) for start in starts]
        ids = torch.as_tensor(prompt, device=device_of(model))[None]
        return Probe((ids,), torch.arange(len(prompt))[:, None], rows=[len(prompt) - 1], spans=spans)
