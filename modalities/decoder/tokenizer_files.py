"""Files of the `tokenizers` library, checked before it sees them: it ends the process where memory for an id is not there, and
its panics are no `Exception`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zoo.inputs import read_json

__all__ = ["MOST_IDS", "check_tokenizer_file", "no_panic", "read_backend"]

MOST_IDS = 2**24  # ids of a vocabulary
_LARGEST = 1 << 28  # bytes of a file; the largest in use have some 30 million


def check_tokenizer_file(path: Path) -> dict[str, Any]:
    """The content of a tokenizer.json.

    Raises:
        ValueError: for what is none, or has an id that no vocabulary has.
    """
    found = read_json(path, most=_LARGEST)
    if not isinstance(found, dict) or not isinstance(found.get("model"), dict):
        raise ValueError(f"{path} is not a `tokenizers` JSON file: it has no object 'model'")
    added, vocabulary = found.get("added_tokens") or [], found["model"].get("vocab") or {}
    if not isinstance(added, list) or not all(isinstance(one, dict) for one in added):
        raise ValueError(f"{path}: added_tokens is not a list of objects")
    ids = [(one.get("content"), one.get("id")) for one in added]
    ids += vocabulary.items() if isinstance(vocabulary, dict) else []
    for token, number in ids:
        if type(number) is not int or not 0 <= number < MOST_IDS:
            raise ValueError(f"{path}: token {token!r:.80} has id {number!r:.80}; expected 0 to {MOST_IDS - 1:,}")
    return found


def read_backend(spec: str, path: Path, tokenizers: Any) -> Any:
    """The tokenizer of a file, of the class of the library `tokenizers`. Raises ValueError for what is none."""
    found = check_tokenizer_file(path)
    try:
        with no_panic(spec):  # what was checked and nothing else: parsers differ where a key comes twice
            return tokenizers.Tokenizer.from_str(json.dumps(found))
    except Exception as error:  # the library raises a bare Exception for every malformed file
        raise ValueError(f"tokenizer {spec!r}: {path} is not a `tokenizers` JSON file: {error}") from error


@contextmanager
def no_panic(name: str) -> Iterator[None]:
    """Turns a panic of the library, such as by a pattern that takes forever, and text with half of a surrogate pair into a
    ValueError."""
    try:
        yield
    except TypeError as error:
        raise ValueError(f"tokenizer {name!r} takes text of whole Unicode characters: {error}") from error
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        told = " ".join(str(error).split())[:200]
        raise ValueError(f"tokenizer {name!r} failed inside its library: {told}") from error
