"""Errors as a command tells them: which come from outside, and each in one line."""

from __future__ import annotations

import re
from importlib.util import find_spec

import torch

__all__ = ["from_outside", "one_line", "printable", "ran_out_of_memory", "require"]

# Values, files, connections, devices, memory; and the libraries whose errors are none of these.
_OUTSIDE = (ValueError, OSError, ImportError, RuntimeError, MemoryError, EOFError)
_LIBRARIES = ("safetensors", "pyarrow", "huggingface_hub", "httpx", "requests", "tokenizers", "deepspeed", "PIL")
# How the allocators of torch and the C++ library name it, where they do not raise MemoryError or torch.OutOfMemoryError.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "bad_alloc", "CUBLAS_STATUS_ALLOC_FAILED")


def require(package: str, purpose: str, extra: str) -> None:
    """ImportError with the command that installs it, where a package is missing: said before the work that needs it."""
    if find_spec(package) is None:
        raise ImportError(f"{purpose} needs the package {package}: pip install 'priorzoo[{extra}]'")


def from_outside(error: BaseException) -> bool:
    """Whether the cause is what a command was given or where it runs. Of any other error this program is the cause."""
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
        return f"out of memory{f' for {size[1]}' if size else ''}: lower lengths or batches, or use a smaller model"
    text = " ".join(str(error).split()) if str(error).count("\n") > 5 else str(error).strip().replace("\n", "; ")
    return printable(text)[:1000] or type(error).__name__


def printable(text: str) -> str:
    """Text for a terminal: control characters, which may be commands to it, as \\x1b and the like."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
