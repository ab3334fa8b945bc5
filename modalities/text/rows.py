"""Training rows made out of plain ones, from which models learn to retrieve: facts asked for, and
text that comes again."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import torch

from modalities.loading import Batch, State
from modalities.text.facts import (
    HELDOUT,
    TRAIN,
    TRAINING,
    Fact,
    Grammar,
    Sentence,
    draw_digits,
    draw_facts,
    insert,
    pick,
    sentence_ends,
)
from modalities.tokenizers.encoding import Tokenizer

MOST_FACTS = 10
# Share of the rows that have so many facts, or as many as fit.
FULL = 0.6
# Tokens that come again, least and most, and most tokens between two copies.
COPIED = (8, 64)
BETWEEN = 40
WORD = re.compile("[A-Za-z]{2,}")


@dataclass(frozen=True)
class RowMix:
    """Shares of training rows: those of facts (whose answers count `weight` in the loss) and of
    copies; the rest is plain."""

    facts: float = 0.0
    copies: float = 0.0
    weight: float = 1.0
    wordings: str = "train"

    def __call__(self, row: Batch, key: list[int], tokenizer: Tokenizer) -> Batch:
        """The row itself, or one made of its text; `key` seeds the draw."""
        if not self.facts and not self.copies:
            return row
        rng = np.random.default_rng(key)
        share = rng.random()
        if share < self.facts:
            return facts_row(row, rng, tokenizer, self.weight, TRAINING[self.wordings])
        if share < self.facts + self.copies:
            return copies_row(row, rng, tokenizer)
        return row

    def identity(self) -> State | None:
        """What decides the rows it makes; None where it makes none, as in states saved before there
        were such rows."""
        if not self.facts and not self.copies:
            return None
        identity: State = {"facts": self.facts, "copies": self.copies, "weight": self.weight}
        if self.facts:
            identity["grammar"] = TRAINING[self.wordings].fingerprint
        return identity

    def check(self, context: int, tokenizer: Tokenizer) -> None:
        """ValueError for a context in which facts with their question do not fit."""
        if not self.facts:
            return
        least = tokens_of_a_fact(tokenizer, TRAINING[self.wordings])
        if context < least:
            needs = f"tokenizer {tokenizer.name!r} needs at least {least}"
            raise ValueError(
                f"context {context} is too short for facts and their questions: {needs}"
            )


def tokens_of_a_fact(tokenizer: Tokenizer, grammar: Grammar = TRAIN) -> int:
    """The most tokens of a fact with its question, of twenty drawn."""
    rng = np.random.default_rng(0)
    facts = [draw_facts(rng, grammar, 1)[0] for _ in range(20)]
    return max(_ask(fact, tokenizer, 1.0)[2] for fact in facts)


def facts_row(
    row: Batch,
    rng: np.random.Generator,
    tokenizer: Tokenizer,
    weight: float,
    grammar: Grammar = TRAIN,
) -> Batch:
    """Facts in the text of a plain row: the same keys and length, and "weights" float32 (L+1,).

    One to ten facts, as many as fit, stand between sentences; all or some are asked for at the end.
    Values count 0 in the loss where they are stated, `weight` in answers; all else counts 1.
    """
    # All but BOS.
    room = len(row["tokens"]) - 1
    statements = []
    answers = []
    words = WORD.findall(tokenizer.decode(row["tokens"]))
    words = [word for word in words if word.lower() not in HELDOUT.vocabulary]
    count = MOST_FACTS if rng.random() < FULL else int(rng.integers(1, MOST_FACTS + 1))
    for fact in draw_facts(rng, grammar, count, text=words):
        statement, answer, size = _ask(fact, tokenizer, weight)
        if size > room:
            break
        room -= size
        statements.append(statement)
        answers.append(answer)
    if rng.random() < 0.3:
        before, after = pick(rng, TRAIN.asides).split("|")
        aside = _encode((" " + before.rstrip(), " " + draw_digits(rng), after), tokenizer, 0.0)
        if aside.shape[1] <= room:
            statements.append(aside)
            rng.shuffle(statements)
    rng.shuffle(answers)
    if len(answers) > 1 and rng.random() < 0.2:
        answers = answers[: int(rng.integers(1, len(answers) + 1))]
    tokens_of_parts = sum(part.shape[1] for part in (*statements, *answers))
    text = _plain(row, tokenizer)[:, : len(row["tokens"]) - 1 - tokens_of_parts]
    ends = sentence_ends(text[0].astype(np.int64), tokenizer)
    places = np.sort(rng.choice(ends, size=len(statements))).tolist()
    pieces = insert(text, list(zip(places, statements, strict=True)))
    return _row(np.concatenate([*pieces, *answers], axis=1), row, tokenizer)


def copies_row(row: Batch, rng: np.random.Generator, tokenizer: Tokenizer) -> Batch:
    """A row in which a stretch comes again and again between other text; keys as in `facts_row`.

    The stretch is the row's first tokens, as they are or in random order, which then count 0 where
    they come first.
    """
    length = len(row["tokens"])
    text = _plain(row, tokenizer)
    stretch = text[:, : int(rng.integers(COPIED[0], COPIED[1] + 1))]
    if not stretch.shape[1]:
        return row
    # Tokens of the text that are used up.
    used = stretch.shape[1]
    first = stretch
    if rng.random() < 0.5:
        stretch = stretch[:, rng.permutation(used)]
        # Its weights become 0: a random order cannot be predicted where it comes first.
        first = stretch * [[1], [0]]
    pieces = [first]
    total = 1 + used
    while total < length:
        between = text[:, used : used + int(rng.integers(0, BETWEEN + 1))]
        pieces += [between, stretch]
        used += between.shape[1]
        total += between.shape[1] + stretch.shape[1]
    return _row(np.concatenate(pieces, axis=1)[:, : length - 1], row, tokenizer)


# Pieces of rows are (2, N): token ids, and what each counts in the loss.


def _encode(sentence: Sentence, tokenizer: Tokenizer, weight: float) -> np.ndarray:
    """A piece of (before, value, after), whose value counts `weight`."""
    parts = [tokenizer.encode(part) for part in sentence]
    weights = [np.ones(len(part)) for part in parts]
    weights[1] *= weight
    return np.stack([np.concatenate(parts), np.concatenate(weights)])


def _ask(fact: Fact, tokenizer: Tokenizer, weight: float) -> tuple[np.ndarray, np.ndarray, int]:
    """(statement, question and answer, tokens of both)."""
    statement = _encode(fact.statement, tokenizer, 0.0)
    answer = _encode((fact.question, fact.value, "."), tokenizer, weight)
    return statement, answer, statement.shape[1] + answer.shape[1]


def _plain(row: Batch, tokenizer: Tokenizer) -> np.ndarray:
    """The text of a row as a piece, without BOS and padding."""
    is_text = (row["segments"] >= 0) & (row["tokens"] != tokenizer.bos_id)
    tokens = row["tokens"][is_text].numpy()
    return np.stack([tokens, np.ones(len(tokens))])


def _row(piece: np.ndarray, like: Batch, tokenizer: Tokenizer) -> Batch:
    """One document of BOS and the piece, padded to the length of `like`."""
    piece = np.concatenate([[[tokenizer.bos_id], [1.0]], piece], axis=1)
    count = piece.shape[1]
    tokens = torch.full_like(like["tokens"], tokenizer.pad_id)
    segments = torch.full_like(like["segments"], -1)
    weights = torch.zeros(len(tokens))
    tokens[:count] = torch.from_numpy(piece[0].astype(np.int64))
    segments[:count] = 0
    weights[:count] = torch.from_numpy(piece[1].astype(np.float32))
    return {"tokens": tokens, "segments": segments, "weights": weights}
