"""Released checkpoints: a file's tensors, each used once and checked, and GOAT's attention module as one of ours.

Nothing in a file is run: torch files are read with `weights_only=True`.
"""

from __future__ import annotations

import math
import os
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.inputs import check_finite, read_tensors
from zoo.layers import Attention, LogitOptions
from zoo.naming import did_you_mean
from zoo.priors import Compose, KeyBias, Prior, Spectral
from zoo.priors.alibi import inverse_softplus

__all__ = ["Tensors", "goat_attention", "read_released"]

WRAPPERS = re.compile(r"^(?:(?:module|_orig_mod)\.)+")  # that DDP and torch.compile put before names
# Configurations that nanoGPT's descendants pickle beside the tensors: their attributes are read, without their classes.
CONFIGS = ("__main__.CableConfig", "__main__.GPTConfig")
MOST_NAMED = 8  # tensors in an error


class Tensors:
    """A state dict of which every tensor is taken once.

    Args:
        tensors: by name; what DDP and torch.compile put before a name is left out.
        source: what they are from, for errors.

    Raises:
        ValueError: where two names are the same without what is left out, or something is no tensor.
    """

    def __init__(self, tensors: Mapping[str, Any], source: str) -> None:
        self.source = source
        self.left: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            own = WRAPPERS.sub("", str(name))
            if own in self.left:
                raise ValueError(f"{source} has the tensor {own!r} twice, once as {name!r}")
            if not isinstance(tensor, Tensor):
                raise ValueError(f"{source}: {name!r} is a {type(tensor).__name__}, expected a tensor")
            self.left[own] = tensor

    def __contains__(self, name: str) -> bool:
        """Whether the tensor is there and not taken."""
        return name in self.left

    def shape(self, name: str, axes: int) -> tuple[int, ...]:
        """Of the tensor of this name, which stays to be taken. Raises ValueError where it is missing or has other axes."""
        shape = tuple(self._find(name).shape)
        if len(shape) != axes:
            raise ValueError(f"{self.source}: {name!r} has shape {shape}, expected one of {axes} axes")
        return shape

    def count(self, pattern: str) -> int:
        """How many different words the group of `pattern` finds at the start of names."""
        return len({found[1] for name in self.left if (found := re.match(pattern, name))})

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor of this name and shape. Raises ValueError where it is missing or has another shape."""
        tensor = self._find(name)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{self.source}: {name!r} has shape {tuple(tensor.shape)}, expected {shape}")
        return self.left.pop(name)

    def finish(self, owner: str) -> None:
        """Raises ValueError, which names them, for tensors that were not taken: `owner` has none of these names."""
        if self.left:
            named = ", ".join(list(self.left)[:MOST_NAMED])
            more = f" and {len(self.left) - MOST_NAMED} more" if len(self.left) > MOST_NAMED else ""
            raise ValueError(f"{self.source} has tensors that {owner} has not: {named}{more}")

    def _find(self, name: str) -> Tensor:
        if name not in self.left:
            near = did_you_mean(name, self.left, cutoff=0.8).strip()
            raise ValueError(f"{self.source} lacks the tensor {name!r}{'; ' if near else ''}{near}")
        return self.left[name]


def read_released(path: str | os.PathLike[str]) -> tuple[Tensors, dict[str, Any]]:
    """A checkpoint's tensors, and the configuration it holds beside them, {} without one.

    Args:
        path: a .safetensors file, or one of torch: a state dict, or a dict that has one as "model" or "state_dict" and may have
            a "config".

    Raises:
        OSError: where it cannot be opened.
        ValueError: where it cannot be read, or only by running code that it names, and for values that are not finite.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        return Tensors(read_tensors(path), str(path)), {}
    with open(path, "rb"):  # torch has errors of its own for what cannot be opened
        pass
    found = _read_torch(path)
    if not isinstance(found, Mapping):
        raise ValueError(f"{path} holds a {type(found).__name__}, expected tensors by name")
    inner = next((found[key] for key in ("model", "state_dict") if isinstance(found.get(key), Mapping)), None)
    check_finite(found if inner is None else inner, path)
    if inner is None:
        return Tensors(found, str(path)), {}
    config = found.get("config", {})
    return Tensors(inner, str(path)), dict(config if isinstance(config, Mapping) else vars(config))


