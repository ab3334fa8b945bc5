"""Checks of names given by users, with errors that suggest the nearest valid name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any

__all__ = ["check_options", "did_you_mean", "nearest"]


def did_you_mean(word: str, known: Iterable[str], *, most: int = 1, cutoff: float = 0.6, form: str = "{}") -> str:
    """ "did you mean 'x'? " for the closest known names, at most `most`, each written as `form`; "" where none is close."""
    near = difflib.get_close_matches(word, list(known), n=most, cutoff=cutoff)
    return f"did you mean {', '.join(repr(form.format(name)) for name in near)}? " if near else ""


def nearest(word: str, choices: Iterable[str]) -> str:
    """The end of an error message: the closest valid choice, or all of them where none is close."""
    choices = sorted(choices)
    return did_you_mean(word, choices, cutoff=0.5).strip() or f"valid: {', '.join(choices)}"


def check_options(
    owner: str,
    make: Callable[..., Any],
    options: Collection[str],
    *,
    fixed: Collection[str] = (),
    defaults: Collection[str] = (),
) -> None:
    """Check the names of keyword options for `make`, whose signature says what it takes.

    Args:
        owner: what the options belong to, for the message.
        fixed: parameters that the caller sets itself; they are no options.
        defaults: parameters that the caller sets unless `options` does.

    Raises:
        ValueError: for an unknown option, or a missing required one.
    """
    parameters = inspect.signature(make).parameters
    valid = [name for name in parameters if name not in fixed]
    for option in options:
        if option not in valid:
            hint = did_you_mean(option, valid)
            raise ValueError(f"{owner} has no option {option!r}; {hint}It takes: {', '.join(valid) or 'none'}")
    for name in valid:
        if parameters[name].default is inspect.Parameter.empty and name not in options and name not in defaults:
            raise ValueError(f"{owner} needs the option {name!r}")
