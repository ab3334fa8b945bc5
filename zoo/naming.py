"""What an error message says about an unknown name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean", "nearest"]


def did_you_mean(word: str, known: Iterable[str], *, cutoff: float = 0.6, form: str = "{}") -> str:
    """ "did you mean 'x'? " for the closest known name, written as `form` has it, or nothing where none is close."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"did you mean {form.format(near[0])!r}? " if near else ""


def nearest(word: str, choices: Iterable[str]) -> str:
    """The end of an error message: the closest valid choice, or all of them where none is close."""
    choices = sorted(choices)
    return did_you_mean(word, choices, cutoff=0.5).strip() or f"valid: {', '.join(choices)}"
