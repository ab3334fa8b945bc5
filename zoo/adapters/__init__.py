"""Priors for models people already have: `adapt` gives one to every self-attention layer of a
transformers or timm model.

    model = AutoModelForCausalLM.from_pretrained("…")
    zoo.adapt(model, "ggd_goat", keep_rope=False, train="priors")

A further library is a file here with `adapt`, `save` and `load`, and a line in `LIBRARIES`.
"""

from __future__ import annotations

import fnmatch
import math
import os
import shutil
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from torch import nn

from zoo.adapters.layer import RECORD, Request, has_priors, prior_parameters
from zoo.errors import Options, check_flags, check_whole, nearest
from zoo.files import data_folder, read_object
from zoo.pretrained import WEIGHTS

__all__ = [
    "adapt",
    "find_folder",
    "is_adapted",
    "limited_reach",
    "list_adapters",
    "load_adapted",
    "save_adapted",
]

Model = TypeVar("Model", bound=nn.Module)
# The record in an adapter folder.
ADAPTER = "adapter.json"
# The file for each library, which is imported when a model of it is adapted.
LIBRARIES = {"transformers": "zoo.adapters.hf", "timm": "zoo.adapters.timm"}


def adapt(
    model: Model,
    position: str = "ggd_goat",
    *,
    options: Mapping[str, object] | None = None,
    keep_rope: bool = True,
    ssmax: bool = False,
    train_context: int | None = None,
    train: str = "all",
) -> Model:
    """Give every self-attention layer of a model a log-prior K on its logits, in place:

        out[i] = Σ_j softmax_j( (scale·⟨q_i, k_j⟩ + K[h,i,j] + mask) · s_h[i] ) v_j,     s = 1
        without SSMax.

    Served are models of transformers whose attention goes through its attention interface (Llama,
    Qwen, Mistral, GPT-2, GPT-NeoX, BERT, ViT, DINOv2 and v3 and their like), and timm's
    VisionTransformer. Priors that can start uniform do: until they are trained the model's output
    is that of its own "sdpa" attention, to the bit. Weights, masks, caches and generation stay the
    library's.

    Args:
        model: of `transformers` or `timm`.
        position: a prior, or a sum of priors, named as in `zoo.methods.create_position` (images:
            `create_grid_position`).
        options: its options; the defaults, but `init` is "uniform".
        keep_rope: False takes out the model's own rotation, or its learned positions, which become
            zeros.
        ssmax: whether there is a row scale s_h·ln n over the n keys that a row sees (SSMax). It
            does not start at the identity.
        train_context: tokens seen in training, for priors and an SSMax relative to it; default:
            max_position_embeddings.
        train: "all" parameters, or "priors" alone.

    Raises:
        ValueError: for a model that is not served or has priors already, a position method that is
            no prior or depends on the layer's input, and "priors" for a prior without parameters.
    """
    library = _library(model)
    if not isinstance(position, str):
        raise ValueError(f"position must be the name of a prior, got {position!r}")
    check_flags(keep_rope=keep_rope, ssmax=ssmax)
    if not isinstance(options or {}, Mapping):
        raise ValueError(f"options must be given by name, got {options!r}")
    if train_context is not None:
        check_whole("train_context", train_context, 1)
    if has_priors(model):
        raise ValueError(f"{type(model).__name__} has priors already")
    if train not in ("all", "priors"):
        raise ValueError(f"unknown train={train!r}; {nearest(train, ('all', 'priors'))}")
    request = Request(
        position,
        dict(options or {}),
        keep_rope=keep_rope,
        ssmax=ssmax,
        train_context=train_context,
        alone=train == "priors",
    )
    library.adapt(model, request)
    if train == "priors":
        priors = prior_parameters(model)
        for name, parameter in model.named_parameters():
            if name not in priors:
                parameter.requires_grad_(False)
    return model


def limited_reach(
    *, window: int | None = None, soft: float | None = None, sinks: int = 0
) -> Options:
    """Arguments of `adapt` for a prior that hides far keys without training: those `window` or more
    tokens back, or by K = −(distance/soft)⁸. The first `sinks` tokens stay seen."""
    if (window is None) == (soft is None):
        raise ValueError("expected one of window and soft, in tokens")
    if soft is None:
        position = "table"
        options: Options = {"length": window, "beyond": "zero", "learnable": False}
    else:
        position = "ggd"
        options = {"init": {"alpha": -8 * math.log(soft), "beta": 8.0}}
    if sinks:
        options["sinks"] = sinks
    return {"position": position, "options": options}


