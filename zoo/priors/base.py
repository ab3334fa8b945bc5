"""The interface of a prior.

    p[i,·] = softmax_j( <q_i, k_j> / sqrt(d_c) + K[h,i,j] )          (GOAT eq. 5, BAM theorem 1)

A prior realises its log-prior K as *lanes* (K = <φ(i), ψ(j)>, a few extra head columns) or as a
*relative table* (K = t[h, i − j], H × (T+S−1) entries). Neither builds the T × S matrix.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.errors import Options, check_whole
from zoo.positions import Positions
from zoo.priors.tables import ParametricTable, RelativeTable, grid_displacements
from zoo.priors.terms import PriorTerms


def prior_dtype(module: nn.Module, x: Tensor | None = None) -> torch.dtype:
    """float32, or float64 where the module's numbers are, or x where it has none: priors never
    compute below float32."""
    first = next(chain(module.parameters(), module.buffers()), x)
    is_double = first is not None and first.dtype == torch.float64
    return torch.float64 if is_double else torch.float32


def prior_device(module: nn.Module) -> torch.device | None:
    """Where the module's numbers are; None, which is torch's default device, for a module
    without."""
    return next((x.device for x in chain(module.parameters(), module.buffers())), None)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context in which autocast rounds nothing where `x` is; the device "meta" has none."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def linear_in(layer: nn.Module, x: Tensor) -> Tensor:
    """A linear layer inside a prior, computed in the dtype of `x` and not the layer's.

    A layer that was put in its place (an adapter, an int8 one) computes as it does, in its own
    dtype or float32.
    """
    with without_autocast(x):
        if type(layer) is nn.Linear:
            bias = None if layer.bias is None else layer.bias.to(x.dtype)
            return F.linear(x, layer.weight.to(x.dtype), bias)
        dtype = next((p.dtype for p in layer.parameters() if p.is_floating_point()), torch.float32)
        return layer(x.to(dtype)).to(x.dtype)


class Prior(nn.Module):
    """A log-prior over key positions of `num_heads` H heads; each subclass gives its formula.

    Attributes:
        num_lanes: head columns it reserves; 0 for a table. Queries and keys then project to head
            width − num_lanes.
        has_state: whether `forward` takes `carry` and its terms give it: state that goes from chunk
            to chunk.
        by_head: names of its own parameters with an entry per head, (H, …), where heads differ by
            nothing else; None: untold.
    """

    num_lanes: int = 0
    has_state: bool = False
    by_head: tuple[str, ...] | None = None

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        check_whole("num_heads", num_heads, 1)
        self.num_heads = num_heads

    def forward(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None
    ) -> PriorTerms:
        """The terms of K for queries at `q_pos` and keys at `k_pos`. x: (B, S, C) the layer's
        input, for CABLE only. A prior with `has_state` also takes `carry`, the last entry of
        `PriorTerms.carry` from the chunk before."""
        raise NotImplementedError

    def content(self, x: Tensor) -> Tensor | None:
        """(B, H, L, n) all that K takes from the layer's input x (B, L, C), token by token; None
        where it takes nothing."""
        if not self.depends_on_content:
            return None
        contents = [content for part in self.parts() if (content := part.content(x)) is not None]
        if len(contents) != 1:
            raise ValueError(
                f"{type(self).__name__} depends on the layer's input and has no `content`"
            )
        return contents[0]

    def of_heads(self, heads: Sequence[int]) -> Prior:
        """This prior of some of its heads, in their order, with the same parameters; what it takes
        for x is `content(x)` of those heads. Without `by_head` it makes the terms of all heads and
        cuts them; ValueError where it depends on x.
        """
        if self.by_head is None:
            if self.depends_on_content:
                raise ValueError(
                    f"{type(self).__name__} depends on the layer's input and has no `by_head`"
                )
            return _CutPrior(self, heads)
        some = copy.copy(self)
        some.num_heads = len(heads)
        parameters: dict[str, Tensor | None] = dict(self._parameters)
        for name in self.by_head:
            parameter = parameters.get(name)
            if parameter is not None:
                parameters[name] = parameter[list(heads)]
        modules = dict(self._modules)
        for name, module in modules.items():
            if isinstance(module, Prior):
                modules[name] = module.of_heads(heads)
        # Slices of parameters are no parameters, which nn.Module's own setters would refuse.
        some.__dict__ |= {"_parameters": parameters, "_modules": modules, "content": lambda x: x}
        return some

    def require_line(self, q_pos: Positions, k_pos: Positions) -> None:
        """Raise ValueError for positions on a grid, whose patches a prior along a line would treat
        as tokens of a text."""
        if q_pos.is_grid or k_pos.is_grid:
            raise ValueError(
                f"{type(self).__name__} is a prior along a line of tokens; a grid needs a 2-D prior"
            )

    def log_prior(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None
    ) -> Tensor:
        """(1 or B, H, T, S) float64: the formula evaluated at every entry. The oracle of tests and
        plots; O(T·S)."""
        raise NotImplementedError

    def next_row(self, length: int) -> tuple[Tensor, Tensor] | None:
        """(H, length) float64, a and b: of causal attention K[h,i,j] is a[h, i − j] + b[h, j] but
        for a constant of each row. None where it is no such sum."""
        rows = self.rows_of_parts(length)
        if rows is None:
            return None
        by_distance, by_key = rows
        if self.is_relative:
            line = Positions.line(length)
            last_row = self.log_prior(line.tail(1), line, causal=True)[0, :, 0].flip(-1)
            return last_row, torch.zeros_like(last_row)
        if not by_distance:
            return None
        return torch.stack(by_distance).sum(0), torch.stack(by_key).sum(0)

    def rows_of_parts(self, length: int) -> tuple[list[Tensor], list[Tensor]] | None:
        """a and b of every part's `next_row`; None where a part has none."""
        by_distance = []
        by_key = []
        for part in self.parts():
            row = part.next_row(length)
            if row is None:
                return None
            by_distance.append(row[0])
            by_key.append(row[1])
        return by_distance, by_key

    def lanes_at_query(self) -> Tensor:
        """(H, 1) float64: what lanes add to K at distance 0, without what depends on the key; of a
        prior that has a `next_row`."""
        parts = self.parts()
        if parts:
            return torch.stack([part.lanes_at_query() for part in parts]).sum(0)
        row = self.next_row(1)
        if row is None or not self.num_lanes:
            return torch.zeros(self.num_heads, 1, dtype=torch.float64)
        by_distance, _ = row
        return by_distance

    def beside_lanes(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None
    ) -> PriorTerms:
        """The terms for a KV cache, whose keys hold their lanes and which holds no inputs: table
        and bias count alone. x: where a prior without numbers makes them. ValueError for a prior
        that it cannot serve."""
        if not self.depends_on_content:
            return self(q_pos, k_pos, causal=causal, x=x)
        if not self.num_lanes:
            raise ValueError(
                f"{type(self).__name__} depends on the layer's input and has no lanes: no cache "
                "serves it"
            )
        return PriorTerms()

    def stored_options(self, options: Options) -> Options:
        """The options that make this prior again before its values are loaded, JSON: `options`
        without what the values hold."""
        return dict(options)

    def parametric(self) -> ParametricTable | None:
        """The table of a `TablePrior` or `GridPrior` as a function of a few parameters."""
        return None

    def parts(self) -> list[Prior]:
        """The priors this one is composed of: summands, or one per axis of a grid. [] for one that
        is not composed."""
        return [part for part in self.children() if isinstance(part, Prior)]

    @property
    def is_zero(self) -> bool:
        """Whether K = 0 for all parameters; for a composed prior, of all parts."""
        parts = self.parts()
        return bool(parts) and all(part.is_zero for part in parts)

    @property
    def depends_on_content(self) -> bool:
        """Whether K depends on the layer's input x; for a composed prior, of any part."""
        return any(part.depends_on_content for part in self.parts())

    @property
    def is_relative(self) -> bool:
        """Whether K depends on the displacement i − j alone; for a composed prior, of all parts."""
        parts = self.parts()
        return bool(parts) and all(part.is_relative for part in parts)

    def retrieval_heads(self, turned: Tensor | None = None) -> Tensor:
        """(H,) bool: heads that look away from the query and leave far keys to content. By default
        those of any part.

        turned: (H,) bool, heads whose K is multiplied by a negative number, as by SSMax with s < 0.
        """
        flags = torch.zeros(self.num_heads, dtype=torch.bool)
        for part in self.parts():
            flags = flags | part.retrieval_heads(turned).cpu()
        return flags


