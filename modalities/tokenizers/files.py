"""Files of the library `tokenizers`, checked before it sees them: it ends the process where memory
for an id is not there, and its panics are no `Exception`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from zoo.files import read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Ids of a vocabulary.
MOST_IDS = 2**24
# Bytes of a file; the largest in use have some 30 million.
_LARGEST = 1 << 28


def check_tokenizer_file(path: Path) -> dict[str, object]:
    """The content of a tokenizer.json. ValueError for what is none, or has an id outside 0 to
    `MOST_IDS`."""
    content = read_json(path, most=_LARGEST)
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise ValueError(f"{path} is not a `tokenizers` JSON file: it has no object 'model'")
    added = content.get("added_tokens") or []
    vocabulary = content["model"].get("vocab") or {}
    if not isinstance(added, list) or not all(isinstance(entry, dict) for entry in added):
        raise ValueError(f"{path}: added_tokens is not a list of objects")
    ids = [(entry.get("content"), entry.get("id")) for entry in added]
    if isinstance(vocabulary, dict):
        ids += vocabulary.items()
    for token, number in ids:
        if type(number) is not int or not 0 <= number < MOST_IDS:
            raise ValueError(
                f"{path}: token {token!r:.80} has id {number!r:.80}; expected 0 to {MOST_IDS - 1:,}"
            )
    return content


def read_backend(spec: str, path: Path, tokenizers: ModuleType) -> Tokenizer:
    """The tokenizer of a file, of the class of the library `tokenizers`. Raises ValueError for what
    is none."""
    content = check_tokenizer_file(path)
    try:
        # The content that was checked, not the file: parsers differ where a key comes twice.
        with no_panic(spec):
            return tokenizers.Tokenizer.from_str(json.dumps(content))
    # The library raises a bare Exception for every malformed file.
    except Exception as error:
        raise ValueError(
            f"tokenizer {spec!r}: {path} is not a `tokenizers` JSON file: {error}"
        ) from error


@contextmanager
def no_panic(name: str) -> Iterator[None]:
    """Turn a panic of the library and text with half of a surrogate pair into a ValueError."""
    try:
        yield
    except TypeError as error:
        raise ValueError(
            f"tokenizer {name!r} takes text of whole Unicode characters: {error}"
        ) from error
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        message = " ".join(str(error).split())[:200]
        raise ValueError(f"tokenizer {name!r} failed inside its library: {message}") from error
