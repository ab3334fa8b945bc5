"""Priors in models of `transformers`: decoders and encoders whose attention goes through its
attention interface.

A layer's prior is the module `position_bias` of its attention, a name that Trainer never decays.
The attention implementation "priorzoo" adds it; masks are those of "sdpa", which is also what
computes layers whose prior is uniform.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from zoo.adapters.layer import RECORD, Grid, LayerPrior, Request, SinkRotation, create_layer, zero
from zoo.errors import Options
from zoo.files import read_object
from zoo.offload import execution_device
from zoo.positions import Positions, check_runs
from zoo.priors.base import Prior

# Name of the attention implementation.
NAME = "priorzoo"
# What config.json has behind the model type.
LOADED_BY = " with priors, which zoo.load_adapted loads"
# Names of learned positions.
LEARNED = ("position_embeddings", "position_embedding", "embed_positions", "wpe")
# Names of tokens before the patches.
PREFIX = ("cls_token", "class_embedding", "distillation_token", "register_tokens")
# Models that rotate all queries and keys as `zoo.rotary.rotate` does.
ROTATED = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gpt_neox")
# Arguments of the attention interface that priors do not serve, and what they are.
NOT_SERVED = {"softcap": "capped logits", "position_bias": "a position bias of its own"}


def adapt(model: PreTrainedModel, request: Request) -> None:
    """As `zoo.adapt`; the request's record in the config is what `load` does again."""
    config = model.config
    layers = attention_layers(model)
    _check_served(model, layers)
    grid, train_grid = _grid(model)
    if config.get_text_config() is not config:
        raise ValueError(
            f"{type(model).__name__} is made of several models: "
            "adapt one, such as its language model"
        )
    limit = getattr(config, "max_position_embeddings", None)
    context = request.train_context or limit or math.prod(train_grid or (0,))
    if not context:
        raise ValueError(
            f"{type(config).__name__} names no max_position_embeddings: "
            "give train_context in tokens"
        )
    priors = [
        create_layer(
            request,
            dim=config.hidden_size,
            num_heads=config.num_attention_heads,
            train_context=context,
            causal=layer.is_causal,
            grid=grid,
            train_grid=train_grid,
            own_sink=hasattr(layer, "sinks"),
        )
        for layer in layers
    ]
    if not request.keep_rope:
        _remove_positions(model, images=grid is not None)
    window = request.window or limit or context
    for layer, prior in zip(layers, priors, strict=True):
        if prior.sinks and request.keep_rope:
            prior.rotation = _sink_rotation(model, layer, window - 1)
        layer.position_bias = prior.to(execution_device(layer))
        layer.patch_grid = grid
        layer.register_forward_pre_hook(_check_implementation)
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    if grid is not None:
        _patches(model)[1].register_forward_hook(grid.read)
    # What was read from the configuration, which may change.
    setattr(config, RECORD, request.record | {"train_context": context, "window": window})
    config.__class__ = _adapted_config(type(config))


def _check_served(model: PreTrainedModel, layers: list[Any]) -> None:
    """ValueError for a model whose attention a prior cannot join."""
    config = model.config
    name = type(model).__name__
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise ValueError(f"{name} has cross-attention, between lines that have no common positions")
    if not layers or not model._supports_attention_backend:
        raise ValueError(
            f"{name} has no self-attention that goes through transformers' attention interface; "
            "Llama, Qwen, Mistral, GPT-2, GPT-NeoX, BERT, ViT and DINO models and their like do"
        )
    if getattr(config, "reorder_and_upcast_attn", False):
        raise ValueError(
            "reorder_and_upcast_attn computes attention outside the attention interface; "
            "set it to False"
        )
    if any(getattr(layer, "attn_logit_softcapping", None) for layer in layers):
        raise ValueError(
            "capped logits are not served with priors: "
            "set attn_logit_softcapping=None in the config"
        )


def save(model: PreTrainedModel, folder: Path) -> None:
    """As `zoo.save_adapted`."""
    model.save_pretrained(folder)


def attention_layers(model: nn.Module) -> list[Any]:
    """The self-attention modules that call the attention interface, in order."""
    return [module for module in model.modules() if _is_self_attention(module)]


def _is_self_attention(module: nn.Module) -> bool:
    scaled = any(hasattr(module, name) for name in ("scaling", "scale", "head_dim"))
    causal_or_not = isinstance(getattr(module, "is_causal", None), bool)
    return scaled and causal_or_not and not getattr(module, "is_cross_attention", False)


