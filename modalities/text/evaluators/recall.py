"""Recall: facts over one long document, read once and asked for at each length; and bits per byte
of its own tokens."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from modalities.decoder.model import Decoder
from modalities.decoder.scoring import device_of, nll_of, nll_of_features, telling
from modalities.evaluation import Cell
from modalities.paired import Observed, scores_by_unit
from modalities.results import CellValue, ModelResult, Row, Score
from modalities.settings import CutSettings, option
from modalities.statistics import standard_error
from modalities.text.data import EncodedDocument
from modalities.text.facts import HELDOUT
from modalities.text.prompts import StatedFact, state_facts
from modalities.text.retrieval import TextEvaluator
from modalities.text.tokenizers import load_tokenizer
from zoo.decoding import KVCache


@dataclass(frozen=True)
class RecallSettings(CutSettings):
    """`samples` counts documents, by default up to 8."""

    questions: int = option(
        40, "facts of a document, at even depths, each asked for at every length that holds it"
    )

    factors = (1, 2, 4, 8)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.questions < 2:
            raise ValueError(
                f"recall asks for several facts, got questions={self.questions}; expected 2 or more"
            )


class Recall(TextEvaluator[RecallSettings]):
    """Facts of a held-out document, at even depths, each asked for at every length up to which it
    is stated.

    A document is read once, part by part; at each length every question is answered from the cache,
    which is cropped after it. A text, a question and its answer together have at most `length`
    tokens. Means and ± are over documents.

    | column | |
    |---|---|
    | `exact`, `tokens_right` | share of answers, and of their tokens, that are the likeliest given
    the true ones before |
    | `nats` | of a token of the answers |
    | `tokens_right_beyond` | of facts that are stated further back than training reached |
    | `bits_per_byte` | of the document's own tokens since the length before, at most half the
    training length |
    | `seconds` | to read the document up to here |

    Models whose rotation depends on the length of the text, and `control`, read afresh at each
    length, after BOS.
    """

    name = "recall"
    version = 2
    summary = "forty facts over a long document, asked at each length after one reading; bits per byte by place"
    scores = (
        Score("exact", "facts recalled exactly", unit_interval=True),
        Score("tokens_right", "tokens of answers", unit_interval=True),
        Score("nats", "nats a token of answers", drawn=False),
        Score("tokens_right_beyond", "of facts beyond the training length", unit_interval=True),
        Score("bits_per_byte", "bits per byte of the last tokens"),
        Score("seconds", "seconds to read", drawn=False),
    )
    paired_over = "documents"

    def points(self, model: Decoder) -> tuple[int, ...]:
        """By default the lengths that a document serves."""
        lengths = self.lengths_for(model)
        longest = max(len(document.tokens) for document in self.heldout_for(model).items)
        return (
            lengths
            if self.settings.lengths
            else tuple(n for n in lengths if n <= longest) or (longest,)
        )

    def identity(self, model: Decoder) -> Row:
        text = self.heldout_for(model).fingerprint
        settings = self.settings
        read = {
            "lengths": self.points(model),
            "questions": settings.questions,
            "control": settings.control,
        }
        return {"text": text, "seed": settings.seed, "grammar": HELDOUT.fingerprint} | read

    def samples_line(self, results: list[ModelResult]) -> str:
        return f"{results[0].rows[-1]['documents']} documents with {self.settings.questions} facts each"

    def cells(self, model: Decoder) -> list[Cell]:
        lengths = self.points(model)
        documents = self.heldout_for(model).items
        if not self.describe(documents, lengths[-1]):
            longest = max(len(document.tokens) for document in documents)
            raise ValueError(
                f"no document of {self.text_name} has {lengths[-1]:,} tokens: at most --lengths {longest}"
            )
        order = np.random.default_rng(self.settings.seed).permutation(len(documents))
        cost = sum(self.at_once(model, n) for n in lengths) if self._afresh(model) else lengths[-1]
        data = {"length": lengths[-1], "lengths": lengths, "questions": self.settings.questions}
        chosen = [int(n) for n in order if len(documents[n].tokens) >= lengths[-1]][
            : self.settings.samples or 8
        ]
        tokenizer = load_tokenizer(model.config.tokenizer)
        rng = np.random.default_rng(0)
        # its errors come now
        state_facts(
            documents[chosen[0]].tokens, lengths[-1], self.settings.questions, rng, tokenizer
        )
        return [
            Cell(f"document={n}", cost, data | {"document": n, "text": documents[n]})
            for n in chosen
        ]

    def trials(self, cells: list[Cell]) -> list[Cell]:
        """The start of a document with its share of the facts, where all of it is long."""
        data = cells[0].data
        trials = []
        for length in (n for n in (1024, 2048) if 2 * n < data["length"]):
            questions = max(2, self.settings.questions * length // data["length"])
            shorter = {"length": length, "lengths": (length,), "questions": questions}
            trials.append(Cell("start", length, data | shorter))
        return trials or cells

    def _afresh(self, model: Decoder) -> bool:
        return self.settings.control is not None or getattr(model, "by_length", False)

    @torch.inference_mode()
    def measure(self, model: Decoder, cell: Cell) -> CellValue:
        tokenizer = load_tokenizer(model.config.tokenizer)
        lengths = cell.data["lengths"]
        document: EncodedDocument = cell.data["text"]
        rng = np.random.default_rng([self.settings.seed, cell.data["document"]])
        text, of_document, facts = state_facts(
            document.tokens, lengths[-1], cell.data["questions"], rng, tokenizer
        )
        room = lengths[-1] - len(text)
        trained = self.trained_at(model)
        device = device_of(model)
        sizes = document.byte_lengths(tokenizer)
        tokens, is_text = (torch.as_tensor(x, device=device) for x in (text, of_document))
        afresh = self._afresh(model)
        by_length = []
        cache = model.new_cache(lengths[-1])
        read = 0
        before = 0
        seconds = 0.0
        for length in lengths:
            stop = length - room
            if afresh:
                cache = model.new_cache(length)
                read = stop - (self.at_once(model, length) - room)
            inputs = tokens[read:stop].clone()
            if read and afresh:
                inputs[0] = tokenizer.bos_id
            started = time.perf_counter()
            with telling(model, len(inputs), self.advance):
                features = model.forward_features(inputs[None], cache=cache)
            seconds = time.perf_counter() - started + (0.0 if afresh else seconds)
            first = max(before + 1, read + 1, stop - trained // 2)
            counted = is_text[first:stop]
            losses = nll_of_features(
                model, features[:, first - read - 1 : -1], tokens[None, first:stop]
            )[0][counted]
            answers = [
                [stop - fact.end, *_answer(model, cache, fact)]
                for fact in facts
                if fact.end <= stop
            ]
            by_length.append(
                {
                    "length": length,
                    "nll_sum": float(losses.sum()),
                    "bytes": float(
                        sizes[int(is_text[:first].sum()) : int(is_text[:stop].sum())].sum()
                    ),
                    "seconds": seconds,
                    "answers": answers,  # (tokens since the statement, tokens, right ones, nats) each
                }
            )
            read = before = stop
        return {"document": cell.data["document"], "trained": trained, "found": by_length}

    def observed(self, name: str, cell: CellValue) -> Iterator[Observed]:
        unit = str(cell["document"])
        for one in cell["found"]:
            length = one["length"]
            for distance, count, right, nats in one["answers"]:
                scores = {
                    "exact": (right == count, 1),
                    "tokens_right": (right, count),
                    "nats": (nats, count),
                }
                if distance >= cell["trained"]:
                    scores["tokens_right_beyond"] = right, count
                for column, (total, weight) in scores.items():
                    yield Observed(length, unit, column, float(total), weight)
            yield Observed(
                length, unit, "bits_per_byte", one["nll_sum"] / math.log(2), one["bytes"]
            )
            yield Observed(length, unit, "seconds", one["seconds"], 1.0)

    def rows(self, cells: Mapping[str, CellValue]) -> list[Row]:
        scores = scores_by_unit(
            one for name, cell in cells.items() for one in self.observed(name, cell)
        )
        rows: dict[int, Row] = {}
        for score in self.scores:
            for (length, column), units in scores.items():
                if column == score.column and units:
                    row = rows.setdefault(length, {"length": length, "documents": len(units)})
                    values = np.array(list(units.values()))
                    row |= {
                        column: float(values.mean()),
                        f"{column}_standard_error": standard_error(values),
                    }
        return [rows[length] for length in sorted(rows)]


def _answer(model: Decoder, cache: KVCache, fact: StatedFact) -> tuple[int, int, float]:
    """(Tokens of the answer, those that are the likeliest given the ones before, nats of all); the
    cache is left as it was."""
    mark = cache.mark()
    count = len(fact.answer)
    ids = torch.as_tensor(np.concatenate([fact.question, fact.answer]), device=device_of(model))
    logits = model.forward_head(model.forward_features(ids[None, :-1], cache=cache, last=count))[
        0
    ].double()
    cache.rewind(mark)
    answer = ids[-count:]
    return count, int((logits.argmax(-1) == answer).sum()), float(nll_of(logits, answer).sum())
