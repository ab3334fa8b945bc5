"""Where documents come from: a spec string in, documents out, and the fixed held-out split.

    "sotu-excerpt"                    State of the Union speeches that ship with the package (the default)
    "sotu" | "poetry" | "rfc"         corpora that `recipes/fetch_data.py text` puts into the data folder
    "sotu-unseen"                     the speeches of sotu that sotu-excerpt does not train on, all held out
    "english"                         a mix of all three: every speech, every 2nd document of poetry, every 10th RFC
    "PATH or GLOB"                    .txt (a document per file), .jsonl, .parquet; .txt and .jsonl also as .gz
    "hf:NAME[:CONFIG][:SPLIT]"        a Hugging Face dataset, streamed

Options follow a "?", joined by "&":  "corpus/*.jsonl?field=body&errors=replace"

    field=text           the field that holds the text (JSONL, Parquet, hf)
    id_field=id          the field that names the document; rows without it are named file:row
    split_field=NAME     a field that says "train", "heldout" or "unused", instead of the split by hash
    split=heldout        or "train": of every document, instead of the split by hash
    errors=strict        or "replace": what to do with invalid UTF-8 in .txt and .jsonl
    data_files=GLOB      hf only: handed to load_dataset, as in "hf:json?data_files=shards/*.jsonl"
    data_dir, revision   hf only: handed to load_dataset

The data folder: `modalities.files.data_folder`.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from modalities.files import data_folder, fetch_command, near_file, opened
from zoo.inputs import parse_json
from zoo.naming import did_you_mean, nearest

SPLITS = ("train", "heldout")
HELDOUT_FRACTION = 0.05
# The number after the name was chosen once, so that enough long speeches of the shipped corpus are held out, and is
# never to change: every shipped weight was trained on what this key leaves to training.
_SPLIT_KEY = b"priorzoo held-out 33"
_ASSETS = Path(__file__).parent / "assets"
# name -> (file under the data folder, options)
_FETCHED: dict[str, tuple[str, dict[str, str]]] = {
    "sotu": ("sotu/sotu.jsonl", {}),
    "poetry": ("poetry/poetry.jsonl", {"split_field": "split"}),
    "rfc": ("rfc/rfc.jsonl", {"split_field": "split"}),
}
# name -> corpora, and every how many documents of each
_MIXES: dict[str, dict[str, int]] = {"english": {"sotu": 1, "poetry": 2, "rfc": 10}}
_OPTIONS = ("field", "id_field", "split_field", "split", "errors", "data_files", "data_dir", "revision")
_SUFFIXES = (".txt", ".jsonl", ".parquet", ".txt.gz", ".jsonl.gz")
LONGEST_TEXT = 1 << 26  # characters that a document is held with as a whole; longer files are read piece by piece
LONGEST_ROW = 1 << 28  # bytes of a row of JSONL
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Document:
    """One text. `split` is set only where the source itself says it (split_field)."""

    id: str
    text: str
    split: str | None = None

    def pieces(self) -> Iterator[str]:
        """The text, in pieces where it is too long to be held as a whole."""
        yield self.text


@dataclass(frozen=True)
class LongDocument(Document):
    """A document of more than `LONGEST_TEXT` characters: `text` is its first piece, `read` reads all of them anew."""

    read: Callable[[], Iterator[str]] = field(kw_only=True, compare=False)

    def pieces(self) -> Iterator[str]:
        return self.read()


def document_split(document: Document) -> str:
    """The split of a document ("train", "heldout", "unused"): what its source says, else by hash of the text.

    blake2b of the stripped text, as a number in [0, 1), below 0.05 is held out. The text alone decides: a copy of a
    document under another name falls into the same split, and neither seed, order nor file layout matters.
    """
    if document.split is not None:
        return document.split
    digest = hashlib.blake2b(digest_size=8, key=_SPLIT_KEY)
    for piece in _stripped(document.pieces()):
        digest.update(piece.encode("utf-8", "surrogatepass"))
    return "heldout" if int.from_bytes(digest.digest(), "big") < HELDOUT_FRACTION * 2**64 else "train"


def _stripped(pieces: Iterable[str]) -> Iterator[str]:
    """The pieces of a text without white space at its two ends."""
    begun, white = False, ""  # white space behind the text so far
    for piece in pieces:
        text = piece if begun else piece.lstrip()
        if end := text.rstrip():
            begun = True
            yield white + end
            white = text[len(end) :]
        elif begun:
            white += text
            if len(white) > LONGEST_TEXT:
                raise ValueError(f"a document has more than {LONGEST_TEXT:,} characters of white space in a row")


class Source:
    """An iterable of documents that can be walked again and again in the same order. Empty documents are left out."""

    spec: str

    def rows(self) -> Iterator[Document]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Document]:
        return (document for document in self.rows() if any(piece.strip() for piece in document.pieces()))

    def cache_key(self) -> str | None:
        """Changes when the content may have changed; None where that cannot be known (streams)."""
        return None


@dataclass(frozen=True)
class FileSource(Source):
    """Documents of files, in the files' sorted order."""

    spec: str
    paths: tuple[Path, ...]
    options: dict[str, str]

    def rows(self) -> Iterator[Document]:
        for path in self.paths:
            kind = path.name.removesuffix(".gz").rpartition(".")[2]
            if kind == "txt":
                yield self._text(path)
            else:
                rows = self._jsonl_rows(path) if kind == "jsonl" else _parquet_rows(path, self.options)
                for number, row in rows:
                    yield row_document(row, f"{path.name}:{number}", f"{path}, row {number}", self.options)

    def cache_key(self) -> str:
        stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in self.paths]
        content = json.dumps([stats, sorted(self.options.items())])
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    def _text(self, path: Path) -> Document:
        pieces: list[str] = []
        size = 0
        for piece in self._pieces(path):
            pieces.append(piece)
            size += len(piece)
            if size > LONGEST_TEXT:
                return LongDocument(path.name, pieces[0], self.options.get("split"), read=lambda: self._pieces(path))
        return Document(path.name, "".join(pieces), self.options.get("split"))

    def _pieces(self, path: Path) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")(self.options.get("errors", "strict"))
        done, first = 0, True
        with opened(path) as stream:
            while True:
                chunk = stream.read(_CHUNK)
                held = len(decoder.getstate()[0])  # bytes of a character that the last chunk began
                try:
                    text = decoder.decode(chunk, final=not chunk)
                except UnicodeDecodeError as error:
                    raise _invalid_utf8(error, str(path), done - held) from error
                done += len(chunk)
                yield text.removeprefix("\ufeff") if first else text
                first = first and not text
                if not chunk:
                    return

    def _jsonl_rows(self, path: Path) -> Iterator[tuple[int, Any]]:
        with opened(path) as stream:
            for number in itertools.count(1):
                line = stream.readline(LONGEST_ROW + 1)
                where = f"{path}, row {number}"
                if not line:
                    return
                if len(line) > LONGEST_ROW:
                    raise ValueError(
                        f"{where}: more than {LONGEST_ROW:,} bytes, the most of a row; a longer text fits in a .txt"
                    )
                if line.strip():
                    yield number, parse_json(_decode(line, where, self.options), where)


