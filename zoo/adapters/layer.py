"""What an attention layer of another library's model gets: a prior, and how it joins that layer's
own attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from zoo.attention import prior_attention
from zoo.attention.call import Kernel
from zoo.attention.sinks import by_group, first_keys
from zoo.errors import Options
from zoo.layers import SSMax
from zoo.methods import create_grid_position, create_position, uniform_options
from zoo.offload import is_offloaded, loaded
from zoo.positions import Positions
from zoo.priors.base import Prior, without_autocast
from zoo.priors.tables import whole_bias
from zoo.priors.terms import PriorTerms
from zoo.rotary import rotate

# The entry of a model's configuration that says which priors it has.
RECORD = "priorzoo"
# A prior whose rows vary by less is one that changes no logit of size 1 in float64 by more than its
# rounding.
UNIFORM = 1e-12
_KERNEL: ContextVar[str | Kernel] = ContextVar("kernel", default="auto")


@contextmanager
def attending_by(kernel: str | Kernel) -> Iterator[None]:
    """Inside the context, what computes the attention of adapted layers: as `kernel` in
    `prior_attention`."""
    token = _KERNEL.set(kernel)
    try:
        yield
    finally:
        _KERNEL.reset(token)


@dataclass(frozen=True)
class Request:
    """The arguments of `zoo.adapt`.

    Attributes:
        alone: nothing but priors is trained.
        window: tokens that the rotation was trained for.
    """

    position: str
    options: Options
    keep_rope: bool
    ssmax: bool
    train_context: int | None = None
    alone: bool = False
    window: int | None = None

    @property
    def record(self) -> Options:
        """What makes the same priors again, for a model's configuration."""
        arguments = dict(vars(self))
        del arguments["alone"]
        del arguments["window"]
        return arguments


class Grid:
    """The patch grid of the images that a model reads: its patch projection's own output, read by a
    hook.

    num_prefix: tokens before the patches, such as a class token.
    """

    def __init__(self, num_prefix: int) -> None:
        self.num_prefix = num_prefix
        self.shape: tuple[int, int] | None = None

    def read(self, module: nn.Module, args: object, output: Tensor) -> None:
        """A forward hook of the convolution that makes patches, whose output is (B, C, height,
        width)."""
        self.shape = (output.shape[-2], output.shape[-1])

    def positions(self, tokens: int) -> Positions:
        """The positions of `tokens` tokens; ValueError unless they are the prefix and then all
        patches."""
        if self.shape is None:
            raise ValueError(
                "an adapted image model needs its images, from which the patch grid follows"
            )
        height, width = self.shape
        patches = height * width
        if tokens != patches + self.num_prefix:
            raise ValueError(
                f"attention over {tokens} tokens: expected {self.num_prefix} prefix tokens and "
                f"{patches} patches of a {height}×{width} grid; a prior needs all patches, and "
                "nothing else behind them"
            )
        return Positions.grid(height, width, num_prefix=self.num_prefix)


@dataclass(frozen=True)
class SinkRotation:
    """A layer's own rotation, in which sinks are at most `limit` tokens back: in training they were
    never further away.

    Attributes:
        owner: has the frequencies under `name`; None for a model, `name`, whose rotation is not
            that of `zoo.rotary.rotate`.
    """

    owner: nn.Module | None
    name: str
    limit: int

    def change(
        self, q: Tensor, k: Tensor, positions: tuple[Positions, Positions], sinks: int
    ) -> Tensor:
        """(B, H, T, sinks): what is added to the logits of each row's sinks; 0 where the query is
        within the limit."""
        if self.owner is None:
            raise ValueError(
                f"{self.name}: sinks are seen from at most {self.limit} tokens on; "
                "drop them or read less"
            )
        q_pos, k_pos = positions
        index = q_pos.index(q.device)
        start = None if k_pos.within is None else q_pos.row_index(q.device) - index
        # Queries beyond the limit turn back to it; their products with the sinks are those there.
        excess = (self.limit - index).clamp(max=0)[:, None, :, None]
        frequencies = getattr(self.owner, self.name).to(q.device, torch.float64)
        wide = q.to(torch.promote_types(q.dtype, torch.float32))
        with without_autocast(q):
            change = rotate(wide, excess * frequencies) - wide
            keys = first_keys(k, start, sinks).to(wide.dtype).transpose(-1, -2)
            return by_group(change * q.shape[-1] ** -0.5, keys)


