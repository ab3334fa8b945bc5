"""Far: facts spread over one long text, each asked for after one reading; what reading takes, and how much it leaves out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modalities.cost import Meter
from modalities.decoder.generation import PREFILL_TOKENS, prefill
from modalities.decoder.model import Decoder
from modalities.decoder.scoring import device_of, force_and_write
from modalities.evaluation import Cell, CellValue, LengthSettings, Observed, Score, option
from modalities.text.prompts import Template, open_haystack
from modalities.text.retrieval import TextEvaluator
from modalities.text.tokenizers import load_tokenizer
from zoo.attention import skipping
from zoo.decoding import Cache

__all__ = ["Far", "FarSettings"]


@dataclass(frozen=True)
class FarSettings(LengthSettings):
    """`samples` counts texts of each length; by default as many, up to 16, as have the longest one's tokens together."""

    template: str = option("heldout", "words of the facts: heldout, train or invented")
    filler: str = option("text", "own, grass, text (held-out documents) or file:PATH")
    facts: int = option(5, "facts at even depths of a text, from its start to its end, each asked for")
    exact: int = option(0, "texts up to this length are read again with no key left out: column `difference`")

    factors = (32, 128, 512, 2048)

    def __post_init__(self) -> None:
        super().__post_init__()
        if Template(self.template, 1).grammar is None or self.facts < 2:
            raise ValueError(
                f"far asks for several facts, got template {self.template!r} with facts={self.facts}; expected two or more of "
                "heldout, train or invented"
            )


class Far(TextEvaluator):
    """Exact match of the facts of a long text: at even depths, of one kind, each asked for after one prefill of the text.

    | column | |
    |---|---|
    | `exact_match` | answers generated exactly, with `standard_error`; `by_depth` in the order of `depths` |
    | `seconds`, `mib` | wall time of the prefill, and its memory at the peak, the cache included |
    | `left_out` | on the CPU, the share of the logits of all layers but the last, which reads for one token, not computed |
    | `difference` | of the answers' logits, read with and without leaving out, the largest absolute difference |

    Times and memory are of the machine that measured, with as many threads as torch was given.
    """

    name = "far"
    summary = (
        "facts spread over a long text, each asked for after one reading: exact match, seconds, memory, keys left out"
    )
    scores = (
        Score("exact_match", "facts recalled exactly", unit_interval=True),
        Score("seconds", "seconds to read the text"),
        Score("mib", "MiB at the peak", drawn=False),
        Score("left_out", "logits left out", unit_interval=True),
        Score("difference", drawn=False),
    )
    settings_class = FarSettings
    paired_over = "questions"

    @property
    def source_name(self) -> str | None:
        return self.text_name if self.settings.filler == "text" else self.settings.filler

    def identity(self, model: Decoder) -> dict[str, Any]:
        given = self.settings
        template = Template(given.template, given.facts)
        assert template.grammar is not None
        hay = self._haystack(model).fingerprint
        asked = {"template": given.template, "facts": given.facts, "grammar": template.grammar.fingerprint, "hay": hay}
        return asked | {"seed": given.seed, "exact": given.exact}

    def points(self, model: Decoder) -> tuple[int, ...]:
        return self.settings.resolved_lengths(self.trained_at(model))

    def cells(self, model: Decoder) -> list[Cell]:
        lengths = self.points(model)
        return [
            Cell(f"length={n}/text={k}", cost=n, data={"length": n, "text": k})
            for n in lengths
            for k in range(self.settings.samples or min(16, lengths[-1] // n))
        ]

    def measure(self, model: Decoder, cell: Cell) -> CellValue:
        given, length = self.settings, cell.data["length"]
        rng = np.random.default_rng([given.seed, length, cell.data["text"], given.facts])
        template, tokenizer = Template(given.template, given.facts), load_tokenizer(model.config.tokenizer)
        text, asked = template.draw_all(length, rng, tokenizer, self._haystack(model))
        tokens = torch.as_tensor(text, device=device_of(model))[None]
        room = max(len(question) + len(answer) for question, answer in asked)
        meter = Meter(tokens.device)
        with meter, skipping(True) as tally:
            cache = self._read(model, tokens, model.new_cache(length + room, "auto"))
        forced, right = self._answer(model, cache, asked)
        every = model.config.num_heads * (model.config.num_layers - 1) * length * (length + 1) // 2
        counted = every > 0 and tokens.device.type == "cpu"
        found: CellValue = {
            "length": length,
            "exact_match": sum(right) / len(right),
            "seconds": meter.seconds,
            "mib": math.nan if meter.peak_bytes is None else meter.peak_bytes / 2**20,
            "left_out": max(0.0, 1 - tally.logits / every)
            if counted
            else math.nan,  # blocks compute some hidden ones too
            "right": right,
        }
        if length <= given.exact:
            with skipping(False):
                cache = self._read(model, tokens, model.new_cache(length + room))
                plain, _ = self._answer(model, cache, asked)
            differences = (float((a - b).abs().max()) for a, b in zip(forced, plain, strict=True))
            found["difference"] = max(differences)
        return found

    @torch.inference_mode()
    def _read(self, model: Decoder, tokens: Tensor, cache: Cache) -> Cache:
        for part in tokens.split(PREFILL_TOKENS, dim=1):
            prefill(model, part, cache)
            self.advance(part.shape[1])
        return cache

    @torch.inference_mode()
    def _answer(
        self, model: Decoder, cache: Cache, asked: list[tuple[np.ndarray, np.ndarray]]
    ) -> tuple[list[Tensor], list[int]]:
        """Of each question the logits (A, V) of its answer, and 1 where it is generated."""
        logits, right = [], []
        for question, answer in asked:
            mark = cache.mark()
            ids, expected = (torch.as_tensor(x, device=device_of(model))[None] for x in (question, answer))
            forced, written = force_and_write(model, ids, expected, cache)
            logits.append(forced[0])
            right.append(int(torch.equal(written, expected)))
            cache.rewind(mark)
        return logits, right

    def rows(self, cells: Mapping[str, CellValue]) -> list[dict[str, Any]]:
        rows = super().rows({name: {k: v for k, v in cell.items() if k != "right"} for name, cell in cells.items()})
        for row in rows:
            right = np.array([cell["right"] for cell in cells.values() if cell["length"] == row["length"]])
            row["standard_error"] = math.sqrt(row["exact_match"] * (1 - row["exact_match"]) / right.size)
            row["depths"] = np.linspace(0, 1, right.shape[1]).tolist()
            row["by_depth"] = right.mean(0).tolist()
        return rows

    def observed(self, name: str, cell: CellValue) -> Iterator[Observed]:
        for k, right in enumerate(cell["right"]):
            yield Observed(cell["length"], f"{name}/{k}", "exact_match", right)

    def _haystack(self, model: Decoder) -> Any:
        documents = self.heldout_for(model).items if self.settings.filler == "text" else ()
        tokenizer = load_tokenizer(model.config.tokenizer)
        return open_haystack(self.settings.filler, tokenizer, [document.tokens for document in documents])