@dataclass(frozen=True)
class MixSource(Source):
    """Several file sources one after the other, every n-th document of each; each keeps its own split."""

    spec: str
    parts: tuple[tuple[FileSource, int], ...]

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(path for source, _ in self.parts for path in source.paths)

    def rows(self) -> Iterator[Document]:
        for source, every in self.parts:
            yield from itertools.islice(source, 0, None, every)

    def cache_key(self) -> str:
        content = json.dumps([(source.cache_key(), every) for source, every in self.parts])
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class HFSource(Source):
    """A streamed Hugging Face dataset. `load()` gives the dataset itself, `row_document` reads its rows."""

    spec: str
    name: str
    config: str | None
    split: str
    options: dict[str, str]

    def load(self) -> Any:
        """`datasets.load_dataset(…, streaming=True)`. Errors of that library pass through unchanged."""
        try:
            import datasets
        except ImportError as error:
            raise ImportError(f"source {self.spec!r} needs the package `datasets`: pip install datasets") from error
        extra: dict[str, Any] = {k: v for k, v in self.options.items() if k in ("data_dir", "revision")}
        if "data_files" in self.options:
            found = self.options["data_files"]
            extra["data_files"] = sorted(glob.glob(found)) or found
        return datasets.load_dataset(self.name, self.config, split=self.split, streaming=True, **extra)

    def document(self, row: dict[str, Any], number: int) -> Document:
        return row_document(row, f"{self.name}:{number}", f"{self.spec}, row {number}", self.options)

    def rows(self) -> Iterator[Document]:
        for number, row in enumerate(self.load()):
            yield self.document(row, number)


