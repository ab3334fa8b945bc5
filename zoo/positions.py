"""Positions of tokens: a line of tokens, or a grid of patches with prefix tokens.

Positions are data, passed on every call. No module stores a length, so a longer text or a larger
image needs no resizing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.errors import check_whole


def document_starts(segments: Tensor) -> Tensor:
    """bool like the document ids `segments` (…, T): the first token of each run of equal ids."""
    starts = torch.ones_like(segments, dtype=torch.bool)
    starts[..., 1:] = segments[..., 1:] != segments[..., :-1]
    return starts


def check_runs(rows: Tensor) -> None:
    """Raise ValueError where not all `rows`, bool, show one run of tokens: places of tokens behind
    a gap would count it.

    A compiled graph asserts it, as a RuntimeError.
    """
    message = (
        "attention_mask hides tokens between tokens that it shows, whose positions would count the "
        "gap: pad before the first token of a row (tokenizer.padding_side='left'), and read a "
        "further turn without its padding"
    )
    if torch.compiler.is_compiling():
        torch._assert_async(rows.all(), message)
    elif not rows.all():
        raise ValueError(message)


@dataclass(frozen=True)
class Positions:
    """Positions of the tokens of one attention axis. Make one with `line`, `documents` or `grid`.

    Attributes:
        length: number of tokens, prefix tokens included.
        offset: row index of the first token; only a line has one.
        within: (B, T) position of each token inside its document, or None if that is the row index.
        shape: (height, width) of the patch grid, or None for a line.
        num_prefix: CLS and register tokens before the patches. They are not on the grid.
    """

    length: int
    offset: int = 0
    within: Tensor | None = None
    shape: tuple[int, int] | None = None
    num_prefix: int = 0

    @staticmethod
    def line(length: int, *, offset: int = 0) -> Positions:
        """`length` tokens in a row, the first at position `offset`."""
        check_whole("length", length, 1)
        check_whole("offset", offset, 0)
        return Positions(length, offset)

    @staticmethod
    def documents(segments: Tensor, *, offset: int = 0) -> Positions:
        """Positions that restart at 0 wherever the document id in `segments` (B, T) changes along a
        row.

        Documents are runs: an id does not recur after another one. `offset` is the row index of the
        first column; it does not shift the restarted positions.
        """
        expected = "segments must be a tensor (B, T) of document ids"
        if not isinstance(segments, Tensor):
            raise ValueError(f"{expected}, got {segments!r}")
        if segments.ndim != 2:
            raise ValueError(f"{expected}, got shape {tuple(segments.shape)}")
        if segments.is_floating_point() or segments.dtype == torch.bool:
            raise ValueError(f"segments must be whole numbers, got {segments.dtype}")
        check_whole("offset", offset, 0)
        length = segments.shape[1]
        index = torch.arange(length, device=segments.device).expand_as(segments)
        # The row index of the first token of each token's document: the last start so far.
        first = torch.where(document_starts(segments), index, 0).cummax(dim=1).values
        return Positions(length, offset, within=index - first)

    @staticmethod
    def grid(height: int, width: int, *, num_prefix: int = 0) -> Positions:
        """`num_prefix` prefix tokens, then `height`·`width` patches in row-major order."""
        check_whole("height", height, 1)
        check_whole("width", width, 1)
        check_whole("num_prefix", num_prefix, 0)
        return Positions(num_prefix + height * width, shape=(height, width), num_prefix=num_prefix)

    def tail(self, count: int) -> Positions:
        """The last `count` positions of a line."""
        check_whole("count", count, 1)
        return self.slice(self.length - count, self.length)

    def slice(self, start: int, stop: int) -> Positions:
        """Positions [start, stop) of a line's, counted from its first."""
        if self.is_grid:
            raise ValueError(f"positions [{start}, {stop}) of a grid: expected those of a line")
        if not 0 <= start < stop <= self.length:
            raise ValueError(
                f"positions [{start}, {stop}) of {self.length}: "
                f"expected 0 <= start < stop <= {self.length}"
            )
        within = None if self.within is None else self.within[:, start:stop]
        return Positions(stop - start, self.offset + start, within=within)

    @property
    def is_grid(self) -> bool:
        return self.shape is not None

    def row_index(self, device: torch.device | str | None = None) -> Tensor:
        """(T,) int64 index in the row, as used by relative tables."""
        return torch.arange(self.offset, self.offset + self.length, device=device)

    def index(self, device: torch.device | str | None = None) -> Tensor:
        """(1 or B, T) int64 position of each token inside its document, as used by absolute
        terms."""
        if self.within is None:
            return self.row_index(device)[None]
        if device is None:
            return self.within
        return self.within.to(device)

    def index_below(self, size: int, what: str, device: torch.device | str | None) -> Tensor:
        """`index`; ValueError where a position is `size` or more, beyond `what`."""
        index = self.index(device)
        last = self.offset + self.length - 1
        if last >= size and self.within is not None:
            # Positions restart in documents. Reading the largest one back synchronises.
            last = int(index.max())
        if last >= size:
            raise ValueError(f"{what}, got position {last}")
        return index

    def yx(self, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
        """Row and column of each patch, both (height·width,) int64, prefix tokens left out.

        Raises:
            ValueError: for a line.
        """
        if self.shape is None:
            raise ValueError(
                "a line of tokens has no grid; "
                "make the positions with Positions.grid(height, width)"
            )
        height, width = self.shape
        y = torch.arange(height, device=device)[:, None].expand(height, width)
        x = torch.arange(width, device=device).expand(height, width)
        return y.flatten(), x.flatten()


def slices(count: int, size: int) -> Iterator[slice]:
    """Split range(count) into slices of `size`, the last one shorter."""
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
