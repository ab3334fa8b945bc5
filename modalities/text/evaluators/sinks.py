"""The attention sink on held-out text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from modalities.attention import Probe, Sinks
from modalities.decoder.model import Decoder
from modalities.decoder.scoring import device_of
from modalities.evaluation import Cell, Settings, option
from modalities.text.retrieval import TextEvaluator
from modalities.text.tokenizers import load_tokenizer

__all__ = ["SinkSettings", "TextSinks"]


@dataclass(frozen=True)
class SinkSettings(Settings):
    """`samples` counts windows, each of another document where there are enough."""

    length: int | None = option(None, "tokens of a window; default: the training length", parse=int)


class TextSinks(Sinks, TextEvaluator):
    __doc__ = Sinks.__doc__

    settings_class = SinkSettings

    def identity(self, model: Decoder) -> dict[str, object]:
        return super().identity(model) | {"text": self.heldout_for(model).fingerprint}

    def cells(self, model: Decoder) -> list[Cell]:
        self.describe(self.heldout_for(model).items, self.settings.length or model.config.train_context)
        return super().cells(model)

    def probe(self, model: Decoder, index: int) -> Probe:
        """BOS and the first tokens of a document, or its next ones where documents are few."""
        length = self.settings.length or model.config.train_context
        documents = [d.tokens for d in self.heldout_for(model).items if len(d.tokens) >= length]
        if not documents:
            raise ValueError(f"no held-out document of {self.text_name} has {length} tokens; choose a shorter --length")
        tokens = documents[index % len(documents)]
        start = index // len(documents) * length % (len(tokens) - length + 1)
        bos = load_tokenizer(model.config.tokenizer).bos_id
        ids = torch.as_tensor(np.concatenate([[bos], tokens[start : start + length - 1]]), device=device_of(model))
        return Probe((ids[None],), torch.arange(length)[:, None])
