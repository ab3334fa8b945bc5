"""What evaluators read off causal decoders: log-likelihoods, answers, and a vector for a text.

Memory grows with the length, never with its square or with length × vocabulary: logits are made for
a slice of positions at a time and dropped once reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from modalities.decoder.generation import prefill
from modalities.decoder.model import Decoder
from zoo.positions import slices

# Logits alive at once, as a count of float64 numbers (64 MiB).
LOGIT_BUDGET = 1 << 23


def device_of(model: torch.nn.Module) -> torch.device:
    """Where the model lives; the CPU for a model without parameters."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def logits_by_slice(model: Decoder, features: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Slices of the T positions of ``features`` (B, T, C), each with its float64 logits (B, ·, V),
    at most LOGIT_BUDGET."""
    logits_per_position = len(features) * model.config.vocab_size
    for part in slices(features.shape[1], max(1, LOGIT_BUDGET // logits_per_position)):
        yield part, model.forward_head(features[:, part]).double()


def nll_of(logits: Tensor, targets: Tensor) -> Tensor:
    """−ln softmax(logits)[target] in nats, (…), of logits (…, V) and targets (…)."""
    return logits.logsumexp(-1) - logits.gather(-1, targets[..., None]).squeeze(-1)


def nll_of_features(model: Decoder, features: Tensor, targets: Tensor) -> Tensor:
    """`nll_of` targets (B, T) by features (B, T, C) of the tokens before them, float64."""
    losses = torch.empty(targets.shape, dtype=torch.float64, device=targets.device)
    for part, logits in logits_by_slice(model, features):
        losses[:, part] = nll_of(logits, targets[:, part])
    return losses


def windows_of(length: int, window: int) -> Iterator[tuple[slice, slice]]:
    """Of `length` targets, those that each window of at most `window` reads and those that it
    scores: all of the first window, and what the one before left of the others, which are half a
    window apart."""
    stop = min(window, length)
    yield slice(0, stop), slice(0, stop)
    while stop < length:
        scored = stop
        stop = min(stop + max(1, window // 2), length)
        yield slice(stop - window, stop), slice(scored, stop)


def position_buckets(length: int) -> np.ndarray:
    """(length,) octave of each target by the tokens n its prediction sees: k holds 2^(k−1) < n ≤
    2^k, 0 holds n = 1."""
    # frexp's exponent of n − 1 is exact, where log2 in floating point is not.
    exponents = np.frexp(np.arange(length))[1]
    return exponents.astype(np.int64)


@contextmanager
def telling(model: Decoder, units: int, advance: Callable[[int], object] | None) -> Iterator[None]:
    """Inside the context one pass calls `advance` after each layer, with its share of `units`."""
    if advance is None:
        yield
        return
    layers = list(getattr(model, "layers", ()))

    def hook_of(number: int) -> Callable[..., None]:
        start = units * number // len(layers)
        stop = units * (number + 1) // len(layers)

        def tell(*_: object) -> None:
            advance(stop - start)

        return tell

    hooks = [layer.register_forward_hook(hook_of(n)) for n, layer in enumerate(layers)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def token_nll(
    model: Decoder,
    inputs: Tensor,
    targets: Tensor,
    *,
    advance: Callable[[int], object] | None = None,
) -> Tensor:
    """−ln p, in nats, of `targets` (B, T) after `inputs` (B, T), as (B, T) float64; the softmax is
    taken in float64.

    advance: called with the tokens read since the last call, B·T in all.
    """
    with telling(model, inputs.numel(), advance):
        features = model.forward_features(inputs)
    return nll_of_features(model, features, targets)


@torch.inference_mode()
def answer_scores(model: Decoder, prompts: np.ndarray, answers: np.ndarray) -> dict[str, Tensor]:
    """Scores of answers (B, A) to equally long prompts (B, P), (B,) float64 each: teacher_forced,
    every answer token is the likeliest given the true tokens before it; free_generation, greedy
    decoding gives the answer, which it does in the same cases; tokens_right, the share of answer
    tokens that are the likeliest; nll, mean nats per token."""
    device = device_of(model)
    prompt_ids = torch.as_tensor(prompts, device=device)
    answer_ids = torch.as_tensor(answers, device=device)
    cache = model.new_cache(prompt_ids.shape[1] + answer_ids.shape[1])
    logits = model.forward_head(prefill(model, prompt_ids, cache))[:, None]
    if answer_ids.shape[1] > 1:
        features = model.forward_features(answer_ids[:, :-1], cache=cache)
        logits = torch.cat([logits, model.forward_head(features)], dim=1)
    logits = logits.double()
    hits = logits.argmax(-1) == answer_ids
    right = hits.all(1)
    scores = {
        "teacher_forced": right,
        "free_generation": right,
        "tokens_right": hits.double().mean(1),
        "nll": nll_of(logits, answer_ids).mean(1),
    }
    return {name: value.double().cpu() for name, value in scores.items()}
