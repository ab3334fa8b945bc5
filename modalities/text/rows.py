"""Training rows that teach retrieval, made of plain rows.

A row of facts states facts between its sentences and asks for them at its end; a row of copies
repeats a stretch of its tokens.
"""

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

# Pieces of rows are arrays (2, N): token ids, and what each token counts in the loss.

MAX_FACTS = 10
# Share of the rows of facts that have MAX_FACTS, or as many as fit; the others draw a number.
FULL_SHARE = 0.6
# Share of the rows of facts that have an aside: a sentence with a number that nothing asks for.
ASIDE_SHARE = 0.3
# Share of the rows of facts that ask for some of their facts only.
PARTIAL_SHARE = 0.2
# Least and most tokens of the stretch that a row of copies repeats.
STRETCH_TOKENS = (8, 64)
# Most tokens between two copies.
MAX_GAP = 40
WORD = re.compile("[A-Za-z]{2,}")


@dataclass(frozen=True)
class RowMix:
    """Shares of rows of facts and of copies in training; the rest are plain.

    weight: what the tokens of an answer count in the loss.
    wordings: key of `TRAINING`, the grammar that facts are drawn from.
    """

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
        """What decides the rows it makes, for saved states; None where all rows stay plain."""
        if not self.facts and not self.copies:
            return None
        identity: State = {"facts": self.facts, "copies": self.copies, "weight": self.weight}
        if self.facts:
            identity["grammar"] = TRAINING[self.wordings].fingerprint
        return identity

    def check(self, context: int, tokenizer: Tokenizer) -> None:
        """ValueError for a context that is too short for a fact and its question."""
        if not self.facts:
            return
        least = tokens_of_a_fact(tokenizer, TRAINING[self.wordings])
        if context < least:
            needs = f"tokenizer {tokenizer.name!r} needs at least {least}"
            raise ValueError(
                f"context {context} is too short for facts and their questions: {needs}"
            )


def tokens_of_a_fact(tokenizer: Tokenizer, grammar: Grammar = TRAIN) -> int:
    """Tokens of the longest of twenty random facts, its question and answer included."""
    rng = np.random.default_rng(0)
    sizes = []
    for _ in range(20):
        fact = draw_facts(rng, grammar, 1)[0]
        _, _, size = _encode_fact(fact, tokenizer, 1.0)
        sizes.append(size)
    return max(sizes)


def facts_row(
    row: Batch,
    rng: np.random.Generator,
    tokenizer: Tokenizer,
    weight: float,
    grammar: Grammar = TRAIN,
) -> Batch:
    """A row of facts in the text of a plain row: its keys and length, and float32 "weights" (L+1,).

    One to ten facts, as many as fit, stand between sentences; all or some are asked for at the end.
    Values count 0 in the loss where they are stated, `weight` in answers; all else counts 1.
    """
    # All tokens but BOS.
    length = len(row["tokens"]) - 1
    room = length
    statements = []
    answers = []
    words = WORD.findall(tokenizer.decode(row["tokens"]))
    words = [word for word in words if word.lower() not in HELDOUT.vocabulary]
    count = MAX_FACTS
    if rng.random() >= FULL_SHARE:
        count = int(rng.integers(1, MAX_FACTS + 1))
    for fact in draw_facts(rng, grammar, count, text=words):
        statement, answer, size = _encode_fact(fact, tokenizer, weight)
        if size > room:
            break
        room -= size
        statements.append(statement)
        answers.append(answer)
    if rng.random() < ASIDE_SHARE:
        before, after = pick(rng, TRAIN.asides).split("|")
        sentence = (" " + before.rstrip(), " " + draw_digits(rng), after)
        aside = _encode_sentence(sentence, tokenizer, 0.0)
        if aside.shape[1] <= room:
            statements.append(aside)
            # Statements keep this order in the text: without it the aside would come last.
            rng.shuffle(statements)
    rng.shuffle(answers)
    if len(answers) > 1 and rng.random() < PARTIAL_SHARE:
        answers = answers[: int(rng.integers(1, len(answers) + 1))]
    num_inserted = sum(piece.shape[1] for piece in (*statements, *answers))
    text = _text_of(row, tokenizer)[:, : length - num_inserted]
    ends = sentence_ends(text[0].astype(np.int64), tokenizer)
    places = np.sort(rng.choice(ends, size=len(statements))).tolist()
    pieces = insert(text, list(zip(places, statements, strict=True)))
    return _make_row(np.concatenate([*pieces, *answers], axis=1), row, tokenizer)


def copies_row(row: Batch, rng: np.random.Generator, tokenizer: Tokenizer) -> Batch:
    """A row that repeats a stretch of tokens with other text between; keys as in `facts_row`.

    The stretch is the row's first tokens, in their order or in a random one. A random order counts
    0 in the loss where it comes first.
    """
    length = len(row["tokens"])
    text = _text_of(row, tokenizer)
    least, most = STRETCH_TOKENS
    stretch = text[:, : int(rng.integers(least, most + 1))]
    size = stretch.shape[1]
    if not size:
        return row
    first_copy = stretch
    if rng.random() < 0.5:
        stretch = stretch[:, rng.permutation(size)]
        # Ids stay and weights become 0: a random order cannot be predicted where it comes first.
        first_copy = stretch * [[1], [0]]
    pieces = [first_copy]
    # Where the next gap begins in the text.
    start = size
    # BOS and the tokens of all pieces.
    total = 1 + size
    while total < length:
        gap = text[:, start : start + int(rng.integers(0, MAX_GAP + 1))]
        pieces += [gap, stretch]
        start += gap.shape[1]
        total += gap.shape[1] + size
    return _make_row(np.concatenate(pieces, axis=1)[:, : length - 1], row, tokenizer)


def _encode_sentence(sentence: Sentence, tokenizer: Tokenizer, weight: float) -> np.ndarray:
    """The piece of a sentence (before, value, after), whose value counts `weight`."""
    parts = [tokenizer.encode(part) for part in sentence]
    weights = [np.ones(len(part)) for part in parts]
    weights[1] *= weight
    return np.stack([np.concatenate(parts), np.concatenate(weights)])


def _encode_fact(
    fact: Fact, tokenizer: Tokenizer, weight: float
) -> tuple[np.ndarray, np.ndarray, int]:
    """(piece of the statement, piece of the question and its answer, tokens of both)."""
    statement = _encode_sentence(fact.statement, tokenizer, 0.0)
    answer = _encode_sentence((fact.question, fact.value, "."), tokenizer, weight)
    return statement, answer, statement.shape[1] + answer.shape[1]


def _text_of(row: Batch, tokenizer: Tokenizer) -> np.ndarray:
    """The text of a row as a piece, without BOS and padding."""
    is_text = (row["segments"] >= 0) & (row["tokens"] != tokenizer.bos_id)
    tokens = row["tokens"][is_text].numpy()
    return np.stack([tokens, np.ones(len(tokens))])


def _make_row(piece: np.ndarray, like: Batch, tokenizer: Tokenizer) -> Batch:
    """A row of one document, BOS and the piece, padded to the length of the row `like`."""
    piece = np.concatenate([[[tokenizer.bos_id], [1.0]], piece], axis=1)
    count = piece.shape[1]
    tokens = torch.full_like(like["tokens"], tokenizer.pad_id)
    segments = torch.full_like(like["segments"], -1)
    weights = torch.zeros(len(tokens))
    tokens[:count] = torch.from_numpy(piece[0].astype(np.int64))
    segments[:count] = 0
    weights[:count] = torch.from_numpy(piece[1].astype(np.float32))
    return {"tokens": tokens, "segments": segments, "weights": weights}
