"""The data folder, files that may be compressed, and folders and tables that appear whole (files: `zoo.files`)."""

from __future__ import annotations

import csv
import glob
import gzip
import hashlib
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from zoo.errors import did_you_mean
from zoo.files import file_digests, find_damage, make_temporary, read_object, replacing, write_json

_CHECKOUT = (Path(__file__).parent.parent / "pyproject.toml").is_file()


def data_folder() -> Path:
    """Where fetched data is: $PRIORZOO_DATA; else ./data in a checkout, or where it exists; else the user's data folder."""
    if folder := os.environ.get("PRIORZOO_DATA"):
        return Path(folder)
    here = Path("data")
    if _CHECKOUT or here.is_dir():
        return here
    from platformdirs import user_data_path  # a checkout does without: tools/gpu.py runs where nothing is installed

    return user_data_path("priorzoo", appauthor=False)


def near_file(place: str | Path, wanted: Callable[[str], bool] = bool) -> str:
    """ "did you mean 'x'? " for the wanted file with the name closest to that of `place`, in its folder; or ""."""
    folder = Path(place).parent
    try:
        names = [path.name for path in folder.iterdir() if wanted(path.name) and path.is_file()]
    except OSError:
        return ""
    escaped = str(folder).replace("{", "{{").replace("}", "}}")
    return did_you_mean(Path(place).name, names, form=str(Path(escaped, "{}")))


def matching_files(pattern: str) -> list[Path]:
    """The files that a glob matches, sorted, each once: links to a folder above make a file match many times."""
    first = {os.path.realpath(path): Path(path) for path in sorted(glob.glob(pattern, recursive=True), reverse=True)}
    return sorted(path for path in first.values() if path.is_file())


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, decompressed where they begin as gzip does. ValueError where the block meets the end of a gzip
    stream that is cut short, or damage in it."""
    with open(path, "rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        try:
            with cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if zipped else raw as stream:
                yield stream
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}: the gzip file is truncated or damaged ({error})") from error


@contextmanager
def new_folder(folder: Path, mark: str) -> Iterator[Path]:
    """A temporary folder to fill; it is renamed to `folder` when the block ends, and removed when it fails. Where another
    process created `folder` first, and it contains the file `mark`, that one stays."""
    temporary = make_temporary(folder, folder=True)
    try:
        yield temporary
        try:
            os.rename(temporary, folder)  # atomic; fails when another process was first
        except OSError:
            if not (folder / mark).is_file():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def seal(folder: Path) -> None:
    """Write manifest.json: the sizes and digests of all files in a folder that caches something."""
    write_json(folder / "manifest.json", file_digests(folder, sorted(path.name for path in folder.iterdir())))


def sealed_damage(folder: Path, names: Sequence[str]) -> str | None:
    """What differs between these files and `seal`'s digests of them; None where nothing does."""
    try:
        manifest = read_object(folder / "manifest.json")
    except (OSError, ValueError):
        return "manifest.json is missing or damaged"
    return find_damage(folder, {name: manifest.get(name) for name in names})


def write_table(path: Path, rows: Sequence[Mapping[str, object]], *, delimiter: str = ",") -> None:
    """Rows under a header of all their columns, in order of first appearance; list values are left out. Text that a
    spreadsheet would take for a formula has an apostrophe before it, and no text has line breaks."""
    columns = dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, list))
    with replacing(path) as file:
        table = csv.writer(file, delimiter=delimiter, lineterminator="\n")
        table.writerows([map(_harmless, columns), *([_harmless(row.get(name)) for name in columns] for row in rows)])


_FORMULA = "=+-@\uff1d\uff0b\uff0d\uff20"  # the last four: in full width


def _harmless(value: object) -> object:
    if not isinstance(value, str):
        return value
    text = " ".join(value.splitlines()).lstrip("\ufeff\u200b")  # which spreadsheets leave out
    try:
        float(text)
    except ValueError:
        return f"'{text}" if len(text) > 1 and text.lstrip()[:1] in tuple(_FORMULA) else text
    return text


def file_safe(text: str) -> str:
    """`text` with everything but letters, digits and ._- replaced by underscores; above 120 bytes its end is a digest."""
    name = "".join(c if c.isalnum() or c in "._-" else "_" for c in text)
    if len(name.encode()) <= 120:
        return name
    digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]
    return name.encode()[:100].decode(errors="ignore") + f"-{digest}"