class _CutPrior(Prior):
    """Some heads of a prior: the terms of all of them, cut."""

    def __init__(self, whole: Prior, heads: Sequence[int]) -> None:
        super().__init__(len(heads))
        self.whole = whole
        self.heads = heads
        self.num_lanes = whole.num_lanes

    def forward(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None
    ) -> PriorTerms:
        return self.whole(q_pos, k_pos, causal=causal, x=x).of_heads(self.heads)


class TablePrior(Prior):
    """A prior that is a function of distance. Subclasses implement `curve`; table and oracle follow
    from it."""

    is_relative = True
    # See `RelativeTable`.
    constant_from: int | None = None

    def curve(self, distance: Tensor, *, causal: bool) -> Tensor:
        """(H, *distance.shape) log-prior at distances d = i − j, in the dtype of `distance`."""
        raise NotImplementedError

    def forward(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None
    ) -> PriorTerms:
        self.require_line(q_pos, k_pos)
        device = x.device if x is not None else prior_device(self)
        lowest = q_pos.offset - (k_pos.offset + k_pos.length - 1)
        highest = q_pos.offset + q_pos.length - 1 - k_pos.offset
        distance = torch.arange(lowest, highest + 1, device=device, dtype=prior_dtype(self, x))
        curve = self.curve(distance, causal=causal)
        table = RelativeTable.line(curve, q_pos, k_pos, center=-lowest)
        table = replace(table, parametric=self.parametric(), constant_from=self.constant_from)
        return PriorTerms(table=table, causal=causal)

    def log_prior(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None
    ) -> Tensor:
        device = prior_device(self)
        i = q_pos.row_index(device)
        j = k_pos.row_index(device)
        return self.curve((i[:, None] - j[None, :]).double(), causal=causal)[None]