def load_whole(
    load: Callable[..., Any], source: str | Path, *args: object, **kwargs: object
) -> Any:
    """Call a from_pretrained of transformers. Raises ValueError for a missing tensor, which would
    be random or unset."""
    with_info = kwargs.pop("output_loading_info", False)
    model, info = load(source, *args, output_loading_info=True, **kwargs)
    missing = info["missing_keys"]
    if missing:
        raise ValueError(
            f"{source} lacks {min(missing)!r}; expected all weights of {type(model).__name__}"
        )
    return (model, info) if with_info else model


def load(folder: Path, **kwargs: Any) -> PreTrainedModel:
    """As `zoo.load_adapted`, for a folder that `save_pretrained` wrote."""
    entries = read_object(folder / "config.json")
    request = Request(**entries.pop(RECORD))
    entries["model_type"] = entries["model_type"].removesuffix(LOADED_BY)
    config = CONFIG_MAPPING[entries["model_type"]].from_dict(entries)
    kind: Any = getattr(transformers, entries["architectures"][0])

    def init(self: PreTrainedModel, config: PretrainedConfig, *args: Any, **more: Any) -> None:
        kind.__init__(self, config, *args, **more)
        adapt(self, request)

    # The priors are there when from_pretrained reads the weights, and stay in float32.
    wide = [*(kind._keep_in_fp32_modules_strict or ()), "position_bias"]
    members = {
        "__init__": init,
        "__module__": kind.__module__,
        "_keep_in_fp32_modules_strict": wide,
    }
    adapted: Any = type(kind.__name__, (kind,), members)
    model = load_whole(adapted.from_pretrained, folder, config=config, **kwargs)
    model.__class__ = kind
    return model


def _adapted_config(base: type[PretrainedConfig]) -> type[PretrainedConfig]:
    """A configuration that is saved under a model type of its own: without priors transformers
    would make another model of the folder, and now says which function reads it."""

    def to_json_string(self: PretrainedConfig, use_diff: bool = True) -> str:
        entries = json.loads(base.to_json_string(self, use_diff))
        entries["model_type"] = base.model_type + LOADED_BY
        return json.dumps(entries, indent=2, sort_keys=True) + "\n"

    def reduce(self: PretrainedConfig) -> tuple[object, ...]:
        return _restore_config, (base, self.__dict__)

    members = {"to_json_string": to_json_string, "__reduce__": reduce}
    return type(f"Adapted{base.__name__}", (base,), members)


def _restore_config(base: type[PretrainedConfig], entries: Options) -> PretrainedConfig:
    """An adapted configuration as it was pickled or copied."""
    config = object.__new__(_adapted_config(base))
    config.__dict__.update(entries)
    return config


