"""The files of a spec's tokenizer, and their copies in a saved model's folder, which come first."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from modalities.tokenizers.outside import fingerprint_of_tokenizer, open_tokenizer
from zoo.files import replacing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_T = TypeVar("_T")
# In a saved model's folder.
COPY = "tokenizer.json"
# By the name in a spec; of "hf:NAME" the folder.
_copies: dict[str, Path] = {}


def tokenizer_file(spec: str) -> Path | None:
    """The file of a spec "FILE.json[?…]": the copy beside the model that was loaded, else
    FILE.json; None of other specs."""
    name = spec.partition("?")[0]
    return _copies.get(name, Path(name)) if name.endswith(".json") else None


def tokenizer_folder(name: str) -> str:
    """The folder or repository of a spec "hf:NAME": the one of the model that was loaded, where it
    holds a copy, else NAME."""
    return str(_copies.get(f"hf:{name}", name))


def load_outside(name: str, wrap: Callable[[PreTrainedTokenizerBase, str], _T]) -> _T:
    """`wrap(tokenizer, name)` of a spec "hf:NAME"; the same object for the same arguments. Errors
    as in `open_tokenizer`."""
    return _wrapped(wrap, name, tokenizer_folder(name))


@lru_cache(maxsize=8)
def _wrapped(wrap: Callable[[PreTrainedTokenizerBase, str], _T], name: str, folder: str) -> _T:
    return wrap(open_tokenizer(folder), name)


def save_copy(spec: str, folder: Path) -> list[str]:
    """Copy a spec's file, or its folder of transformers, into a saved model's folder; names of the
    files written."""
    if spec.startswith("hf:"):
        return _save_folder(tokenizer_folder(spec.removeprefix("hf:")), folder)
    file = tokenizer_file(spec)
    if file is None or not file.is_file():
        return []
    content = file.read_bytes()
    with replacing(folder / COPY, "wb") as out:
        out.write(content)
    return [COPY]


def _save_folder(name: str, folder: Path) -> list[str]:
    # Not a tokenizer of the hub, which its name finds.
    if not Path(name).is_dir():
        return []
    with tempfile.TemporaryDirectory() as temporary:
        open_tokenizer(name).save_pretrained(temporary)
        files = sorted(path for path in Path(temporary).iterdir() if path.is_file())
        for path in files:
            with replacing(folder / path.name, "wb") as out:
                out.write(path.read_bytes())
    return [path.name for path in files]


def use_copy(spec: str, folder: Path) -> None:
    """Read the spec's tokenizer from a saved model's folder from now on, where it has one.
    ValueError where another model that was loaded brought another one of this name."""
    if spec.startswith("hf:"):
        name = spec
        copy = folder.absolute()
        exists = (folder / "tokenizer_config.json").is_file()
    else:
        name = spec.partition("?")[0]
        copy = (folder / COPY).absolute()
        exists = name.endswith(".json") and copy.is_file()
    if not exists:
        return
    other = _copies.get(name, copy)
    if other != copy and other.exists() and _content(other) != _content(copy):
        both = f"{other} and {copy} differ and are both called {name!r}"
        raise ValueError(f"{both}: read their models one after the other")
    _copies[name] = copy


def _content(place: Path) -> bytes | str:
    if place.is_file():
        return place.read_bytes()
    return fingerprint_of_tokenizer(open_tokenizer(str(place)))
