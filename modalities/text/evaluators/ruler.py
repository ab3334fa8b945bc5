"""RULER's eight retrieval tasks (arXiv 2404.06654), offline.

Each asks for "special magic" values by key; its templates are kept word for word, since scores
depend on them. Essays are held-out documents instead of Paul Graham's, and keys come from our own word lists, so
that everything works offline. Haystacks are sized by bisection over a bounded number of pieces: a length too short for
the template is an error, and nothing loops until something fits.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from modalities.decoder.model import Decoder
from modalities.decoder.scoring import greedy_texts
from modalities.evaluation import Cell, CellValue, Score
from modalities.text.data import EncodedDocument
from modalities.text.needle_words import ADJECTIVES, NOUNS
from modalities.text.retrieval import TextEvaluator
from modalities.text.tokenizers import Tokenizer, load_tokenizer
from zoo.slices import slices

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
HEAD = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n"
)
TAIL = (
    "\nWhat are all the special magic {kind} for {query} mentioned in the provided text?"
    " The special magic {kind} for {query} mentioned in the provided text are"
)
DEPTHS = np.linspace(0, 100, 40).round().astype(int)  # per cent of the sentences, as in RULER
MAX_NEW_TOKENS = 128


@dataclass(frozen=True)
class RulerTask:
    """haystack: "noise" lines, "essay" text or other "needles"; key, value: "words", "numbers" or "uuids"."""

    haystack: str
    key: str
    value: str
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1


RULER_TASKS = {
    "single_1": RulerTask("noise", "words", "numbers"),
    "single_2": RulerTask("essay", "words", "numbers"),
    "single_3": RulerTask("essay", "words", "uuids"),
    "multikey_1": RulerTask("essay", "words", "numbers", num_keys=4),
    "multikey_2": RulerTask("needles", "words", "numbers"),
    "multikey_3": RulerTask("needles", "uuids", "uuids"),
    "multivalue": RulerTask("essay", "words", "numbers", num_values=4),
    "multiquery": RulerTask("essay", "words", "numbers", num_keys=4, num_queries=4),
}


class Ruler(TextEvaluator):
    """RULER's eight needle tasks: mean fraction of references found in at most 128 generated tokens, 0 to 1.

    A prompt, answer prefix included, holds at most L tokens (RULER counts the 128 generated ones too). A sample ends
    early once every reference was found, which cannot change its score. `samples` prompts per task and length
    (default 20). Without `lengths`, the default lengths that are too short for the templates are left out.
    """

    name = "ruler"
    summary = "RULER's eight needle-in-a-haystack tasks: fraction of references found in 128 generated tokens"
    scores = (
        Score("average", "references found, average of tasks", unit_interval=True),
        *(Score(task, f"{task}: references found", unit_interval=True, tabled=False) for task in RULER_TASKS),
    )
    default_samples = 20

    @property
    def samples(self) -> int:
        return self.settings.samples or self.default_samples

    def identity(self, model: Decoder) -> dict[str, Any]:
        text = self.heldout_for(model).fingerprint
        return {"text": text, "seed": self.settings.seed, "samples": self.samples, "new_tokens": MAX_NEW_TOKENS}

    def essay(self, model: Decoder) -> tuple[str, ...]:
        """The words of all held-out documents, one after the other."""
        return _words(self.heldout_for(model).items)

    def points(self, model: Decoder) -> tuple[int, ...]:
        lengths = self.settings.resolved_lengths(self.trained_at(model))
        if self.settings.lengths:
            return lengths  # given explicitly: measured, or an error
        shortest = max(_shortest(model.config.tokenizer, self.essay(model), task) for task in RULER_TASKS)
        return tuple(length for length in lengths if length >= shortest)

    def cells(self, model: Decoder) -> list[Cell]:
        tokenizer, essay, seed = model.config.tokenizer, self.essay(model), self.settings.seed
        return [
            Cell(
                f"length={length}/task={task}",
                cost=self.samples * (length + MAX_NEW_TOKENS),
                data={
                    "length": length,
                    "task": task,
                    "samples": _ruler_cell(tokenizer, essay, task, length, self.samples, seed),
                },
            )
            for length in self.points(model)
            for task in RULER_TASKS
        ]

    def measure(self, model: Decoder, cell: Cell) -> CellValue:
        tokenizer = load_tokenizer(model.config.tokenizer)
        samples, length = cell.data["samples"], cell.data["length"]
        scores: list[float] = []
        for part in slices(len(samples), self.settings.batch_size(length + MAX_NEW_TOKENS)):
            wanted = [answers for _, answers in samples[part]]
            texts = greedy_texts(
                model,
                tokenizer,
                [prompt for prompt, _ in samples[part]],
                max_new_tokens=MAX_NEW_TOKENS,
                finished=[partial(_all_found, references=answers) for answers in wanted],
            )
            scores += [fraction_found(text, answers) for text, answers in zip(texts, wanted, strict=True)]
        return {"length": length, "task": cell.data["task"], "samples": len(scores), "score": sum(scores) / len(scores)}

    def rows(self, cells: Mapping[str, CellValue]) -> list[dict[str, Any]]:
        rows = []
        for length in sorted({c["length"] for c in cells.values()}):
            by_task = {c["task"]: c["score"] for c in cells.values() if c["length"] == length}
            rows.append({"length": length, "average": sum(by_task.values()) / len(by_task), **by_task})
        return rows


def fraction_found(text: str, references: tuple[str, ...]) -> float:
    """Share of references that occur in ``text``, case aside: RULER's score of one sample."""
    lowered = text.lower()
    return sum(reference.lower() in lowered for reference in references) / len(references)