def save_adapted(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write an adapted model in its library's layout; for transformers it is `save_pretrained`.

    A model that `priorzoo adapt` or `load_adapted` put on a base is written as an adapter folder,
    without the base.

    ValueError for a model in which PEFT has put adapters: its `save_pretrained` writes these alone,
    without priors.
    """
    record = model.__dict__.get(RECORD)
    if isinstance(record, dict) and "base" in record:
        return import_module("zoo.adapters.released").save_adapter(model, Path(folder))
    if getattr(model, "peft_config", None) is not None:
        raise ValueError(
            f"{type(model).__name__} has adapters of PEFT, and would be saved without its priors: "
            "merge_and_unload() it first, or save_pretrained() the adapter with "
            "modules_to_save=['position_bias']"
        )
    folder = Path(folder)
    _library(model).save(model, folder)
    # safetensors makes files that only their owner can read.
    for file in folder.glob("model*.safetensors"):
        shutil.copymode(folder / "config.json", file)


def list_adapters(pattern: str = "*") -> list[str]:
    """Names of the adapters of released models that ship, which match a shell pattern."""
    names = [path.parent.name for path in WEIGHTS.glob(f"*/{ADAPTER}")]
    return fnmatch.filter(sorted(names), pattern)


def find_folder(name: str) -> str:
    """The folder of a shipped adapter, or of a base that `priorzoo fetch-data` made, by its name;
    any other path or name."""
    if Path(name).is_dir():
        return name
    for file in (WEIGHTS / name / ADAPTER, data_folder() / name / "config.json"):
        if file.is_file():
            return str(file.parent)
    return name


def hub_name(name: str) -> tuple[str, Options]:
    """What transformers takes for a model: its folder or name of the hub; of a file NAME.gguf its
    folder and `gguf_file`."""
    if not name.endswith(".gguf"):
        return name, {}
    file = Path(name)
    return str(file.parent), {"gguf_file": file.name}


def load_adapted(
    folder: str | os.PathLike[str], *, base: str | None = None, merge: bool = False, **kwargs: Any
) -> Any:
    """The model that `save_adapted` wrote; kwargs as in the library's loader. ValueError where the
    folder has none.

    Args:
        folder: or the name of a shipped adapter (`priorzoo list --adapters`).
        base: of an adapter folder, where its base model is; by default where it was.
        merge: add LoRA to the weights; the model is a whole one then.
    """
    folder = find_folder(os.fspath(folder))
    if (Path(folder) / ADAPTER).is_file():
        released = import_module("zoo.adapters.released")
        return released.load_adapter(Path(folder), base=base, merge=merge, **kwargs)
    if base is not None:
        raise ValueError(
            f"{folder} has no {ADAPTER}: it holds a whole model, or none, and takes no base"
        )
    config = _config(folder)
    if RECORD not in config:
        raise ValueError(
            f"{folder} holds no adapted model; expected a config.json that save_adapted wrote"
        )
    library = "timm" if "architecture" in config else "transformers"
    return import_module(LIBRARIES[library]).load(Path(folder), **kwargs)


def is_adapted(folder: str | os.PathLike[str]) -> bool:
    """Whether `load_adapted` loads what is in a folder."""
    return RECORD in _config(folder)


def _config(folder: str | os.PathLike[str]) -> Options:
    try:
        return read_object(Path(folder) / "config.json")
    except (OSError, ValueError):
        return {}


def _library(model: nn.Module) -> ModuleType:
    """The file of `LIBRARIES` for a model."""
    name = type(model).__name__
    packages = {base.__module__.partition(".")[0] for base in type(model).__mro__}
    if "modalities" in packages:
        raise ValueError(
            f"{name} is a model of the zoo: choose its position method when it is made"
        )
    for library, file in LIBRARIES.items():
        if library in packages:
            return import_module(file)
    raise ValueError(
        f"unsupported model {name}: expected a transformers or timm model; in modules of your own, "
        "use zoo.layers.Attention"
    )
