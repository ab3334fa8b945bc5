"""Files written whole or not at all, and read safely: what is wrong with one is an error of one
line."""

from __future__ import annotations

import errno
import glob
import gzip
import hashlib
import json
import math
import os
import secrets
import shutil
import stat
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from zoo.errors import did_you_mean

# Path within a folder → {"bytes": its size, "sha256": hex digits}.
Digests = dict[str, dict[str, int | str]]
# Seconds without a write, after which a temporary file is one of a process that was killed.
ABANDONED = 3600.0


def remove_abandoned(path: Path, seconds: float = ABANDONED, *, now: float | None = None) -> None:
    """Remove temporary files and folders of `path` that nothing was written to for `seconds`: their
    processes were killed.

    now: by the file system's clock, as the modification time of a new file; None: by this
    machine's.
    """
    if now is None:
        now = time.time()
    before, after = _temporary_name(path)
    for temporary in path.parent.glob(f"{glob.escape(before)}????????{glob.escape(after)}"):
        # An OSError: another process removed it.
        with suppress(OSError):
            newest = max(part.stat().st_mtime for part in (temporary, *temporary.glob("**/*")))
            if newest > now - seconds:
                continue
            if temporary.is_dir():
                shutil.rmtree(temporary)
            else:
                temporary.unlink()


def _temporary_name(path: Path) -> tuple[str, str]:
    """What is before and after the eight random letters of a temporary name; a long name is cut to
    fit in 255 bytes."""
    name = os.fsdecode(os.fsencode(path.name)[:180])
    return f".{name}-", path.suffix[:16]


def make_temporary(path: Path, *, folder: bool = False) -> Path:
    """An empty file or folder in the folder of `path`, which is made with its parents; readable as
    the umask allows."""
    make_folder(path.parent)
    before, after = _temporary_name(path)
    temporary = path.parent / f"{before}{secrets.token_hex(4)}{after}"
    if folder:
        temporary.mkdir()
    else:
        temporary.touch(exist_ok=False)
    remove_abandoned(path, now=temporary.stat().st_mtime)
    return temporary


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, each flushed to the disk in its own parent."""
    missing = [part for part in (folder, *folder.parents) if not part.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for part in reversed(missing):
        sync(part.parent)


@contextmanager
def replacing_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """As `replacing`, for libraries that write to a path of their own."""
    path = Path(path)
    temporary = make_temporary(path)
    mode = temporary.stat().st_mode
    try:
        yield temporary
        # safetensors replaces the file by one that only its owner can read.
        if temporary.stat().st_mode != mode:
            temporary.chmod(stat.S_IMODE(mode))
        # Without it a power failure may leave the name with nothing behind it.
        sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextmanager
def replacing(path: str | os.PathLike[str], mode: str = "w") -> Iterator[IO[Any]]:
    """A temporary file in the folder of `path` that is renamed to it when the block ends, and
    removed when it fails.

    Readers see the old file or the new one, never a part. `mode` is "w" (UTF-8) or "wb".
    """
    options: dict[str, Any] = {} if "b" in mode else {"newline": "", "encoding": "utf-8"}
    with replacing_path(path) as temporary, open(temporary, mode, **options) as file:
        yield file


def write_text(path: str | os.PathLike[str], text: str) -> None:
    with replacing(path) as file:
        file.write(text)


def write_json(path: str | os.PathLike[str], value: object) -> None:
    """Indented JSON; NaN and infinities, which JSON does not have, are null, other unknown values
    strings."""
    write_text(path, json.dumps(without_nan(value), indent=2, default=str, allow_nan=False) + "\n")


def without_nan(value: object) -> object:
    """`value` with None for every float in its mappings and sequences that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return value


def sync(path: str | os.PathLike[str]) -> None:
    """Flush a file, or the names in a folder, to the disk; a file system that cannot flush folders
    is told once."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOTSUP) and os.path.isdir(path):
            warnings.warn(
                "this file system does not flush folders: a power failure may lose new names",
                stacklevel=2,
            )
            return
        # The system's error names no file.
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(handle)


def sync_tree(folder: str | os.PathLike[str]) -> None:
    """Flush every file and folder below `folder`, and itself."""
    for inside, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(os.path.join(inside, name))
        sync(inside)


def file_sha256(path: str | os.PathLike[str]) -> str:
    """Hex digits of a file's SHA-256."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_digests(folder: str | os.PathLike[str], names: Iterable[str]) -> Digests:
    """Size and SHA-256 of files, by their paths within `folder`."""
    digests: Digests = {}
    for name in names:
        path = Path(folder) / name
        digests[name] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    return digests