class LayerPrior(nn.Module):
    """A layer's log-prior K and, optionally, SSMax's scale; `grid` is None for a line of tokens.

    While K is the same for all keys, as with a prior that starts uniform, the layer's own attention
    gives the output, to the bit; gradients are those of attention with K. With sinks, a learned
    sink of the layer's own (`own_sink`) or a grid's prefix tokens, whose K is 0, the table counts
    less its value at the start (`level`), so that they keep their share of attention.
    """

    level: Tensor | None
    rotation: SinkRotation | None = None

    def __init__(
        self,
        prior: Prior,
        *,
        ssmax: SSMax | None = None,
        grid: Grid | None = None,
        sinks: int = 0,
        own_sink: bool = False,
    ) -> None:
        super().__init__()
        self.prior = prior
        self.ssmax = ssmax
        self.sinks = sinks
        self.own_sink = own_sink
        # Versions of the parameters at which K was not uniform.
        self._varied_at: object = None
        # (H,) the table's value at a token's own place.
        level = None
        if grid is not None or sinks or own_sink:
            one = Positions.line(1) if grid is None else Positions.grid(1, 1)
            with torch.no_grad():
                table = prior(one, one, causal=grid is None).table
            if table is not None:
                level = table.table[:, table.center].float()
        self.register_buffer("level", level)

    def terms(self, q_pos: Positions, k_pos: Positions, causal: bool) -> PriorTerms:
        """K, less its `level` where something without K shares the softmax."""
        terms = self.prior(q_pos, k_pos, causal=causal)
        if self.level is None or terms.table is None:
            return terms
        if not (k_pos.num_prefix or self.sinks or self.own_sink):
            return terms
        lowered = terms.table.table - self.level.to(terms.table.table.dtype)[:, None]
        # The Jacobian of a table does not change with a constant.
        return replace(terms, table=replace(terms.table, table=lowered))

    def attend(
        self,
        without_prior: Callable[[], Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: tuple[Positions, Positions],
        *,
        causal: bool,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        dropout: float = 0.0,
        scale: float | None = None,
        sink: Tensor | None = None,
    ) -> Tensor:
        """(B, H, T, D): softmax((scale·⟨q, k⟩ + K + bias)·SSMax's scale) v.

        Args:
            without_prior: the layer's own attention, (B, H, T, D).
            q, k, v: (B, H, T, D), (B, G, S, D), (B, G, S, D).
            positions: of queries and keys; `within` without a mask: of causal documents, which see
                their own keys alone.
            causal: whether keys after the query are hidden, without a mask.
            mask, bias: (1 or B, 1 or H, T, S) bool, True where a key may be seen; finite numbers
                added to the logits.
            scale: None for 1/√D.
            sink: (H,) of the layer's own learned sink, as in `PriorTerms`.
        """
        compiling = torch.compiler.is_compiling()
        offloaded = not compiling and is_offloaded(self)
        with loaded([self]) if offloaded else nullcontext():
            q_pos, k_pos = positions
            terms = self.terms(q_pos, k_pos, causal) + PriorTerms(sink=sink)
            # A graph has one kind of attention.
            kernel = "auto" if compiling else _KERNEL.get()
            rotation = self._limited_rotation(k_pos)
            uniform = kernel == "auto" and rotation is None and self._is_uniform(terms, k_pos)
            if uniform and not self._needs_gradients():
                return without_prior()
            if bias is not None:
                bias = bias.to(torch.promote_types(bias.dtype, torch.float32))
                terms = terms + PriorTerms(bias=bias.expand(-1, q.shape[1], -1, -1))
            if scale is not None and scale != q.shape[-1] ** -0.5:
                # Attention multiplies by 1/√D.
                q = q * (scale * q.shape[-1] ** 0.5)
            # Norms of q and k give float32 under autocast.
            q = q.to(v.dtype)
            k = k.to(v.dtype)
            if rotation is not None:
                change = rotation.change(q, k, positions, self.sinks)
                terms = terms + PriorTerms(of_sinks=change)
            segments = None
            if k_pos.within is not None and (self.sinks or mask is None):
                segments = (k_pos.within == 0).cumsum(1).expand(len(q), -1)
            out = prior_attention(
                q,
                k,
                v,
                terms,
                causal=causal and mask is None,
                query_scale=self._row_scales(q_pos, mask, causal),
                segments=segments,
                mask=mask,
                dropout=dropout,
                sinks=self.sinks,
                kernel=kernel,
            )
            if uniform and not dropout:
                # The value of the layer's own attention, to the bit, with the gradient of `out`:
                # `out - out.detach()` is 0. A fresh prior trains, and the model starts as it was.
                return without_prior().detach() + (out - out.detach())
            return out

    def _limited_rotation(self, k_pos: Positions) -> SinkRotation | None:
        """The rotation, where queries are further from the sinks than its limit."""
        if self.rotation is None or k_pos.length <= max(self.rotation.limit + 1, self.sinks):
            return None
        return self.rotation

    def _needs_gradients(self) -> bool:
        return torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())

    def _row_scales(self, q_pos: Positions, mask: Tensor | None, causal: bool) -> Tensor | None:
        """SSMax's scale of each row, by the keys that the mask shows where there is one."""
        if self.ssmax is None:
            return None
        if mask is None:
            return self.ssmax(q_pos, causal=causal)
        return self.ssmax.scale_rows(mask.sum(-1).clamp(min=1).double())

    def _is_uniform(self, terms: PriorTerms, k_pos: Positions) -> bool:
        """Whether K is now the same for all keys of these positions.

        While it is, every call checks it: fused optimisers and writes to `.data` change parameters
        without a new version.
        """
        if self.ssmax is not None or torch.compiler.is_compiling():
            return False
        parameters = list(self.parameters())
        if any(p.is_inference() for p in parameters):
            return False
        state = tuple((p.data_ptr(), p._version) for p in parameters)
        prefixed = k_pos.num_prefix > 0 or self.sinks > 0
        if state == self._varied_at or not _uniform(terms, prefixed):
            self._varied_at = state
            return False
        return True


