"""Sampling from a causal LM with a KV cache: greedy, temperature, top-k, top-p, streaming."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from zoo.errors import LARGEST_SEED
from zoo.offload import execution_device
from zoo.positions import slices

# Prompt tokens, of all rows, that are read at a time.
PREFILL_TOKENS = 1 << 15
# Token ids, of any lengths.
Prompts = Tensor | Sequence[Sequence[int] | np.ndarray]
# What decoding writes for bytes that are no character, or not yet.
BROKEN = "\ufffd"


class CausalDecoder(Protocol):
    """What generation asks of a model: `Decoder`, and those of other libraries."""

    @property
    def embedding(self) -> nn.Module: ...

    def new_cache(self, capacity: int = 0) -> Any:
        """An empty cache of keys and values."""

    def forward_features(
        self,
        tokens: Tensor,
        *,
        segments: Tensor | None = None,
        cache: Any = None,
        last: int | None = None,
    ) -> Tensor:
        """(B, T, C) of tokens (B, T) that follow those of the cache; of the `last` ones alone."""

    def forward_head(self, features: Tensor) -> Tensor:
        """(…, V) logits of features (…, C)."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: 0 takes the likeliest, else divide logits by `temperature`;
    among the `top_k` likeliest, or those that together reach the probability `top_p`. ValueError
    for values out of range."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if self.temperature != 0 and not 1e-6 <= self.temperature < math.inf:
            raise ValueError(
                f"temperature must be finite, and 0 or at least 1e-6, got {self.temperature}"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is a probability in (0, 1], got {self.top_p}")

    def draw(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        """(B,) token ids from (B, V) logits."""
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.top_p is not None:
            descending, index = logits.sort(descending=True)
            probabilities = descending.softmax(-1)
            # A token stays where those before it have not reached top_p: always the first.
            before = probabilities.cumsum(-1) - probabilities
            descending = descending.masked_fill(before >= self.top_p, -torch.inf)
            logits = logits.scatter(-1, index, descending)
        return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


def generate(
    model: CausalDecoder,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    eos_id: int | None = None,
    seed: int | torch.Generator | None = None,
    **sampling: float | None,
) -> list[list[int]]:
    """New tokens of each prompt, at most `max_new_tokens`, without the prompt or the token `eos_id`
    that ends it.

    All rows are read together. ValueError for empty prompts or settings out of range.
    """
    rows: list[list[int]] = []
    ended: set[int] = set()
    for tokens in stream(model, prompts, max_new_tokens=max_new_tokens, seed=seed, **sampling):
        if not rows:
            rows = [[] for _ in tokens]
        for n, token in enumerate(tokens.tolist()):
            if token == eos_id:
                ended.add(n)
            if n not in ended:
                rows[n].append(token)
        if len(ended) == len(rows):
            break
    return rows


def stream(
    model: CausalDecoder,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    seed: int | torch.Generator | None = None,
    **sampling: float | None,
) -> Iterator[Tensor]:
    """Yield (B,) int64, the next token of every row. Arguments and errors as in `generate`."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if isinstance(seed, int):
        if not 0 <= seed <= LARGEST_SEED:
            raise ValueError(f"seed must be from 0 to {LARGEST_SEED}, got {seed}")
        seed = torch.Generator(execution_device(model.embedding)).manual_seed(seed)
    settings = Sampling(**sampling)  # type: ignore[arg-type]
    return _stream(model, prompts, max_new_tokens, settings, seed)


@torch.no_grad()
def _stream(
    model: CausalDecoder,
    prompts: Prompts,
    count: int,
    sampling: Sampling,
    generator: torch.Generator | None,
) -> Iterator[Tensor]:
    tokens, segments = left_pad(prompts, execution_device(model.embedding))
    cache = model.new_cache(tokens.shape[1] + count)
    # New tokens are of document 0, where prompts are padded.
    new_segments = None if segments is None else torch.zeros_like(segments[:, :1])
    for _ in range(count):
        features = prefill(model, tokens, cache, segments)
        next_tokens = sampling.draw(model.forward_head(features), generator)
        yield next_tokens
        tokens = next_tokens[:, None]
        segments = new_segments


def prefill(
    model: CausalDecoder, tokens: Tensor, cache: Any, segments: Tensor | None = None
) -> Tensor:
    """Features (B, C) of the last of tokens (B, T), which follow what the cache holds and are read
    in parts."""
    tokens_at_once = max(1, PREFILL_TOKENS // len(tokens))
    for part in slices(tokens.shape[1], tokens_at_once):
        features = model.forward_features(
            tokens[:, part],
            segments=None if segments is None else segments[:, part],
            cache=cache,
            last=1,
        )
    return features[:, -1]


def stream_text(
    model: CausalDecoder,
    prompt: Sequence[int] | np.ndarray,
    decode: Callable[[list[int]], str],
    *,
    max_new_tokens: int,
    eos_id: int | None = None,
    seed: int | torch.Generator | None = None,
    **sampling: float | None,
) -> Iterator[str]:
    """The continuation of one prompt of token ids as text, in pieces of whole characters that
    joined are `decode` of all new tokens. Other arguments as in `generate`."""
    tokens = stream(model, [prompt], max_new_tokens=max_new_tokens, seed=seed, **sampling)
    return _whole_characters(map(int, tokens), decode, eos_id)


def _whole_characters(
    tokens: Iterable[int], decode: Callable[[list[int]], str], eos_id: int | None
) -> Iterator[str]:
    ids: list[int] = []
    # Characters that were yielded.
    written = 0
    for token in tokens:
        if token == eos_id:
            break
        ids.append(token)
        whole = decode(ids).rstrip(BROKEN)
        yield whole[written:]
        written = max(written, len(whole))
    yield decode(ids)[written:]


def left_pad(prompts: Prompts, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Tokens (B, T) and document ids (B, T), −1 on padding and 0 on prompts, or None where all are
    equally long.

    Raises ValueError for no prompts, or an empty one.
    """
    rows = [torch.as_tensor(row, dtype=torch.int64).to(device) for row in prompts]
    if not rows or any(row.numel() == 0 for row in rows):
        raise ValueError("every prompt needs at least one token, such as the tokenizer's bos_id")
    tokens = pad_sequence(rows, batch_first=True, padding_side="left")
    padding = [tokens.shape[1] - len(row) for row in rows]
    if not any(padding):
        return tokens, None
    in_prompt = torch.arange(tokens.shape[1]) >= torch.tensor(padding)[:, None]
    return tokens, in_prompt.long().to(device) - 1
