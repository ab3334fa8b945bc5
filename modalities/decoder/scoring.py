"""What evaluators read off causal decoders: log-likelihoods, answers, and a vector for a text.

Memory grows with the length, never with its square or with length × vocabulary: logits are made for a slice of
positions at a time and dropped once reduced.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from modalities.decoder.generation import prefill
from modalities.decoder.model import Decoder
from zoo.decoding import Cache
from zoo.positions import slices

LOGIT_BUDGET = 1 << 23  # logits alive at once, as a count of float64 numbers (64 MiB)


def device_of(model: torch.nn.Module) -> torch.device:
    """Where the model lives; the CPU for a model without parameters."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def logits_by_slice(model: Decoder, features: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Slices of the T positions of ``features`` (B, T, C), each with its float64 logits (B, ·, V), at most LOGIT_BUDGET."""
    for part in slices(features.shape[1], max(1, LOGIT_BUDGET // (len(features) * model.config.vocab_size))):
        yield part, model.forward_head(features[:, part]).double()


def position_buckets(length: int) -> np.ndarray:
    """(length,) octave of each target by the tokens n its prediction sees: k holds 2^(k−1) < n ≤ 2^k, 0 holds n = 1."""
    return np.frexp(np.arange(length))[1].astype(np.int64)  # of n − 1; exact, where log2 in floating point is not


@contextmanager
def telling(model: Decoder, units: int, advance: Callable[[int], object] | None) -> Iterator[None]:
    """Inside the context one pass calls `advance` after each layer, with its share of `units`."""
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
    """−ln p, in nats, of `targets` (B, T) after `inputs` (B, T), as (B, T) float64; the softmax is taken in float64.

    advance: called with the tokens read since the last call, B·T in all.
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
    """(Logits (B, A, V) of each token of answers (B, A) given the true ones before it, tokens (B, A) of greedy decoding).

    Both from one prefill of equally long prompts (B, P), which follow what `cache` holds; it holds them and the written tokens
    afterwards.
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
    """Scores of answers (B, A) to equally long prompts (B, P), (B,) float64 each.

    teacher_forced: every answer token is the likeliest given the true tokens before it.  free_generation: greedy decoding gives
    the answer; a difference from teacher_forced is a fault of the cache or a tie.  tokens_right: share of answer tokens that
    are the likeliest under teacher forcing.  nll: mean nats per token.
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
