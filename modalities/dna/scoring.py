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

BIT = math.log(2)  # nats
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
    """The part of a model's configuration that tables, figures and evaluators read. `position` is
    the baseline's name, and `train_context`, of which default lengths are multiples, that of the
    models beside it."""

    position: str
    train_context: int = 256
    ssmax: bool = False
    tokenizer: str = "bases"
    strands: str = "one"
    version: int = 1  # raised when numbers change, so that stored ones are not reused


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
    both = strands == "both"
    length = windows.shape[1]
    if at_once is not None and at_once < length:
        parts = list(windows_of(length, at_once))
        codes = np.concatenate([windows[:, read] for read, _ in parts])
        cut = score_windows(model, codes, strands=strands, batch_tokens=batch_tokens, by_base=True)
        skipped = [scored.start - read.start for read, scored in parts]
        nll, bases, correct = (
            torch.cat(
                [part[:, n:] for part, n in zip(values.split(len(windows)), skipped, strict=True)],
                1,
            )
            for values in (cut.nll, cut.bases, cut.correct)
        )
        return Scores(nll, bases, correct)

    def one_strand(part: np.ndarray) -> Scores:
        if isinstance(model, WindowScorer):
            return model.score(part)
        return _score_tokens(cast(Decoder, model), part, by_base or both)

    batches = []
    for part in slices(len(windows), max(1, batch_tokens // max(1, length))):
        forth = one_strand(windows[part])
        if both:
            forth = _mean_of_strands(forth, one_strand(reverse_complement(windows[part])))
        batches.append(forth)
    longest = max(part.nll.shape[1] for part in batches)

    def rows(name: str) -> Tensor:
        return torch.cat(
            [F.pad(getattr(part, name), (0, longest - part.nll.shape[1])) for part in batches]
        )

    return Scores(
        rows("nll"), rows("bases"), rows("correct"), sum(part.left_over for part in batches)
    )


def _mean_of_strands(forth: Scores, back: Scores) -> Scores:
    counted = (forth.bases > 0) & (back.bases.flip(1) > 0)
    pairs = (forth.nll, back.nll), (forth.correct, back.correct)
    nll, correct = (torch.where(counted, (a + b.flip(1)) / 2, 0.0) for a, b in pairs)
    return Scores(
        nll, torch.where(counted, forth.bases, 0), correct, forth.left_over + back.left_over
    )


@torch.inference_mode()
def _score_tokens(model: Decoder, windows: np.ndarray, by_base: bool) -> Scores:
    """Scores of one strand, per token or, sharing a token's cost evenly, per base. The softmax is
    taken in float64 over the model's logits, for a slice of positions at a time."""
    tokenizer = load_tokenizer(model.config.tokenizer)
    rows = [tokenizer.encode(window) for window in windows]
    ids = np.full((len(rows), max(len(row.ids) for row in rows)), tokenizer.pad_id, np.int64)
    spans = np.zeros_like(ids)  # shorter rows end in padding of span 0
    for n, row in enumerate(rows):
        ids[n, : len(row.ids)], spans[n, : len(row.ids)] = row.ids, row.spans
    targets = torch.as_tensor(ids, device=device_of(model))
    inputs = torch.cat([torch.full_like(targets[:, :1], tokenizer.bos_id), targets], dim=1)
    counts = targets < tokenizer.num_targets
    targets = targets.where(counts, 0)
    nll, correct = (torch.zeros(targets.shape, dtype=torch.float64) for _ in range(2))
    for part, logits in logits_by_slice(model, model.forward_features(inputs[:, :-1])):
        nll[:, part] = nll_of(logits, targets[:, part]).cpu()
        best = logits == logits.amax(-1, keepdim=True)  # equal tokens share the hit
        correct[:, part] = (
            best.gather(-1, targets[:, part, None])[..., 0].double() / best.sum(-1)
        ).cpu()
    counts = counts.cpu()
    bases = torch.from_numpy(spans).where(counts, 0)
    scores = Scores(
        nll.where(counts, 0.0),
        bases,
        correct.where(counts, 0.0),
        sum(row.left_over for row in rows),
    )
    return _by_base(scores, spans, windows.shape[1]) if by_base else scores


def _by_base(scores: Scores, spans: np.ndarray, length: int) -> Scores:
    """Token scores (B, N) as scores (B, length) of the bases that the tokens span."""
    dtypes = torch.float64, torch.int64, torch.float64
    nll, bases, correct = (torch.zeros(len(spans), length, dtype=dtype) for dtype in dtypes)
    for n, row in enumerate(torch.from_numpy(spans)):
        token = torch.repeat_interleave(row)  # of each base
        part = slice(0, len(token))
        nll[n, part] = scores.nll[n, token] / row[token]
        bases[n, part] = (scores.bases[n, token] > 0).long()
        correct[n, part] = scores.correct[n, token]
    return Scores(nll, bases, correct, scores.left_over)