def _grid(model: PreTrainedModel) -> tuple[Grid | None, tuple[int, int] | None]:
    """Of an image model, what reads its patch grid, and the grid that it was made for."""
    config = model.config
    patch_size = getattr(config, "patch_size", None)
    image_size = getattr(config, "image_size", None)
    if patch_size is None or image_size is None:
        return None, None
    embedding, _ = _patches(model)
    num_prefix = 0
    for name in PREFIX:
        tokens = getattr(embedding, name, None)
        if tokens is not None:
            # (C,), or (…, N, C) for N tokens
            num_prefix += 1 if tokens.dim() == 1 else tokens.shape[-2]
    patch_height, patch_width = _height_width(patch_size)
    height, width = _height_width(image_size)
    return Grid(num_prefix), (height // patch_height, width // patch_width)


def _height_width(size: int | Sequence[int]) -> tuple[int, int]:
    """A size of a configuration, one number for a square, in pixels."""
    if isinstance(size, int):
        return size, size
    height, width = size
    return height, width


def _patches(model: nn.Module) -> tuple[nn.Module, nn.Conv2d]:
    """The embedding module of an image model, and the convolution in it that makes patches."""
    for module in model.modules():
        patches = getattr(module, "patch_embeddings", getattr(module, "patch_embedding", None))
        for part in () if patches is None else patches.modules():
            if isinstance(part, nn.Conv2d):
                return module, part
    raise ValueError(
        f"{type(model).__name__} has no convolution that makes patches "
        "and tells the grid of an image"
    )


def _remove_positions(model: nn.Module, *, images: bool) -> None:
    """Turn rotations off, or learned positions into zeros that are not trained."""
    rotations = [m for m in model.modules() if re.search(r"Rotary|Rope|RoPE", type(m).__name__)]
    for module in rotations:
        module.register_forward_hook(_no_rotation)
    learned = False
    for owner in list(model.modules()):
        for name in LEARNED:
            table = getattr(owner, name, None)
            if not isinstance(table, nn.Embedding | nn.Parameter):
                continue
            learned = True
            if isinstance(table, nn.Parameter):
                zero(owner, table)
            elif images:
                # The library resizes the table for other images, so that it has to stay.
                zero(owner, table.weight)
            else:
                setattr(owner, name, NoPositions(table.embedding_dim))
                owner.register_forward_pre_hook(_lengthen_buffers, with_kwargs=True)
    if not rotations and not learned:
        raise ValueError(
            f"keep_rope=False: {type(model).__name__} has neither a rotation nor learned positions"
        )


def _sink_rotation(model: PreTrainedModel, layer: nn.Module, limit: int) -> SinkRotation | None:
    """A layer's own rotation, if the model has any."""
    kind = model.config.model_type
    buffers: list[tuple[nn.Module, str]] = []
    for module in model.modules():
        for name in module._buffers:
            if name.endswith("inv_freq"):
                buffers.append((module, name))
    if kind not in ROTATED:
        return SinkRotation(None, kind, limit) if buffers else None
    # Models with two kinds of layers have frequencies for each.
    names = (f"{getattr(layer, 'layer_type', None)}_inv_freq", "inv_freq")
    owner, name = next(buffer for buffer in buffers if buffer[1] in names)
    return SinkRotation(owner, name, limit)


class NoPositions(nn.Module):
    """In the place of an embedding of positions: zeros, at any position."""

    zero: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("zero", torch.zeros(()))

    def forward(self, ids: Tensor, past: int = 0, position_ids: Tensor | None = None) -> Tensor:
        """(B, T, C) for (B, T) position_ids alone, or, as OPT calls it, for a mask (B, past
        + T)."""
        return self.zero.expand(*ids[:, past:].shape, self.dim)


def _lengthen_buffers(module: nn.Module, args: tuple[Tensor, ...], kwargs: Options) -> None:
    """A forward pre-hook of embeddings without positions: BERT's buffers end where its table of
    positions ended."""
    candidates = (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
    inputs = next(tensor for tensor in candidates if tensor is not None)
    length = inputs.shape[1] + kwargs.get("past_key_values_length", 0)
    # RoBERTa counts from the padding's number.
    length += getattr(module, "padding_idx", None) or 0
    for name in ("position_ids", "token_type_ids"):
        buffer = module._buffers.get(name)
        if buffer is not None and buffer.shape[1] <= length:
            index = torch.arange(2 * length, device=buffer.device)[None]
            module._buffers[name] = index if name == "position_ids" else torch.zeros_like(index)


def _no_rotation(
    module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]
) -> Tensor | tuple[Tensor, ...]:
    """A forward hook: the cosine and sine of no angle, or Llama 4's complex numbers of none."""
    if isinstance(output, Tensor) and output.is_complex():
        return torch.ones_like(output)
    cos, sin = output
    return torch.ones_like(cos), torch.zeros_like(sin)


def _check_implementation(module: Any, args: object) -> None:
    """A forward pre-hook of attention with a prior; ValueError where another implementation would
    leave the prior out."""
    name = module.config._attn_implementation
    if name != NAME:
        raise ValueError(
            f"attention by {name!r} would leave the priors out: set_attn_implementation({NAME!r})"
        )


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention implementation "priorzoo"."""
    layer: LayerPrior | None = module._modules.get("position_bias")

    library_mask = attention_mask

    def without_prior() -> Tensor:
        options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
        out, _ = sdpa_attention_forward(module, query, key, value, library_mask, **options)
        return out.transpose(1, 2)

    if layer is None:
        return without_prior().transpose(1, 2), None
    for name, what in NOT_SERVED.items():
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} has {what} ({name}), not served by attention with a prior"
            )
    causal = module.is_causal if is_causal is None else is_causal
    mask, bias = _split(attention_mask)
    if causal:
        filled = _filled(mask, query.shape[2], key.shape[2])
        if filled < key.shape[2]:
            key = key[:, :, :filled]
            value = value[:, :, :filled]
            mask = _first_keys(mask, filled)
            bias = _first_keys(bias, filled)
            library_mask = _first_keys(library_mask, filled)
    documents = None
    if causal and mask is not None and not torch.compiler.is_compiling():
        documents = _documents(mask)
    if documents is not None:
        # Without a mask kernels can leave keys out.
        mask = None
    elif mask is not None:
        _check_gaps(mask, key.shape[2])
    if documents is not None and documents.within is not None:
        positions = documents, documents
    else:
        positions = _positions(
            module,
            query.shape[2],
            key.shape[2],
            mask,
            causal,
            kwargs.get("sliding_window"),
        )
    out = layer.attend(
        without_prior,
        query,
        key,
        value,
        positions,
        causal=causal,
        mask=mask,
        bias=bias,
        dropout=dropout,
        scale=scaling,
        sink=kwargs.get("s_aux"),
    )
    return out.transpose(1, 2).contiguous(), None


def _first_keys(mask: Tensor | None, count: int) -> Tensor | None:
    """(…, T, count) of a mask (…, T, S)."""
    return None if mask is None else mask[..., :count]


def _filled(mask: Tensor | None, queries: int, keys: int) -> int:
    """Keys up to the last query's own; a static cache has room for more behind them."""
    if mask is None:
        # transformers has no mask where an empty cache is filled.
        return queries if queries > 1 else keys
    if queries == keys or bool(mask[..., -1, -1].any()):
        return keys
    return int(mask[..., -1, :].flatten(0, 1).any(0).nonzero().max()) + 1


def _split(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """A mask of transformers, bool or added to logits, as keys that are shown and finite
    addends."""
    if mask is None or mask.dtype == torch.bool:
        return mask, None
    shown = mask > torch.finfo(mask.dtype).min / 2
    bias = mask.masked_fill(~shown, 0.0)
    return shown, bias if bool(bias.any()) else None


def _documents(mask: Tensor) -> Positions | None:
    """The keys' positions where every query sees exactly its document's keys up to its own: a line
    for one document a row. None for other masks, and where a cache holds several documents."""
    queries, keys = mask.shape[-2:]
    index = torch.arange(keys, device=mask.device)
    first = mask[:, 0].view(torch.uint8).argmax(-1)
    own_document = (first[..., None] <= index) & (index <= index[keys - queries :, None])
    ordered = (first.diff(dim=1) >= 0).all()
    # A document's first query sees no earlier key; queries are keys here, or all see the key 0.
    starts = (first.gather(1, first.clamp(max=queries - 1)) == first).all()
    # One value is read back from the device.
    if not bool(ordered & starts & (mask == own_document[:, None]).all()):
        return None
    if not bool(first.any()):
        return Positions.line(keys)
    return Positions.documents(first) if queries == keys else None


def _check_gaps(mask: Tensor, keys: int) -> None:
    """Raise ValueError where a query that sees its own key sees a run of keys with a gap, whose
    places would be wrong."""
    sees_itself = mask[..., keys - mask.shape[2] :].diagonal(dim1=-2, dim2=-1)
    index = torch.arange(keys, device=mask.device)
    first = torch.where(mask, index, keys).amin(-1)
    last = torch.where(mask, index, -1).amax(-1)
    no_gap = mask.sum(-1) == last - first + 1
    check_runs(~sees_itself | no_gap)


def _positions(
    module: Any, queries: int, keys: int, mask: Tensor | None, causal: bool, window: int | None
) -> tuple[Positions, Positions]:
    """Of queries and keys. Tokens count from the first that their query sees, so that padding and
    packing move nothing."""
    if module.patch_grid is not None:
        grid = module.patch_grid.positions(keys)
        return grid, grid
    layer = module.position_bias
    k_pos = Positions.line(keys)
    if layer.sinks or not layer.prior.is_relative:
        if window is not None and queries < keys and keys >= window:
            raise ValueError(
                f"a cache of the last {window} keys does not tell their positions, on which "
                f"{_dependent(layer)}: use a prior of distance, such as ggd, without sinks; "
                "if all layers have this window, sliding_window=None in the config will do too"
            )
        if mask is not None:
            within = _within(mask, queries, keys, window if causal else None)
            k_pos = Positions(keys, within=within)
    return k_pos.tail(queries), k_pos


def _dependent(layer: LayerPrior) -> str:
    """What of a layer's prior depends on absolute positions, with its verb."""
    if layer.sinks:
        return "sinks depend"
    priors = [module for module in layer.prior.modules() if isinstance(module, Prior)]
    absolute = [type(prior).__name__ for prior in priors if not prior.is_relative]
    return f"{absolute[-1]} depends"


def _within(mask: Tensor, queries: int, keys: int, window: int | None) -> Tensor:
    """(B, S) int64: each key's distance from the first key that the query of its row, or the first
    query, sees."""
    first = mask[:, 0].to(torch.uint8).argmax(-1)
    index = torch.arange(keys, device=mask.device)
    if window is not None:
        # Where the first key is the window's first, the document began earlier: where that of the
        # row before began.
        cut = first == index[keys - queries :] - window + 1
        first = first.masked_fill(cut, -1).cummax(-1).values.clamp(min=0)
    before = first[:, :1].expand(-1, keys - queries)
    return (index - torch.cat([before, first], dim=-1)).clamp(min=0)