@dataclass(frozen=True)
class UnseenSource(Source):
    """The speeches that no model trained on the shipped excerpt has seen: all of `every` that `excerpt` does not train on.

    Raises ValueError where one that it trains on is not there word by word, since it could then not be left out.
    """

    spec: str
    every: FileSource
    excerpt: FileSource

    @property
    def paths(self) -> tuple[Path, ...]:
        return self.every.paths

    def rows(self) -> Iterator[Document]:
        seen = {document.text.strip() for document in self.excerpt if document_split(document) == "train"}
        every = list(self.every)
        if missing := len(seen - {document.text.strip() for document in every}):
            raise ValueError(
                f"source {self.spec!r}: {missing} speeches of the excerpt are not in {self.every.paths[0]}"
            )
        for document in every:
            if document.text.strip() not in seen:
                yield Document(document.id, document.text, "heldout")

    def cache_key(self) -> str:
        return f"unseen-{self.every.cache_key()}-{self.excerpt.cache_key()}"


def open_source(spec: str = "sotu-excerpt") -> Source:
    """The source of a spec string (grammar: the module's docstring).

    Errors: ValueError for an unknown name or option, naming the nearest valid one; FileNotFoundError where files are
    missing, naming the command that fetches them if there is one.
    """
    if not isinstance(spec, str) or not spec:
        raise ValueError(f"source must be a non-empty string such as 'sotu-excerpt', got {spec!r}")
    place, options = _parse(spec)
    if place.startswith("hf:"):
        return _hf_source(spec, place[len("hf:") :], options)
    for key in ("data_files", "data_dir", "revision"):
        if key in options:
            raise ValueError(f"source {spec!r}: option {key!r} is only for 'hf:…' sources")
    excerpt = FileSource(spec, (_ASSETS / "sotu_excerpt.jsonl",), options)
    if place == "sotu-excerpt":
        return excerpt
    if place == "sotu-unseen":
        return UnseenSource(spec, _fetched(spec, ["sotu"], options)[0], excerpt)
    if place in _FETCHED:
        return _fetched(spec, [place], options)[0]
    if place in _MIXES:
        if options:
            raise ValueError(f"source {spec!r}: a mix takes no options; its parts, {', '.join(_MIXES[place])}, do")
        mix = _MIXES[place]
        return MixSource(spec, tuple(zip(_fetched(spec, [*mix], options), mix.values(), strict=True)))
    return FileSource(spec, _find_files(spec, place), options)


def _fetched(spec: str, names: list[str], options: dict[str, str]) -> list[FileSource]:
    """Corpora of the data folder; FileNotFoundError says how to fetch all that are missing."""
    paths = {name: data_folder() / _FETCHED[name][0] for name in names}
    if missing := {name: path for name, path in paths.items() if not path.is_file()}:
        listed, command = ", ".join(map(str, missing.values())), f"text {' '.join(missing)} --offline"
        raise FileNotFoundError(f"source {spec!r}: no {listed}; to fetch it, {fetch_command(command)}")
    return [FileSource(spec, (path,), {**_FETCHED[name][1], **options}) for name, path in paths.items()]


def _parse(spec: str) -> tuple[str, dict[str, str]]:
    """(what comes before the options, options). A "?" with no "=" behind it is part of a glob."""
    place, mark, query = spec.rpartition("?")
    if not mark or "=" not in query:
        return spec, {}
    options: dict[str, str] = {}
    for part in query.split("&"):
        key, _, value = part.partition("=")
        if key not in _OPTIONS:
            raise ValueError(f"source {spec!r}: unknown option {key!r}; {nearest(key, _OPTIONS)}")
        options[key] = unquote(value)
    if options.get("errors", "strict") not in ("strict", "replace"):
        raise ValueError(f"source {spec!r}: errors={options['errors']!r}, expected 'strict' or 'replace'")
    if (split := options.get("split", SPLITS[0])) not in SPLITS:
        raise ValueError(f"source {spec!r}: split={split!r}, expected {' or '.join(map(repr, SPLITS))}")
    if "split" in options and "split_field" in options:
        raise ValueError(f"source {spec!r}: split= is of every document, split_field= of each; give one of them")
    return place, options


