"""What all layers of a model take from positions, made together: a few operations on all heads instead of as many a layer.

Priors that differ only in their parameters are stacked (`Prior.stack`): one prior of L·H heads, whose terms are cut into
those of the layers. Others make their own terms. This pays where launching a kernel takes longer than a small one runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zoo.positions import Positions
from zoo.priors.base import Prior, PriorTerms
from zoo.sequence import SequenceGroup

if TYPE_CHECKING:
    from zoo.layers import Attention

__all__ = ["LayerTerms", "layer_terms", "stacked_terms"]

# Numbers of all layers' terms, in memory at once, up to which they are made together.
LARGEST = 1 << 23
# Attributes of any module; those that a class adds are its options.
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
PLAIN = (bool, int, float, str, list, tuple, type(None))  # options that are compared by value


@dataclass(frozen=True)
class LayerTerms:
    """The prior's terms and SSMax's (1 or B, H, T) row scale; what is None is made by the layer."""

    terms: PriorTerms | None = None
    row_scale: Tensor | None = None


def costs_launches(x: Tensor) -> bool:
    """Whether one operation on all layers costs less than one for each: CPUs do not launch, torch.compile fuses."""
    return x.device.type != "cpu" and not torch.compiler.is_compiling()


def layer_terms(
    layers: Sequence[Attention], positions: Positions, x: Tensor, *, sequence: SequenceGroup | None = None
) -> list[LayerTerms]:
    """What layers without a cache take from the positions of whole lines, made for all of them at once where that pays.

    x is the input of the first, (B, T, C); this rank's part in a sequence group.
    """
    if len(layers) < 2 or not costs_launches(x):
        return [LayerTerms()] * len(layers)
    q_positions = positions if sequence is None else sequence.part_of(positions)
    terms: dict[int, PriorTerms | None] = {}
    scales: dict[int, Tensor] = {}
    for causal in {layer.causal for layer in layers}:
        chosen = [n for n, layer in enumerate(layers) if layer.causal == causal]
        priors = [layers[n].prior for n in chosen]
        if sequence is not None:
            priors = [prior.of_heads(sequence.heads(prior.num_heads)) for prior in priors]
        each = stacked_terms(priors, positions, positions, causal=causal, x=x)
        terms |= dict(zip(chosen, each, strict=True))
        alike: dict[tuple[object, ...], list[int]] = {}
        for n in chosen:
            ssmax = layers[n].ssmax
            if ssmax is not None and _is_whole(ssmax):
                alike.setdefault((ssmax.window, ssmax.s.shape, ssmax.s.dtype), []).append(n)
        for group in alike.values():
            modules = [ssmax for n in group if (ssmax := layers[n].ssmax) is not None]
            scales |= zip(group, modules[0].of_layers(modules, q_positions, causal=causal), strict=True)
    return [LayerTerms(terms[n], scales.get(n)) for n in range(len(layers))]


def stacked_terms(
    priors: Sequence[Prior], q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor
) -> list[PriorTerms | None]:
    """The terms of each layer's prior, on the device of x; None for those that are not made together with others'.

    One prior may be that of several layers; q_pos, k_pos and causal are those of `Prior.forward`.
    """
    groups: dict[tuple[object, ...], dict[int, Prior]] = {}
    for prior in priors:
        if not prior.depends_on_content and (signature := _signature(prior)) is not None:
            groups.setdefault(signature, {})[id(prior)] = prior
    uses = Counter(map(id, priors))
    terms: dict[int, PriorTerms] = {}
    for group in groups.values():
        members = list(group.values())
        first = members[0]
        if len(members) == 1 and uses[id(first)] > 1:
            terms[id(first)] = first(q_pos, k_pos, causal=causal, x=x)
        elif len(members) > 1 and _numbers(first, q_pos, k_pos) * len(members) <= LARGEST:
            stacked = type(first).stack(members, _stacked_values(members))
            parts = stacked(q_pos, k_pos, causal=causal, x=x).split(len(members), causal=causal)
            terms |= zip(group, parts, strict=True)
    return [terms.get(id(prior)) for prior in priors]


def _signature(module: nn.Module) -> tuple[object, ...] | None:
    """All of a prior but the values of parameters and buffers, which stacked priors have in common. None where parameters
    cannot be read outside the forward pass, are not declared by head, or are those of another's layer, such as an adapter."""
    options: tuple[object, ...] = ()
    if isinstance(module, Prior):
        if module.by_head is None or not module._parameters.keys() <= {*module.by_head}:
            return None
        names = [*module._buffers, *(name for name, part in module._modules.items() if not isinstance(part, Prior))]
        if not {*names} <= {*module.by_layer}:
            return None
        values = [(name, value) for name, value in vars(module).items() if name not in MODULE_ATTRIBUTES]
        options = tuple((name, repr(value) if isinstance(value, PLAIN) else id(value)) for name, value in values)
    elif not type(module).__module__.startswith("torch.nn.modules."):
        return None
    if not _is_whole(module):
        return None
    tensors = [*module._parameters.items(), *module._buffers.items()]
    facts = [(name, None if t is None else (t.shape, t.dtype, t.device, t.requires_grad)) for name, t in tensors]
    parts = [_signature(part) for part in module._modules.values() if part is not None]
    return None if None in parts else (type(module), options, tuple(facts), tuple(module._modules), tuple(parts))


def _is_whole(module: nn.Module) -> bool:
    """Whether a module's tensors can be read outside its forward pass: sharding engines (ZeRO-3, FSDP) gather them in hooks."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return False
    tensors = (*module._parameters.values(), *module._buffers.values())
    return all(t is None or (type(t) in (nn.Parameter, Tensor) and t.numel() > 0) for t in tensors)


def _named(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """`named_parameters`, which takes the host several times as long; every step asks this of every layer."""
    for name, tensor in module._parameters.items():
        if tensor is not None:
            yield prefix + name, tensor
    for name, part in module._modules.items():
        if part is not None:
            yield from _named(part, f"{prefix}{name}.")


def _numbers(prior: Prior, q_pos: Positions, k_pos: Positions) -> int:
    """How many numbers a prior's parameters and terms are."""
    rows = 1 if k_pos.within is None else k_pos.within.shape[0]
    # Of a head: a table, and lanes.
    each = (q_pos.length + k_pos.length) * (1 + rows * prior.num_lanes // 2)
    return prior.num_heads * each + sum(tensor.numel() for _, tensor in _named(prior))


def _stacked_values(priors: Sequence[Prior]) -> dict[str, Tensor]:
    """The parameters of all priors by name, those of one name after each other, in the dtype of a prior's arithmetic."""
    first, each = dict(_named(priors[0])), [[tensor for _, tensor in _named(prior)] for prior in priors]
    every = dict(zip(first, zip(*each, strict=True), strict=True))
    stacked: dict[str, Tensor] = {}
    for dtype in {tensor.dtype for tensor in first.values()}:
        names = [name for name, tensor in first.items() if tensor.dtype == dtype]
        joined = torch.cat([tensor.flatten() for name in names for tensor in every[name]])
        joined = joined.to(torch.promote_types(dtype, torch.float32))
        parts = joined.split([len(priors) * first[name].numel() for name in names])
        for name, part in zip(names, parts, strict=True):
            part = part if first[name].requires_grad else part.detach()
            stacked[name] = part.view(-1, *first[name].shape[1:])
    return stacked
