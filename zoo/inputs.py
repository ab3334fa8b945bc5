"""Safe readers for untrusted JSON and tensors: what is wrong is a ValueError of one line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

__all__ = ["LARGEST_JSON", "check_finite", "parse_json", "read_json", "read_object", "read_tensors"]

LARGEST_JSON = 1 << 26  # bytes; in memory it takes about ten times as many


def parse_json(data: str | bytes, where: str) -> Any:
    """The value of JSON; `where` names it in the ValueError for what is no JSON or is nested too deep."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        reason = "its values are nested too deep" if isinstance(error, RecursionError) else str(error)
        raise ValueError(f"{where}: not JSON ({reason})") from error


def read_json(path: str | os.PathLike[str], *, most: int = LARGEST_JSON) -> Any:
    """The value of a JSON file. ValueError as in `parse_json`, and for more than `most` bytes."""
    with open(path, "rb") as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise ValueError(f"{path}: {size:,} bytes of JSON; at most {most:,} are read")
        return parse_json(file.read(), str(path))


def read_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The object of a JSON file, read as by `read_json`."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def read_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a .safetensors file. ValueError for another or damaged file, and for a NaN or an infinity."""
    path = Path(path)
    with path.open("rb"):  # the library has errors of its own for what cannot be opened
        pass
    try:
        tensors = load_file(path)
    except (SafetensorError, RecursionError) as error:
        raise ValueError(f"{path} is no safetensors file, or is damaged: {error}") from error
    check_finite(tensors, path)
    return tensors


def check_finite(tensors: Mapping[str, object], path: str | os.PathLike[str]) -> None:
    """ValueError for a tensor of a file that has a NaN or an infinity."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or not tensor.numel():
            continue
        if not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        # One pass without a copy, where `isfinite` makes one: a NaN is both the least and the greatest.
        ends = (real if real.itemsize > 1 else real.float()).aminmax()
        if not torch.isfinite(torch.stack([*ends])).all():
            raise ValueError(f"{path}: the tensor {name!r} has values that are not finite (NaN or infinity)")
