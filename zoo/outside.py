"""Python files and modules that a user names on a command line, imported once: they register priors, or hold recipes."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["import_file", "import_named"]


def import_file(path: str | Path) -> ModuleType:
    """The module in a file. Named twice, it is imported once.

    Raises:
        FileNotFoundError: where there is no such file.
        ImportError: where the file cannot be imported; the cause is attached.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise FileNotFoundError(f"no file {str(path)!r} to import")
    name = "outside" + re.sub(r"\W", "_", str(file.with_suffix("")))  # unlike any module's own name
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file: expected a name that ends in .py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, Exception):
            raise ImportError(f"importing {path} fails: {type(error).__name__}: {error}") from error
        raise
    return module


def import_named(names: list[str]) -> None:
    """Import what `--import` names: files that end in .py, and modules by their dotted names.

    Raises:
        FileNotFoundError, ImportError: see `import_file`.
    """
    for name in names:
        if name.endswith(".py"):
            import_file(name)
        else:
            importlib.import_module(name)
