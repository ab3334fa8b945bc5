"""The wheel, built and tried from another folder in an environment of its own, beside another owner
of `recipes`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

from tests.launching import ROOT

SHIPPED = "text_ggd_tiny.facts"
pytestmark = pytest.mark.slow


def run(*words: str | Path, **settings) -> str:
    done = subprocess.run(
        list(map(str, words)), capture_output=True, text=True, timeout=240, **settings
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_the_wheel(tmp_path: Path) -> None:
    """With the weights of one model alone: the others only take time."""
    source = tmp_path / "source"

    def left_out(inside: str, names: list[str]) -> set[str]:
        weights = {
            name for name in names if name.endswith(".safetensors") and not name.startswith(SHIPPED)
        }
        return weights | {"__pycache__"}

    for name in ("priorzoo", "zoo", "modalities", "recipes"):
        shutil.copytree(ROOT / name, source / name, ignore=left_out)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ("--quiet", "--no-deps", "--no-build-isolation", "-w", source / "dist")
    environment = os.environ | {"PRIORZOO_URL": "https://code.example/me/priorzoo/"}
    run(sys.executable, "-m", "pip", "wheel", *options, source, env=environment)
    (wheel,) = (source / "dist").glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    assert {"modalities/text/assets/bpe-1k.json", "zoo/weights/smollm2.soft/adapter.json"} <= set(
        names
    )
    assert not [name for name in names if name.startswith(("recipes/", "tools/", "tests/"))]
    (about,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    metadata = HeaderParser().parsestr(archive.read(about).decode())
    assert {"train", "text", "vision", "dna", "hf"} <= set(metadata.get_all("Provides-Extra"))
    required = {
        word.split(">")[0] for word in metadata.get_all("Requires-Dist") if "extra" not in word
    }
    assert {"torch", "numpy", "typer"} <= required
    assert "timm" not in required
    assert (
        metadata["Project-URL"] == "Repository, https://code.example/me/priorzoo"
    )  # links of the page are absolute
    page = metadata.get_payload()
    assert "](https://code.example/me/priorzoo/blob/HEAD/docs/" in page
    assert "](docs" not in page

    # The environment has this one's libraries, and a top-level `recipes` that cannot be imported.
    venv.create(tmp_path / "environment", with_pip=False)
    bins = tmp_path / "environment" / "bin"
    pip = (sys.executable, "-m", "pip", "--python", bins / "python", "install", "--quiet")
    run(*pip, "--no-deps", "--no-index", "--no-compile", wheel)
    (site,) = bins.parent.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    (site / "recipes").mkdir()
    (site / "recipes" / "__init__.py").write_text("raise ModuleNotFoundError('another package')\n")
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "PRIORZOO"))
    }
    here = {
        "cwd": tmp_path,
        "env": clean | {"OMP_NUM_THREADS": "1", "HOME": str(tmp_path), "COLUMNS": "160"},
    }
    options = ("--lengths", "64", "--samples", "1", "--out", "here")
    assert "written: here/" in run(
        bins / "priorzoo", "evaluate", SHIPPED, "perplexity", *options, **here
    )
    assert {"perplexity.csv", "perplexity.png"} <= {
        path.name for path in (tmp_path / "here").iterdir()
    }
    # Launchers of several ranks name the module.
    assert "text_ggd_tiny" in run(
        bins / "python", "-m", "priorzoo.train", "text.ggd_tiny", "--dry-run", **here
    )

    # Its types are seen: a wrong keyword in a user's file is an error of mypy.
    user = (
        "import zoo\nzoo.create_prior('ggd', heads=8)\nzoo.prior_attention(1, 2, 3, causl=True)\n"
    )
    (tmp_path / "user.py").write_text(user)
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\n[mypy-torch.*,numpy.*,rich.*,typer.*]\nfollow_imports = skip\n"
    )
    words = [
        "-m",
        "mypy",
        "--python-executable",
        str(bins / "python"),
        "--follow-imports",
        "silent",
        "user.py",
    ]
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=tmp_path, env=here["env"]
    )
    out = done.stdout
    assert done.returncode == 1, out
    assert '"num_heads"' in out, out
    assert 'did you mean "causal"?' in out, out
