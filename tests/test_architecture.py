"""Who may import whom, read from the source: layers point down, and nothing goes round."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from modalities import SHIPPED

ROOT = Path(__file__).parent.parent
LAYERS = [
    "zoo",
    "modalities",
    "recipes",
    "tools",
    "tests",
]  # each may import itself and what is left of it
FILES = {
    str(path.relative_to(ROOT)): path
    for layer in LAYERS
    for path in sorted((ROOT / layer).rglob("*.py"))
}
MODULES = {
    name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in FILES
}
# Files whose names begin so know nothing of modules whose names begin so.
KERNELS = [f"zoo/attention/{name}" for name in ("reference", "sdpa", "toeplitz", "flash", "triton")]
STRANGERS = [("zoo/attention/", "zoo/decoding.py"), ("zoo/priors/", "zoo/attention/")]
STRANGERS += [
    (f"modalities/{one}/", f"modalities/{other}/")
    for one in SHIPPED
    for other in SHIPPED
    if one != other
]
# What modalities share names none of them, and of each other the decoder alone the tokenizers.
SHARED = ["decoder", "encoder", "tokenizers"]
STRANGERS += [
    (f"modalities/{room}/", f"modalities/{name}/")
    for room in SHARED
    for name in (*SHIPPED, *SHARED)
    if room != name and (room, name) != ("decoder", "tokenizers")
]
STRANGERS += [(one, other) for one in KERNELS for other in KERNELS if one != other]
# What files of the core import when they are loaded: the fused kernels, adapters and the command
# line need more.
CORE = {"torch", "numpy", "safetensors", "zoo", *sys.stdlib_module_names}
MORE = {"zoo/cli.py": "typer rich", "zoo/console.py": "typer rich"}
MORE |= {f"zoo/adapters/{name}.py": "transformers" for name in ("hf", "released")} | {
    "zoo/adapters/timm.py": "timm"
}
HEAVY = {"triton", "rich", "typer", "modalities", "matplotlib", "transformers", "timm"}


@cache
def imports(file: str) -> list[tuple[int, str, bool]]:
    """(line, module, whether when it is loaded) of what a file imports."""
    return list(_imports(ast.parse(FILES[file].read_text()), True))


def _imports(node: ast.AST, at_load: bool) -> Iterator[tuple[int, str, bool]]:
    if isinstance(node, ast.Import):
        yield from ((node.lineno, alias.name, at_load) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "a relative import"
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            yield node.lineno, inner if inner in MODULES else str(node.module), at_load
    else:
        for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        in_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        at_load = at_load and not for_types and not in_function
        for child in ast.iter_child_nodes(node):
            yield from _imports(child, at_load)


def why_not(file: str, module: str, at_load: bool) -> str:
    """What is wrong with a file's import of a module; empty where nothing is."""
    layer = file.partition("/")[0]
    target = module.partition(".")[0]
    if target in LAYERS and LAYERS.index(target) > LAYERS.index(layer):
        return f"{layer} is below {target}"
    if any(
        file.startswith(one) and MODULES.get(module, "").startswith(other)
        for one, other in STRANGERS
    ):
        return "they know nothing of each other"
    allowed = CORE | set(
        MORE.get(file, "triton" if file.startswith("zoo/attention/triton/") else "").split()
    )
    return "the core is light" if layer == "zoo" and at_load and target not in allowed else ""


@pytest.mark.slow
def test_imports_point_down() -> None:
    offenders = [
        f"{file}:{line} imports {module}: {wrong}"
        for file in FILES
        for line, module, at_load in imports(file)
        if (wrong := why_not(file, module, at_load))
    ]
    assert not offenders, "\n" + "\n".join(offenders)
    code = f"import sys, zoo, zoo.attention; sys.exit(any(name.split('.')[0] in {HEAVY} for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_no_circle_of_imports() -> None:
    """Imports inside functions and for type checkers count: they only hide a circle."""
    above = {
        module: {other for _, other, _ in imports(file) if other in MODULES and other != module}
        for module, file in MODULES.items()
        if not file.startswith("tests/")
    }
    try:
        graphlib.TopologicalSorter(above).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


FORBIDDEN = r"import_module\(\s*f\"|\bmodality\s*(?:==|!=)|(?:==|!=)\s*[\w.]*\bmodality\b|\bhasattr\(\s*\w*model\b"
# They filter names by modality, and refuse a folder of another.
MAY = {"zoo/catalog.py", "zoo/model.py"}


def test_modality_is_never_named() -> None:
    """No module by a name put together, no modality compared by name, no model asked what it is."""
    offenders = [
        f"{name}: {match[0]}"
        for name, path in FILES.items()
        if name.startswith(("zoo/", "modalities/", "recipes/")) and name not in MAY
        for match in re.finditer(FORBIDDEN, path.read_text())
    ]
    assert not offenders, "\n".join(offenders)
