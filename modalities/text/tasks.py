"""Sequence tasks of known answer: a source, a separator, the target that a rule makes of it.

The length suite of ASEntmax (arXiv 2506.16640, appendix): trained on sources of 32 to 64 symbols
(64 to 128 for `local_count`) and tested at multiples of 64. A row is

    BOS  source (n)  |  target (m)

and the targets of the loss are the target's tokens alone. Rows are drawn from a random key and
never stored; `TASKS` has the rules by name, and a recipe names one in `data.source`:

    "task:reverse"                      sources of the suite's own lengths
    "task:reverse?least=16&most=32"     shorter ones
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import parse_qsl

import numpy as np
import torch

from modalities.loading import Batch, State
from modalities.tokenizers.symbols import SymbolTokenizer
from zoo.errors import nearest

PREFIX = "task:"
# Held-out rows of a task: as many as a recipe may ask for.
HELDOUT_ROWS = 4096
# First word of the random keys of rows, so that training and held-out rows share no stream.
_TRAIN = 0
_HELDOUT = 1
# Raise it when the rules or the order of random draws change.
_VERSION = 1

# MQMTAR: symbols of a key and of a value, how many of each there are, share of the source that
# pairs fill, and pairs that are asked for.
PAIR_SYMBOLS = 2
NUM_KEYS = 10_000
FILLED = 0.8
NUM_QUERIES = 4
# Local count: least and most repeats of a number.
RUN_LENGTHS = (2, 48)
# Flip-flop: symbols of its instructions, after the two bits, and their probabilities.
WRITE = 2
IGNORE = 3
READ = 4
INSTRUCTIONS = (0.8, 0.1, 0.1)


class Example(NamedTuple):
    """A source (n,) and its target (m,), int64 ids of the task's tokenizer."""

    source: np.ndarray
    target: np.ndarray


Draw = Callable[[np.random.Generator, int, SymbolTokenizer], Example]


@dataclass(frozen=True)
class Task:
    """A rule that makes targets of sources.

    draw: an example whose source has about so many tokens, from a random generator.
    symbols: of the source and the target together.
    least, most: length of the sources in training.
    shortest: the least length that the rule can have.
    rest: tokens of queries and target, where they are not as many as the source's.
    """

    name: str
    draw: Draw
    symbols: int
    least: int = 32
    most: int = 64
    shortest: int = 2
    rest: int | None = None

    @property
    def tokenizer(self) -> str:
        """The spec of its tokenizer."""
        return f"symbols:{self.symbols}"

    @property
    def context(self) -> int:
        """Inputs of the longest row in training."""
        return self.row_length(self.most) - 1

    def row_length(self, length: int) -> int:
        """The most tokens of a row whose source has `length`."""
        rest = length if self.rest is None else self.rest
        return 2 + length + rest

    def example(self, key: list[int], length: int) -> Example:
        """The example of a random key; ValueError for a source shorter than `shortest`."""
        if length < self.shortest:
            raise ValueError(
                f"task {self.name!r}: sources have at least {self.shortest} tokens, got {length}"
            )
        return self.draw(np.random.default_rng(key), length, SymbolTokenizer(self.symbols))


def _draw_copy(rng: np.random.Generator, length: int, tokenizer: SymbolTokenizer) -> Example:
    source = rng.integers(0, 32, length)
    return Example(source, source)


def _draw_reverse(rng: np.random.Generator, length: int, tokenizer: SymbolTokenizer) -> Example:
    source = rng.integers(0, 32, length)
    return Example(source, source[::-1])


def _draw_sort(rng: np.random.Generator, length: int, tokenizer: SymbolTokenizer) -> Example:
    source = rng.integers(0, 32, length)
    return Example(source, np.sort(source))


def _draw_two_back(rng: np.random.Generator, length: int, tokenizer: SymbolTokenizer) -> Example:
    source = rng.integers(0, 16, length)
    return Example(source, np.concatenate([[0, 0], source[:-2]]))


