"""Log-priors given as numbers: over the distance (`Table`), or over pairs of positions (`Matrix`)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributions import Distribution

from zoo.naming import check_flags, check_number, check_whole, nearest
from zoo.positions import Positions
from zoo.priors.base import Prior, PriorTerms, TablePrior, prior_dtype, split_bf16

__all__ = ["IMPOSSIBLE", "Matrix", "Table", "over_distances", "read_numbers"]

# log 0, finite so that a query whose visible keys are all impossible still has a softmax: e^−10000 is 0 in every dtype.
IMPOSSIBLE = -1e4
KINDS = ("log", "weights")
BEYOND = ("last", "zero", "linear")

Numbers = Tensor | np.ndarray | Sequence[Any]


class Table(TablePrior):
    """K[h,i,j] = log π_h(abs(i − j)), given by numbers for the distances 0 … N−1.

    Args:
        num_heads: H.
        values: (N,) for all heads or (H, N) numbers; or a function from distances (N,) float64 to such log-values; or a
            torch distribution over distances, of batch shape () or (H,), with weight 0 outside its support.
        file: the numbers instead: .npy, .csv (a row per head), .json, or .safetensors of one tensor.
        kind: what numbers in `values` or `file` are, "log" or "weights", whose logarithm is then taken (0: never attended to).
        length: N of a function, a distribution, or a table without numbers; the training context by default.
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
        values: Numbers | Callable[[Tensor], Tensor] | Distribution | None = None,
        file: str | Path | None = None,
        kind: str = "log",
        length: int | None = None,
        beyond: str = "last",
        learnable: bool | None = None,
        train_context: int | None = None,
    ) -> None:
        super().__init__(num_heads)
        if beyond not in BEYOND:
            raise ValueError(f"unknown beyond={beyond!r} of a table prior; {nearest(beyond, BEYOND)}")
        self.beyond = beyond
        if learnable is not None:
            check_flags(learnable=learnable)
        for name, count in (("length", length), ("train_context", train_context)):
            if count is not None:
                check_whole(f"{name} of a table prior", count, 1)
        given = _given(values, file, "a table prior")
        if given is None or callable(given) or isinstance(given, Distribution):
            numbers = over_distances(given, length or train_context)
        else:
            numbers = log_numbers(given, kind, str(file or "values"))
            if length not in (None, numbers.shape[-1]):
                raise ValueError(
                    f"a table prior of length {length} cannot hold {numbers.shape[-1]} numbers; leave length out"
                )
        if numbers.ndim not in (1, 2) or numbers.numel() == 0 or (numbers.ndim == 2 and len(numbers) != num_heads):
            raise ValueError(
                f"a table prior of {num_heads} heads needs numbers of shape (N,) or ({num_heads}, N), "
                f"got {tuple(numbers.shape)}"
            )
        learnable = given is None if learnable is None else learnable
        self.values = nn.Parameter(numbers.expand(num_heads, -1).float().clone(), requires_grad=learnable)

    @classmethod
    def fit(
        cls,
        num_heads: int,
        *,
        distances: Numbers | None = None,
        counts: Numbers | None = None,
        length: int | None = None,
        smoothing: float = 1.0,
        **options: Any,
    ) -> Self:
        """The table of a histogram: log( (counts + smoothing) / (total + N·smoothing) ).

        Args:
            num_heads: H.
            distances: observed distances, integers of 0 or more; those of `length` and more are left out.
            counts: (N,) or (H, N), how often each distance was observed, instead.
            length: N; by default the largest distance and one, or as many as counts. Fewer counts are followed by zeros.
            smoothing: added to every count; 0 leaves unobserved distances impossible.
            options: `beyond`, `learnable`.
        """
        if (distances is None) == (counts is None):
            raise ValueError("a table prior is fitted to `distances` or to `counts`, exactly one of them")
        check_number("smoothing", smoothing, least=0)
        if length is not None:
            check_whole("length", length, 1)
        if distances is not None:
            observed = torch.as_tensor(distances, device="cpu").flatten()
            if observed.is_floating_point() or not len(observed) or bool((observed < 0).any()):
                raise ValueError("distances must be integers of 0 or more, at least one")
            length = length or int(observed.max()) + 1
            found = torch.bincount(observed[observed < length], minlength=length).double()
        else:
            found = torch.as_tensor(counts, device="cpu").double()
            if length is not None:
                found = F.pad(found[..., :length], (0, max(0, length - found.shape[-1])))
        weights = found + smoothing
        if bool((found < 0).any()) or not bool((weights.sum(-1) > 0).all()):
            raise ValueError("counts must be 0 or more, with at least one above 0 per head")
        return cls(num_heads, values=weights / weights.sum(-1, keepdim=True), kind="weights", **options)

    def curve(self, distance: Tensor, *, causal: bool) -> Tensor:
        length, values = self.values.shape[1], self.values.to(distance.dtype)
        away = distance.abs()
        found = values[:, away.clamp(max=length - 1).long()]
        if self.beyond == "zero":
            return torch.where(away < length, found, IMPOSSIBLE)
        if self.beyond == "linear":
            slope = ((values[:, -1] - values[:, 0]) / max(length - 1, 1)).clamp(max=0)
            return found + slope.view(-1, *[1] * distance.ndim) * (away - (length - 1)).clamp(min=0)
        return found

    def stored_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Its length in place of the numbers, which the state dict holds."""
        kept = {key: value for key, value in options.items() if key not in ("values", "file", "kind")}
        return (
            kept if kept == options else kept | {"length": self.values.shape[1], "learnable": self.values.requires_grad}
        )


class Matrix(Prior):
    """K[h,i,j] = log π_h[i,j], given by numbers for the first T query and S key positions, in each document anew.

    Subtracting each row's mean changes no weight and gives the lowest rank that K has up to row constants. Where its
    singular value decomposition, cut to at most `max_rank` terms, differs from K by at most `tolerance` logits in every
    entry, up to a row constant, K is that product φ(i)·ψ(j), realised by 4 lanes a term (each factor is two bfloat16 pieces).
    Otherwise it is dense: a (H, T, S) bias, with the kernels that serve one.

    Of a square matrix that has no weight at all above its diagonal, a causal π, the product is fitted to the other entries
    alone: a causal call sees no more. A call that is not causal gets the dense form, with weight 0 above the diagonal.

    Args:
        num_heads: H.
        values: (T, S) for all heads or (H, T, S) numbers.
        file: the numbers instead, as in `Table`; .csv holds one (T, S) matrix.
        kind: "log" or "weights", as in `Table`.
        tolerance: the largest error of lanes, in logits; 0 keeps the matrix dense.
        max_rank: most terms.
        shape: (T, S, rank) of one whose numbers are loaded afterwards, rank None if dense.
        causal: with `shape`, whether the product is of a causal π; of numbers it is found.

    Attributes:
        rank: terms of the product; None where K is dense.
        causal: whether the product is K on and below the diagonal alone.
        error: largest difference in logits from the given numbers, up to a row constant; 0 where K is dense.

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
        file: str | Path | None = None,
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
        given = _given(values, file, "a matrix prior")
        self.error, self.causal = 0.0, causal
        self.rank: int | None
        if (given is None) == (shape is None):
            raise ValueError(
                "a matrix prior needs its numbers: position_options={'file': 'K.npy'}, or values of (T, S) or (H, T, S)"
            )
        if given is not None and causal:
            raise ValueError("causal of a matrix prior goes with its shape; of numbers it is found")
        if given is None:
            assert shape is not None
            if len(shape) != 3:
                raise ValueError(f"shape of a matrix prior must be (T, S, rank), rank None if dense, got {shape!r}")
            for name, count in zip(("T", "S", "rank"), shape[: 3 if shape[2] is not None else 2], strict=False):
                check_whole(f"{name} in shape of a matrix prior", count, 1)
            queries, keys, self.rank = int(shape[0] or 0), int(shape[1] or 0), shape[2]
            factors = [torch.zeros(num_heads, n, self.rank or 0) for n in (queries, keys)]
            dense = torch.zeros(num_heads, queries, keys)
        else:
            dense = log_numbers(given, kind, str(file or "values"))
            if dense.ndim not in (2, 3) or dense.numel() == 0 or (dense.ndim == 3 and len(dense) != num_heads):
                raise ValueError(
                    f"a matrix prior of {num_heads} heads needs numbers of shape (T, S) or ({num_heads}, T, S), "
                    f"got {tuple(dense.shape)}"
                )
            causal = _is_causal(dense)
            found = (factor_causal if causal else factor)(dense, tolerance, max_rank)
            dense = dense.expand(num_heads, -1, -1)
            self.rank = None
            if found is not None:
                *factors, self.error = found
                self.causal = causal
                factors = [f.expand(num_heads, -1, -1) for f in factors]
                self.rank = factors[0].shape[-1]
        if self.rank is None:
            self.values = nn.Parameter(dense.float().clone(), requires_grad=False)
            self.num_queries, self.num_keys = dense.shape[1:]
        else:
            self.queries, self.keys = (nn.Parameter(f.float().clone(), requires_grad=False) for f in factors)
            self.num_queries, self.num_keys = self.queries.shape[1], self.keys.shape[1]
            self.num_lanes = 4 * self.rank

    def _at(self, pos: Positions, size: int, what: str) -> Tensor:
        """(1 or B, L) positions, checked against the matrix."""
        device = next(self.parameters()).device
        index = pos.index(device)
        last = pos.offset + pos.length - 1
        if last >= size and pos.within is not None:
            last = int(index.max())  # positions restart in documents; reading them back synchronises
        if last >= size:
            raise ValueError(f"the matrix prior has {size} {what} positions, got position {last}; give a larger matrix")
        return index

    def forward(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None, carry: Tensor | None = None
    ) -> PriorTerms:
        self.require_line(q_pos, k_pos)
        dtype = prior_dtype(self)
        offset = q_pos.offset - k_pos.offset
        if self.rank is None or (self.causal and not causal):
            return PriorTerms(bias=self._dense(q_pos, k_pos, dtype), offset=offset)
        i, j = self._at(q_pos, self.num_queries, "query"), self._at(k_pos, self.num_keys, "key")
        # (1 or B, H, L, R, 2): the products of two pieces each are the product itself.
        q, k = (
            split_bf16(f.double()[:, at].transpose(0, 1), 2).to(dtype) for f, at in ((self.queries, i), (self.keys, j))
        )
        return PriorTerms(q[..., [0, 0, 1, 1]].flatten(-2), k[..., [0, 1, 0, 1]].flatten(-2), offset=offset)

    def relative_table(self, q_pos: Positions, k_pos: Positions, *, causal: bool) -> None:
        """None: it has no table, whatever the positions."""

    def _dense(self, q_pos: Positions, k_pos: Positions, dtype: torch.dtype) -> Tensor:
        """(1 or B, H, T, S) K itself, or the product of its factors."""
        i, j = self._at(q_pos, self.num_queries, "query"), self._at(k_pos, self.num_keys, "key")
        if self.rank is not None:
            q, k = (f.to(dtype)[:, at].transpose(0, 1) for f, at in ((self.queries, i), (self.keys, j)))
            product = q @ k.transpose(-1, -2)
            if self.causal:  # below every other logit, whatever the product is there
                later = (j[:, None, :] > i[:, :, None])[:, None]
                product = torch.where(later, IMPOSSIBLE + product.detach().amin(), product)
            return product
        return self.values.to(dtype)[:, i[:, :, None], j[:, None, :]].transpose(0, 1)

    def log_prior(self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None) -> Tensor:
        return self._dense(q_pos, k_pos, torch.float64)

    def tail(self, distance: Tensor, horizon: int) -> Tensor:
        """(H, n) float64: max of K[h,i,j] − K[h,i,i] over i below `horizon` and j ≤ i − distance; +∞ beyond the matrix."""
        if horizon > min(self.num_queries, self.num_keys):
            return super().tail(distance, horizon)
        bias = self._dense(Positions.line(horizon), Positions.line(horizon), torch.float64)[0]
        above = bias - bias.diagonal(dim1=1, dim2=2)[..., None]
        highest = torch.stack([above.diagonal(-d, 1, 2).amax(-1) for d in range(horizon)], dim=-1)
        highest = highest.flip(-1).cummax(-1).values.flip(-1)
        # Both pieces of a lane are exact to 2^−17 of the factor.
        rounded = bias.tril().abs().amax((1, 2))[:, None] * 2.0**-14 if self.rank is not None else 0.0
        return highest.to(distance.device)[:, distance.clamp(max=horizon - 1)] + rounded

    def stored_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The shape in place of the numbers, which the state dict holds."""
        shape = {"shape": [self.num_queries, self.num_keys, self.rank]}
        return shape | {"causal": True} if self.causal else shape


def factor(matrix: Tensor, tolerance: float, max_rank: int) -> tuple[Tensor, Tensor, float] | None:
    """φ (…, T, R), ψ (…, S, R) with φψᵀ = matrix to `tolerance` in every entry up to a row constant, and the error.

    Of (…, T, S) float64; R is the least that all heads do with, at least 1. None where it is above `max_rank`.
    """
    centred = matrix - matrix.mean(-1, keepdim=True)
    u, s, vh = torch.linalg.svd(centred, full_matrices=False)
    root = s.sqrt()
    for rank in range(1, min(max_rank, s.shape[-1]) + 1):
        queries, keys = u[..., :rank] * root[..., None, :rank], vh.mT[..., :rank] * root[..., None, :rank]
        left = matrix - queries.float().double() @ keys.float().double().mT
        error = float((left.amax(-1) - left.amin(-1)).max()) / 2
        if error <= tolerance:
            return queries, keys, error
    return None


STEPS = 30  # of alternating least squares at most; a product that is exact needs one or two


def _is_causal(matrix: Tensor) -> bool:
    """Whether a (…, T, S) matrix is square and no entry above its diagonal is possible."""
    size = matrix.shape[-1]
    if size < 2 or matrix.shape[-2] != size:
        return False
    later = torch.ones(size, size, dtype=torch.bool, device="cpu").triu(1)
    return bool((matrix[..., later] == IMPOSSIBLE).all())


def factor_causal(matrix: Tensor, tolerance: float, max_rank: int) -> tuple[Tensor, Tensor, float] | None:
    """`factor` of a causal (…, T, T) matrix, where only entries on and below the diagonal count.

    Queries of the second half see all keys of the first: the singular value decomposition of that block gives their factors,
    least squares those of all others. Where that is not enough, least squares alternate between queries and keys.
    """
    size, half = matrix.shape[-1], matrix.shape[-1] // 2
    lower, seen = matrix.tril(), torch.ones_like(matrix).tril()
    block = matrix[..., half:, : half + 1]
    means = block.mean(-1, keepdim=True)
    _, s, vh = torch.linalg.svd(block - means, full_matrices=False)
    # The squared error of rank r over the block is at least that of its decomposition: a rank with more than `tolerance` in
    # every entry fits no better elsewhere.
    missed = F.pad(s.square().flip(-1).cumsum(-1).flip(-1), (0, max_rank + 1))
    most = tolerance**2 * block.shape[-1] * block.shape[-2]
    for rank in range(1, min(max_rank, size - 1) + 1):
        if bool((missed[..., rank] > most).any()):
            continue
        keys, queries = (lower.new_zeros(*lower.shape[:-1], rank) for _ in range(2))
        known = vh.mT[..., :rank] * half**0.5
        keys[..., : half + 1, : known.shape[-1]] = known
        queries[..., half:, : known.shape[-1]] = (block - means) @ known / half
        constants = F.pad(means, (0, 0, half, 0))
        keys[..., half + 1 :, :] = _key_factors(lower, seen, constants, queries)[..., half + 1 :, :]
        before = math.inf
        for _ in range(STEPS):
            constants, queries = _query_factors(lower, keys)
            q, k = _balanced(queries, keys)
            left = matrix - q.float().double() @ k.float().double().mT
            high, low = (left.masked_fill(seen == 0, end) for end in (-math.inf, math.inf))
            error = float((high.amax(-1) - low.amin(-1)).max()) / 2
            if error <= tolerance:
                return q, k, error
            if not error < 0.9 * before:
                break
            before, keys = error, _key_factors(lower, seen, constants, queries)
    return None


def _query_factors(lower: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """(row constants (…, T, 1), φ (…, T, R)) by least squares over the keys that each query sees."""
    design = torch.cat([torch.ones_like(keys[..., :1]), keys], dim=-1)
    gram = (design[..., :, None] * design[..., None, :]).cumsum(-3)
    found = _solve(gram, lower @ design)
    return found[..., :1], found[..., 1:]


def _key_factors(lower: Tensor, seen: Tensor, constants: Tensor, queries: Tensor) -> Tensor:
    """ψ (…, T, R) by least squares over the queries that see each key."""
    gram = (queries[..., :, None] * queries[..., None, :]).flip(-3).cumsum(-3).flip(-3)
    return _solve(gram, (lower - constants * seen).mT @ queries)


def _solve(gram: Tensor, right: Tensor) -> Tensor:
    """The shortest solution: the first queries see too few keys to tell their factors, and few queries see the last keys."""
    return (torch.linalg.pinv(gram, rtol=1e-12, hermitian=True) @ right[..., None])[..., 0]


def _balanced(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The same product up to row constants, of factors of one size."""
    (q, left), (k, right) = torch.linalg.qr(queries), torch.linalg.qr(keys - keys.mean(-2, keepdim=True))
    u, s, vh = torch.linalg.svd(left @ right.mT)
    root = s.sqrt()[..., None, :]
    return q @ u * root, k @ vh.mT * root


