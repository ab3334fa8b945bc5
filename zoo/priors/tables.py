"""Relative tables, log-priors that are functions of the displacement between query and key, and
biases made by blocks of rows.

The matrix of a table is Toeplitz: on a line each row is the one above it shifted by one key, on a
grid block-Toeplitz with Toeplitz blocks. Its rows are overlapping windows of the table and can be
copied without a T × S index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from zoo.positions import Positions, slices

# Numbers of a curve's hidden layer in memory at once.
HIDDEN_LIMIT = 1 << 22


class ParametricTable(Protocol):
    """table[h, n] = f(params[:, h], n), of which a kernel takes the gradient Σ dL/dK
    · ∂table/∂params without dL/dtable.

    params: (P, H) float32 or float64, differentiable with respect to the prior's parameters.
    log_factor: whether the first of them is the logarithm of a factor of the table, which then is
        its own derivative by it; but for entries below −1e4, which may be taken for constants. All
        are finite.
    """

    @property
    def params(self) -> Tensor: ...

    @property
    def log_factor(self) -> bool: ...

    def jacobian(self, displacements: dict[str, Tensor]) -> Tensor:
        """(P, H, N) ∂table/∂params at every column, without gradient; see
        `RelativeTable.displacements`."""

    def of_heads(self, heads: slice | Tensor | Sequence[int]) -> ParametricTable:
        """The same function for some heads: a slice, or their indices."""


@dataclass(frozen=True)
class RelativeTable:
    """K[h,i,j] = table[h, q_code[i] − k_code[j] + center]; prefix tokens get 0.

    Attributes:
        table: (H, N) float32 or float64, differentiable.
        q_code, k_code: (T,), (S,) int64. On a line the row index; on a grid y·(2·width − 1) + x.
        center: the table's column for code difference 0.
        num_prefix: leading queries and keys without a position; their rows and columns of K are 0.
        origin: on a line the column of (first query, first key), so that K[h,i,j] = table[h, origin
            + i − j]; None on a grid.
        shape: (height, width) of the grid that queries and keys share, N = (2·height − 1)·(2·width
            − 1); None on a line.
        parametric: the table as a function of a few parameters per head, or None, as of a sum of
            tables.
        constant_from: the distance i − j on a line from which on all columns of a head are one
            number of the prior, so that their gradient may be in any of them; None: there is no
            such distance.
    """

    table: Tensor
    q_code: Tensor
    k_code: Tensor
    center: int
    num_prefix: int = 0
    origin: int | None = None
    shape: tuple[int, int] | None = None
    parametric: ParametricTable | None = None
    constant_from: int | None = None

    @staticmethod
    def line(table: Tensor, q_pos: Positions, k_pos: Positions, *, center: int) -> RelativeTable:
        """A table over distances of a line; `center` is its column for distance 0."""
        q_code = q_pos.row_index(table.device)
        k_code = q_code if k_pos is q_pos else k_pos.row_index(table.device)
        return RelativeTable(
            table, q_code, k_code, center, origin=center + q_pos.offset - k_pos.offset
        )

    @staticmethod
    def grid(table: Tensor, pos: Positions) -> RelativeTable:
        """A table (H, (2·height − 1)·(2·width − 1)) over the displacements (dy, dx) of a grid, dx
        the faster, both rising."""
        y, x = pos.yx(table.device)
        height, width = pos.shape or (1, 1)
        code = F.pad(y * (2 * width - 1) + x, (pos.num_prefix, 0))
        return RelativeTable(
            table, code, code, table.shape[1] // 2, pos.num_prefix, shape=(height, width)
        )

    def dense(self) -> Tensor:
        """(1, H, T, S): the matrix itself, gathered code by code. For the oracle and for plots."""
        bias = self.table[:, self.q_code[:, None] - self.k_code[None, :] + self.center]
        if self.num_prefix:
            patch_q = torch.arange(self.q_code.shape[0], device=bias.device) >= self.num_prefix
            patch_k = torch.arange(self.k_code.shape[0], device=bias.device) >= self.num_prefix
            bias = torch.where(patch_q[:, None] & patch_k[None, :], bias, 0.0)
        return bias[None]

    def of_heads(self, heads: slice | Tensor | Sequence[int]) -> RelativeTable:
        """The table of some heads: a slice, or their indices."""
        parametric = None if self.parametric is None else self.parametric.of_heads(heads)
        return replace(self, table=self.table[heads], parametric=parametric)

    def of_rows(self, rows: slice) -> RelativeTable:
        """The table of some queries, whose dense form has those rows; of a grid without prefix, or
        all rows."""
        if rows == slice(None):
            return self
        if self.num_prefix:
            raise ValueError("a table with prefix tokens cannot be cut by rows")
        origin = self.origin
        if origin is not None:
            origin += rows.indices(len(self.q_code))[0]
        return replace(self, q_code=self.q_code[rows], origin=origin)

    def displacements(self) -> dict[str, Tensor]:
        """Displacement of each column, (N,) in the table's dtype: "d" = i − j on a line; "y", "x"
        = query − key on a grid."""
        if self.shape is None:
            column = torch.arange(
                self.table.shape[1], device=self.table.device, dtype=self.table.dtype
            )
            return {"d": column - self.center}
        dy, dx = grid_displacements(self.shape, device=self.table.device, dtype=self.table.dtype)
        return {"y": dy.flatten(), "x": dx.flatten()}

    def jacobian(self) -> Tensor:
        """(P, H, N) ∂table/∂params of `parametric`, without gradient."""
        assert self.parametric is not None
        with torch.no_grad():
            return self.parametric.jacobian(self.displacements())

    def unroll(self, dtype: torch.dtype | None = None) -> UnrolledTable:
        """The layout whose rows are windows, in `dtype`. On a grid 2·H·width·S elements, on a line
        as many as the table."""
        table = self.table if dtype is None else self.table.to(dtype)
        if self.shape is not None:
            height, width = self.shape
            surface = table.unflatten(1, (2 * height - 1, 2 * width - 1))
            windows = surface.flip(1, 2).unfold(2, width, 1)
            # (H, width, 2·height−1, width): [h, x, a, x'] is the bias at dy = height−1−a,
            # dx = x − x'.
            return UnrolledTable(windows.flip(2).transpose(1, 2).contiguous(), self)
        if self.origin is None:
            return UnrolledTable(table, self)
        return UnrolledTable(table.flip(1), self)

    def shifted(self, q_pos: Positions, k_pos: Positions) -> RelativeTable:
        """The same table at other positions of the line, without recomputing it."""
        moved = RelativeTable.line(self.table, q_pos, k_pos, center=self.center)
        return replace(moved, parametric=self.parametric)

    def __add__(self, other: RelativeTable) -> RelativeTable:
        same = (
            self.shape == other.shape
            and self.center == other.center
            and self.num_prefix == other.num_prefix
        )
        if not same or self.table.shape != other.table.shape:
            raise ValueError("relative tables can only be added over the same positions")
        return replace(self, table=self.table + other.table, parametric=None, constant_from=None)


@dataclass(frozen=True)
class FusedTable:
    """A relative table as a fused kernel reads it, float32; on a line less each head's largest
    entry that the call sees.

    A constant per head changes neither the softmax nor gradients, since Σ_j dS_ij = 0. In bfloat16
    the residual Σ_j dS_ij ≠ 0 (δ uses the rounded output) is multiplied by the table's magnitude,
    which this keeps small.

    Attributes:
        values: (H, N); without gradient where there are `params`.
        params: (P, H) of a parametric table whose gradient is needed, else None.
        jacobian: (P or P − 1, H, N): without the first row where that is `values`.
    """

    values: Tensor
    params: Tensor | None = None
    jacobian: Tensor | None = None

    @staticmethod
    def of(table: RelativeTable, *, causal: bool) -> FusedTable:
        values = table.table
        params = None
        jacobian = None
        if table.parametric is not None and torch.is_grad_enabled() and values.requires_grad:
            values = values.detach()
            params = table.parametric.params.float()
            jacobian = table.jacobian().float()
            jacobian = jacobian[1:] if table.parametric.log_factor else jacobian
        values = values.float()
        if table.origin is None:
            return FusedTable(values, params, jacobian)
        # Without gradients too: recomputation under activation checkpointing must give the same
        # bits.
        first_seen = max(table.center, 0) if causal else 0
        first = min(first_seen, values.shape[1] - 1)
        shift, column = values.detach()[:, first:].max(dim=1, keepdim=True)
        values = values - shift.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        if jacobian is not None:
            columns = column.expand(len(jacobian), -1, 1)
            jacobian = jacobian - jacobian[:, :, first:].gather(2, columns)
        return FusedTable(values, params, jacobian)


@dataclass(frozen=True)
class UnrolledTable:
    """A relative table laid out so that rows of its matrix are windows of `source`. Made by
    `RelativeTable.unroll`."""

    source: Tensor
    of: RelativeTable

    def rows(self, start: int, stop: int, last_key: int, *, out: Tensor | None = None) -> Tensor:
        """(1, H, stop − start, last_key) the matrix for queries [start, stop) and keys [0,
        last_key).

        out: (1, H, stop − start, S) buffer for a grid's rows; only where no gradient is needed.
        """
        of = self.of
        source = self.source
        if of.shape is not None:
            place = _GridRows(of.shape, of.num_prefix, start, stop)
            rows = _Windows.apply(source, place) if out is None else place.write(source, out[0])
            return rows[None, ..., :last_key]
        if of.origin is None:
            q_code = of.q_code[start:stop]
            k_code = of.k_code[:last_key]
            return replace(of, table=source, q_code=q_code, k_code=k_code).dense()
        # source is the reversed table: query i starts at column N − 1 − origin − i, so the last
        # query comes first.
        first = source.shape[1] - of.origin - stop
        return source.unfold(1, last_key, 1)[:, first : first + stop - start].flip(1)[None]


@dataclass(frozen=True)
class _GridRows:
    """Rows [start, stop) of a grid's matrix as windows of the unrolled table.

    For the queries of one row of patches all keys form one window, contiguous in memory.
    """

    shape: tuple[int, int]
    num_prefix: int
    start: int
    stop: int

    def parts(self, matrix: Tensor, source: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Views, of equal shape, of `matrix` (H, stop − start, S) and of `source` (H, width,
        2·height−1, width)."""
        height, width = self.shape
        patches = matrix[..., self.num_prefix :].unflatten(2, self.shape)
        first = max(self.start - self.num_prefix, 0)
        last = self.stop - self.num_prefix
        parts = []
        for y in range(first // width, -(-last // width)):
            x0 = max(first - y * width, 0)
            x1 = min(last - y * width, width)
            at = y * width + x0 + self.num_prefix - self.start
            window = source[:, x0:x1, height - 1 - y : 2 * height - 1 - y]
            parts.append((patches[:, at : at + x1 - x0], window))
        return parts

    def write(self, source: Tensor, matrix: Tensor) -> Tensor:
        matrix[:, : max(self.num_prefix - self.start, 0)] = 0
        matrix[:, :, : self.num_prefix] = 0
        for part, window in self.parts(matrix, source):
            part.copy_(window)
        return matrix


class _Windows(torch.autograd.Function):
    """`_GridRows.write` as a linear map of the unrolled table; its gradient is the transposed map.

    Autograd's gradient of overlapping windows scatters; here windows are added in a fixed order,
    which is deterministic.
    """

    @staticmethod
    def forward(ctx, source: Tensor, place: _GridRows) -> Tensor:
        ctx.place = place
        num_keys = place.num_prefix + place.shape[0] * place.shape[1]
        matrix = source.new_empty(source.shape[0], place.stop - place.start, num_keys)
        return place.write(source, matrix)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        place = ctx.place
        height, width = place.shape
        sums = grad.new_zeros(grad.shape[0], width, 2 * height - 1, width)
        for part, window in place.parts(grad, sums):
            window += part
        return sums, None


def grid_displacements(
    shape: tuple[int, int], *, device: torch.device | str | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(2·height−1, 2·width−1) dy and dx of a grid's table, in its order."""
    height, width = shape
    dy = torch.arange(1 - height, height, device=device, dtype=dtype)
    dx = torch.arange(1 - width, width, device=device, dtype=dtype)
    return dy[:, None].expand(-1, 2 * width - 1), dx.expand(2 * height - 1, -1)


@dataclass(frozen=True)
class BlockedBias:
    """K of shape (1 or B, H, T, S) that is neither lanes nor a table, made a block of rows at a
    time: no (H, T, S) matrix.

    Attributes:
        curve: (…, H) of |i − j|, 0 for later keys where `causal`, and of `extent`, the two
            broadcast. It holds copies of parameters: those that a sharded optimiser gathers for the
            prior's `forward` are gone when a block is made.
        q_row, k_row: (T,), (S,) int64 rows of queries and keys.
        extent: (1 or B, T) int64 position of each query in its document.
        heads: those of the curve that K has.
        dtype, requires_grad: of K.
        hidden: numbers that the curve holds for each pair of positions; some rows of a block are
            made at a time.
    """

    curve: Callable[[Tensor, Tensor], Tensor]
    q_row: Tensor
    k_row: Tensor
    extent: Tensor
    causal: bool
    heads: Sequence[int]
    dtype: torch.dtype
    requires_grad: bool
    hidden: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.extent.shape[0], len(self.heads), self.q_row.shape[0], self.k_row.shape[0]

    @property
    def device(self) -> torch.device:
        return self.extent.device

    def block(self, heads: slice | Tensor, rows: slice, num_keys: int) -> Tensor:
        """(1 or B, h, t, num_keys): K of some heads, a slice or their indices, for some queries and
        the first keys."""
        keys = self.k_row[:num_keys]
        q_row = self.q_row[rows]
        extent = self.extent[:, rows]

        def rows_of(part: slice) -> Tensor:
            distance = (q_row[part, None] - keys).to(self.dtype)
            distance = distance.clamp(min=0) if self.causal else distance.abs()
            return self.curve(distance, extent[:, part, None].to(self.dtype)).movedim(-1, 1)

        hidden_of_a_row = extent.shape[0] * num_keys * self.hidden
        parts = list(slices(q_row.shape[0], max(HIDDEN_LIMIT // hidden_of_a_row, 1)))
        # Several parts are there to save memory: backward makes each again.
        remade = len(parts) > 1 and self.requires_grad and torch.is_grad_enabled()
        blocks = []
        for part in parts:
            if remade:
                blocks.append(checkpoint(rows_of, part, use_reentrant=False))
            else:
                blocks.append(rows_of(part))
        block = blocks[0] if len(parts) == 1 else torch.cat(blocks, dim=2)
        if self.heads != range(block.shape[1]):
            block = block[:, list(self.heads)]
        return block[:, heads]

    def of_heads(self, heads: Sequence[int]) -> BlockedBias:
        """The same of some heads."""
        return replace(self, heads=[self.heads[head] for head in heads])

    def padded(self, before: int, after: int) -> BlockedBias:
        """With queries in front, and keys and as many queries at the end, at which K is any finite
        number."""
        return replace(
            self,
            q_row=F.pad(self.q_row, (before, after)),
            k_row=F.pad(self.k_row, (0, after)),
            extent=F.pad(self.extent, (before, after)),
        )

    def __add__(self, other: Bias) -> Tensor:
        """With a matrix, whose memory it then takes too."""
        if isinstance(other, BlockedBias):
            raise ValueError("only one part of a composed prior may be made by blocks (FIRE)")
        return whole_bias(self) + other

    __radd__ = __add__


Bias: TypeAlias = Tensor | BlockedBias


def bias_block(bias: Bias, heads: slice | Tensor, rows: slice, num_keys: int) -> Tensor:
    """`BlockedBias.block`, also of a matrix, which the heads may share."""
    if isinstance(bias, BlockedBias):
        return bias.block(heads, rows, num_keys)
    return bias[:, heads if bias.shape[1] > 1 else slice(None), rows, :num_keys]


def whole_bias(bias: Bias) -> Tensor:
    """(1 or B, H, T, S): the matrix itself."""
    if not isinstance(bias, BlockedBias):
        return bias
    return bias.block(slice(None), slice(None), bias.shape[3])