def _all_found(text: str, references: tuple[str, ...]) -> bool:
    return fraction_found(text, references) == 1.0


def make_ruler_sample(
    task: RulerTask, length: int, tokenizer: Tokenizer, essay: tuple[str, ...], rng: np.random.Generator
) -> tuple[np.ndarray, tuple[str, ...]]:
    """One prompt (ids with BOS, at most ``length`` of them) and the references it asks for.

    The haystack is the largest that fits, found by bisection; length 0 asks for none. Raises ValueError, with the
    least length, when the template does not fit even without a haystack.
    """
    keys = _distinct(task.key, task.num_keys, rng)
    values = [_distinct(task.value, task.num_values, rng) for _ in keys]
    needles = [NEEDLE.format(kind=task.value, key=k, value=v) for k, vs in zip(keys, values, strict=True) for v in vs]
    needles = [needles[i] for i in rng.permutation(len(needles))]
    queried = rng.permutation(task.num_keys)[: task.num_queries]
    query = ", ".join(keys[i] for i in queried[:-1]) + ", and " * (len(queried) > 1) + keys[queried[-1]]
    references = tuple(value for i in queried for value in values[i])
    head, tail = HEAD, TAIL
    kind = task.value
    if len(references) == 1:  # RULER's own grammar for one answer
        kind = kind[:-1]
        head, tail = (t.replace("Some", "A").replace("are all", "is").replace("are", "is") for t in (head, tail))
    head, tail = head.format(kind=kind), tail.format(kind=kind, query=query)

    build = _haystack(task, needles, essay, rng)

    def prompt(pieces: int) -> np.ndarray:
        return np.concatenate([[tokenizer.bos_id], tokenizer.encode(head + build(pieces) + tail)])

    if length == 0:
        return prompt(0), references
    if len(shortest := prompt(0)) > length:
        raise ValueError(
            f"length {length} is too short for this RULER task: its shortest prompt takes {len(shortest)} tokens "
            f"of tokenizer {tokenizer.name!r}"
        )
    low, high = 0, 1
    while len(prompt(high)) <= length:  # ends: every piece is at least one token
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if len(prompt(middle)) <= length else (low, middle)
    return prompt(low), references


