"""The terms of all layers of a model made together: a few operations on all heads of all layers instead of as many a layer.

Priors that differ by nothing but their parameters are stacked (`Prior.stack`): one prior of L·H heads, whose terms are cut
into those of the layers. Others, among them all that read the layer's input, make their own terms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from zoo.positions import Positions
from zoo.priors.base import Prior, PriorTerms

__all__ = ["has_whole_parameters", "stacked_terms"]

# Numbers of the terms of a model's layers up to which they are made together: those of all layers are then in memory at once,
# with what their gradients need. Beyond, a layer's terms take longer than their launches.
LARGEST = 1 << 23
# Attributes of any module; those that a class adds are made of its options.
TORCHS = frozenset(vars(nn.Module())) - {"training"}
PLAIN = (bool, int, float, str, list, tuple, type(None))  # options that are compared by value


def stacked_terms(
    priors: Sequence[Prior], q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor
) -> list[PriorTerms | None]:
    """The terms of each prior, of one layer each; None of those that are not made together with others'.

    Args:
        priors: of the layers, in any order; one may be that of several.
        q_pos, k_pos, causal: as in `Prior.forward`.
        x: a tensor on the device of the terms.
    """
    found: dict[int, PriorTerms] = {}
    for group in _groups(priors):
        if len(group) > 1 and not _small(group, q_pos, k_pos):
            continue
        own = [contents.prior for contents in group]
        prior = own[0] if len(own) == 1 else type(own[0]).stack(own, _values(group))
        terms = prior(q_pos, k_pos, causal=causal, x=x)
        parts = [terms] if len(own) == 1 else terms.split(len(own), causal=causal)
        found |= {id(prior): part for prior, part in zip(own, parts, strict=True)}
    return [found.get(id(prior)) for prior in priors]


class _Contents:
    """What is in a prior: its modules, and their parameters and buffers by name.

    Every step asks this of every layer: `named_parameters` and `modules` would take the host several times as long.
    """

    def __init__(self, prior: Prior) -> None:
        self.prior = prior
        self.modules: list[nn.Module] = []
        self.parameters: dict[str, Tensor | None] = {}
        self.buffers: dict[str, Tensor | None] = {}
        self._add(prior, "")

    def _add(self, module: nn.Module, prefix: str) -> None:
        self.modules.append(module)
        for own, every in ((module._parameters, self.parameters), (module._buffers, self.buffers)):
            for name, tensor in own.items():
                every[prefix + name] = tensor
        for name, part in module._modules.items():
            if part is not None:
                self._add(part, f"{prefix}{name}.")

    @property
    def trained(self) -> dict[str, Tensor]:
        return {name: one for name, one in self.parameters.items() if one is not None}


def _groups(priors: Sequence[Prior]) -> list[list[_Contents]]:
    """Priors whose terms are made together: those that can be stacked, and those of several layers; each once."""
    groups: list[list[_Contents]] = []
    uses: dict[int, int] = {}
    for prior in priors:
        uses[id(prior)] = uses.get(id(prior), 0) + 1
        if uses[id(prior)] > 1:
            continue
        contents = _Contents(prior)
        if not _are_whole(contents.modules):
            continue
        for group in groups:
            if _alike(group[0], contents) and (len(group) > 1 or _tells_heads(prior)):
                group.append(contents)
                break
        else:
            if not prior.depends_on_content:
                groups.append([contents])
    return [group for group in groups if len(group) > 1 or uses[id(group[0].prior)] > 1]


def _values(group: Sequence[_Contents]) -> dict[str, Tensor]:
    """The parameters of all priors by name, those of one name after each other, in the dtype of a prior's arithmetic: one copy
    of all those of a dtype."""
    first, each = group[0].trained, [contents.trained.values() for contents in group]
    every = dict(zip(first, zip(*each, strict=True), strict=True))
    alike: dict[torch.dtype, list[str]] = {}
    for name, one in first.items():
        alike.setdefault(one.dtype, []).append(name)
    found: dict[str, Tensor] = {}
    for dtype, names in alike.items():
        joined = torch.cat([one.flatten() for name in names for one in every[name]])
        joined = joined.to(torch.promote_types(dtype, torch.float32))
        parts = joined.split([len(group) * first[name].numel() for name in names])
        for name, part in zip(names, parts, strict=True):
            one = first[name]
            found[name] = (part if one.requires_grad else part.detach()).view(-1, *one.shape[1:])
    return found


def _small(group: Sequence[_Contents], q_pos: Positions, k_pos: Positions) -> bool:
    """Whether the numbers of all terms, and of all parameters, are at most `LARGEST`."""
    prior = group[0].prior
    rows = 1 if k_pos.within is None else k_pos.within.shape[0]
    each = (q_pos.length + k_pos.length) * (1 + rows * prior.num_lanes // 2)  # of a head: a table, and lanes
    parameters = sum(one.numel() for one in group[0].trained.values())
    return len(group) * (prior.num_heads * each + parameters) <= LARGEST


def has_whole_parameters(module: nn.Module) -> bool:
    """Whether parameters can be read outside of the module's own forward pass.

    Sharding engines (ZeRO-3, FSDP) gather them in hooks before it; elsewhere one may be empty, or no plain tensor.
    """
    return _are_whole(module.modules())


def _are_whole(modules: Iterable[nn.Module]) -> bool:
    for part in modules:
        if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
            return False
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None and (type(tensor) not in (nn.Parameter, Tensor) or not tensor.numel()):
                return False
    return True


def _alike(one: _Contents, other: _Contents) -> bool:
    """Whether priors differ by nothing but values of parameters and buffers. Of torch's layers the type and shapes tell."""
    if len(one.modules) != len(other.modules):
        return False
    for part, its in zip(one.modules, other.modules, strict=True):
        if type(part) is not type(its) or (isinstance(part, Prior) and not _alike_options(vars(part), vars(its))):
            return False
    for ours, theirs in ((one.parameters, other.parameters), (one.buffers, other.buffers)):
        if ours.keys() != theirs.keys():
            return False
        for x, y in zip(ours.values(), theirs.values(), strict=True):
            if x is None or y is None:
                if x is not y:
                    return False
            elif x.shape != y.shape or x.dtype != y.dtype or x.device != y.device or x.requires_grad != y.requires_grad:
                return False
    return True


def _alike_options(ours: Mapping[str, object], theirs: Mapping[str, object]) -> bool:
    for name, option in ours.items():
        if name in TORCHS or option is (found := theirs.get(name, TORCHS)):  # which is no option
            continue
        if not isinstance(option, PLAIN) or repr(option) != repr(found):
            return False
    return len(ours) == len(theirs)


def _tells_heads(prior: Prior) -> bool:
    """Whether a prior tells which of its values are whose, as stacking needs, and has no layer but torch's, such as an
    adapter's."""
    if prior.by_head is None or not prior._parameters.keys() <= set(prior.by_head):
        return False
    if not prior._buffers.keys() <= set(prior.by_layer):
        return False
    for name, part in prior._modules.items():
        if not (_tells_heads(part) if isinstance(part, Prior) else name in prior.by_layer and _torchs(part)):
            return False
    return True


def _torchs(module: nn.Module | None) -> bool:
    inside = [] if module is None else module.modules()
    return all(type(layer).__module__.startswith("torch.nn.modules.") for layer in inside)
