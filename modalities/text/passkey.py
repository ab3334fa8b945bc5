"""Passkey documents: a number hidden in filler text, with the question at the end.

    [BOS] filler … "The pass key is 48213. Remember it." filler … "What is the pass key? The pass key is " 4 8 2 1 3

The task is that of the passkey test of BAM (arXiv 2505.22842); the words are our own. One builder serves training
and evaluation, so that both ask the same question. The number is five random digits, one token each, whatever the
tokenizer. Filler is cut to the token, so a document has exactly the requested length; the cut is made at the
document's first sentence and at the last one before the question, and the information stands between whole sentences.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from modalities.text.tokenizers import Tokenizer

NUM_DIGITS = 5
FILLER = (
    " The river runs slow.",
    " A lamp is lit in the barn.",
    " The hills are far away.",
    " We walk on and rest at noon.",
    " Rain falls on the old road.",
    " The mill wheel turns again.",
)
INFO = (" The pass key is ", ". Remember it.")
QUESTION = " What is the pass key? The pass key is "


@dataclass(frozen=True)
class _Pieces:
    """The template in ids of one tokenizer."""

    filler: np.ndarray  # all sentences once
    starts: np.ndarray  # where in `filler` each sentence starts
    before: np.ndarray  # the information up to the digits
    after: np.ndarray  # and behind them
    question: np.ndarray
    digits: np.ndarray  # (10,) the token of each digit
    bos_id: int

    @property
    def fixed(self) -> int:
        """Tokens that every document holds: BOS, information, question, answer."""
        return 1 + len(self.before) + NUM_DIGITS + len(self.after) + len(self.question) + NUM_DIGITS


_PIECES: weakref.WeakKeyDictionary[Tokenizer, _Pieces] = weakref.WeakKeyDictionary()


def _pieces(tokenizer: Tokenizer) -> _Pieces:
    if tokenizer not in _PIECES:
        digits = [tokenizer.encode(str(digit)) for digit in range(10)]
        broken = [str(d) for d, ids in enumerate(digits) if len(ids) != 1]
        if broken:
            raise ValueError(f"tokenizer {tokenizer.name!r} has no single token for the digits {', '.join(broken)}")
        sentences = [tokenizer.encode(sentence) for sentence in FILLER]
        starts = np.cumsum([0] + [len(s) for s in sentences[:-1]])
        before, after = (tokenizer.encode(part) for part in INFO)
        _PIECES[tokenizer] = _Pieces(
            filler=np.concatenate(sentences),
            starts=starts,
            before=before,
            after=after,
            question=tokenizer.encode(QUESTION),
            digits=np.concatenate(digits),
            bos_id=tokenizer.bos_id,
        )
    return _PIECES[tokenizer]


def minimum_length(tokenizer: Tokenizer) -> int:
    """The shortest passkey document in tokens, BOS and answer included: one with no filler at all (bytes: 81)."""
    return _pieces(tokenizer).fixed


def draw_key(rng: np.random.Generator, tokenizer: Tokenizer) -> np.ndarray:
    """Five random digits, a token each, int64."""
    return _pieces(tokenizer).digits[rng.integers(0, 10, size=NUM_DIGITS)].astype(np.int64)


def hide_key(key: np.ndarray, haystack: np.ndarray, ahead: int, tokenizer: Tokenizer) -> np.ndarray:
    """The prompt, int64: BOS, the haystack's ids with the information behind the first `ahead` of them, the question."""
    pieces = _pieces(tokenizer)
    information = [pieces.before, key, pieces.after]
    prompt: list[Any] = [[pieces.bos_id], haystack[:ahead], *information, haystack[ahead:], pieces.question]
    return np.concatenate(prompt).astype(np.int64)


def make_passkey(
    length: int, depth: float, rng: np.random.Generator, tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
    """One passkey question: (prompt ids, answer ids), both int64; together exactly `length` tokens with BOS.

    depth: 0 puts the information at the start, 1 right before the question; in between, `round(depth · F)` of the
        F filler tokens come before it.
    rng: draws the five digits and the sentence that the filler begins with; nothing else is random.
    Errors: ValueError when `length` is below `minimum_length(tokenizer)`, or depth is outside 0..1.
    """
    pieces = _pieces(tokenizer)
    if length < pieces.fixed:
        raise ValueError(
            f"a passkey document of {length} tokens is too short: with tokenizer {tokenizer.name!r} "
            f"information, question and answer need at least {pieces.fixed}"
        )
    if not 0.0 <= depth <= 1.0:
        raise ValueError(f"passkey depth {depth!r} is outside 0..1")
    key = draw_key(rng, tokenizer)
    start = int(rng.choice(pieces.starts))
    total = length - pieces.fixed
    ahead = round(depth * total)
    # The filler is one endless loop of sentences. `start` is a sentence's start: up to it lies the part ahead of the
    # information, from it on the part behind, so both meet the information at a sentence's edge.
    loop = np.arange(start - ahead, start + total - ahead) % len(pieces.filler)
    return hide_key(key, pieces.filler[loop], ahead, tokenizer), key


def make_passkey_document(length: int, rng: np.random.Generator, tokenizer: Tokenizer) -> np.ndarray:
    """A passkey document for training: `length` ids, int64, answer included, the depth uniform in 0..1."""
    prompt, answer = make_passkey(length, float(rng.random()), rng, tokenizer)
    return np.concatenate([prompt, answer])


def passkey_row(context: int, rng: np.random.Generator, tokenizer: Tokenizer, weight: float) -> dict[str, torch.Tensor]:
    """A row that one passkey document fills; with "weights" float32 (L+1,) where its answer does not count 1."""
    tokens = torch.from_numpy(make_passkey_document(context + 1, rng, tokenizer))
    row = {"tokens": tokens, "segments": torch.zeros_like(tokens)}
    if weight != 1:
        row["weights"] = torch.ones(len(tokens))
        row["weights"][-NUM_DIGITS:] = weight
    return row
