"""What users give, checked, and errors in one line that say what is valid and suggest the nearest
name."""

from __future__ import annotations

import difflib
import inspect
import math
import numbers
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import field, fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import SymFloat, SymInt

# Options of methods, priors and models, by name.
Options: TypeAlias = dict[str, Any]
# Types of numbers; torch.compile traces with symbols.
WHOLE = (int, np.integer, SymInt)
REAL = (float, np.floating, SymFloat, *WHOLE)


def did_you_mean(
    word: str, known: Iterable[str], *, most: int = 1, cutoff: float = 0.6, form: str = "{}"
) -> str:
    """ "did you mean 'x'? " for at most `most` close names, each written as `form`, those that
    differ in case first; or ""."""
    known = list(known)
    same = [name for name in known if name.casefold() == word.casefold()]
    close = difflib.get_close_matches(word, known, n=most, cutoff=cutoff)
    names = list(dict.fromkeys(same + close))[:most]
    if not names:
        return ""
    choices = ", ".join(repr(form.format(name)) for name in names)
    return f"did you mean {choices}? "


def nearest(word: str, choices: Iterable[str]) -> str:
    """The end of an error message: the closest valid choice, or all of them where none is close."""
    choices = sorted(choices)
    return did_you_mean(word, choices, cutoff=0.5).strip() or f"valid: {', '.join(choices)}"


def check_options(
    owner: str,
    make: Callable[..., object],
    options: Collection[str],
    *,
    fixed: Collection[str] = (),
    defaults: Collection[str] = (),
) -> None:
    """ValueError, in the name of `owner`, for an option that the signature of `make` does not have,
    or a missing one.

    The caller sets the parameters `fixed`, which are no options, and `defaults` unless `options`
    does.
    """
    parameters = inspect.signature(make).parameters
    valid = [name for name in parameters if name not in fixed]
    for option in options:
        if option not in valid:
            hint = did_you_mean(option, valid)
            raise ValueError(
                f"{owner} has no option {option!r}; {hint}It takes: {', '.join(valid) or 'none'}"
            )
    for name in valid:
        required = parameters[name].default is inspect.Parameter.empty
        if required and name not in options and name not in defaults:
            raise ValueError(f"{owner} needs the option {name!r}")


def check_whole(what: str, value: object, least: int) -> None:
    """ValueError unless `value` is a whole number of `least` or more. True and False are none."""
    if not isinstance(value, WHOLE) or isinstance(value, bool) or value < least:
        raise ValueError(f"{what} must be a whole number of {least} or more, got {value!r}")


def check_number(
    what: str, value: Any, *, above: float | None = None, least: float | None = None
) -> None:
    """ValueError unless `value` is a finite number, more than `above` and at least `least`. True
    and False are none."""
    bound = ""
    if above is not None:
        bound = f" above {above:g}"
    elif least is not None:
        bound = f" of {least:g} or more"
    finite = (
        isinstance(value, REAL) and not isinstance(value, bool) and -math.inf < value < math.inf
    )
    too_small = finite and (
        (above is not None and value <= above) or (least is not None and value < least)
    )
    if not finite or too_small:
        raise ValueError(f"{what} must be a finite number{bound}, got {value!r}")


def check_flags(**flags: object) -> None:
    """ValueError for a switch that is neither True nor False, such as "false", which would be
    on."""
    for name, value in flags.items():
        if not isinstance(value, bool | np.bool_):
            raise ValueError(f"{name} must be True or False, got {value!r}")


def check_grid(what: str, grid: object) -> None:
    """ValueError unless `grid` is (height, width), whole numbers of 1 or more."""
    if not isinstance(grid, tuple | list) or len(grid) != 2:
        raise ValueError(f"{what} must be (height, width) in patches, got {grid!r}")
    for side in grid:
        check_whole(f"each side of {what}", side, 1)


# Values, files, connections, devices, memory; and the libraries whose errors are none of these.
_OUTSIDE = (ValueError, OSError, ImportError, RuntimeError, MemoryError, EOFError)
_LIBRARIES = (
    "safetensors",
    "pyarrow",
    "huggingface_hub",
    "httpx",
    "httpx2",
    "tokenizers",
    "deepspeed",
    "PIL",
)
# How the allocators of torch and the C++ library name it, where they do not raise MemoryError or
# torch.OutOfMemoryError.
_NO_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "bad_alloc",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def require(package: str, purpose: str, extra: str) -> None:
    """ImportError with the command that installs it, where a package is missing: said before the
    work that needs it."""
    if find_spec(package) is None:
        raise ImportError(f"{purpose} needs the package {package}: pip install 'priorzoo[{extra}]'")


def from_outside(error: BaseException) -> bool:
    """Whether the cause is what a command was given or where it runs. Of any other error this
    program is the cause."""
    return isinstance(error, _OUTSIDE) or type(error).__module__.partition(".")[0] in _LIBRARIES


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an error is an allocator's."""
    if isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY):
        return True
    return isinstance(error, MemoryError | torch.OutOfMemoryError)