def log_numbers(numbers: Numbers, kind: str, where: str = "values") -> Tensor:
    """float64 log-values of numbers that are log-values or weights; −∞ and weights of 0 become `IMPOSSIBLE`.

    where: what holds them, for errors.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind={kind!r} of numbers; {nearest(kind, KINDS)}")
    try:
        given = torch.as_tensor(numbers, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        hint = ", such as its logpdf or logpmf" if hasattr(numbers, "logpdf") or hasattr(numbers, "logpmf") else ""
        raise ValueError(
            f"{where} of a prior must be an array of numbers, or of a table a function from distances to log-values{hint} or "
            f"a torch distribution, got {type(numbers).__name__}: {error}"
        ) from error
    if given.is_complex():
        raise ValueError(f"{where} of a prior must be real numbers, got {given.dtype}")
    found, words = given.double(), "weights" if kind == "weights" else "log-values"
    wrong = found.isnan() | (found == math.inf)
    if bool(wrong.any()):
        place = wrong.nonzero()[0].tolist()
        among = (
            "weights of a prior must be finite" if kind == "weights" else "log-values of a prior must be finite or −∞"
        )
        raise ValueError(f"{among}, got {float(found[tuple(place)])} at {place} of {where}")
    if kind == "weights" and bool((found < 0).any()):
        raise ValueError(f"weights of a prior must be 0 or more, got {float(found.min()):g} in {where}")
    found = found.log() if kind == "weights" else found
    if not bool(found.isfinite().any()):
        what = "weight above 0" if kind == "weights" else "finite log-value"
        raise ValueError(f"{where} of a prior must have a {what} at least once, of {found.numel()} {words}")
    return found.clamp(min=IMPOSSIBLE)


def over_distances(given: Callable[[Tensor], Tensor] | Distribution | None, length: int | None) -> Tensor:
    """(N,) or (H, N) float64 log-values of a function or distribution at the distances 0 … N−1; zeros of neither.

    Raises:
        ValueError: without a length N, for a function that returns anything else, or a distribution without probability there.
    """
    if length is None:
        raise ValueError("a table prior without numbers needs its length, the number of distances")
    check_whole("length of a table prior", length, 1)
    distance = torch.arange(length, dtype=torch.float64, device="cpu")
    if given is None:
        return torch.zeros_like(distance)
    if not isinstance(given, Distribution):
        made = given(distance)
        if made is None:
            raise ValueError(
                "the function of a table prior returns None, expected log-values at the distances it is given"
            )
        found = log_numbers(made, "log", "what the function returns")
        if found.ndim not in (1, 2) or found.shape[-1] != length:
            raise ValueError(
                f"the function of a table prior returns numbers of shape {tuple(found.shape)}, expected ({length},) or "
                f"(heads, {length}): one at each distance from 0 to {length - 1}"
            )
        return found
    distance = distance.view(-1, *[1] * len(given.batch_shape))
    assert given.support is not None
    inside = given.support.check(distance).expand(length, *given.batch_shape)
    common = distance[inside.reshape(length, -1).all(1)][:1]
    if not len(common):
        raise ValueError(f"{type(given).__name__} has no probability at any distance from 0 to {length - 1}")
    # Outside its support a distribution raises an error or returns no number: ask for a distance inside it, then overwrite.
    found = given.log_prob(torch.where(inside, distance, common)).masked_fill(~inside, -math.inf)
    return log_numbers(found if found.ndim == 1 else found.mT, "log")


def read_numbers(path: str | Path) -> Tensor:
    """The numbers in a .npy, .csv, .json or .safetensors file (of one tensor), float64.

    Raises:
        ValueError: for another ending, or content that is no array of numbers.
        FileNotFoundError: where there is no file.
    """
    path = Path(path)
    readers: dict[str, Callable[[], Any]] = {
        ".npy": lambda: np.load(path, allow_pickle=False),
        ".csv": lambda: np.loadtxt(path, delimiter=",", ndmin=1),
        ".json": lambda: np.array(json.loads(path.read_text()), dtype=np.float64),
        ".safetensors": lambda: _only_tensor(path),
    }
    if path.suffix not in readers:
        raise ValueError(
            f"{path}: numbers are read from {', '.join(readers)} files, got {path.suffix or 'no ending'!r}"
        )
    if not path.is_file():
        raise FileNotFoundError(f"no file {str(path)!r} with a prior's numbers")
    try:
        found = readers[path.suffix]()
        if np.asarray(found).dtype.kind not in "biuf":
            raise ValueError(f"expected real numbers, got {np.asarray(found).dtype}")
        return torch.from_numpy(np.ascontiguousarray(found, dtype=np.float64))
    except (ValueError, TypeError, EOFError, SafetensorError) as error:
        raise ValueError(f"{path} holds no array of numbers: {error}") from error


def _only_tensor(path: Path) -> np.ndarray:
    from safetensors.torch import load_file

    tensors = load_file(path)
    if any(tensor.is_complex() for tensor in tensors.values()):
        raise ValueError("expected real numbers, got complex ones")
    if len(tensors) != 1:
        raise ValueError(f"expected one tensor, got {', '.join(sorted(tensors)) or 'none'}")
    return next(iter(tensors.values())).double().numpy()


def _given(values: Any, file: str | Path | None, owner: str) -> Any:
    if values is not None and file is not None:
        raise ValueError(f"{owner} takes its numbers from `values` or from `file`, not from both")
    if isinstance(values, str | Path):
        raise ValueError(f"{owner}'s `values` are numbers; those in a file are given by file={str(values)!r}")
    return values if file is None else read_numbers(file)
