"""What an error says about a name that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean"]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ "did you mean 'x'? " for the closest known name, or nothing where none is close."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {near[0]!r}? " if near else ""
