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

RECORD = "priorzoo"  # of what was done, in a model's configuration
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
    """The arguments of `zoo.adapt`. alone: nothing but priors is trained; window: tokens that the
    rotation was trained for."""

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
        return {
            name: value for name, value in vars(self).items() if name not in ("alone", "window")
        }


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
        """Of `tokens` tokens, the patches last; ValueError unless they are the prefix and all
        patches."""
        if self.shape is None:
            raise ValueError(
                "an adapted image model needs its images, from which the patch grid follows"
            )
        height, width = self.shape
        if tokens != height * width + self.num_prefix:
            raise ValueError(
                f"attention over {tokens} tokens: expected {self.num_prefix} prefix tokens and {height * width} patches of a "
                f"{height}×{width} grid; a prior needs all patches, and nothing else behind them"
            )
        return Positions.grid(height, width, num_prefix=self.num_prefix)


@dataclass(frozen=True)
class SinkRotation:
    """A layer's own rotation, in which sinks are at most `limit` tokens back: further away they are
    as in no training.

    owner: has its frequencies under `name`; None for a model, `name`, whose rotation is not that of
    `zoo.rotary.rotate`.
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
                f"{self.name}: sinks are seen from at most {self.limit} tokens on; drop them or read less"
            )
        at = positions[0].index(q.device)
        wide = q.to(torch.promote_types(q.dtype, torch.float32))
        start = None if positions[1].within is None else positions[0].row_index(q.device) - at
        back = (self.limit - at).clamp(max=0)[:, None, :, None]
        with without_autocast(q):
            turned = rotate(wide, back * getattr(self.owner, self.name).to(q.device, torch.float64))
            keys = first_keys(k, start, sinks).to(wide.dtype).transpose(-1, -2)
            return by_group((turned - wide) * q.shape[-1] ** -0.5, keys)


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
        self._moved: object = (
            None  # the parameters' versions at which K was found not to be uniform
        )
        level = None
        if grid is not None or sinks or own_sink:  # (H,) the table's value at a token's own place
            one = Positions.line(1) if grid is None else Positions.grid(1, 1)
            with torch.no_grad():
                table = prior(one, one, causal=grid is None).table
            level = None if table is None else table.table[:, table.center].float()
        self.register_buffer("level", level)

    def terms(self, q_pos: Positions, k_pos: Positions, causal: bool) -> PriorTerms:
        terms = self.prior(q_pos, k_pos, causal=causal)
        if (
            self.level is None
            or terms.table is None
            or not (k_pos.num_prefix or self.sinks or self.own_sink)
        ):
            return terms
        lowered = terms.table.table - self.level.to(terms.table.table.dtype)[:, None]
        # The Jacobian of a table does not change with a constant.
        return replace(terms, table=replace(terms.table, table=lowered))

    def attend(
        self,
        own: Callable[[], Tensor],
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
            own: the layer's attention without K, (B, H, T, D).
            q, k, v: (B, H, T, D), (B, G, S, D), (B, G, S, D).
            positions: of queries and keys; `within` without a mask: of causal documents, which see
                their own keys alone.
            causal: whether keys after the query are hidden, without a mask.
            mask, bias: (1 or B, 1 or H, T, S) bool, True where a key may be seen; finite numbers
                added to the logits.
            scale: None for 1/√D.
            sink: (H,) of the layer's own learned sink, as in `PriorTerms`.
        """
        offloaded = not torch.compiler.is_compiling() and is_offloaded(self)
        with loaded([self]) if offloaded else nullcontext():
            q_pos, k_pos = positions
            terms = self.terms(q_pos, k_pos, causal) + PriorTerms(sink=sink)
            kernel = (
                "auto" if torch.compiler.is_compiling() else _KERNEL.get()
            )  # a graph has one kind of attention
            far = self.rotation is not None and k_pos.length > max(
                self.rotation.limit + 1, self.sinks
            )
            uniform = kernel == "auto" and not far and self._is_uniform(terms, k_pos)
            if uniform and not (
                torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())
            ):
                return own()
            if bias is not None:
                bias = bias.to(torch.promote_types(bias.dtype, torch.float32)).expand(
                    -1, q.shape[1], -1, -1
                )
                terms = terms + PriorTerms(bias=bias)
            if scale is not None and scale != q.shape[-1] ** -0.5:
                q = q * (scale * q.shape[-1] ** 0.5)
            # norms of q and k give float32 under autocast
            q = q.to(v.dtype)
            k = k.to(v.dtype)
            if self.rotation is not None and far:
                terms = terms + PriorTerms(
                    of_sinks=self.rotation.change(q, k, positions, self.sinks)
                )
            scales = None
            if self.ssmax is not None and mask is not None:
                scales = self.ssmax.scale_rows(mask.sum(-1).clamp(min=1).double())
            elif self.ssmax is not None:
                scales = self.ssmax(q_pos, causal=causal)
            segments = None
            if k_pos.within is not None and (self.sinks or mask is None):
                segments = (k_pos.within == 0).cumsum(1).expand(len(q), -1)
            out = prior_attention(
                q,
                k,
                v,
                terms,
                causal=causal and mask is None,
                query_scale=scales,
                segments=segments,
                mask=mask,
                dropout=dropout,
                sinks=self.sinks,
                kernel=kernel,
            )
            return own().detach() + (out - out.detach()) if uniform and not dropout else out

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
        if state == self._moved or not _uniform(terms, k_pos.num_prefix > 0 or self.sinks > 0):
            self._moved = state
            return False
        return True


