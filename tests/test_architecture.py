"""Who may import whom, read from the source: layers point down, nothing goes round, a modality is asked and never named."""

from __future__ import annotations

import ast
import graphlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from zoo.registry import SHIPPED

ROOT = Path(__file__).parent.parent
LAYERS = ["zoo", "modalities", "recipes", "tools", "tests"]  # each may import itself and what is left of it
# What importing the core needs; its command line needs more, and the fused kernels' files, which the first call that needs
# them reads, need Triton; so do the adapters' files need the library whose models they adapt.
CORE = {"torch", "numpy", "safetensors", "zoo", *sys.stdlib_module_names}
MORE = {f"zoo/{name}.py": {"typer", "rich"} for name in ("cli", "__main__", "doctor")}
MORE |= {f"zoo/adapters/{name}.py": {library} for name, library in {"hf": "transformers", "timm": "timm"}.items()}


def files(*layers: str) -> list[Path]:
    return [path for layer in layers for path in sorted((ROOT / layer).rglob("*.py"))]


def name_of(path: Path) -> str:
    """The dotted name of a file's module."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in files(*LAYERS)}


def imports(path: Path, *, at_load: bool = False) -> Iterator[tuple[int, str]]:
    """(line, module) of what a file imports: wherever in it, or only when it is loaded; never `if TYPE_CHECKING`."""
    package = name_of(path) if path.name == "__init__.py" else name_of(path).rpartition(".")[0]
    todo: list[ast.AST] = [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            todo += node.orelse
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield node.lineno, inner if inner in MODULES else base
        elif not (at_load and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            todo += ast.iter_child_nodes(node)


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def why_not(path: Path, name: str) -> str:
    """What is wrong with a file's import of a module; empty where nothing is."""
    place, layer, target = path.relative_to(ROOT), path.relative_to(ROOT).parts[0], name.partition(".")[0]
    if target in LAYERS and LAYERS.index(target) > LAYERS.index(layer):
        return f"{layer} is below {target}"
    if layer == "modalities" and any(inside(name, f"modalities.{other}") for other in set(SHIPPED) - {place.parts[1]}):
        return "modalities know nothing of each other"
    if place.is_relative_to("zoo/attention") and inside(name, "zoo.decoding"):
        return "attention is below decoding"
    if place.is_relative_to("zoo/priors") and inside(name, "zoo.attention"):
        return "a prior knows no kernel"
    kernels = ("reference", "sdpa", "toeplitz", "flash", "triton")
    kernel = place.parts[2].removesuffix(".py") if place.is_relative_to("zoo/attention") else ""
    if kernel in kernels and any(inside(name, f"zoo.attention.{other}") for other in kernels if other != kernel):
        return "kernels know nothing of each other"
    return ""


def test_imports_point_down() -> None:
    offenders = [
        f"{path.relative_to(ROOT)}:{line} imports {name}: {wrong}"
        for path in files(*LAYERS)
        for line, name in imports(path)
        if (wrong := why_not(path, name))
    ]
    for path in files("zoo"):
        kernel = path.parent.name == "triton" and path.name != "__init__.py"
        allowed = CORE | ({"triton"} if kernel else set()) | MORE.get(str(path.relative_to(ROOT)), set())
        offenders += [
            f"{path.relative_to(ROOT)}:{line} imports {name}: the core is light"
            for line, name in imports(path, at_load=True)
            if name.partition(".")[0] not in allowed
        ]
    assert not offenders, "\n" + "\n".join(offenders)
    heavy = "('triton', 'rich', 'typer', 'modalities', 'matplotlib', 'transformers', 'timm')"
    unasked = f"import sys, zoo, zoo.attention; sys.exit(any(n.split('.')[0] in {heavy} for n in sys.modules))"
    assert subprocess.run([sys.executable, "-c", unasked], cwd=ROOT).returncode == 0


def test_no_file_imports_itself_by_way_of_others() -> None:
    """Imports inside functions count: they only hide a circle."""
    above = {
        name: {other for _, other in imports(path) if other in MODULES and other != name}
        for name, path in MODULES.items()
        if not inside(name, "tests")
    }
    try:
        graphlib.TopologicalSorter(above).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


FORBIDDEN = {
    r"import_module\(\s*f\"": "a module found by a name put together",
    r"\bmodality\s*(?:==|!=)|(?:==|!=)\s*[\w.]*\bmodality\b": "a modality compared by name",
    r"\bhasattr\(\s*\w*model\b": "a model asked what it is",
}
MAY = {"zoo/registry.py", "zoo/model.py"}  # they filter names by modality, and refuse a folder of another


def test_a_modality_is_asked_and_never_named() -> None:
    offenders = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {what}: {match[0]}"
        for path in files("zoo", "modalities", "recipes")
        if str(path.relative_to(ROOT)) not in MAY
        for text in [path.read_text()]
        for pattern, what in FORBIDDEN.items()
        for match in re.finditer(pattern, text)
    ]
    assert not offenders, "\n" + "\n".join(offenders)