def _draw_local_count(rng: np.random.Generator, length: int, tokenizer: SymbolTokenizer) -> Example:
    """Runs of one number each; the target counts from 0 in each run."""
    least, most = RUN_LENGTHS
    numbers: list[np.ndarray] = []
    counts: list[np.ndarray] = []
    total = 0
    number = int(rng.integers(16))
    while total < length:
        repeats = int(rng.integers(least, most + 1))
        numbers.append(np.full(repeats, number))
        counts.append(np.arange(repeats))
        total += repeats
        # One of the 15 other numbers.
        number = (number + int(rng.integers(1, 16))) % 16
    return Example(np.concatenate(numbers)[:length], np.concatenate(counts)[:length])


def _draw_flip_flop(rng: np.random.Generator, length: int, tokenizer: SymbolTokenizer) -> Example:
    """Instructions and bits in turn: the first writes, the last reads.

    A read is followed by a blank; the target has the last written bit for each read.
    """
    count = length // 2
    instructions = rng.choice((WRITE, IGNORE, READ), size=count, p=INSTRUCTIONS)
    instructions[0] = WRITE
    instructions[-1] = READ
    bits = rng.integers(0, 2, count)
    reads = instructions == READ
    # The number of the last write up to each instruction.
    last_write = np.maximum.accumulate(np.where(instructions == WRITE, np.arange(count), 0))
    target = bits[last_write][reads]
    bits = np.where(reads, tokenizer.blank_id, bits)
    return Example(np.stack([instructions, bits], axis=1).reshape(-1), target)