def _hf_source(spec: str, rest: str, options: dict[str, str]) -> HFSource:
    name, config, split, *more = [*rest.split(":"), "", ""][: max(3, rest.count(":") + 1)]
    if not name or more:
        raise ValueError(f"source {spec!r}: expected 'hf:NAME[:CONFIG][:SPLIT]'")
    if config in ("train", "validation", "test") and not split:  # "hf:name:validation" can only mean the split
        config, split = "", config
    return HFSource(spec, name, config or None, split or "train", options)


def _find_files(spec: str, place: str) -> tuple[Path, ...]:
    if any(mark in place for mark in "*?["):
        paths = sorted(Path(p) for p in glob.glob(place, recursive=True) if os.path.isfile(p))
        if not paths:
            raise FileNotFoundError(f"source {spec!r}: no file matches {place}")
    else:
        paths = [Path(place)]
        if not paths[0].is_file():
            raise FileNotFoundError(_missing(spec, place))
    for path in paths:
        if not path.name.endswith(_SUFFIXES):
            raise ValueError(f"source {spec!r}: {path} is none of {', '.join(_SUFFIXES)}")
    return tuple(paths)


def _missing(spec: str, place: str) -> str:
    names = ["sotu-excerpt", "sotu-unseen", *_FETCHED, *_MIXES]
    if os.path.isdir(place):
        return f"source {spec!r} is a folder; give a glob of its files, such as '{place.rstrip('/')}/*.jsonl'"
    beside = near_file(place, lambda name: name.endswith(_SUFFIXES))
    hint = beside or did_you_mean(place, [*names, "hf:NAME"], cutoff=0.4)
    return f"source {spec!r}: no such file, and not one of {', '.join(names)}, hf:NAME; {hint}".rstrip("; ")


def row_document(row: Any, default_id: str, where: str, options: dict[str, str]) -> Document:
    """A JSONL, Parquet or dataset row as a Document. `where` names the row in errors."""
    field = options.get("field", "text")
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected an object with a field {field!r}, got {type(row).__name__}")
    text = _field(row, field, where)
    if text is None:  # a null is an empty document; it is left out like one
        text = ""
    if not isinstance(text, str):
        raise ValueError(f"{where}: field {field!r} is {type(text).__name__}, expected a string")
    split = options.get("split")
    if "split_field" in options:
        split = _field(row, options["split_field"], where)
        if split not in (*SPLITS, "unused"):
            raise ValueError(f"{where}: split {split!r} is none of 'train', 'heldout', 'unused'")
    name = row.get(options.get("id_field", "id"))
    return Document(default_id if name is None else str(name), text, split)


def _field(row: dict[str, Any], field: str, where: str) -> Any:
    if field not in row:
        hint = did_you_mean(field, map(str, row), form="?field={}")
        raise ValueError(f"{where}: no field {field!r} among {sorted(map(str, row))}; {hint}".rstrip("; "))
    return row[field]


def _parquet_rows(path: Path, options: dict[str, str]) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ImportError(f"{path} needs the package `pyarrow`: pip install pyarrow") from error
    with open(path, "rb"):  # what cannot be opened is an OSError; so is what is damaged, by the library
        pass
    numbers = itertools.count(1)
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            wanted = {options.get("field", "text"), options.get("id_field", "id"), options.get("split_field", "")}
            columns = [name for name in names if name in wanted]
            if options.get("field", "text") not in columns:
                columns = names  # so that the error can say what is there
            for batch in file.iter_batches(batch_size=256, columns=columns):
                for row in batch.to_pylist():
                    yield next(numbers), row
    except (OSError, MemoryError, ValueError, TypeError, LookupError, pyarrow.ArrowException) as error:
        told = " ".join(str(error).split())[:200]
        raise ValueError(f"{path}, after row {next(numbers) - 1}: damaged Parquet ({told})") from error


def _decode(data: bytes, where: str, options: dict[str, str]) -> str:
    try:
        return data.decode("utf-8", errors=options.get("errors", "strict"))
    except UnicodeDecodeError as error:
        raise _invalid_utf8(error, where) from error


def _invalid_utf8(error: UnicodeDecodeError, where: str, before: int = 0) -> ValueError:
    return ValueError(
        f"{where}: invalid UTF-8 at byte {before + error.start} (0x{error.object[error.start]:02x}); "
        "correct the file, or add '?errors=replace' to the source to put U+FFFD there"
    )
