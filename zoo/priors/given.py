"""Log-priors as numbers: over the distance (`Table`), or over pairs of positions (`Matrix`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from zoo.naming import Options, check_flags, check_number, check_whole, nearest
from zoo.positions import Positions
from zoo.priors.base import Prior, PriorTerms, TablePrior, prior_dtype, split_bf16

__all__ = ["IMPOSSIBLE", "Matrix", "Table", "over_distances"]

# log 0, finite so that a query whose visible keys are all impossible still has a softmax: e^−10000 is 0 in every dtype.
IMPOSSIBLE = -1e4

Numbers: TypeAlias = Tensor | np.ndarray | Sequence[object]
Curve: TypeAlias = Callable[[Tensor], Tensor]


class Table(TablePrior):
    """K[h,i,j] = log π_h(abs(i − j)), from numbers for the distances 0 … N−1.

    Args:
        num_heads: H.
        values: (N,) for all heads or (H, N) numbers; or a function from distances (N,) float64 to such log-values.
        kind: what numbers are, "log" or "weights", whose logarithm is then taken (0: never attended to).
        length: N of a function, or of a table without numbers; the training context by default.
        beyond: K at distances of N and more: "last", as at N−1; "zero", weight 0; "linear", the line through the first and the
            last value, level where that rises.
        learnable: train the values. Without numbers they start at 0 and are trained unless this is False: a learned bias per
            distance.

    Raises:
        ValueError: for numbers of another shape, without a finite value, or weights below 0.
    """

    by_head = ("values",)

    def __init__(
        self,
        num_heads: int,
        *,
        values: Numbers | Curve | None = None,
        kind: str = "log",
        length: int | None = None,
        beyond: str = "last",
        learnable: bool | None = None,
        train_context: int | None = None,
    ) -> None:
        super().__init__(num_heads)
        if beyond not in ("last", "zero", "linear"):
            raise ValueError(
                f"unknown beyond={beyond!r} of a table prior; {nearest(beyond, ('last', 'zero', 'linear'))}"
            )
        learnable = values is None if learnable is None else learnable
        check_flags(learnable=learnable)
        for name, count in (("length", length), ("train_context", train_context)):
            if count is not None:
                check_whole(f"{name} of a table prior", count, 1)
        if values is None or callable(values):
            numbers = over_distances(values, length or train_context)
        else:
            numbers = log_numbers(values, kind)
            if length not in (None, numbers.shape[-1]):
                raise ValueError(
                    f"a table prior of length {length} cannot hold {numbers.shape[-1]} numbers; leave length out"
                )
        self.beyond = beyond
        self.values = nn.Parameter(_by_head(numbers, num_heads, ("N",)), requires_grad=learnable)

    def curve(self, distance: Tensor, *, causal: bool) -> Tensor:
        length, values, away = self.values.shape[1], self.values.to(distance.dtype), distance.abs()
        inside = values[:, away.clamp(max=length - 1).long()]
        if self.beyond == "zero":
            return torch.where(away < length, inside, IMPOSSIBLE)
        if self.beyond == "linear":
            slope = ((values[:, -1] - values[:, 0]) / max(length - 1, 1)).clamp(max=0)
            return inside + slope.view(-1, *[1] * distance.ndim) * (away - (length - 1)).clamp(min=0)
        return inside

    def stored_options(self, options: Options) -> Options:
        """The length in place of the numbers, which the state dict holds."""
        others = {key: value for key, value in options.items() if key not in ("values", "kind")}
        shape = {"length": self.values.shape[1], "learnable": self.values.requires_grad}
        return others if others == options else others | shape


class Matrix(Prior):
    """K[h,i,j] = log π_h[i,j], from numbers for the first T query and S key positions, in each document anew.

    Subtracting each row's mean changes no weight and gives the lowest rank that K has up to row constants. Where its
    singular value decomposition, cut to at most `max_rank` terms, differs from K by at most `tolerance` logits in every
    entry, up to a row constant, K is that product φ(i)·ψ(j), realised by 4 lanes a term (each factor is two bfloat16 pieces).
    Otherwise it is dense: a (H, T, S) bias, with the kernels that serve one.

    Args:
        num_heads: H.
        values: (T, S) for all heads or (H, T, S) numbers.
        kind: "log" or "weights", as in `Table`.
        tolerance: the largest error of lanes, in logits; 0 keeps the matrix dense.
        max_rank: most terms.
        shape: (T, S, rank) of one whose numbers are loaded afterwards, rank None if dense.
        causal: with `shape`, whether the product is K on and below the diagonal alone, as version 0.5 saved causal matrices.

    Attributes:
        rank: terms of the product; None where K is dense.
        error: largest difference in logits from the numbers, up to a row constant; 0 where K is dense.

    Raises:
        ValueError: for numbers of another shape, without a finite value, or weights below 0; and at a call for positions
            beyond them.
    """

    requires_options = True
    by_head = ("values", "queries", "keys")

    def __init__(
        self,
        num_heads: int,
        *,
        values: Numbers | None = None,
        kind: str = "log",
        tolerance: float = 1e-3,
        max_rank: int = 4,
        shape: Sequence[int | None] | None = None,
        causal: bool = False,
    ) -> None:
        super().__init__(num_heads)
        check_flags(causal=causal)
        check_number("tolerance of a matrix prior", tolerance, least=0)
        check_whole("max_rank of a matrix prior", max_rank, 0)
        if (values is None) == (shape is None):
            raise ValueError("a matrix prior needs its numbers: position_options={'values': …} of (T, S) or (H, T, S)")
        self.error, self.causal, self.rank = 0.0, causal, None if shape is None else shape[-1]
        if values is not None:
            if causal:
                raise ValueError("causal of a matrix prior goes with its shape")
            numbers = log_numbers(values, kind)
            dense, product = _by_head(numbers, num_heads, ("T", "S")), factor(numbers, tolerance, max_rank)
            if product is not None:
                factors, self.error = [f.expand(num_heads, -1, -1).float().clone() for f in product[:2]], product[2]
                self.rank = factors[0].shape[-1]
        else:
            assert shape is not None
            if len(shape) != 3:
                raise ValueError(f"shape of a matrix prior must be (T, S, rank), rank None if dense, got {shape!r}")
            for name, count in zip(("T", "S", "rank"), shape if shape[2] is not None else shape[:2], strict=False):
                check_whole(f"{name} in shape of a matrix prior", count, 1)
            queries, keys, rank = (int(count or 0) for count in shape)
            dense = torch.zeros(num_heads, queries, keys) if self.rank is None else torch.empty(0, queries, keys)
            factors = [torch.zeros(num_heads, count, rank) for count in (queries, keys)]
        self.num_queries, self.num_keys = dense.shape[1:]
        if self.rank is None:
            self.values = nn.Parameter(dense, requires_grad=False)
        else:
            self.queries, self.keys = (nn.Parameter(f, requires_grad=False) for f in factors)
            self.num_lanes = 4 * self.rank

    def _index(self, positions: Positions, size: int, what: str) -> Tensor:
        """(1 or B, L) positions, checked against the matrix."""
        index, last = positions.index(next(self.parameters()).device), positions.offset + positions.length - 1
        if last >= size and positions.within is not None:
            # Positions restart in documents; reading them back synchronises.
            last = int(index.max())
        if last >= size:
            raise ValueError(f"the matrix prior has {size} {what} positions, got position {last}; pass a larger matrix")
        return index

    def forward(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None, carry: Tensor | None = None
    ) -> PriorTerms:
        self.require_line(q_pos, k_pos)
        dtype, offset = prior_dtype(self), q_pos.offset - k_pos.offset
        if self.rank is None or (self.causal and not causal):
            return PriorTerms(bias=self._dense(q_pos, k_pos, dtype), offset=offset)
        i, j = self._index(q_pos, self.num_queries, "query"), self._index(k_pos, self.num_keys, "key")
        # (1 or B, H, L, R, 2): the products of two pieces each are the product itself.
        q, k = (
            split_bf16(f.double()[:, at].transpose(0, 1), 2).to(dtype) for f, at in ((self.queries, i), (self.keys, j))
        )
        return PriorTerms(q[..., [0, 0, 1, 1]].flatten(-2), k[..., [0, 1, 0, 1]].flatten(-2), offset=offset)

    def relative_table(self, q_pos: Positions, k_pos: Positions, *, causal: bool) -> None:
        """None: it has no table, whatever the positions."""

    def _dense(self, q_pos: Positions, k_pos: Positions, dtype: torch.dtype) -> Tensor:
        """(1 or B, H, T, S) K itself, or the product of its factors."""
        i, j = self._index(q_pos, self.num_queries, "query"), self._index(k_pos, self.num_keys, "key")
        if self.rank is None:
            return self.values.to(dtype)[:, i[:, :, None], j[:, None, :]].transpose(0, 1)
        q, k = (f.to(dtype)[:, at].transpose(0, 1) for f, at in ((self.queries, i), (self.keys, j)))
        product = q @ k.transpose(-1, -2)
        if self.causal:
            # Below every other logit, whatever the product is there.
            later = (j[:, None, :] > i[:, :, None])[:, None]
            product = torch.where(later, IMPOSSIBLE + product.detach().amin(), product)
        return product

    def log_prior(self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None) -> Tensor:
        return self._dense(q_pos, k_pos, torch.float64)

    def stored_options(self, options: Options) -> Options:
        """The shape in place of the numbers, which the state dict holds."""
        shape: Options = {"shape": [self.num_queries, self.num_keys, self.rank]}
        return shape | {"causal": True} if self.causal else shape


def factor(matrix: Tensor, tolerance: float, max_rank: int) -> tuple[Tensor, Tensor, float] | None:
    """φ (…, T, R), ψ (…, S, R) with φψᵀ = matrix to `tolerance` in every entry up to a row constant, and the error.

    Of (…, T, S) float64; R is the least that all heads do with, at least 1. None where it is above `max_rank`.
    """
    u, s, vh = torch.linalg.svd(matrix - matrix.mean(-1, keepdim=True), full_matrices=False)
    root = s.sqrt()[..., None, :]
    for rank in range(1, min(max_rank, s.shape[-1]) + 1):
        queries, keys = ((side * root)[..., :rank] for side in (u, vh.mT))
        left = matrix - queries.float().double() @ keys.float().double().mT
        error = float((left.amax(-1) - left.amin(-1)).max()) / 2
        if error <= tolerance:
            return queries, keys, error
    return None


def log_numbers(numbers: Numbers, kind: str = "log", where: str = "values") -> Tensor:
    """float64 log-values of numbers that are log-values or weights; −∞ and weights of 0 become `IMPOSSIBLE`.

    where: what holds them, for errors.
    """
    if kind not in ("log", "weights"):
        raise ValueError(f"unknown kind={kind!r} of numbers; {nearest(kind, ('log', 'weights'))}")
    try:
        values = torch.as_tensor(numbers, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{where} of a prior must be an array of numbers, or of a table a function from distances to log-values, got "
            f"{type(numbers).__name__}: {error}"
        ) from error
    if values.is_complex():
        raise ValueError(f"{where} of a prior must be real numbers, got {values.dtype}")
    values = values.double()
    if kind == "weights":
        wrong, expected = ~values.isfinite() | (values < 0), "weights of a prior must be finite and 0 or more"
    else:
        wrong, expected = values.isnan() | (values == math.inf), "log-values of a prior must be finite or −∞"
    if bool(wrong.any()):
        place = wrong.nonzero()[0].tolist()
        raise ValueError(f"{expected}, got {float(values[tuple(place)]):g} at {place} of {where}")
    values = values.log() if kind == "weights" else values
    if not bool(values.isfinite().any()):
        what = "weight above 0" if kind == "weights" else "finite log-value"
        raise ValueError(f"{where} of a prior must have a {what} at least once, of {values.numel()}")
    return values.clamp(min=IMPOSSIBLE)


def over_distances(curve: Curve | None, length: int | None) -> Tensor:
    """(N,) or (H, N) float64 log-values of a function at the distances 0 … N−1; zeros without one.

    Raises:
        ValueError: without a length N, or for a function that returns anything else.
    """
    if length is None:
        raise ValueError("a table prior without numbers needs its length, the number of distances")
    check_whole("length of a table prior", length, 1)
    distance = torch.arange(length, dtype=torch.float64, device="cpu")
    if curve is None:
        return torch.zeros_like(distance)
    values = log_numbers(curve(distance), where="what the function returns")
    if values.ndim not in (1, 2) or values.shape[-1] != length:
        raise ValueError(
            f"the function of a table prior returns numbers of shape {tuple(values.shape)}, expected ({length},) or "
            f"(heads, {length}): one at each distance from 0 to {length - 1}"
        )
    return values


def _by_head(numbers: Tensor, num_heads: int, axes: tuple[str, ...]) -> Tensor:
    """(H, …) float32 copy of numbers for all heads or by head."""
    one = (num_heads,) if numbers.ndim > len(axes) else ()
    if numbers.ndim not in (len(axes), len(axes) + 1) or not numbers.numel() or numbers.shape[: len(one)] != one:
        shape = ", ".join(axes)
        raise ValueError(
            f"a prior of {num_heads} heads needs numbers of shape ({shape}{',' * (len(axes) == 1)}) or ({num_heads}, {shape}), "
            f"got {tuple(numbers.shape)}"
        )
    return numbers.expand(num_heads, *numbers.shape[numbers.ndim - len(axes) :]).float().clone()