def _uniform(terms: PriorTerms, prefixed: bool) -> bool:
    """Whether no row of K varies by more than rounding, without a learned sink; with prefix tokens
    or sinks, whether K is 0."""
    if terms.sink is not None or terms.gain is not None:
        return False
    spread = torch.zeros(())
    with torch.no_grad():
        if terms.q_lanes is not None and terms.k_lanes is not None:
            k_lanes = terms.k_lanes
            if not prefixed:
                # What all keys have in common moves a row's logits as a whole.
                k_lanes = k_lanes - k_lanes[:, :, :1]
            spread = (_largest_of_lane(terms.q_lanes) * _largest_of_lane(k_lanes)).sum()
        if terms.table is not None:
            spread = spread + _row_spread(terms.table.table, prefixed)
        if terms.bias is not None:
            spread = spread + _row_spread(whole_bias(terms.bias), prefixed)
    return bool(spread <= UNIFORM)


def _largest_of_lane(lanes: Tensor) -> Tensor:
    """(R,) float64 the largest absolute value of each lane."""
    return lanes.abs().amax((0, 1, 2)).double()


def _row_spread(values: Tensor, prefixed: bool) -> Tensor:
    """The largest absolute value with prefix tokens; else the largest difference within a row."""
    if prefixed:
        return values.abs().amax()
    return (values.amax(-1) - values.amin(-1)).amax()


def zero(owner: nn.Module, table: Tensor) -> None:
    """Make learned positions of a module zeros that are not trained. ValueError where accelerate
    has offloaded their values."""
    if table.is_meta and is_offloaded(owner):
        raise ValueError(
            "learned positions are offloaded: adapt the model before accelerate dispatches it"
        )
    table.requires_grad_(False).data.zero_()


def has_priors(model: nn.Module) -> bool:
    """Whether a model was adapted."""
    return any(isinstance(module, LayerPrior) for module in model.modules())


def prior_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of an adapted model's priors and SSMax, by their names in the model."""
    parameters = {}
    for path, module in model.named_modules():
        if isinstance(module, LayerPrior):
            for name, parameter in module.named_parameters():
                parameters[f"{path}.{name}"] = parameter
    return parameters


def create_layer(
    request: Request,
    *,
    dim: int,
    num_heads: int,
    train_context: int,
    causal: bool,
    grid: Grid | None,
    train_grid: tuple[int, int] | None,
    own_sink: bool = False,
) -> LayerPrior:
    """A layer's prior of the requested method. Parts that can start uniform do, unless its options
    say otherwise."""
    position = request.position
    shared: Options = {
        "dim": dim,
        "num_heads": num_heads,
        "lanes": "beside",
        "options": uniform_options(position, request.options, grid=train_grid is not None),
    }
    # On the CPU also where a library makes its model without values.
    with torch.device("cpu"):
        if train_grid is not None:
            parts = create_grid_position(position, train_grid=train_grid, **shared)
        else:
            parts = create_position(position, train_context=train_context, **shared)
        if parts.rotary is not None or parts.embedding is not None or parts.window is not None:
            raise ValueError(
                f"position {position!r} has a rotation, an embedding or a window; "
                "models of other libraries take priors"
            )
        if parts.prior.depends_on_content:
            raise ValueError(
                f"position {position!r} depends on the layer's input; "
                "attention receives only q, k, v"
            )
        ssmax = None
        if request.ssmax:
            ssmax = SSMax(num_heads, train_context=train_context, causal=causal)
        layer = LayerPrior(
            parts.prior,
            ssmax=ssmax,
            grid=grid,
            sinks=parts.sinks,
            own_sink=own_sink,
        )
    if request.alone and not any(p.requires_grad for p in layer.parameters()):
        raise ValueError(
            f"train='priors': position {position!r} has no parameters: nothing would be trained"
        )
    return layer
