"""C that ships with the package, compiled when first used."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from modalities.files import data_folder

__all__ = ["compile_library", "compiler", "library"]


def compiler() -> str | None:
    """A C compiler, where there is one."""
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def compile_library(source: Path, target: Path, *flags: str) -> None:
    """A shared library of one C file; flags follow the source, such as -lm.

    Raises:
        OSError: without a compiler, or where it fails.
    """
    cc = compiler()
    if cc is None:
        raise OSError(
            f"{source.name} is compiled when first used, and no C compiler is installed: expected cc, gcc or clang"
        )
    command = [cc, "-shared", "-fPIC", "-O3", "-o", str(target), str(source), *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), f"exit code {done.returncode}")
        raise OSError(f"{cc} cannot compile {source}: {said}")


@cache
def library(source: Path) -> ctypes.CDLL:
    """The library of a C file, kept in the data folder's cache under the file's digest. Raises as `compile_library`."""
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    kept = data_folder() / "cache" / f"{source.stem}-{digest}.so"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            dir=kept.parent
        ) as folder:  # processes that compile at the same time do no harm
            made = Path(folder, kept.name)
            compile_library(source, made, "-lm")
            os.replace(made, kept)
    return ctypes.CDLL(str(kept))
