"""Far: facts over one long text, each asked for after one reading of it; what reading takes, and what it leaves out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modalities.cost import Meter
from modalities.decoder.generation import prefill
from modalities.decoder.model import Decoder
from modalities.decoder.scoring import device_of, force_and_write
from modalities.evaluation import (
    Cell,
    CellValue,
    LengthSettings,
    ModelResult,
    Observed,
    Score,
    option,
    standard_error,
)
from modalities.text.facts import HELDOUT
from modalities.text.prompts import Template
from modalities.text.retrieval import FILLERS, HaystackEvaluator
from modalities.text.tokenizers import load_tokenizer
from zoo.attention import skipping
from zoo.decoding import Cache

__all__ = ["Far", "FarSettings"]


@dataclass(frozen=True)
class FarSettings(LengthSettings):
    """`samples` counts texts of each length. By default shorter texts are more, up to 16: together as long as the longest."""

    filler: str = option("text", FILLERS)
    depths: int = option(5, "facts of a text, at even depths from its start to its end, each asked for")

    factors = (8, 32, 128)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.depths < 2:
            raise ValueError(f"far asks for several facts, got depths={self.depths}; expected 2 or more")


class Far(HaystackEvaluator[FarSettings]):
    """Exact match of the facts of a long text: at even depths, of one kind, each asked for after one prefill of the text.

    | column | |
    |---|---|
    | `exact_match` | answers generated exactly, with `standard_error` over texts; `by_depth` in the order of `depths` |
    | `seconds`, `mib` | wall time of the prefill, and its memory at the peak, the cache included |
    | `left_out` | share of the logits that were not computed, without the last layer, which attends for one token only; CPU |

    Times and memory are of the machine that measured, with as many threads as torch was given. Texts are read one at a time.
    """

    name = "far"
    summary = "facts over a long text, each asked for after one reading: exact match, seconds, memory, logits left out"
    scores = (
        Score("exact_match", "facts recalled exactly", unit_interval=True),
        Score("seconds", "seconds to read the text"),
        Score("mib", "MiB at the peak", drawn=False),
        Score("left_out", "logits left out", unit_interval=True),
    )
    paired_over = "texts"

    @property
    def filler(self) -> str:
        return self.settings.filler

    def identity(self, model: Decoder) -> dict[str, object]:
        facts = {"seed": self.settings.seed, "template": "heldout", "facts": self.settings.depths}
        return facts | {"hay": self.haystack(model).fingerprint, "grammar": HELDOUT.fingerprint}

    def points(self, model: Decoder) -> tuple[int, ...]:
        return self.lengths_for(model)

    def samples_line(self, results: list[ModelResult]) -> str:
        texts = ", ".join(f"{row['texts']} of {row['length']:,} tokens" for row in results[0].rows)
        return f"texts with {self.settings.depths} facts each, {texts},"

    def cells(self, model: Decoder) -> list[Cell]:
        lengths = self.points(model)
        self.describe_hay(model, max(lengths))
        return [
            Cell(f"length={n}/text={k}", cost=n, data={"length": n, "text": k})
            for n in lengths
            for k in range(self.settings.samples or min(16, lengths[-1] // n))
        ]

    def measure(self, model: Decoder, cell: Cell) -> CellValue:
        settings, length = self.settings, cell.data["length"]
        rng = np.random.default_rng([settings.seed, length, cell.data["text"], settings.depths])
        template, tokenizer = Template("heldout", settings.depths), load_tokenizer(model.config.tokenizer)
        text, asked = template.draw_all(length, rng, tokenizer, self.haystack(model))
        tokens = torch.as_tensor(text, device=device_of(model))[None]
        meter = Meter(tokens.device)
        with meter, skipping(True) as tally:
            cache = self._read(model, tokens, model.new_cache(length))
        right = self._answer(model, cache, asked)
        every = model.config.num_heads * (model.config.num_layers - 1) * len(text) * (len(text) + 1) // 2
        counted = every > 0 and tokens.device.type == "cpu"
        return {
            "length": length,
            "exact_match": sum(right) / len(right),
            "seconds": meter.seconds,
            "mib": math.nan if meter.peak_bytes is None else meter.peak_bytes / 2**20,
            "left_out": tally.left_out / every if counted else math.nan,
            "right": right,
        }

    @torch.inference_mode()
    def _read(self, model: Decoder, tokens: Tensor, cache: Cache) -> Cache:
        prefill(model, tokens, cache, advance=self.advance)
        return cache

    @torch.inference_mode()
    def _answer(self, model: Decoder, cache: Cache, asked: list[tuple[np.ndarray, np.ndarray]]) -> list[int]:
        """1 where the answer of a question is generated; the cache is left as it was."""
        right = []
        for question, answer in asked:
            mark = cache.mark()
            ids, expected = (torch.as_tensor(x, device=device_of(model))[None] for x in (question, answer))
            right.append(int(torch.equal(force_and_write(model, ids, expected, cache)[1], expected)))
            cache.rewind(mark)
        return right

    def rows(self, cells: Mapping[str, CellValue]) -> list[dict[str, Any]]:
        rows = super().rows({name: {k: v for k, v in cell.items() if k != "right"} for name, cell in cells.items()})
        for row in rows:
            texts = [cell for cell in cells.values() if cell["length"] == row["length"]]
            right = np.array([cell["right"] for cell in texts])
            row["standard_error"] = standard_error(right.mean(1))
            row["texts"], row["depths"] = len(texts), np.linspace(0, 1, right.shape[1]).tolist()
            row["by_depth"] = right.mean(0).tolist()
        return rows

    def observed(self, name: str, cell: CellValue) -> Iterator[Observed]:
        yield Observed(cell["length"], name, "exact_match", sum(cell["right"]), len(cell["right"]))