def find_damage(folder: str | os.PathLike[str], written: Mapping[str, object]) -> str | None:
    """What differs between the files in `folder` and their digests when they were written; None
    where nothing does."""
    for name, facts in written.items():
        path = Path(folder) / name
        if not path.is_file():
            return f"{name} is missing"
        if not isinstance(facts, dict) or not {"bytes", "sha256"} <= set(facts):
            return f"there is no digest of {name}"
        size = path.stat().st_size
        if size != facts["bytes"]:
            return f"{name} has {size:,} bytes, and had {facts['bytes']}"
        if file_sha256(path) != facts["sha256"]:
            return f"{name} has another SHA-256 than when it was written"
    return None


_CHECKOUT = (Path(__file__).parent.parent / "pyproject.toml").is_file()


def data_folder() -> Path:
    """Where fetched data is: $PRIORZOO_DATA; else ./data in a checkout, or where it exists; else
    the user's data folder."""
    folder = os.environ.get("PRIORZOO_DATA")
    if folder:
        return Path(folder)
    local = Path("data")
    if _CHECKOUT or local.is_dir():
        return local
    # A checkout does without this package: tools/gpu.py runs where nothing is installed.
    from platformdirs import user_data_path

    return user_data_path("priorzoo", appauthor=False)


def near_file(place: str | Path, wanted: Callable[[str], bool] = bool) -> str:
    """ "did you mean 'x'? " for the wanted file with the name closest to that of `place`, in its
    folder; or ""."""
    folder = Path(place).parent
    try:
        names = [path.name for path in folder.iterdir() if wanted(path.name) and path.is_file()]
    except OSError:
        return ""
    # The folder goes into a format, in which braces are doubled.
    escaped = str(folder).replace("{", "{{").replace("}", "}}")
    return did_you_mean(Path(place).name, names, form=str(Path(escaped, "{}")))


def matching_files(pattern: str) -> list[Path]:
    """The files that a glob matches, sorted, each once: links to a folder above make a file match
    many times."""
    by_target: dict[str, Path] = {}
    for match in sorted(glob.glob(pattern, recursive=True)):
        by_target.setdefault(os.path.realpath(match), Path(match))
    return sorted(path for path in by_target.values() if path.is_file())


@contextmanager
def open_decompressed(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, decompressed where they begin as gzip does. ValueError where the block
    meets the end of a gzip stream that is cut short, or damage in it."""
    with open(path, "rb") as raw:
        compressed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        if not compressed:
            yield raw
            return
        try:
            with gzip.GzipFile(fileobj=raw) as stream:
                yield cast(IO[bytes], stream)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}: the gzip file is truncated or damaged ({error})") from error


@contextmanager
def new_folder(folder: Path, mark: str) -> Iterator[Path]:
    """A temporary folder to fill; it is renamed to `folder` when the block ends, and removed when
    it fails. Where another process created `folder` first, and it contains the file `mark`, that
    one stays."""
    temporary = make_temporary(folder, folder=True)
    try:
        yield temporary
        try:
            # Atomic; it fails when another process was first.
            os.rename(temporary, folder)
        except OSError:
            if not (folder / mark).is_file():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def seal(folder: Path) -> None:
    """Write manifest.json: the sizes and digests of all files in a folder that caches something."""
    names = sorted(path.name for path in folder.iterdir())
    write_json(folder / "manifest.json", file_digests(folder, names))


def sealed_damage(folder: Path, names: Sequence[str]) -> str | None:
    """What differs between these files and `seal`'s digests of them; None where nothing does."""
    try:
        manifest = read_object(folder / "manifest.json")
    except (OSError, ValueError):
        return "manifest.json is missing or damaged"
    return find_damage(folder, {name: manifest.get(name) for name in names})


# Bytes; in memory it takes about ten times as many.
LARGEST_JSON = 1 << 26


def parse_json(data: str | bytes, where: str) -> Any:
    """The value of JSON; `where` names it in the ValueError for what is no JSON or is nested too
    deep."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError(f"{where}: not JSON (its values are nested too deep)") from error
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error})") from error


def read_json(path: str | os.PathLike[str], *, most: int = LARGEST_JSON) -> Any:
    """The value of a JSON file. ValueError as in `parse_json`, and for more than `most` bytes."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"{path}: {size:,} bytes of JSON; at most {most:,} are read")
        return parse_json(file.read(), str(path))


def read_object(path: str | os.PathLike[str], *, most: int = LARGEST_JSON) -> dict[str, Any]:
    """The object of a JSON file, read as by `read_json`."""
    value = read_json(path, most=most)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def read_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a .safetensors file. ValueError for another or damaged file, and for a NaN or
    an infinity."""
    # For a file that cannot be opened the library has errors of its own.
    open(path, "rb").close()
    try:
        tensors = load_file(path)
    except (SafetensorError, RecursionError) as error:
        raise ValueError(f"{path} is no safetensors file, or is damaged: {error}") from error
    for name, tensor in tensors.items():
        # `isfinite` does not take all dtypes of one byte.
        values = tensor if tensor.itemsize > 1 else tensor.float()
        if not values.isfinite().all():
            raise ValueError(
                f"{path}: the tensor {name!r} has values that are not finite (NaN or infinity)"
            )
    return tensors
