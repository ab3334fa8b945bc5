"""What heads look at where a fact of a text is asked for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from modalities.attention import Heads, Probe
from modalities.decoder.model import Decoder
from modalities.decoder.scoring import device_of
from modalities.evaluation import Cell, Settings, option
from modalities.text.prompts import Template
from modalities.text.retrieval import HaystackEvaluator
from modalities.text.tokenizers import load_tokenizer

__all__ = ["HeadSettings", "TextHeads"]


@dataclass(frozen=True)
class HeadSettings(Settings):
    """`samples` counts prompts, at depths drawn alike over the text."""

    length: int | None = option(None, "tokens of a prompt and its answer; default: the training length", parse=int)
    seed: int = option(42, "of every random draw")


class TextHeads(Heads, HaystackEvaluator):
    __doc__ = Heads.__doc__

    settings_class = HeadSettings

    filler = "own"

    def identity(self, model: Decoder) -> dict[str, object]:
        return super().identity(model) | {"hay": self.haystack(model).fingerprint}

    def cells(self, model: Decoder) -> list[Cell]:
        self.describe_hay(model, self.settings.length or model.config.train_context)
        return super().cells(model)

    def probe(self, model: Decoder, index: int) -> Probe:
        """A prompt: its last query, which writes the answer's first token, and the answer's tokens wherever they stand."""
        settings, tokenizer = self.settings, load_tokenizer(model.config.tokenizer)
        length = settings.length or model.config.train_context
        rng = np.random.default_rng([settings.seed, length, index, 1])
        try:
            prompt, answer = Template().draw(length, rng.random(), rng, tokenizer, self.haystack(model))
        except ValueError as error:
            raise ValueError(f"heads: {error}" + "; give --length" * (settings.length is None)) from error
        windows = np.lib.stride_tricks.sliding_window_view(prompt, len(answer))
        starts = np.flatnonzero((windows == answer).all(1)).tolist()
        if not starts:
            raise ValueError("the answer is cut into other tokens where it is stated")
        spans = [(start, start + len(answer)) for start in starts]
        ids = torch.as_tensor(prompt, device=device_of(model))[None]
        return Probe((ids,), torch.arange(len(prompt))[:, None], rows=[len(prompt) - 1], spans=spans)
