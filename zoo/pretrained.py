"""Weights that ship: their manifest, and their files with the digests that it names."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

from zoo.errors import did_you_mean
from zoo.files import file_sha256, read_object

WEIGHTS = Path(__file__).parent / "weights"
# Of a checkout: what is too large for the package.
RELEASE = Path(__file__).parents[1] / "release"


def manifest() -> dict[str, dict[str, Any]]:
    """Tagged name → {file, sha256, license, recipe, seed, commit, data, …} of the weights that
    ship."""
    return _read_manifest(WEIGHTS)


@cache
def _read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / "manifest.json"
    digest = folder / "manifest.sha256"
    if digest.exists() and file_sha256(path) != digest.read_text().strip():
        raise ValueError(
            f"{path} is damaged: its SHA-256 is not that in {digest.name}; "
            "install the package again"
        )
    return read_object(path)


def weights_entry(name: str) -> dict[str, Any]:
    """What the manifest says of a tagged name. ValueError, with the nearest names, where it has no
    weights."""
    if name in manifest():
        return manifest()[name]
    model = name.partition(".")[0]
    tagged = [full for full in manifest() if full.partition(".")[0] == model]
    if tagged:
        hint = f"there are {', '.join(tagged)}"
    else:
        near = did_you_mean(name, manifest(), most=3)
        hint = near or "`priorzoo list --pretrained` prints all"
    raise ValueError(f"no weights {name!r}; {hint}")


def verified_file(name: str) -> Path:
    """The weights file of a tagged name; ValueError where its digest differs from the manifest.

    It is in the package, or in the folder that $PRIORZOO_WEIGHTS names, by default `release` in a
    checkout.
    """
    entry = weights_entry(name)
    path = WEIGHTS / entry["file"]
    if not path.is_file():
        path = Path(os.environ.get("PRIORZOO_WEIGHTS") or RELEASE) / entry["file"]
    if not path.is_file():
        raise FileNotFoundError(
            f"the weights of {name} ({entry['bytes'] / 1e6:.1f} MB) are neither in the package "
            f"nor at {path}: set PRIORZOO_WEIGHTS to a folder that has them"
        )
    digest = file_sha256(path)
    if digest != entry["sha256"]:
        raise ValueError(
            f"{path} is damaged: its SHA-256 is {digest}, the manifest says {entry['sha256']}"
        )
    return path
