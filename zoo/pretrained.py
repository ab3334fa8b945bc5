"""Weights: find, verify, load. Only safetensors, and only with the SHA-256 that the manifest states."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from zoo.files import file_sha256
from zoo.inputs import read_object, read_tensors
from zoo.model import ZooModel
from zoo.naming import did_you_mean

__all__ = ["WEIGHTS", "list_weights", "load_pretrained", "manifest", "resolve_tag", "verified_file"]

WEIGHTS = Path(__file__).parent / "weights"


def manifest(folder: Path | None = None) -> dict[str, dict[str, Any]]:
    """Tagged name → {file, sha256, license, recipe, seed, commit, data, …}, as `folder`'s manifest.json has it; by default
    that of the weights that ship."""
    return _read_manifest(folder or WEIGHTS)


@cache
def _read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / "manifest.json"
    return read_object(path) if path.exists() else {}


def list_weights(folder: Path | None = None) -> list[str]:
    """Tagged names with weights."""
    return list(manifest(folder))


def resolve_tag(name: str, folder: Path | None = None) -> str:
    """`name` with its tag: itself, or the architecture's first tag in the manifest.

    Raises:
        ValueError: if there are no such weights, with those that exist.
    """
    known = list_weights(folder)
    if name in known:
        return name
    base, _, tag = name.partition(".")
    tags = [full.partition(".")[2] for full in known if full.partition(".")[0] == base]
    if not tag and tags:
        return f"{base}.{tags[0]}"
    if tags:
        raise ValueError(f"{base} has no weights {tag!r}; it has: {', '.join(tags)}")
    hint = did_you_mean(base, dict.fromkeys(full.partition(".")[0] for full in known), most=3)
    raise ValueError(f"no weights ship for {base!r}; {hint}`python -m zoo list --pretrained` prints all")


def verified_file(name: str, folder: Path | None = None) -> Path:
    """The weights file of a tagged name, after its digest matched.

    Raises:
        FileNotFoundError: if the file is missing.
        ValueError: if its digest differs from the manifest.
    """
    entry = manifest(folder)[name]
    path = (folder or WEIGHTS) / entry["file"]
    if not path.exists():
        raise FileNotFoundError(f"the weights of {name} should be at {path}; reinstall the package")
    found = file_sha256(path)
    if found != entry["sha256"]:
        raise ValueError(f"{path} is damaged: its SHA-256 is {found}, the manifest says {entry['sha256']}")
    return path


def load_pretrained(model: ZooModel, name: str, folder: Path | None = None) -> ZooModel:
    """Load the weights of a tagged name into `model`, strictly, and the names of its classes.

    Raises:
        ValueError: for a damaged file, or weights that are not finite or do not match the model (for example after an
            override).
    """
    state = read_tensors(verified_file(name, folder))
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"the weights of {name} do not fit this model: {error}") from error
    model.class_names = tuple(manifest(folder)[name].get("class_names", ()))
    return model