def one_line(error: BaseException) -> str:
    """What an error says, on a line of at most a thousand characters."""
    if ran_out_of_memory(error):
        size = re.search(r"[Tt]ried to allocate ([\d.]+ ?\w+)", str(error))
        what = f"out of memory for {size[1]}" if size else "out of memory"
        return f"{what}: lower lengths or batches, or use a smaller model"
    if isinstance(error, FileExistsError | NotADirectoryError) and error.filename:
        path = Path(error.filename)
        for part in (path, *path.parents):
            if part.is_file():
                return printable(f"{part}: a file is where a folder is expected")
    text = str(error)
    if text.count("\n") > 5:
        text = " ".join(text.split())
    else:
        text = text.strip().replace("\n", "; ")
    return printable(text)[:1000] or type(error).__name__


def printable(text: str) -> str:
    """Text for a terminal: control characters, which may be commands to it, as \\x1b and the
    like."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


LARGEST_SEED = 2**63 - 1
# Tokens, or patches, of a training sample.
LONGEST_CONTEXT = 2**24
# Parameters of a model.
MOST_PARAMETERS = 2**40

_WORDS = {bool: "true or false", str: "a string", type(None): "none", dict: "values by name"}


def bounded(default: Any, least: float, most: float) -> Any:
    """A dataclass field whose numbers lie in [least, most]."""
    return field(default=default, metadata={"bounds": (least, most)})


def check_fields(config: Any, prefix: str = "") -> None:
    """ValueError for the first field of a dataclass that does not fit its annotation and bounds;
    floats must be finite.

    A whole number is a float too, lists and tuples are one kind (JSON knows lists alone), and a
    bool is no number.
    """
    hints = _hints(config.__class__)
    for entry in fields(config):
        value = getattr(config, entry.name)
        hint = hints[entry.name]
        bounds = entry.metadata.get("bounds", (-math.inf, math.inf))
        if not _fits(value, hint, bounds):
            raise ValueError(
                f"{prefix}{entry.name}={value!r:.80}: expected {_expected(hint, bounds)}"
            )


def check_parameters(count: int) -> None:
    """ValueError for a configuration of about `count` parameters, more than `MOST_PARAMETERS`."""
    if count > MOST_PARAMETERS:
        raise ValueError(
            f"a model of about {count:,} parameters; at most {MOST_PARAMETERS:,} (2⁴⁰)"
        )


@cache
def _hints(kind: type) -> dict[str, object]:
    return typing.get_type_hints(kind)


def _fits(value: Any, hint: Any, bounds: tuple[float, float]) -> bool:
    """Whether a value is of an annotation's type, and its numbers are within the bounds."""
    kind = typing.get_origin(hint) or hint
    parts = typing.get_args(hint)
    if kind is Any:
        return True
    if kind in (typing.Union, types.UnionType):
        return any(_fits(value, part, bounds) for part in parts)
    if kind in (int, float):
        return _is_number(value, kind, bounds)
    if kind in (list, tuple):
        if not isinstance(value, list | tuple):
            return False
        if _has_any_length(kind, parts):
            return all(_fits(item, parts[0], bounds) for item in value)
        if len(value) != len(parts):
            return False
        return all(_fits(item, part, bounds) for item, part in zip(value, parts, strict=True))
    return isinstance(value, Mapping if kind is dict else kind)


def _is_number(value: Any, kind: type, bounds: tuple[float, float]) -> bool:
    number = numbers.Integral if kind is int else numbers.Real
    if not issubclass(value.__class__, number) or value.__class__ is bool:
        return False
    least, most = bounds
    try:
        return math.isfinite(value) and least <= value <= most
    except OverflowError:
        # A whole number beyond all floats.
        return False


def _has_any_length(kind: type, parts: tuple[Any, ...]) -> bool:
    """Whether an annotation is list[X] or tuple[X, ...]."""
    return kind is list or parts[1:] == (Ellipsis,)


def _expected(hint: Any, bounds: tuple[float, float]) -> str:
    """An annotation with its bounds, in words."""
    kind = typing.get_origin(hint) or hint
    parts = typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        return " or ".join(_expected(part, bounds) for part in parts)
    if kind in (int, float):
        least, most = bounds
        word = "a whole number" if kind is int else "a number"
        if math.isinf(least):
            return word
        if math.isinf(most):
            return f"{word}, at least {least:,}"
        return f"{word} from {least:,} to {most:,}"
    if kind in (list, tuple):
        items = "a list" if _has_any_length(kind, parts) else f"{len(parts)} values"
        return f"{items}, each {_expected(parts[0], bounds)}"
    return _WORDS.get(kind, getattr(kind, "__name__", str(kind)))