class _Attributes:
    """Stands in for a class of a file's."""


def _read_torch(path: Path) -> Any:
    try:
        with torch.serialization.safe_globals([(_Attributes, name) for name in CONFIGS]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        needed = re.search(r"GLOBAL ([\w.]+)", str(error))
        reason = (
            f"it needs {needed[1]}" if needed else "it holds more than tensors and plain values, or is no file of torch"
        )
        raise ValueError(
            f"{path} is refused: {reason}, and code from files is never run. Where you trust it, save its state dict alone"
        ) from error
    except (RuntimeError, EOFError, KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} is no file of torch: {str(error).partition(chr(10))[0]}") from error


def goat_attention(
    state: Mapping[str, Tensor],
    *,
    train_context: int | None = None,
    causal: bool = True,
    prior_gate: bool = False,
    prior_scale: float = 1.0,
) -> Attention:
    """GOAT's released attention module (goat-attention 0.1.1, arXiv 2601.15380) on a line of tokens: `for_gpt` or `for_bert`.

    The released module gives a head 2R + 1 columns for the prior and D − 2R − 1 for content; the sink's ramp takes more here,
    so the lanes are beside the head, and the columns of q and k that the released code projects and does not read are 0, and
    stay 0 in training. Its prior has parameters per key-value head: each of the queries' heads here has a copy of its own,
    which training may move apart. What its state dict does not say is an argument. `for_vit` is not served: its sink reads the
    number of a patch and Fourier features of row and column, and no prior here does. Neither are other keys than the queries,
    `add_bias_kv` and `add_zero_attn`.

    Args:
        state: `GoatAttention(…).state_dict()`.
        train_context: its `training_seq_len`, needed with a key bias; without one it divides positions by the present length.
        causal: how it was called; the sink's slope is of causal attention alone.
        prior_gate: whether its `prior_gate` is "query_norm". The released gate may fall below 2^−20, ours does not.
        prior_scale: its `goat_prior_scale`, which multiplies the key bias and not the spectral prior.

    Returns:
        an `Attention` that computes the same from x (B, T, C).

    Raises:
        ValueError: for a missing or unknown tensor, a wrong shape, a negative scale, a module without a prior, or a key bias
            without `train_context`.
    """
    if prior_scale < 0:
        raise ValueError(f"prior_scale must be at least 0, got {prior_scale}")
    tensors = Tensors(state, "the state dict")
    (dim, _), (heads,) = tensors.shape("out_proj.weight", 2), tensors.shape("prior_gate_bias", 1)
    kv_heads, rank = tensors.shape("lambda_sym", 2)
    if dim % heads or heads % kv_heads:
        raise ValueError(f"heads must divide: {dim} columns, {heads} heads, {kv_heads} of keys and values")
    width, group, has_sink = dim // heads, heads // kv_heads, "sink_gain" in tensors
    content = width - 2 * rank - has_sink
    if content < 1:
        raise ValueError(f"a prior of {width - content} columns leaves none of the {width} of a head for content")
    parts: dict[str, Prior] = {}
    frequencies = tensors.take("abs_freqs_base", *tensors.shape("abs_freqs_base", 1))  # there without a key bias too
    if has_sink:
        if train_context is None:
            raise ValueError("the key bias divides positions by the training context: give train_context, in tokens")
        parts["key_bias"] = _sink(tensors, frequencies, kv_heads, group, train_context, prior_scale)
    sym, asym = (
        tensors.take(name, kv_heads, rank).repeat_interleave(group, 0) for name in ("lambda_sym", "lambda_asym")
    )
    omega = tensors.take("rel_freqs_base", rank)
    if rank:
        parts["spectral"] = spectral = Spectral(heads, rank=rank)
        spectral.load_state_dict({"alpha": sym, "beta": asym, "omega": omega.double()})
    if not parts:
        raise ValueError("the state dict has neither a spectral prior nor a key bias: it is attention without a prior")
    attention = Attention(
        dim,
        heads,
        prior=Compose(**parts),
        num_kv_heads=kv_heads,
        causal=causal,
        lanes="beside",
        bias="out_proj.bias" in tensors,
        logits=LogitOptions(temperature=math.sqrt(content / width), prior_gate=prior_gate),
    )
    weights = _projections(tensors, "weight", (dim, kv_heads * width), (dim,))
    if attention.out.bias is not None:
        weights |= _projections(tensors, "bias", (dim, kv_heads * width), ())
    for name, value in weights.items():
        if name.startswith(("query", "key")):  # the columns that the released code does not read
            weights[name] = value = value.clone()
            value.unflatten(0, (-1, width))[:, content:] = 0.0
    gate = {
        name: tensors.take(f"prior_gate_{theirs}", heads) for name, theirs in (("slope", "scale_raw"), ("bias", "bias"))
    }
    if prior_gate:
        weights |= {f"prior_gate.{name}": value for name, value in gate.items()}
    tensors.finish("a GoatAttention that this serves")
    attention.load_state_dict(
        weights | {f"prior.{name}": value for name, value in attention.prior.state_dict().items()}
    )
    return attention


def _projections(tensors: Tensors, kind: str, rows: tuple[int, int], columns: tuple[int, ...]) -> dict[str, Tensor]:
    """Weights or biases of the four projections by our names; the module has query, key and value apart or as one."""
    sizes = {"query": rows[0], "key": rows[1], "value": rows[1]}
    if f"in_proj.{kind}" in tensors:
        found = tensors.take(f"in_proj.{kind}", sum(sizes.values()), *columns).split(list(sizes.values()))
    else:
        found = tuple(tensors.take(f"{name[0]}_proj.{kind}", size, *columns) for name, size in sizes.items())
    own = dict(zip((f"{name}.{kind}" for name in sizes), found, strict=True))
    return own | {f"out.{kind}": tensors.take(f"out_proj.{kind}", rows[0], *columns)}


def _sink(
    tensors: Tensors, frequencies: Tensor, kv_heads: int, group: int, train_context: int, prior_scale: float
) -> KeyBias:
    rank = len(frequencies)
    base = 1.0 / float(frequencies[-1]) if rank > 1 else 1.0
    sink = KeyBias(kv_heads * group, train_context=train_context, rank=rank, base=base)
    steps = torch.arange(rank, dtype=torch.float64) / max(rank - 1, 1)
    if not torch.allclose(frequencies.double(), base**-steps, rtol=1e-5, atol=0.0):
        raise ValueError(
            f"abs_freqs_base must fall from 1 by one ratio, got {[round(f, 6) for f in frequencies.tolist()]}"
        )
    gain, bump, raw = (
        tensors.take(name, kv_heads).repeat_interleave(group)
        for name in ("sink_gain", "sink_bump", "recency_slope_raw")
    )
    if prior_scale != 1.0:
        slope = prior_scale * F.softplus(raw.double())
        gain, bump, raw = gain * prior_scale, bump * prior_scale, inverse_softplus(slope).float()
    mlp = {
        "mlp.0.weight": tensors.take("key_bias.fc1.weight", 4, 2 * rank + 2),
        "mlp.0.bias": tensors.take("key_bias.fc1.bias", 4),
        "mlp.2.weight": tensors.take("key_bias.fc2.weight", 1, 4),
        "mlp.2.bias": tensors.take("key_bias.fc2.bias", 1),
    }
    sink.load_state_dict({"gain": gain, "bump": bump, "raw_slope": raw} | mlp)
    return sink
