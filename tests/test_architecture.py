"""Who may import whom, and how long a file may grow."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ["zoo", "modalities", "recipes", "tools"]
FILES = [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))]


def imported(path: Path, *, at_load: bool = False) -> set[str]:
    """Modules a file imports: wherever in it, or only when it is loaded itself."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    for node in tree.body if at_load else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    layer = path.relative_to(ROOT).parts[0]
    above = [*LAYERS[LAYERS.index(layer) + 1 :], "tests"]
    assert not {name for name in imported(path) if name.split(".")[0] in above}


def test_the_core_is_light() -> None:
    """Importing zoo needs torch and safetensors and nothing heavier; `python -m zoo` adds rich and typer, and the fused
    kernels' own files, which are read when the first call needs them, Triton."""
    allowed = {"torch", "safetensors", "zoo", *sys.stdlib_module_names}
    kernels = ROOT / "zoo" / "attention" / "triton"
    for path in (ROOT / "zoo").rglob("*.py"):
        if path.name == "__main__.py":
            continue
        also = {"triton"} if path.parent == kernels and path.name != "__init__.py" else set()
        assert {name.split(".")[0] for name in imported(path, at_load=True)} <= allowed | also, path
    unasked = "import sys, zoo, zoo.attention; sys.exit(any(n.split('.')[0] == 'triton' for n in sys.modules))"
    assert subprocess.run([sys.executable, "-c", unasked], cwd=ROOT).returncode == 0


def test_kernels_and_priors_keep_to_themselves() -> None:
    attention = ROOT / "zoo" / "attention"
    files = {name: [attention / f"{name}.py"] for name in ("reference", "sdpa", "toeplitz", "flash")}
    files["triton"] = sorted((attention / "triton").glob("*.py"))
    for name, paths in files.items():
        others = [f"zoo.attention.{other}" for other in files if other != name]
        for path in paths:
            assert not any(found.startswith(tuple(others)) for found in imported(path)), path
    for path in (ROOT / "zoo" / "priors").glob("*.py"):
        assert not any(name.startswith("zoo.attention") for name in imported(path)), path


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_stay_readable(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 420
