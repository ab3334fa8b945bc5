"""Log-priors that are neither lanes nor a table, made a block of rows at a time: no (H, T, S) matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["Bias", "BlockedBias", "bias_block", "padded_bias", "whole_bias"]


class BlockedBias:
    """K of shape (1 or B, H, T, S) as a function of rows. It holds copies of parameters: those that a sharded optimiser gathers
    for the prior's `forward` are gone when attention asks for a block."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        raise NotImplementedError

    @property
    def requires_grad(self) -> bool:
        raise NotImplementedError

    def block(self, heads: slice | Tensor, rows: slice, num_keys: int) -> Tensor:
        """(1 or B, h, t, num_keys): K of some heads, a slice or their indices, for some queries and the first keys."""
        raise NotImplementedError

    def of_heads(self, heads: slice) -> BlockedBias:
        """The same of some heads."""
        raise NotImplementedError

    def padded(self, before: int, after: int) -> BlockedBias:
        """With queries in front, and keys and as many queries at the end, at which K is any finite number."""
        raise NotImplementedError

    def __add__(self, other: Bias) -> BlockedBias:
        return _Sum((self, other))

    __radd__ = __add__


Bias: TypeAlias = Tensor | BlockedBias


def bias_block(bias: Bias, heads: slice | Tensor, rows: slice, num_keys: int) -> Tensor:
    """`BlockedBias.block`, also of a matrix, which the heads may share."""
    if isinstance(bias, BlockedBias):
        return bias.block(heads, rows, num_keys)
    return bias[:, heads if bias.shape[1] > 1 else slice(None), rows, :num_keys]


def whole_bias(bias: Bias) -> Tensor:
    """(1 or B, H, T, S): the matrix itself."""
    every = slice(None)
    return bias.block(every, every, bias.shape[3]) if isinstance(bias, BlockedBias) else bias


def padded_bias(bias: Bias, before: int, after: int) -> Bias:
    """`BlockedBias.padded`, also of a matrix."""
    if isinstance(bias, BlockedBias):
        return bias.padded(before, after)
    return torch.nn.functional.pad(bias, (0, after, before, after))


@dataclass(frozen=True)
class _Sum(BlockedBias):
    """A sum of log-priors, one of them at least made by blocks."""

    parts: tuple[Bias, ...]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, heads, queries, keys = torch.broadcast_shapes(*(tuple(part.shape) for part in self.parts))
        return batch, heads, queries, keys

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.parts[0].dtype, self.parts[1].dtype)

    @property
    def requires_grad(self) -> bool:
        return any(part.requires_grad for part in self.parts)

    def block(self, heads: slice | Tensor, rows: slice, num_keys: int) -> Tensor:
        first, *rest = (bias_block(part, heads, rows, num_keys) for part in self.parts)
        return sum(rest, first)

    def of_heads(self, heads: slice) -> BlockedBias:
        def cut(part: Bias) -> Bias:
            return (
                part.of_heads(heads)
                if isinstance(part, BlockedBias)
                else part
                if part.shape[1] == 1
                else part[:, heads]
            )

        return _Sum(tuple(cut(part) for part in self.parts))

    def padded(self, before: int, after: int) -> BlockedBias:
        return _Sum(tuple(padded_bias(part, before, after) for part in self.parts))