def _haystack(
    task: RulerTask, needles: list[str], essay: tuple[str, ...], rng: np.random.Generator
) -> Callable[[int], str]:
    """A function from a number of haystack pieces (words of essays, else lines) to the context, needles in place."""
    if task.haystack == "essay":
        first = int(rng.integers(len(essay)))
        depths = np.sort(rng.choice(DEPTHS, size=len(needles), replace=False))

        def build(count: int) -> str:
            sentences = _sentences(essay[(first + k) % len(essay)] for k in range(count))
            places = [len(sentences) * int(depth) // 100 for depth in depths]
            for place, needle in zip(places[::-1], needles[::-1], strict=True):  # from the back: places stay valid
                sentences.insert(place, needle)
            return " ".join(sentences)

        return build

    taken = {_key_of(needle) for needle in needles}
    fillers: list[str] = []
    stream = rng.spawn(1)[0]  # its own stream: how many fillers are drawn must not change the next sample

    def filler(k: int) -> str:
        if task.haystack == "noise":
            return NOISE
        while len(fillers) <= k:
            key = _distinct(task.key, 1, stream, avoid=taken)[0]
            fillers.append(NEEDLE.format(kind=task.value, key=key, value=_random(task.value, stream)))
        return fillers[k]

    # As in RULER's own code, lines of noise and of other needles take the needles anywhere; only essays use the 40 depths.
    places = np.sort(rng.random(len(needles)))

    def build_lines(count: int) -> str:
        lines = [filler(k) for k in range(count)]
        for place, needle in zip(places[::-1], needles[::-1], strict=True):
            lines.insert(int(place * count), needle)
        return "\n".join(lines)

    return build_lines


def _key_of(needle: str) -> str:
    return needle.split(" for ", 1)[1].split(" is: ", 1)[0]


def _random(kind: str, rng: np.random.Generator) -> str:
    if kind == "words":
        return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
    if kind == "numbers":
        return str(int(rng.integers(1_000_000, 10_000_000)))
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))


def _distinct(kind: str, count: int, rng: np.random.Generator, avoid: set[str] | None = None) -> list[str]:
    """``count`` different draws outside ``avoid``; of over ten thousand possible values, so the bound is never met."""
    found: dict[str, None] = {}
    for _ in range(100 * count):
        if (drawn := _random(kind, rng)) not in (avoid or ()):
            found[drawn] = None
        if len(found) == count:
            return list(found)
    raise RuntimeError(f"could not draw {count} different {kind}")


def _sentences(words: Iterable[str]) -> list[str]:
    """Words joined up to each that ends a sentence; the last may be cut short."""
    sentences: list[list[str]] = [[]]
    for word in words:
        sentences[-1].append(word)
        if word.rstrip("\"')").endswith((".", "!", "?")):
            sentences.append([])
    return [" ".join(sentence) for sentence in sentences if sentence]


@lru_cache(maxsize=4)
def _words(documents: tuple[EncodedDocument, ...]) -> tuple[str, ...]:
    return tuple(word for document in documents for word in document.text.split())


@lru_cache(maxsize=32)
def _shortest(tokenizer_name: str, essay: tuple[str, ...], task: str) -> int:
    """Tokens of the longest of some prompts without a haystack, and 5% more: a length that nearly every draw fits."""
    tokenizer = load_tokenizer(tokenizer_name)
    rng = np.random.default_rng(0)
    drawn = [len(make_ruler_sample(RULER_TASKS[task], 0, tokenizer, essay, rng)[0]) for _ in range(20)]
    return round(1.05 * max(drawn))


@lru_cache(maxsize=256)
def _ruler_cell(tokenizer_name: str, essay: tuple[str, ...], task: str, length: int, count: int, seed: int) -> tuple:
    tokenizer = load_tokenizer(tokenizer_name)
    rng = np.random.default_rng([seed, length, list(RULER_TASKS).index(task)])
    try:
        return tuple(make_ruler_sample(RULER_TASKS[task], length, tokenizer, essay, rng) for _ in range(count))
    except ValueError as error:
        raise ValueError(f"ruler {task}: {error}") from error
