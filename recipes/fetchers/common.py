"""What every fetcher shares: downloads over HTTPS, packages of apt, npm and pip, and output that is complete or absent.

Packages are for machines whose only network is a mirror of packages. Nothing of them is installed.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from rich.console import Console
from rich.progress import track

from zoo.download import DownloadError
from zoo.download import download as fetch
from zoo.files import file_sha256, replacing

console = Console(stderr=True)
DEBIAN = "this corpus comes as Debian packages: run this on Debian or Ubuntu, or in a container of one"


class FetchError(RuntimeError):
    """Why something was not fetched, and what to do about it; shown without a traceback."""


@dataclass(frozen=True)
class Corpus:
    """One thing to fetch: `files` under the data folder.

    public, offline: (scratch folder) → raw material, from where it is published and out of packages; a text in place of
    `public` says why only --offline provides it. sizes: of the two downloads. write: (raw material, data folder, scratch
    folder) → a line about what is there now. note: how the public data differ from those of the shipped weights.
    """

    title: str
    files: tuple[str, ...]
    public: Callable[[Path], Any] | str
    offline: Callable[[Path], Any]
    sizes: tuple[str, str]
    write: Callable[[Any, Path, Path], str]
    note: str = ""


# ---- downloads


def download(url: str, folder: Path, *, sha256: str | None = None) -> Path:
    """Fetch one file into a folder. FetchError: for what fails, comes short or has another SHA-256."""
    path = folder / url.rsplit("/", 1)[-1]
    try:
        fetch(url, path)
    except DownloadError as error:
        hint = ". Try --offline: packages of apt, npm, pip" if error.tried_again else ""
        raise FetchError(f"{error}{hint}") from error
    if sha256 is not None:
        verify_sha256(path, sha256)
    return path


def verify_sha256(path: Path, expected: str) -> None:
    """FetchError where a file has another SHA-256."""
    digest = file_sha256(path)
    if digest != expected:
        raise FetchError(f"{path.name}: SHA-256 is {digest}, expected {expected}; nothing was kept")


# ---- packages


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
    """Fetch one wheel with this Python's pip and verify it."""
    run_tool([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", requirement], folder, requirement)
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"{requirement}: expected one wheel, pip left {[path.name for path in wheels]}")
    verify_sha256(wheels[0], sha256)
    return wheels[0]


def apt_unpack(
    packages: list[str], *, component: str, folder: Path, all_needed: bool = True
) -> dict[str, tuple[str, Path]]:
    """Fetch Debian packages and unpack each into a folder: name → (version, folder). apt checks their hashes.

    component: "main" or "non-free"; it need not be enabled on this system, for apt is given the system's sources with that
    component. all_needed: False leaves out the packages that this release lacks, and names them.
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
    if not all_needed:
        known = set(run_tool(["apt-cache", *options, "pkgnames"], folder, what, DEBIAN).split())
        if missing := [name for name in packages if name not in known]:
            console.print(f"{len(missing)} packages are not in this system's Debian release: {', '.join(missing)}")
        packages = [name for name in packages if name in known]
    run_tool(["apt-get", *options, "download", *packages], folder, what, DEBIAN)
    unpacked = {}
    for name in packages:
        path = next(iter(folder.glob(f"{name}_*.deb")), None)
        if path is None:
            raise FetchError(f"apt left no package {name}")
        place = folder / "unpacked" / name
        place.mkdir(parents=True)
        run_tool(["dpkg-deb", "-x", str(path), str(place)], folder, path.name, DEBIAN)
        path.unlink()
        unpacked[name] = unquote(path.name.split("_")[1]), place
    return unpacked


def debian_sources(root: Path, component: str) -> Iterator[tuple[str, str]]:
    """(file name, text) of the system's apt sources with every component replaced by one; both of apt's formats."""
    for path in sorted(root.glob("sources.list.d/*.sources")):
        yield path.name, re.sub(r"(?im)^Components:.*$", f"Components: {component}", path.read_text(encoding="utf-8"))
    for path in [root / "sources.list", *sorted(root.glob("sources.list.d/*.list"))]:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        lines = re.findall(r"(?m)^\s*(deb\s+(?:\[[^\]]*\]\s+)?\S+\s+\S+)[ \t]+\S", text)
        if lines:
            yield path.name, "".join(f"{line} {component}\n" for line in lines)


# ---- what is written


def tracked(items: Iterable[Any], description: str, total: int | None = None) -> Iterator[Any]:
    """The items, with a bar."""
    yield from track(items, description, total=total, console=console)


@contextmanager
def scratch(beside: Path) -> Iterator[Path]:
    """A temporary folder on the data folder's disk, gone afterwards whatever happens."""
    beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=beside) as folder:
        yield Path(folder).resolve()  # tools run with other working directories


def replace_folder(new: Path, place: Path, scratch_folder: Path) -> None:
    """Put a finished folder in its place; the earlier one goes with the scratch folder."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.exists():
        os.replace(place, scratch_folder / f"replaced-{place.name}")
    os.replace(new, place)


def write_jsonl(
    path: Path, rows: Iterable[dict[str, Any]], *, total: int | None = None, at_least: tuple[int, int] = (1, 1)
) -> str:
    """Write rows as JSONL; the file appears only when it is complete. Returns a line about it.

    at_least: rows and UTF-8 bytes of text; fewer are a FetchError, and leave an earlier file as it was.
    """
    count = size = 0
    with replacing(path) as stream:
        for row in tracked(rows, f"writing {path.name}", total):
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
            count, size = count + 1, size + len(row["text"].encode("utf-8"))
        if count < at_least[0] or size < at_least[1]:
            raise FetchError(
                f"{path.name} came out with {count:,} documents and {size:,} bytes of text; "
                f"at least {at_least[0]:,} and {at_least[1]:,} were expected, so nothing was kept"
            )
    return f"{path}: {count:,} documents, {size / 1e6:,.1f} MB of text"


@dataclass(frozen=True)
class Sample:
    """One picture as its file's bytes, its label, what else is known of it, and how its file's name ends."""

    picture: bytes
    label: int
    about: Mapping[str, Any]
    ending: str = "jpg"


def write_shards(
    folder: Path, samples: Iterable[Sample], *, name: str, per_shard: int, total: int, index: Mapping[str, Any]
) -> int:
    """Write WebDataset shards NAME-000000.tar … and index.json last; returns the number of samples.

    Equal samples give equal bytes: entries bear no time and no owner. index.json lists file, samples and sha256 of each shard.
    """
    folder.mkdir(parents=True)
    shards: list[dict[str, Any]] = []
    stream = tracked(samples, f"writing {name} {folder.name}", total)
    for number, part in enumerate(iter(lambda: list(itertools.islice(stream, per_shard)), [])):
        path = folder / f"{name}-{number:06d}.tar"
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
            for key, sample in enumerate(part, start=number * per_shard):
                about = json.dumps(sample.about, ensure_ascii=False, sort_keys=True).encode()
                members = {"cls": str(sample.label).encode(), sample.ending: sample.picture, "json": about}
                for ending, content in members.items():
                    entry = tarfile.TarInfo(f"{key:06d}.{ending}")
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        shards.append({"file": path.name, "samples": len(part), "sha256": digest})
    count = sum(shard["samples"] for shard in shards)
    (folder / "index.json").write_text(json.dumps({**index, "samples": count, "shards": shards}, indent=1) + "\n")
    return count
