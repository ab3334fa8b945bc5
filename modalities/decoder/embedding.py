"""One vector for a text or a sequence, from the features of its tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from modalities.contract import Reading
from modalities.decoder.model import Decoder
from zoo.naming import nearest

__all__ = ["POOLS", "embed"]

POOLS = ("mean", "last")


@torch.inference_mode()
def embed(model: Decoder, reading: Reading, *, pool: str | None = None, size: int | None = None) -> Tensor:
    """(C,) float32 features after the last norm, of a reading whose first token is the start.

    Args:
        pool: "mean" over the tokens without the start (None), or the "last" token, which alone has seen all of them.

    Raises:
        ValueError: for another pool, a size, or a reading without tokens.
    """
    if pool not in (None, *POOLS):
        raise ValueError(f"pool {pool!r}: {nearest(pool, POOLS)}")
    if size is not None:
        raise ValueError(f"size {size} is of images, and this model reads {model.modality}")
    (tokens,) = reading.inputs
    if tokens.shape[1] < 2:
        raise ValueError("nothing to embed: the input is empty")
    if pool == "last":
        return model.forward_features(tokens, last=1)[0, 0].float()
    return model.forward_features(tokens)[0, 1:].float().mean(0)