def _uniform(terms: PriorTerms, prefixed: bool) -> bool:
    """Whether no row of K varies by more than rounding, without a learned sink; with prefix tokens
    or sinks, whether K is 0."""
    spread = torch.zeros(())
    with torch.no_grad():
        if terms.q_lanes is not None and terms.k_lanes is not None:
            # What all keys have in common moves a row's logits as a whole.
            k_lanes = terms.k_lanes if prefixed else terms.k_lanes - terms.k_lanes[:, :, :1]
            most = [x.abs().amax((0, 1, 2)).double() for x in (terms.q_lanes, k_lanes)]
            spread = (most[0] * most[1]).sum()
        bias = None if terms.bias is None else whole_bias(terms.bias)
        for values in (terms.table.table if terms.table is not None else None, bias):
            if values is not None:
                spread = spread + (
                    values.abs().amax() if prefixed else (values.amax(-1) - values.amin(-1)).amax()
                )
    return terms.sink is None and terms.gain is None and bool(spread <= UNIFORM)


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
    layers = (
        (path, module) for path, module in model.named_modules() if isinstance(module, LayerPrior)
    )
    return {f"{path}.{name}": p for path, layer in layers for name, p in layer.named_parameters()}


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
    options = uniform_options(position, request.options, grid=train_grid is not None)
    shared: Options = dict(dim=dim, num_heads=num_heads, lanes="beside", options=options)
    with torch.device("cpu"):  # also where a library makes its model without values
        if train_grid is not None:
            parts = create_grid_position(position, train_grid=train_grid, **shared)
        else:
            parts = create_position(position, train_context=train_context, **shared)
        if any(part is not None for part in (parts.rotary, parts.embedding, parts.window)):
            what = "a rotation, an embedding or a window"
            raise ValueError(
                f"position {position!r} has {what}; models of other libraries take priors"
            )
        if parts.prior.depends_on_content:
            raise ValueError(
                f"position {position!r} depends on the layer's input; attention receives only q, k, v"
            )
        ssmax = (
            SSMax(num_heads, train_context=train_context, causal=causal) if request.ssmax else None
        )
        layer = LayerPrior(
            parts.prior, ssmax=ssmax, grid=grid, sinks=parts.sinks, own_sink=own_sink
        )
    if request.alone and not any(p.requires_grad for p in layer.parameters()):
        raise ValueError(
            f"train='priors': position {position!r} has no parameters: nothing would be trained"
        )
    return layer
