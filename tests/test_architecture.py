"""Who may import whom, read from the source: layers point down, nothing goes round, a modality is asked and never named."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from zoo.registry import SHIPPED

ROOT = Path(__file__).parent.parent
LAYERS = ["zoo", "modalities", "recipes", "tools", "tests"]  # each may import itself and what is left of it
MODALITIES = set(SHIPPED)
# What importing the core needs; its command line needs more, and the fused kernels' files, which the first call that needs
# them reads, need Triton; so do the adapters' files need the library whose models they adapt.
CORE = {"torch", "numpy", "safetensors", "zoo", *sys.stdlib_module_names}
COMMAND_LINE = {"zoo/cli.py", "zoo/__main__.py", "zoo/doctor.py"}
ADAPTED = {"zoo/adapters/hf.py": {"transformers"}, "zoo/adapters/timm.py": {"timm"}}


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
    place, layer, wanted = path.relative_to(ROOT), path.relative_to(ROOT).parts[0], name.partition(".")[0]
    if wanted in LAYERS and LAYERS.index(wanted) > LAYERS.index(layer):
        return f"{layer} is below {wanted}"
    own = place.parts[1] if layer == "modalities" else ""
    for other in MODALITIES - {own}:
        if own and inside(name, f"modalities.{other}"):
            return "modalities know nothing of each other"
    if place.is_relative_to("zoo/attention") and inside(name, "zoo.decoding"):
        return "attention is below decoding"
    if place.is_relative_to("zoo/priors") and inside(name, "zoo.attention"):
        return "a prior knows no kernel"
    kernels = ("reference", "sdpa", "toeplitz", "flash", "triton")
    mine = place.parts[2].removesuffix(".py") if place.is_relative_to("zoo/attention") else ""
    if mine in kernels and any(inside(name, f"zoo.attention.{other}") for other in kernels if other != mine):
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
        allowed = (
            CORE
            | ({"triton"} if kernel else set())
            | ({"typer", "rich"} if str(path.relative_to(ROOT)) in COMMAND_LINE else set())
            | ADAPTED.get(str(path.relative_to(ROOT)), set())
        )
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
        name: {found for _, found in imports(path) if found in MODULES and found != name}
        for name, path in MODULES.items()
        if not inside(name, "tests")
    }
    circles = [" → ".join([*circle, circle[0]]) for circle in _circles(above)]
    assert not circles, "\n" + "\n".join(circles)


def _circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """A shortest circle through each node that is in one, each circle once."""
    found: dict[frozenset[str], list[str]] = {}
    for start in sorted(graph):
        before: dict[str, str] = {}
        todo = [start]
        for node in todo:
            for following in sorted(graph.get(node, ())):
                if following == start:
                    circle = [node]
                    while circle[-1] != start:
                        circle.append(before[circle[-1]])
                    found.setdefault(frozenset(circle), circle[::-1])
                elif following not in before:
                    before[following] = node
                    todo.append(following)
    return list(found.values())


FORBIDDEN = {
    r"import_module\(\s*f\"": "a module found by a name put together",
    r"\bmodality\s*(?:==|!=)|(?:==|!=)\s*[\w.]*\bmodality\b": "a modality compared by name",
    r"\bhasattr\(\s*\w*model\b": "a model asked what it is",
}
MAY = {"zoo/registry.py", "zoo/model.py"}  # they filter names by modality, and refuse a folder of another


def test_a_modality_is_asked_and_never_named() -> None:
    offenders = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, found.start()) + 1}: {what}: {found[0]}"
        for path in files("zoo", "modalities", "recipes")
        if str(path.relative_to(ROOT)) not in MAY
        for text in [path.read_text()]
        for pattern, what in FORBIDDEN.items()
        for found in re.finditer(pattern, text)
    ]
    assert not offenders, "\n" + "\n".join(offenders)
