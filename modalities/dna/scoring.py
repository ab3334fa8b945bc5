"""The cost of DNA under a model: nats of each token of a window, and the bases it stands for.

A window is T base codes, scored from its first base on, after BOS: in tokens of the model's
tokenizer, or in single bases by a `WindowScorer`. Tokens with an unknown base are read, but not
scored; nor are bases at the end that make no whole token.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modalities.decoder.model import Decoder
from modalities.decoder.scoring import device_of, logits_by_slice, nll_of, windows_of
from modalities.dna.tokenizers import load_tokenizer, reverse_complement
from zoo.model import ZooModel
from zoo.positions import slices

# A bit in nats.
BIT = math.log(2)
STRANDS = ("one", "both")


@dataclass
class Scores:
    """The cost of windows, token by token, on the CPU; shorter rows end in tokens that do not
    count, which have 0s.

    nll: (B, N) float64 nats. bases: (B, N) int64. correct: (B, N) float64, 1 where the likeliest
    token is the true one, the probability of a hit where several tie; the mean of both strands.
    left_over: bases that make no token.
    """

    nll: Tensor
    bases: Tensor
    correct: Tensor
    left_over: int = 0


@dataclass(frozen=True)
class BaselineConfig:
    """The part of a model's configuration that tables, figures and evaluators read.

    `position` is the baseline's name, and `train_context`, of which default lengths are multiples,
    that of the models beside it.
    """

    position: str
    train_context: int = 256
    ssmax: bool = False
    tokenizer: str = "bases"
    strands: str = "one"
    # Raised when numbers change, so that stored ones are not reused.
    version: int = 1


class WindowScorer(nn.Module, ABC):
    """A module that scores windows base by base itself, instead of through logits of tokens."""

    config: BaselineConfig

    @abstractmethod
    def score(self, windows: np.ndarray) -> Scores:
        """Scores (B, T) of windows (B, T) of base codes, one strand."""


def score_windows(
    model: ZooModel | WindowScorer,
    windows: np.ndarray,
    *,
    strands: str = "one",
    batch_tokens: int = 16384,
    by_base: bool = False,
    at_once: int | None = None,
) -> Scores:
    """Score windows (B, T) of base codes, at most `batch_tokens` in a pass, at least one window.

    strands="both" is the mean over a window and its reverse complement, nll_i = (nll⁺_i
    + nll⁻_{T−1−i}) / 2, by base: bases share the cost of their token evenly and count where they do
    on both strands. by_base: also for one strand. at_once: bases that are read in a pass where
    windows are longer, in `windows_of` them, each from BOS on; by base.
    """
    if at_once is not None and at_once < windows.shape[1]:
        return _score_cut(model, windows, at_once, strands, batch_tokens)
    both = strands == "both"

    def one_strand(codes: np.ndarray) -> Scores:
        if isinstance(model, WindowScorer):
            return model.score(codes)
        return _score_tokens(cast(Decoder, model), codes, by_base or both)

    batches = []
    for part in slices(len(windows), max(1, batch_tokens // max(1, windows.shape[1]))):
        scores = one_strand(windows[part])
        if both:
            scores = _mean_of_strands(scores, one_strand(reverse_complement(windows[part])))
        batches.append(scores)
    longest = max(scores.nll.shape[1] for scores in batches)

    def padded(values: Tensor) -> Tensor:
        return F.pad(values, (0, longest - values.shape[1]))

    return Scores(
        nll=torch.cat([padded(scores.nll) for scores in batches]),
        bases=torch.cat([padded(scores.bases) for scores in batches]),
        correct=torch.cat([padded(scores.correct) for scores in batches]),
        left_over=sum(scores.left_over for scores in batches),
    )


def _score_cut(
    model: ZooModel | WindowScorer,
    windows: np.ndarray,
    at_once: int,
    strands: str,
    batch_tokens: int,
) -> Scores:
    """Scores by base of windows that are read at most `at_once` bases at a time."""
    parts = list(windows_of(windows.shape[1], at_once))
    codes = np.concatenate([windows[:, read] for read, _ in parts])
    scores = score_windows(model, codes, strands=strands, batch_tokens=batch_tokens, by_base=True)

    def joined(values: Tensor) -> Tensor:
        """(B, T) of the bases that each part scores; those before them are only read."""
        pieces = []
        for piece, (read, scored) in zip(values.split(len(windows)), parts, strict=True):
            pieces.append(piece[:, scored.start - read.start :])
        return torch.cat(pieces, 1)

    return Scores(joined(scores.nll), joined(scores.bases), joined(scores.correct))


def _mean_of_strands(forth: Scores, back: Scores) -> Scores:
    """Of scores by base of windows and of their reverse complements."""
    counted = (forth.bases > 0) & (back.bases.flip(1) > 0)
    return Scores(
        nll=torch.where(counted, (forth.nll + back.nll.flip(1)) / 2, 0.0),
        bases=torch.where(counted, forth.bases, 0),
        correct=torch.where(counted, (forth.correct + back.correct.flip(1)) / 2, 0.0),
        left_over=forth.left_over + back.left_over,
    )


@torch.inference_mode()
def _score_tokens(model: Decoder, windows: np.ndarray, by_base: bool) -> Scores:
    """Scores of one strand, per token or, sharing a token's cost evenly, per base.

    The softmax is taken in float64 over the model's logits, for a slice of positions at a time.
    """
    tokenizer = load_tokenizer(model.config.tokenizer)
    rows = [tokenizer.encode(window) for window in windows]
    # Shorter rows end in padding of span 0.
    ids = np.full((len(rows), max(len(row.ids) for row in rows)), tokenizer.pad_id, np.int64)
    spans = np.zeros_like(ids)
    for n, row in enumerate(rows):
        ids[n, : len(row.ids)] = row.ids
        spans[n, : len(row.ids)] = row.spans
    targets = torch.as_tensor(ids, device=device_of(model))
    inputs = torch.cat([torch.full_like(targets[:, :1], tokenizer.bos_id), targets], dim=1)
    counts = targets < tokenizer.num_targets
    targets = targets.where(counts, 0)
    nll = torch.zeros(targets.shape, dtype=torch.float64)
    correct = torch.zeros(targets.shape, dtype=torch.float64)
    for part, logits in logits_by_slice(model, model.forward_features(inputs[:, :-1])):
        nll[:, part] = nll_of(logits, targets[:, part]).cpu()
        # Equal tokens share the hit.
        best = logits == logits.amax(-1, keepdim=True)
        hits = best.gather(-1, targets[:, part, None])[..., 0]
        correct[:, part] = (hits.double() / best.sum(-1)).cpu()
    counts = counts.cpu()
    scores = Scores(
        nll=nll.where(counts, 0.0),
        bases=torch.from_numpy(spans).where(counts, 0),
        correct=correct.where(counts, 0.0),
        left_over=sum(row.left_over for row in rows),
    )
    return _by_base(scores, spans, windows.shape[1]) if by_base else scores


def _by_base(scores: Scores, spans: np.ndarray, length: int) -> Scores:
    """Token scores (B, N) as scores (B, length) of the bases that the tokens span."""
    nll = torch.zeros(len(spans), length, dtype=torch.float64)
    bases = torch.zeros(len(spans), length, dtype=torch.int64)
    correct = torch.zeros(len(spans), length, dtype=torch.float64)
    for n, row in enumerate(torch.from_numpy(spans)):
        # The token of each base.
        token = torch.repeat_interleave(row)
        part = slice(0, len(token))
        nll[n, part] = scores.nll[n, token] / row[token]
        bases[n, part] = (scores.bases[n, token] > 0).long()
        correct[n, part] = scores.correct[n, token]
    return Scores(nll, bases, correct, scores.left_over)
