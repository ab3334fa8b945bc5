"""Training rows made out of plain ones, from which models learn to retrieve: facts asked for, and text that comes again."""

from __future__ import annotations

import re

import numpy as np
import torch

from modalities.loading import Batch
from modalities.text.facts import HELDOUT, TRAIN, Fact, Sentence, draw_facts, fill_aside, pick, sentence_ends
from modalities.text.tokenizers import Tokenizer

__all__ = ["copies_row", "facts_row", "tokens_of_a_fact"]

MOST_FACTS = 10
FULL = 0.6  # share of the rows with that many, or as many as fit
COPIED = (8, 64)  # tokens that come again, least and most
BETWEEN = 40  # most tokens between two copies
WORD = re.compile("[A-Za-z]{2,}")


def tokens_of_a_fact(tokenizer: Tokenizer) -> int:
    """The most tokens of a fact with its question, of twenty drawn."""
    rng = np.random.default_rng(0)
    return max(_ask(fact, tokenizer, 1.0)[2] for _ in range(20) for fact in draw_facts(rng, TRAIN, 1))


def facts_row(row: Batch, rng: np.random.Generator, tokenizer: Tokenizer, weight: float) -> Batch:
    """Facts in the text of a plain row: the same keys and length, and "weights" float32 (L+1,).

    One to ten facts, as many as fit, stand between sentences; all or some are asked for at the end. Values count 0 in the loss
    where they are stated, `weight` in answers; all else counts 1.
    """
    room = len(row["tokens"]) - 1  # BOS
    statements, answers = [], []
    said = [word for word in WORD.findall(tokenizer.decode(row["tokens"])) if word.lower() not in HELDOUT.vocabulary]
    count = MOST_FACTS if rng.random() < FULL else int(rng.integers(1, MOST_FACTS + 1))
    for fact in draw_facts(rng, TRAIN, count, text=said):
        statement, answer, size = _ask(fact, tokenizer, weight)
        if size > room:
            break
        room -= size
        statements.append(statement)
        answers.append(answer)
    if rng.random() < 0.3:
        aside = _encode(fill_aside(pick(rng, TRAIN.asides), rng), tokenizer, 0.0)
        if aside.shape[1] <= room:
            statements.append(aside)
            rng.shuffle(statements)
    rng.shuffle(answers)
    if len(answers) > 1 and rng.random() < 0.2:
        answers = answers[: int(rng.integers(1, len(answers) + 1))]
    spare = len(row["tokens"]) - 1 - sum(part.shape[1] for part in (*statements, *answers))
    text = _plain(row, tokenizer)[:, :spare]
    places = np.sort(rng.choice(sentence_ends(text[0].astype(np.int64), tokenizer), size=len(statements)))
    pieces, done = [text[:, :0]], 0
    for place, statement in zip(places, statements, strict=True):
        pieces += [text[:, done:place], statement]
        done = place
    return _row(np.concatenate([*pieces, text[:, done:], *answers], axis=1), row, tokenizer)


def copies_row(row: Batch, rng: np.random.Generator, tokenizer: Tokenizer) -> Batch:
    """A row in which a stretch comes again and again between other text; keys as in `facts_row`.

    The stretch is the row's first tokens, as they are or in random order, which then count 0 where they come first.
    """
    length, text = len(row["tokens"]), _plain(row, tokenizer)
    stretch = text[:, : int(rng.integers(COPIED[0], COPIED[1] + 1))]
    if not stretch.shape[1]:
        return row
    done = stretch.shape[1]
    first = stretch
    if rng.random() < 0.5:
        stretch = stretch[:, rng.permutation(done)]
        first = stretch * [[1], [0]]
    pieces, total = [first], 1 + done
    while total < length:
        between = text[:, done : done + int(rng.integers(0, BETWEEN + 1))]
        pieces += [between, stretch]
        done += between.shape[1]
        total += between.shape[1] + stretch.shape[1]
    return _row(np.concatenate(pieces, axis=1)[:, : length - 1], row, tokenizer)


# Pieces of rows are (2, N): token ids, and what each counts in the loss.


def _encode(sentence: Sentence, tokenizer: Tokenizer, weight: float) -> np.ndarray:
    """Of (before, value, after), whose value counts `weight`."""
    parts = [tokenizer.encode(piece) for piece in sentence]
    weights = [np.full(len(part), weight if n == 1 else 1.0) for n, part in enumerate(parts)]
    return np.stack([np.concatenate(parts), np.concatenate(weights)])


def _ask(fact: Fact, tokenizer: Tokenizer, weight: float) -> tuple[np.ndarray, np.ndarray, int]:
    """(statement, question and answer, tokens of both)."""
    statement = _encode(fact.statement, tokenizer, 0.0)
    answer = _encode((fact.question, fact.value, "."), tokenizer, weight)
    return statement, answer, statement.shape[1] + answer.shape[1]


def _plain(row: Batch, tokenizer: Tokenizer) -> np.ndarray:
    """The text of a row, without BOS and padding."""
    tokens = row["tokens"][(row["segments"] >= 0) & (row["tokens"] != tokenizer.bos_id)].numpy()
    return np.stack([tokens, np.ones(len(tokens))])


def _row(pieces: np.ndarray, like: Batch, tokenizer: Tokenizer) -> Batch:
    """One document of BOS and the pieces, padded to the length of `like`."""
    pieces = np.concatenate([[[tokenizer.bos_id], [1.0]], pieces], axis=1)
    count = pieces.shape[1]
    tokens, segments = torch.full_like(like["tokens"], tokenizer.pad_id), torch.full_like(like["segments"], -1)
    weights = torch.zeros(len(tokens))
    tokens[:count] = torch.from_numpy(pieces[0].astype(np.int64))
    segments[:count] = 0
    weights[:count] = torch.from_numpy(pieces[1].astype(np.float32))
    return {"tokens": tokens, "segments": segments, "weights": weights}
