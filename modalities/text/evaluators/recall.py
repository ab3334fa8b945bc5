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
from modalities.text.evaluation import TextEvaluator
from modalities.text.facts import HELDOUT
from modalities.text.prompts import StatedFact, state_facts
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
    | `exact`, `tokens_right` | share of answers, and of their tokens, that are the likeliest |
    | `nats` | of a token of the answers |
    | `tokens_right_beyond` | of facts that are stated further back than training reached |
    | `bits_per_byte` | of the document's own tokens since the length before |
    | `seconds` | to read the document up to here |

    The tokens of an answer are predicted from the true ones before. Bits per byte are of at most as
    many tokens as half the training length. Models whose rotation depends on the length of the
    text, and `control`, read afresh at each length, after BOS.
    """

    name = "recall"
    version = 2
    summary = (
        "forty facts over a long document, asked at each length after one reading; "
        "bits per byte by place"
    )
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
        if self.settings.lengths:
            return lengths
        longest = max(len(document.tokens) for document in self.heldout_for(model).items)
        served = tuple(length for length in lengths if length <= longest)
        return served or (longest,)

    def identity(self, model: Decoder) -> Row:
        return {
            "text": self.heldout_for(model).fingerprint,
            "seed": self.settings.seed,
            "grammar": HELDOUT.fingerprint,
            "lengths": self.points(model),
            "questions": self.settings.questions,
            "control": self.settings.control,
        }

    def samples_line(self, results: list[ModelResult]) -> str:
        documents = results[0].rows[-1]["documents"]
        return f"{documents} documents with {self.settings.questions} facts each"

    def cells(self, model: Decoder) -> list[Cell]:
        lengths = self.points(model)
        longest = lengths[-1]
        questions = self.settings.questions
        documents = self.heldout_for(model).items
        if not self.describe(documents, longest):
            most = max(len(document.tokens) for document in documents)
            raise ValueError(
                f"no document of {self.text_name} has {longest:,} tokens: at most --lengths {most}"
            )
        order = np.random.default_rng(self.settings.seed).permutation(len(documents))
        numbers = [int(n) for n in order if len(documents[n].tokens) >= longest]
        numbers = numbers[: self.settings.samples or 8]
        # Errors of the words come before anything is measured.
        tokenizer = load_tokenizer(model.config.tokenizer)
        first = documents[numbers[0]].tokens
        state_facts(first, longest, questions, np.random.default_rng(0), tokenizer)
        cost = longest
        if self._reads_each_length(model):
            cost = sum(self.at_once(model, length) for length in lengths)
        cells = []
        for n in numbers:
            data = {"length": longest, "lengths": lengths, "questions": questions}
            data |= {"document": n, "text": documents[n]}
            cells.append(Cell(f"document={n}", cost, data))
        return cells

    def trials(self, cells: list[Cell]) -> list[Cell]:
        """The start of a document with its share of the facts, where all of it is long."""
        data = cells[0].data
        trials = []
        for length in (1024, 2048):
            if 2 * length < data["length"]:
                questions = max(2, self.settings.questions * length // data["length"])
                shorter = {"length": length, "lengths": (length,), "questions": questions}
                trials.append(Cell("start", length, data | shorter))
        return trials or cells

    def _reads_each_length(self, model: Decoder) -> bool:
        """Whether each length is read afresh, and not as the continuation of the one before."""
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
        # Tokens of the longest question with its answer.
        room = lengths[-1] - len(text)
        trained = self.trained_at(model)
        device = device_of(model)
        sizes = document.byte_lengths(tokenizer)
        tokens = torch.as_tensor(text, device=device)
        is_text = torch.as_tensor(of_document, device=device)
        afresh = self._reads_each_length(model)
        by_length = []
        cache = model.new_cache(lengths[-1])
        # Inputs are tokens[start:stop]; `before` is the stop of the length before.
        start = 0
        before = 0
        seconds = 0.0
        for length in lengths:
            stop = length - room
            if afresh:
                cache = model.new_cache(length)
                start = stop - (self.at_once(model, length) - room)
                seconds = 0.0
            inputs = tokens[start:stop].clone()
            if start and afresh:
                inputs[0] = tokenizer.bos_id
            started = time.perf_counter()
            with telling(model, len(inputs), self.advance):
                features = model.forward_features(inputs[None], cache=cache)
            seconds += time.perf_counter() - started
            # Tokens scored: since the length before, at most half the training length.
            first = max(before + 1, start + 1, stop - trained // 2)
            features = features[:, first - start - 1 : -1]
            losses = nll_of_features(model, features, tokens[None, first:stop])[0]
            document_tokens = slice(int(is_text[:first].sum()), int(is_text[:stop].sum()))
            # (tokens since the statement, tokens, right ones, nats) of each answer.
            answers = []
            for fact in facts:
                if fact.end <= stop:
                    answers.append([stop - fact.end, *_answer(model, cache, fact)])
            by_length.append(
                {
                    "length": length,
                    "nll_sum": float(losses[is_text[first:stop]].sum()),
                    "bytes": float(sizes[document_tokens].sum()),
                    "seconds": seconds,
                    "answers": answers,
                }
            )
            start = stop
            before = stop
        return {"document": cell.data["document"], "trained": trained, "found": by_length}

    def observed(self, name: str, cell: CellValue) -> Iterator[Observed]:
        unit = str(cell["document"])
        for value in cell["found"]:
            length = value["length"]
            for distance, count, right, nats in value["answers"]:
                yield Observed(length, unit, "exact", float(right == count), 1)
                yield Observed(length, unit, "tokens_right", float(right), count)
                yield Observed(length, unit, "nats", float(nats), count)
                if distance >= cell["trained"]:
                    yield Observed(length, unit, "tokens_right_beyond", float(right), count)
            bits = value["nll_sum"] / math.log(2)
            yield Observed(length, unit, "bits_per_byte", bits, value["bytes"])
            yield Observed(length, unit, "seconds", value["seconds"], 1.0)

    def rows(self, cells: Mapping[str, CellValue]) -> list[Row]:
        observations: list[Observed] = []
        for name, cell in cells.items():
            observations += self.observed(name, cell)
        scores = scores_by_unit(observations)
        rows: dict[int, Row] = {}
        for score in self.scores:
            for (length, column), units in scores.items():
                if column == score.column and units:
                    row = rows.setdefault(length, {"length": length, "documents": len(units)})
                    values = np.array(list(units.values()))
                    row[column] = float(values.mean())
                    row[f"{column}_standard_error"] = standard_error(values)
        return [rows[length] for length in sorted(rows)]


def _answer(model: Decoder, cache: KVCache, fact: StatedFact) -> tuple[int, int, float]:
    """(Tokens of the answer, those that are the likeliest given the ones before, nats of all); the
    cache is left as it was."""
    mark = cache.mark()
    count = len(fact.answer)
    ids = torch.as_tensor(np.concatenate([fact.question, fact.answer]), device=device_of(model))
    features = model.forward_features(ids[None, :-1], cache=cache, last=count)
    logits = model.forward_head(features)[0].double()
    cache.rewind(mark)
    answer = ids[-count:]
    right = int((logits.argmax(-1) == answer).sum())
    return count, right, float(nll_of(logits, answer).sum())