class GridPrior(Prior):
    """A prior that is a function of the displacement on a grid of patches, realised as a table;
    prefix tokens get 0.

    Subclasses implement `surface`; table and oracle follow from it.
    """

    is_relative = True
    num_lanes = 0

    def surface(self, dy: Tensor, dx: Tensor, *, grid: tuple[int, int]) -> Tensor:
        """(H, *dy.shape) log-prior at displacements (dy, dx) = query − key in patches, in their
        dtype.

        grid: (height, width) of the current image, for priors that normalise distances by its size.
        """
        raise NotImplementedError

    def forward(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None
    ) -> PriorTerms:
        same_grid = q_pos.shape == k_pos.shape and q_pos.num_prefix == k_pos.num_prefix
        if q_pos.shape is None or not same_grid:
            raise ValueError("a 2-D table needs queries and keys on the same grid")
        device = x.device if x is not None else prior_device(self)
        dy, dx = grid_displacements(q_pos.shape, device=device, dtype=prior_dtype(self, x))
        table = RelativeTable.grid(self.surface(dy, dx, grid=q_pos.shape).flatten(1), q_pos)
        return PriorTerms(table=replace(table, parametric=self.parametric()))

    def log_prior(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None
    ) -> Tensor:
        device = prior_device(self)
        q_y, q_x = q_pos.yx(device)
        k_y, k_x = k_pos.yx(device)
        dy = (q_y[:, None] - k_y).double()
        dx = (q_x[:, None] - k_x).double()
        patches = self.surface(dy, dx, grid=k_pos.shape or (1, 1))
        return F.pad(patches, (k_pos.num_prefix, 0, q_pos.num_prefix, 0))[None]


class IsotropicPrior(GridPrior):
    """The curve of a prior along a line over the Euclidean patch distance √(dy² + dx²). List it
    before that prior's class."""

    curve: Callable[..., Tensor]

    def surface(self, dy: Tensor, dx: Tensor, *, grid: tuple[int, int]) -> Tensor:
        return self.curve(torch.hypot(dy, dx), causal=False)
