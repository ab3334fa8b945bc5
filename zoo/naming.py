"""Checks of names given by users, with errors that suggest the nearest valid name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any

__all__ = ["check_options", "did_you_mean"]


def did_you_mean(word: str, known: Iterable[str], *, most: int = 1) -> str:
    """ "did you mean 'x'? " for the closest known names, at most `most`; "" where none is close."""
    near = difflib.get_close_matches(word, list(known), n=most)
    return f"did you mean {', '.join(map(repr, near))}? " if near else ""


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