@lru_cache(maxsize=1)
def _pairs_of_symbols() -> tuple[np.ndarray, np.ndarray]:
    """(NUM_KEYS, 2) keys and (NUM_KEYS, 2) values, drawn once for all examples."""
    rng = np.random.default_rng(0)
    tables = []
    for _ in range(2):
        numbers = rng.choice(256**PAIR_SYMBOLS, size=NUM_KEYS, replace=False)
        tables.append(np.stack([numbers // 256, numbers % 256], axis=1))
    return tables[0], tables[1]


def _draw_mqmtar(rng: np.random.Generator, length: int, tokenizer: SymbolTokenizer) -> Example:
    """Multi-query multi-token associative recall: pairs among blanks, then four queries."""
    keys, values = _pairs_of_symbols()
    size = 2 * PAIR_SYMBOLS + 1
    count = int(FILLED * length) // size
    # Keys of one source differ; values may be equal.
    chosen_keys = keys[rng.choice(NUM_KEYS, size=count, replace=count > NUM_KEYS)]
    chosen_values = values[rng.integers(0, NUM_KEYS, count)]
    if count > NUM_KEYS:
        # Longer sources repeat keys: the first value of a key is that of all its places.
        _, first, number = np.unique(chosen_keys, axis=0, return_index=True, return_inverse=True)
        chosen_values = chosen_values[first[number.reshape(-1)]]
    marks = np.full((count, 1), tokenizer.value_id)
    pairs = np.concatenate([chosen_keys, marks, chosen_values], axis=1)
    blanks = length - count * size
    # Where pairs begin: a random choice of the places of pairs among pairs and blanks.
    order = np.zeros(count + blanks, dtype=bool)
    order[rng.choice(count + blanks, size=count, replace=False)] = True
    lengths = np.where(order, size, 1)
    starts = np.cumsum(lengths) - lengths
    pairs_and_blanks = np.full(length, tokenizer.blank_id)
    pairs_and_blanks[starts[order][:, None] + np.arange(size)] = pairs
    asked = rng.choice(count, size=NUM_QUERIES, replace=False)
    query_mark = np.full((NUM_QUERIES, 1), tokenizer.query_id)
    value_mark = np.full((NUM_QUERIES, 1), tokenizer.value_id)
    queries = np.concatenate([query_mark, chosen_keys[asked]], axis=1)
    answers = np.concatenate([value_mark, chosen_values[asked]], axis=1)
    source = np.concatenate([pairs_and_blanks, queries.reshape(-1)])
    return Example(source, answers.reshape(-1))


_TABLE = (
    Task("copy", _draw_copy, symbols=32),
    Task("reverse", _draw_reverse, symbols=32),
    Task("sort", _draw_sort, symbols=32),
    Task(
        "mqmtar",
        _draw_mqmtar,
        symbols=256,
        shortest=25,
        # A query is a mark and a key, its answer a mark and a value.
        rest=2 * NUM_QUERIES * (1 + PAIR_SYMBOLS),
    ),
    Task("two_back", _draw_two_back, symbols=16),
    Task("local_count", _draw_local_count, symbols=48, least=64, most=128),
    Task("flip_flop", _draw_flip_flop, symbols=5, shortest=4),
)
TASKS: dict[str, Task] = {task.name: task for task in _TABLE}


def is_task(source: object) -> bool:
    """Whether a source is a task, not text."""
    return isinstance(source, str) and source.startswith(PREFIX)


def open_task(source: str) -> Task:
    """The task of a source such as "task:sort?least=16&most=32"; ValueError for an unknown one."""
    name, _, query = source.removeprefix(PREFIX).partition("?")
    if name not in TASKS:
        raise ValueError(f"source {source!r}: no task {name!r}; {nearest(name, TASKS)}")
    task = TASKS[name]
    lengths = {"least": task.least, "most": task.most}
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key not in lengths:
            raise ValueError(f"source {source!r}: unknown option {key!r}; {nearest(key, lengths)}")
        if not value.isdigit():
            raise ValueError(f"source {source!r}: {key}={value!r}, expected a number of tokens")
        lengths[key] = int(value)
    if not task.shortest <= lengths["least"] <= lengths["most"]:
        raise ValueError(
            f"source {source!r}: expected {task.shortest} ≤ least ≤ most, "
            f"got least={lengths['least']}, most={lengths['most']}"
        )
    return replace(task, least=lengths["least"], most=lengths["most"])


class TaskRows:
    """Rows of a task as a dataset: row n depends on (task, seed, n) alone."""

    def __init__(self, task: Task, context: int, seed: int, *, heldout: bool = False) -> None:
        self.task = task
        self.context = context
        self.seed = seed
        self.stream = _HELDOUT if heldout else _TRAIN
        self.size = HELDOUT_ROWS if heldout else None

    def __getitem__(self, index: int) -> Batch:
        """{"tokens", "segments"} int64 and {"weights"} float32, each (L+1,)."""
        key = [_VERSION, self.stream, self.seed, index]
        task = self.task
        length = int(np.random.default_rng([*key, 0]).integers(task.least, task.most + 1))
        example = task.example([*key, 1], length)
        row = self.padding_row()
        ids = row_of(example, SymbolTokenizer(task.symbols))
        row["tokens"][: len(ids)] = torch.from_numpy(ids)
        row["segments"][: len(ids)] = 0
        row["weights"][len(ids) - len(example.target) : len(ids)] = 1.0
        return row

    def identity(self) -> State:
        return {
            "kind": "task",
            "version": _VERSION,
            "task": self.task.name,
            "least": self.task.least,
            "most": self.task.most,
            "seed": self.seed,
            "context": self.context,
        }

    def padding_row(self) -> Batch:
        """A row of nothing but padding: it adds no target."""
        pad_id = SymbolTokenizer(self.task.symbols).pad_id
        tokens = torch.full((self.context + 1,), pad_id, dtype=torch.int64)
        segments = torch.full_like(tokens, -1)
        return {"tokens": tokens, "segments": segments, "weights": torch.zeros(len(tokens))}


def row_of(example: Example, tokenizer: SymbolTokenizer) -> np.ndarray:
    """(2 + n + m,) int64: BOS, source, separator, target."""
    return np.concatenate(
        [[tokenizer.bos_id], example.source, [tokenizer.separator_id], example.target]
    ).astype(np.int64)
