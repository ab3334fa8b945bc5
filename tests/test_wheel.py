"""The wheel, built and tried from another folder in an environment of its own, beside another owner of `recipes`."""

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

ROOT = Path(__file__).parent.parent
PACKAGES = ("priorzoo", "zoo", "modalities", "recipes")
SHIPPED = "text_ggd_tiny.facts"
pytestmark = pytest.mark.slow


def run(words: list[str | Path], **settings) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=240, **settings)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """What a wheel is built of, with the weights of one model alone: the others only take time."""
    folder = tmp_path_factory.mktemp("source")

    def left_out(inside: str, names: list[str]) -> set[str]:
        weights = {name for name in names if name.endswith(".safetensors") and not name.startswith(SHIPPED)}
        return weights | {name for name in names if name == "__pycache__"}

    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=left_out)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            source / "dist",
            source,
        ]
    )
    return next((source / "dist").glob("*.whl"))


def metadata(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(archive.read(name).decode())


def test_it_has_what_an_index_page_shows(wheel: Path, source: Path, tmp_path: Path) -> None:
    found, names = metadata(wheel), zipfile.ZipFile(wheel).namelist()
    assert (
        "priorzoo/packages/recipes/fetchers/font-packages.txt" in names
        and "modalities/text/assets/bpe-1k.json" in names
    )
    assert not [name for name in names if name.startswith(("recipes/", "tools/", "tests/"))]
    assert found["License-Expression"] == "Apache-2.0" and len(found.get_all("Classifier")) > 5
    assert {"train", "track", "text", "vision", "dna", "data", "hub", "figures"} <= set(found.get_all("Provides-Extra"))
    needed = {word.split(">")[0]: word for word in found.get_all("Requires-Dist") if "extra" not in word}
    assert {"torch", "numpy", "typer", "filelock"} <= set(needed) and "timm" not in needed
    page = found.get_payload()
    assert "# priorzoo" in page and "](benchmarks" not in page and "](docs" not in page
    assert found["Project-URL"] is None  # none is known where it is built
    code = (
        "from setuptools import build_meta; import sys; print(build_meta.prepare_metadata_for_build_wheel(sys.argv[1]))"
    )
    told = os.environ | {"PRIORZOO_URL": "https://code.example/me/priorzoo/"}
    made = run([sys.executable, "-c", code, tmp_path], cwd=source, env=told).stdout.split()[-1]
    page = (tmp_path / made / "METADATA").read_text()
    assert "Project-URL: Repository, https://code.example/me/priorzoo\n" in page
    assert "](https://code.example/me/priorzoo/raw/HEAD/benchmarks/text_tiny/overview.png)" in page
    assert "](https://code.example/me/priorzoo/blob/HEAD/docs/KERNELS.md)" in page


def other_owner(folder: Path) -> Path:
    """A wheel of another distribution that has a top-level `recipes`, which cannot be imported."""
    path, about = folder / "tuner-1.0-py3-none-any.whl", "tuner-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("recipes/__init__.py", 'raise ModuleNotFoundError("the recipes of tuner are no package")\n')
        archive.writestr("recipes/train.py", "raise SystemExit(9)\n")
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tuner\nVersion: 1.0\n")
        archive.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{about}/RECORD", "")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory) -> Path:
    """The bin folder of an environment in which both are installed, and which has this one's libraries."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-compile",
    ]
    run([*pip, wheel, other_owner(folder)])
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(
        sysconfig.get_paths()["purelib"] + "\n"
    )  # without its own .pth: not this checkout
    assert (site / "recipes" / "__init__.py").read_text().startswith("raise")
    return folder / "bin"


def test_it_works_from_another_folder_beside_another_recipes(installed: Path, tmp_path: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PRIORZOO"))}
    here = {"cwd": tmp_path, "env": clean | {"OMP_NUM_THREADS": "1", "HOME": str(tmp_path), "COLUMNS": "160"}}
    words = [
        installed / "priorzoo",
        "evaluate",
        SHIPPED,
        "perplexity",
        "--lengths",
        "64",
        "--samples",
        "1",
        "--out",
        "here",
    ]
    assert "files to here" in run(words, **here).stdout
    assert {"perplexity.csv", "perplexity.png"} <= {path.name for path in (tmp_path / "here").iterdir()}
    planned = run([installed / "python", "-m", "priorzoo.train", "text.ggd_tiny", "--dry-run"], **here)  # of launchers
    assert "text_ggd_tiny" in planned.stdout
