"""What evaluators read off causal decoders: log-likelihoods, answers, continuations, and a vector for a text.

Memory grows with the length, never with its square or with length × vocabulary: logits are made for a slice of
positions at a time and dropped once reduced.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from modalities.decoder.generation import PREFILL_TOKENS, batches, left_pad, prefill
from modalities.decoder.model import Decoder
from zoo.decoding import Cache
from zoo.naming import nearest
from zoo.slices import slices

LOGIT_BUDGET = 1 << 23  # logits alive at once, as a count of float64 numbers (64 MiB)
POOLS = ("mean", "last")


def device_of(model: torch.nn.Module) -> torch.device:
    """Where the model lives; the CPU for a model without parameters."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def logits_by_slice(model: Decoder, features: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Slices of the T positions of ``features`` (B, T, C), each with its float64 logits (B, ·, V), at most LOGIT_BUDGET."""
    step = max(1, LOGIT_BUDGET // (len(features) * model.config.vocab_size))
    for start in range(0, features.shape[1], step):
        part = slice(start, start + step)
        yield part, model.forward_head(features[:, part]).double()


def position_buckets(length: int) -> np.ndarray:
    """(length,) octave of each target by the tokens n its prediction sees: k holds 2^(k−1) < n ≤ 2^k, 0 holds n = 1."""
    return np.frexp(np.arange(length))[1].astype(np.int64)  # of n − 1; exact, where log2 in floating point is not


@contextmanager
def telling(model: Decoder, units: int, advance: Callable[[int], object] | None) -> Iterator[None]:
    """Inside the context one pass through the layers calls `advance` after each of them, with its share of ``units``."""
    layers = list(getattr(model, "layers", ())) if advance else []
    reported, reader = 0, threading.get_ident()

    def tell(number: int) -> None:
        nonlocal reported
        done = units * (number + 1) // len(layers)
        if advance and done > reported and threading.get_ident() == reader:  # hooks see what other threads read, too
            advance(done - reported)
            reported = done

    hooks = [layer.register_forward_hook(lambda *_, n=n: tell(n)) for n, layer in enumerate(layers)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def token_nll(
    model: Decoder, inputs: Tensor, targets: Tensor, *, advance: Callable[[int], object] | None = None
) -> Tensor:
    """Negative log-likelihood in nats of ``targets`` (B, T) after ``inputs`` (B, T), as (B, T) float64.

    The softmax is taken in float64 over the model's logits, so that a mean over millions of tokens carries no
    rounding of ours. ``advance``: called with tokens as they are read, B·T in all.
    """
    with telling(model, inputs.numel(), advance):
        features = model.forward_features(inputs)
    losses = torch.empty(targets.shape, dtype=torch.float64, device=inputs.device)
    for part, logits in logits_by_slice(model, features):
        picked = logits.gather(-1, targets[:, part, None]).squeeze(-1)
        losses[:, part] = logits.logsumexp(-1) - picked
    return losses


@torch.inference_mode()
def next_logits(model: Decoder, tokens: Tensor, cache: Cache) -> Tensor:
    """Logits (B, T, V) after each of ``tokens`` (B, T), which follow what the cache holds."""
    return model.forward_head(model.forward_features(tokens, cache=cache))


@torch.inference_mode()
def force_and_write(
    model: Decoder, prompts: Tensor, answers: Tensor, cache: Cache | None = None
) -> tuple[Tensor, Tensor]:
    """Both readings of equally long prompts (B, P) with answers (B, A), from one prefill.

    Prompts follow what `cache` holds, which holds them and the written tokens afterwards; without one they begin a text.
    Returns the logits (B, A, V) of each answer token given the true ones before it, read in one parallel pass, and the
    A tokens (B, A) that greedy decoding writes one at a time through the cache.
    """
    count = answers.shape[1]
    cache = cache or model.new_cache(prompts.shape[1] + count)
    last = model.forward_head(prefill(model, prompts, cache))
    forced = last[:, None]
    if count > 1:
        mark = cache.mark()
        forced = torch.cat([forced, next_logits(model, answers[:, :-1], cache)], dim=1)
        cache.rewind(mark)
    written = [last.argmax(-1)]
    while len(written) < count:
        written.append(next_logits(model, written[-1][:, None], cache)[:, -1].argmax(-1))
    return forced, torch.stack(written, dim=1)


def answer_scores(model: Decoder, prompts: np.ndarray, answers: np.ndarray) -> dict[str, Tensor]:
    """Score answers (B, A) to equally long prompts (B, P) in both ways, (B,) float64 each.

    ``teacher_forced``: every answer token is the likeliest one given the *true* tokens before it.
    ``free_generation``: greedy decoding of A tokens gives the answer exactly.
    ``tokens_right``: share of answer tokens that are the likeliest under teacher forcing; ``nll``: mean nats per token.

    For greedy decoding and exact match the first two are the same event (the first wrong token spoils both); they
    are computed on separate paths, so a difference is a fault of the cache or a tie, and worth a look.
    """
    device = device_of(model)
    prompt_ids, answer_ids = (torch.as_tensor(x, device=device) for x in (prompts, answers))
    forced, written = force_and_write(model, prompt_ids, answer_ids)
    forced = forced.double()
    hits = forced.argmax(-1) == answer_ids
    nll = forced.logsumexp(-1) - forced.gather(-1, answer_ids[..., None]).squeeze(-1)
    free = (written == answer_ids).all(1)
    scores = {"teacher_forced": hits.all(1), "free_generation": free, "tokens_right": hits.double().mean(1)}
    return {name: value.double().cpu() for name, value in (scores | {"nll": nll.mean(1)}).items()}


@torch.inference_mode()
def continuation_scores(
    model: Decoder, contexts: Sequence[Sequence[int]], continuations: Sequence[Sequence[Sequence[int]]]
) -> list[list[tuple[float, bool]]]:
    """Score any number of continuations of each context. The contexts are read once, as one batch, or as several where their
    keys and values need more than a quarter of the memory (see `batches`).

    Args:
        contexts: token ids, B rows of any lengths.
        continuations: of each context the token ids that may follow it, any number of rows of any lengths.

    Returns:
        of each context, for each continuation: its log-probability in nats, the sum over its tokens in float64, and whether
        each of its tokens is the likeliest after those before it, so that greedy decoding writes it.

    Raises:
        ValueError: for a context or a continuation without tokens.
    """
    lengths = [len(row) for rows in continuations for row in rows]
    if 0 in lengths:
        raise ValueError("every continuation needs at least one token")
    parts = batches(model, contexts, max(lengths, default=0))
    if len(parts) > 1:
        return [row for part in parts for row in continuation_scores(model, contexts[part], continuations[part])]
    tokens, segments = left_pad(contexts, device_of(model))
    cache = model.new_cache(tokens.shape[1] + max(lengths, default=0))
    last = prefill(model, tokens, cache, segments)[:, None]
    mark = cache.mark()
    scores: list[list[tuple[float, bool]]] = [[] for _ in contexts]
    for turn in zip_longest(*continuations, fillvalue=()):  # a continuation of every context that has more
        log_probs, greedy = _scores_after(model, cache, last, turn, padded=segments is not None)
        for row, score in enumerate(zip(log_probs.tolist(), greedy.tolist(), strict=True)):
            if turn[row]:
                scores[row].append(score)
        cache.rewind(mark)
    return scores


def _scores_after(
    model: Decoder, cache: Cache, last: Tensor, rows: Sequence[Sequence[int]], *, padded: bool
) -> tuple[Tensor, Tensor]:
    """Log-probability (B,) float64 of rows of token ids after what `cache` holds, and whether greedy decoding writes them.

    Args:
        last: features (B, 1, C) of the last token held.
        padded: whether the cache holds document ids.
    """
    device = last.device
    targets = pad_sequence([torch.tensor(row, dtype=torch.int64) for row in rows], batch_first=True).to(device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    real = torch.arange(targets.shape[1], device=device) < lengths[:, None]
    log_probs, likeliest = torch.zeros_like(targets, dtype=torch.float64), torch.ones_like(real)
    for part, features in _features_before(model, cache, last, targets, padded=padded):
        here = real[:, part]
        wanted = targets[:, part][here]
        log_p, hits = torch.empty_like(wanted, dtype=torch.float64), torch.empty_like(wanted, dtype=torch.bool)
        for piece, (logits,) in logits_by_slice(model, features[here][None]):
            log_p[piece] = logits.gather(-1, wanted[piece, None])[:, 0] - logits.logsumexp(-1)
            hits[piece] = logits.argmax(-1) == wanted[piece]
        log_probs[:, part][here], likeliest[:, part][here] = log_p, hits
    return log_probs.sum(1), likeliest.all(1)


def _features_before(
    model: Decoder, cache: Cache, last: Tensor, targets: Tensor, *, padded: bool
) -> Iterator[tuple[slice, Tensor]]:
    """Slices of the T positions of ``targets`` (B, T), each with the features (B, ·, C) that predict it; read in parts."""
    yield slice(0, 1), last
    for part in slices(targets.shape[1] - 1, max(1, PREFILL_TOKENS // len(targets))):
        inputs = targets[:, part]
        segments = torch.zeros_like(inputs) if padded else None
        yield slice(part.start + 1, part.stop + 1), model.forward_features(inputs, segments=segments, cache=cache)


@torch.inference_mode()
def embed(model: Decoder, tokens: Tensor, *, pool: str | None = None, size: int | None = None) -> Tensor:
    """(C,) float32 features after the last norm, of tokens (1, T) whose first is the start.

    Args:
        pool: "mean" over the tokens without the start (None), or the "last" token, which alone has seen all of them.

    Raises:
        ValueError: for another pool, a size, or no token but the start.
    """
    if pool not in (None, *POOLS):
        raise ValueError(f"pool {pool!r}: {nearest(pool, POOLS)}")
    if size is not None:
        raise ValueError(f"size {size} is of images, and this model reads {model.modality}")
    if tokens.shape[1] < 2:
        raise ValueError("nothing to embed: the input is empty")
    if pool == "last":
        return model.forward_features(tokens, last=1)[0, 0].float()
    return model.forward_features(tokens)[0, 1:].float().mean(0)
