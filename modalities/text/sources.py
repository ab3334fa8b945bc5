"""Where documents come from: a spec string in, documents out, and the fixed held-out split.

    "sotu-excerpt"              State of the Union speeches that ship with the package (the default)
    "sotu" | "poetry" | "rfc"   corpora that `priorzoo fetch-data text sotu` and, in a checkout,
                                `python -m tools.offline poetry rfc` put into the data folder
    "sotu-unseen"               the speeches of sotu that sotu-excerpt does not train on, all held
                                out
    "english"                   a mix of all three: every speech, every 2nd document of poetry,
                                every 10th RFC
    "PATH or GLOB"              .txt (a document per file) and .jsonl, also as .gz
    "hf:NAME[:CONFIG][:SPLIT]"  a Hugging Face dataset of the hub or in a folder, streamed

A task of known answer ("task:reverse") is no source of documents: see `modalities.text.tasks`.

Options follow a "?", joined by "&":  "corpus/*.jsonl?field=body&errors=replace"

    field=text        the field that holds the text (JSONL, hf)
    split_field=NAME  a field that says "train", "heldout" or "unused", instead of the split by hash
    split=heldout     or "train": of every document, instead of the split by hash
    errors=strict     or "replace": what to do with invalid Unicode in .txt and .jsonl
    data_files=GLOB   hf only: handed to load_dataset, as in
                      "hf:parquet?data_files=shards/*.parquet"

JSONL is read here because errors of `datasets` name no row.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from modalities.digests import content_digests
from modalities.sources import HashSplit, find_files, has_suffix
from modalities.text.tasks import is_task, open_task
from zoo.errors import did_you_mean, nearest, require
from zoo.files import data_folder, matching_files, open_decompressed, parse_json

SPLITS = ("train", "heldout")
_SPLIT = HashSplit(key=b"priorzoo held-out 33", fraction=0.05)
_ASSETS = Path(__file__).parent / "assets"
# name -> (file under the data folder, options)
_FETCHED: dict[str, tuple[str, dict[str, str]]] = {
    "sotu": ("sotu/sotu.jsonl", {}),
    "poetry": ("poetry/poetry.jsonl", {"split_field": "split"}),
    "rfc": ("rfc/rfc.jsonl", {"split_field": "split"}),
}
# name -> corpora, and every how many documents of each
_MIXES: dict[str, dict[str, int]] = {"english": {"sotu": 1, "poetry": 2, "rfc": 10}}
_OPTIONS = ("field", "split_field", "split", "errors", "data_files")
_SUFFIXES = (".txt", ".jsonl")
# Specs that are not files.
_NAMES = ("sotu-excerpt", "sotu-unseen", *_FETCHED, *_MIXES, "hf:NAME")
_SURROGATES = re.compile("[\ud800-\udfff]")
# Bytes of a .txt, which is tokenised whole, and of a row of JSONL.
LONGEST_TEXT = 1 << 29
LONGEST_ROW = 1 << 28


@dataclass(frozen=True)
class Document:
    """One text. `split` is set only where the source itself says it (split_field)."""

    text: str
    split: str | None = None


def document_split(document: Document) -> str:
    """The split that the source says, else by a hash of the stripped text, which holds out 5%."""
    if document.split is not None:
        return document.split
    text = document.text.strip().encode("utf-8", "surrogatepass")
    return "heldout" if _SPLIT.is_heldout(text) else "train"


class Source:
    """An iterable of documents that can be walked again and again in the same order.

    Empty documents are left out.
    """

    spec: str

    def rows(self) -> Iterator[Document]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Document]:
        return (document for document in self.rows() if document.text.strip())

    @property
    def paths(self) -> list[Path]:
        """Its files; none of a stream."""
        return []

    def cache_key(self) -> str | None:
        """Changes when the content may have changed; None where that cannot be known (streams)."""
        return None


@dataclass(frozen=True)
class FileSource(Source):
    """Documents of files one after the other: `parts` are (path, options, n), of which every n-th
    document counts."""

    spec: str
    parts: tuple[tuple[Path, dict[str, str], int], ...]

    @property
    def paths(self) -> list[Path]:
        return [path for path, _, _ in self.parts]

    def rows(self) -> Iterator[Document]:
        for path, options, every in self.parts:
            # Empty documents do not count among the n.
            documents = (one for one in _documents(path, options) if one.text.strip())
            yield from itertools.islice(documents, 0, None, every)

    def cache_key(self) -> str:
        parts = []
        digests = content_digests(self.paths)
        for (path, options, every), digest in zip(self.parts, digests, strict=True):
            # The name says how the bytes are read.
            parts.append((path.name, digest, sorted(options.items()), every))
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class UnseenSource(Source):
    """The speeches of `every` that `excerpt` does not train on."""

    spec: str
    every: FileSource
    excerpt: FileSource

    def rows(self) -> Iterator[Document]:
        training = (one for one in self.excerpt if document_split(one) == "train")
        training_texts = {one.text.strip() for one in training}
        for document in self.every:
            if document.text.strip() not in training_texts:
                yield Document(document.text, "heldout")

    def cache_key(self) -> str:
        return f"unseen-{self.every.cache_key()}-{self.excerpt.cache_key()}"


@dataclass(frozen=True)
class HFSource(Source):
    """A streamed Hugging Face dataset.

    `load()` gives the dataset itself, `document` reads its rows.
    """

    spec: str
    name: str
    config: str | None
    split: str
    options: dict[str, str]

    def load(self) -> Iterable[Mapping[str, object]]:
        """`datasets.load_dataset(…, streaming=True)`.

        Errors of that library pass through unchanged.
        """
        options: dict[str, object] = {}
        pattern = self.options.get("data_files")
        if pattern:
            # What matches no local file is for `datasets` to find, as on the hub.
            options["data_files"] = [str(path) for path in matching_files(pattern)] or pattern
        require("datasets", f"source {self.spec!r}", "data")
        from datasets import load_dataset

        return load_dataset(self.name, self.config, split=self.split, streaming=True, **options)

    def document(self, row: Mapping[str, object], number: int) -> Document:
        return _row_document(row, f"{self.spec}, row {number}", self.options)

    def rows(self) -> Iterator[Document]:
        return (self.document(row, number) for number, row in enumerate(self.load()))


def open_source(spec: str = "sotu-excerpt") -> Source:
    """The source of a spec string.

    ValueError for an unknown name or option, FileNotFoundError for missing files.
    """
    if not isinstance(spec, str) or not spec:
        raise ValueError(f"source must be a non-empty string such as 'sotu-excerpt', got {spec!r}")
    if is_task(spec):
        open_task(spec)
        raise ValueError(
            f"source {spec!r} is a sequence task, which has no documents: "
            "`priorzoo evaluate MODEL exact_match` measures it"
        )
    place, options = _parse(spec)
    if place.startswith("hf:"):
        return _hf_source(spec, place.removeprefix("hf:"), options)
    if "data_files" in options:
        raise ValueError(f"source {spec!r}: option 'data_files' is only for 'hf:…' sources")
    excerpt = FileSource(spec, ((_ASSETS / "sotu_excerpt.jsonl", options, 1),))
    if place == "sotu-excerpt":
        return excerpt
    if place == "sotu-unseen":
        return UnseenSource(spec, _fetched_corpora(spec, {"sotu": 1}, options), excerpt)
    if place in _MIXES and options:
        parts = ", ".join(_MIXES[place])
        raise ValueError(f"source {spec!r}: a mix takes no options; its parts, {parts}, do")
    if place in (*_FETCHED, *_MIXES):
        return _fetched_corpora(spec, _MIXES.get(place, {place: 1}), options)
    paths = find_files(spec, place, _SUFFIXES, _NAMES)
    return FileSource(spec, tuple((path, options, 1) for path in paths))


def _fetched_corpora(spec: str, every: dict[str, int], options: dict[str, str]) -> FileSource:
    """Corpora of the data folder, by name; FileNotFoundError says how to fetch all that are
    missing."""
    parts = []
    missing: dict[str, Path] = {}
    for name, n in every.items():
        file, corpus_options = _FETCHED[name]
        path = data_folder() / file
        if not path.is_file():
            missing[name] = path
        parts.append((path, corpus_options | options, n))
    if missing:
        listed = ", ".join(map(str, missing.values()))
        if set(missing) == {"sotu"}:
            command = "`priorzoo fetch-data text sotu`"
        else:
            command = f"`python -m tools.offline {' '.join(missing)}` in a checkout"
        raise FileNotFoundError(f"source {spec!r}: no {listed}; to fetch it, {command}")
    return FileSource(spec, tuple(parts))


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
    for key, choices in (("errors", ("strict", "replace")), ("split", SPLITS)):
        if key in options and options[key] not in choices:
            expected = " or ".join(map(repr, choices))
            raise ValueError(f"source {spec!r}: {key}={options[key]!r}, expected {expected}")
    return place, options


def _hf_source(spec: str, rest: str, options: dict[str, str]) -> HFSource:
    parts = rest.split(":")
    if not parts[0] or len(parts) > 3:
        raise ValueError(f"source {spec!r}: expected 'hf:NAME[:CONFIG][:SPLIT]'")
    name = parts[0]
    config = parts[1] if len(parts) > 1 else ""
    split = parts[2] if len(parts) > 2 else ""
    if config in ("train", "validation", "test") and not split:
        # "hf:name:validation" can only mean the split.
        split = config
        config = ""
    return HFSource(spec, name, config or None, split or "train", options)


def _documents(path: Path, options: dict[str, str]) -> Iterator[Document]:
    """The documents of a .txt or .jsonl file."""
    if has_suffix(path.name, (".txt",)):
        yield _text_document(path, options)
        return
    with open_decompressed(path) as stream:
        for number in itertools.count(1):
            line = stream.readline(LONGEST_ROW + 1)
            where = f"{path}, row {number}"
            if not line:
                return
            if len(line) > LONGEST_ROW:
                raise ValueError(
                    f"{where}: more than {LONGEST_ROW:,} bytes, the most of a row; use a .txt"
                )
            if line.strip():
                row = parse_json(_decode(line, where, options), where)
                yield _row_document(row, where, options)


def _text_document(path: Path, options: dict[str, str]) -> Document:
    with open_decompressed(path) as stream:
        # One read of all would ask for the greatest size, even of a small file.
        parts = iter(lambda: stream.read(1 << 20), b"")
        data = b"".join(itertools.islice(parts, (LONGEST_TEXT >> 20) + 1))
    if len(data) > LONGEST_TEXT:
        raise ValueError(
            f"{path}: more than {LONGEST_TEXT:,} bytes, the most of a document; cut it into files"
        )
    return Document(_decode(data, str(path), options), options.get("split"))


def _row_document(row: object, where: str, options: dict[str, str]) -> Document:
    field = options.get("field", "text")
    if not isinstance(row, dict):
        raise ValueError(
            f"{where}: expected an object with a field {field!r}, got {type(row).__name__}"
        )
    text = _field(row, field, where)
    if not isinstance(text, str | None):
        raise ValueError(f"{where}: field {field!r} is {type(text).__name__}, expected a string")
    text = text or ""
    half = _SURROGATES.search(text)
    if half:
        if options.get("errors") != "replace":
            place = f"U+{ord(half[0]):04X}, half of a surrogate pair, at character {half.start()}"
            raise ValueError(
                f"{where}: field {field!r} has {place}; '?errors=replace' puts U+FFFD there"
            )
        text = _SURROGATES.sub("\ufffd", text)
    split = options.get("split")
    if "split_field" in options:
        split = str(_field(row, options["split_field"], where))
        if split not in (*SPLITS, "unused"):
            raise ValueError(f"{where}: split {split!r} is none of 'train', 'heldout', 'unused'")
    return Document(text, split)


def _field(row: Mapping[str, object], field: str, where: str) -> object:
    if field not in row:
        fields = sorted(map(str, row))
        texts = [str(name) for name, value in row.items() if isinstance(value, str)]
        hint = f"expected '?field={texts[0]}'" if len(texts) == 1 else ""
        hint = did_you_mean(field, map(str, row), form="?field={}") or hint
        if not hint and texts:
            hint = f"'?field={texts[0]}' behind the source names one"
        raise ValueError(f"{where}: no field {field!r} among {fields}; {hint}".rstrip("; "))
    return row[field]


def _decode(data: bytes, where: str, options: dict[str, str]) -> str:
    """Text of UTF-8 bytes, without a byte order mark."""
    try:
        text = data.decode("utf-8", errors=options.get("errors", "strict"))
        return text.removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        place = f"byte {error.start} (0x{data[error.start]:02x})"
        raise ValueError(
            f"{where}: invalid UTF-8 at {place}; '?errors=replace' puts U+FFFD there"
        ) from error
