"""The terms of all layers of a model made together: a few operations on all heads of all layers instead of as many a layer.

Priors that differ by nothing but their parameters are stacked (`Prior.stack`): one prior of L·H heads, whose terms are cut
into those of the layers. Others, among them all that read the layer's input, make their own terms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from zoo.positions import Positions
from zoo.priors.base import Prior, PriorTerms

__all__ = ["has_whole_parameters", "stacked_terms"]

# Numbers of the terms of a model's layers up to which they are made together: those of all layers are then in memory at once,
# with what their gradients need. Beyond, a layer's terms take longer than their launches.
LARGEST = 1 << 23
TORCHS = frozenset(vars(nn.Module())) - {
    "training"
}  # attributes of any module; all others are what a class made of its options


def stacked_terms(
    priors: Sequence[Prior], q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor
) -> list[PriorTerms | None]:
    """The terms of each prior, of one layer each; None of those that are not made together with others'.

    Args:
        priors: of the layers, in any order; one may be that of several.
        q_pos, k_pos, causal: as in `Prior.forward`.
        x: a tensor on the device of the terms.
    """
    groups: dict[object, list[Prior]] = {}
    for prior in priors:
        groups.setdefault(_kind(prior), []).append(prior)
    found: dict[int, PriorTerms] = {}
    for kind, group in groups.items():
        own = list({id(prior): prior for prior in group}.values())
        if kind is None or len(group) == 1 or (len(own) > 1 and not _small(own, q_pos, k_pos)):
            continue
        prior = own[0] if len(own) == 1 else type(own[0]).stack(own, _values(own))
        terms = prior(q_pos, k_pos, causal=causal, x=x)
        parts = [terms] if len(own) == 1 else terms.split(len(own), causal=causal)
        found |= {id(prior): part for prior, part in zip(own, parts, strict=True)}
    return [found.get(id(prior)) for prior in priors]


def _values(priors: Sequence[Prior]) -> dict[str, Tensor]:
    """The parameters of all priors by name, those of one name after each other, in the dtype of a prior's arithmetic: one copy
    of all those of a dtype."""
    named = [_named(prior) for prior in priors]
    alike: dict[torch.dtype, list[str]] = {}
    for name, one in named[0].items():
        alike.setdefault(one.dtype, []).append(name)
    found: dict[str, Tensor] = {}
    for dtype, names in alike.items():
        every = torch.cat([own[name].flatten() for name in names for own in named])
        every = every.to(torch.promote_types(dtype, torch.float32))
        parts = every.split([len(named) * named[0][name].numel() for name in names])
        for name, part in zip(names, parts, strict=True):
            one = named[0][name]
            found[name] = (part if one.requires_grad else part.detach()).view(-1, *one.shape[1:])
    return found


# What `named_parameters` and `modules` give, which take the host several times as long: a step asks every layer's prior.
def _named(module: nn.Module, prefix: str = "") -> dict[str, nn.Parameter]:
    found = {prefix + name: one for name, one in module._parameters.items() if one is not None}
    for name, part in module._modules.items():
        if part is not None:
            found |= _named(part, f"{prefix}{name}.")
    return found


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    for part in module._modules.values():
        if part is not None:
            yield from _parts(part)


def _small(priors: Sequence[Prior], q_pos: Positions, k_pos: Positions) -> bool:
    """Whether the numbers of all terms, and of all parameters, are at most `LARGEST`."""
    rows = 1 if k_pos.within is None else k_pos.within.shape[0]
    each = (q_pos.length + k_pos.length) * (1 + rows * priors[0].num_lanes // 2)  # of a head: a table, and lanes
    parameters = sum(p.numel() for prior in priors for p in _named(prior).values())
    return sum(prior.num_heads for prior in priors) * each + parameters <= LARGEST


def has_whole_parameters(module: nn.Module) -> bool:
    """Whether parameters can be read outside of the module's own forward pass.

    Sharding engines (ZeRO-3, FSDP) gather them in hooks before it; elsewhere one may be empty, or no plain tensor.
    """
    for part in _parts(module):
        if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
            return False
        for tensor in chain(part._parameters.values(), part._buffers.values()):
            if tensor is not None and (type(tensor) not in (nn.Parameter, Tensor) or not tensor.numel()):
                return False
    return True


def _kind(prior: Prior) -> object:
    """Equal for priors that differ by values of parameters alone, and can be stacked; None of one that makes its own terms."""
    if prior.depends_on_content or not has_whole_parameters(prior):
        return None
    return _structure(prior) or id(prior)  # which layers may share


def _structure(prior: Prior) -> tuple[object, ...] | None:
    """What stacked priors have in common; None for one that does not tell which of its values are whose."""
    if prior.by_head is None or not prior._parameters.keys() <= set(prior.by_head):
        return None
    found: list[object] = [type(prior), *_options(prior)]
    for name, part in prior._modules.items():
        known = _structure(part) if isinstance(part, Prior) else _layers(part) if name in prior.by_layer else None
        if known is None:
            return None
        found.append((name, known))
    return (*found, *_shapes(prior)) if prior._buffers.keys() <= set(prior.by_layer) else None


def _options(prior: Prior) -> list[tuple[str, object]]:
    plain = (bool, int, float, str, list, tuple, type(None))
    own = {name: value for name, value in vars(prior).items() if name not in TORCHS}
    return [(name, repr(value) if isinstance(value, plain) else id(value)) for name, value in own.items()]


def _layers(module: nn.Module | None) -> tuple[object, ...] | None:
    """Types and shapes of torch's own layers; None where there is another, such as an adapter's."""
    inside = [] if module is None else list(_parts(module))
    if not all(type(layer).__module__.startswith("torch.nn.modules.") for layer in inside):
        return None
    return tuple((type(layer), *_shapes(layer)) for layer in inside)


def _shapes(module: nn.Module) -> list[tuple[object, ...]]:
    tensors = chain(module._parameters.items(), module._buffers.items())
    return [(n, *((t.shape, t.dtype, t.device, t.requires_grad) if t is not None else ())) for n, t in tensors]
