"""Weights: find, verify, load. Only safetensors, and only with the SHA-256 that the manifest states."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from zoo.errors import require
from zoo.files import file_sha256, replacing_path, write_json, write_text
from zoo.inputs import read_object, read_tensors
from zoo.model import ZooModel
from zoo.naming import did_you_mean

__all__ = [
    "BUNDLED",
    "WEIGHTS",
    "cache_folder",
    "list_weights",
    "load_pretrained",
    "manifest",
    "resolve_tag",
    "verified_file",
    "write_manifest",
]

WEIGHTS = Path(__file__).parent / "weights"
RELEASE = Path(__file__).parents[1] / "release"  # of a checkout: what is too large for the package
BUNDLED = 2_000_000  # bytes of the largest file in the package; others are in a release folder or a hub repository


def manifest(folder: Path | None = None) -> dict[str, dict[str, Any]]:
    """Tagged name → {file, sha256, license, recipe, seed, commit, data, …} of `folder`, by default of the weights that ship."""
    return _read_manifest(folder or WEIGHTS)


@cache
def _read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    path, digest = folder / "manifest.json", folder / "manifest.sha256"
    if not path.exists():
        return {}
    if digest.exists() and file_sha256(path) != digest.read_text().strip():
        raise ValueError(f"{path} is damaged: its SHA-256 is not that in {digest.name}; install the package again")
    return read_object(path)


def write_manifest(entries: Mapping[str, Any], folder: Path = WEIGHTS) -> None:
    """Write manifest.json, and manifest.sha256 that verifies it."""
    write_json(folder / "manifest.json", entries)
    write_text(folder / "manifest.sha256", file_sha256(folder / "manifest.json") + "\n")


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
    raise ValueError(f"no weights ship for {base!r}; {hint}`priorzoo list --pretrained` prints all")


def verified_file(name: str, folder: Path | None = None) -> Path:
    """The weights file of a tagged name, after its digest matched.

    Files above `BUNDLED` bytes are not in the package but in a checkout's folder `release`, or where $PRIORZOO_WEIGHTS or the
    manifest's entry `source` says: a folder, an http(s) address, or `hf:OWNER/NAME[@REVISION]`, a repository of the hub. What
    was fetched is not fetched again: `cache_folder()`, or the hub library's own cache, has it.

    Raises:
        OSError: if the file is nowhere, or does not come; one line says what to set.
        ValueError: if its digest differs from the manifest.
        ImportError: for a repository of the hub without huggingface_hub.
    """
    entry = manifest(folder)[name]
    path = (folder or WEIGHTS) / entry["file"]
    if not path.exists():
        path = _outside_package(name, entry)
    digest = file_sha256(path)
    if digest != entry["sha256"]:
        raise ValueError(f"{path} is damaged: its SHA-256 is {digest}, the manifest says {entry['sha256']}")
    return path


def cache_folder() -> Path:
    """Where fetched weights are, in the user's cache folder."""
    from platformdirs import user_cache_path

    return user_cache_path("priorzoo", appauthor=False) / "weights"


def _outside_package(name: str, entry: Mapping[str, Any]) -> Path:
    """The file of an entry that the package does not have, fetched where it must be."""
    file, source = entry["file"], os.environ.get("PRIORZOO_WEIGHTS", "")
    if not source and (RELEASE / file).is_file():
        return RELEASE / file
    source = source or entry.get("source", "")
    cached = cache_folder() / entry["sha256"][:16] / file
    if source.startswith("hf:"):
        return _from_hub(name, source.removeprefix("hf:"), file)
    if source.startswith(("http://", "https://")):
        if not cached.is_file() or file_sha256(cached) != entry["sha256"]:
            from zoo.download import download

            with replacing_path(cached) as temporary:
                download(f"{source.rstrip('/')}/{file}", temporary, size=entry["bytes"])
                if (digest := file_sha256(temporary)) != entry["sha256"]:
                    raise ValueError(f"{source}/{file}: its SHA-256 is {digest}, the manifest says {entry['sha256']}")
        return cached
    if "://" in source:
        raise ValueError(f"PRIORZOO_WEIGHTS={source!r}: expected a folder, an http(s) address or hf:OWNER/NAME")
    place = Path(source) / file if source else cached
    if place.is_file():
        return place
    if source:
        raise FileNotFoundError(f"the weights of {name} should be at {place}, by PRIORZOO_WEIGHTS")
    raise FileNotFoundError(
        f"the weights of {name} ({file}, {entry['bytes'] / 1e6:.1f} MB) are neither in the package nor in a checkout's "
        f"release/ nor in {cached.parent}: set PRIORZOO_WEIGHTS to a folder, http(s) address or hf:OWNER/NAME that has it"
    )


def _from_hub(name: str, repository: str, file: str) -> Path:
    """A file of a repository, in the hub library's own cache, which resumes and locks."""
    require("huggingface_hub", f"PRIORZOO_WEIGHTS=hf:{repository}", "hub")
    from huggingface_hub import hf_hub_download

    owner_name, _, revision = repository.partition("@")
    try:
        return Path(hf_hub_download(owner_name, file, revision=revision or None))
    except (OSError, ValueError) as error:
        # The library's errors are of these two kinds.
        reason = " ".join(str(error).split())[:300]
        raise FileNotFoundError(f"the weights of {name} do not come from hf:{repository}: {reason}") from error


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
