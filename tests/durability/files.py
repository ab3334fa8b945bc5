"""Small whole files of every kind that a reader takes, the damage that is done to them, and a
pickle that runs code."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from modalities.text import CausalLM, TextConfig
from tests.vision.image_files import encoded, solid, tar

# What happens to a file on its way.
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "first bytes": lambda data: b"\xff\0\xff\xff" + data[4:],
    "middle": lambda data: (
        data[: len(data) // 2] + b"\xff\0\x80\n>9999999999\t" + data[len(data) // 2 + 8 :]
    ),
    "moved": lambda data: data[len(data) // 3 :] + data[: len(data) // 3],
    "another kind": lambda data: b"\x80\x04\x95" + b"PK\x03\x04" * 20,
}
RECORDS = (
    "##fileformat=VCFv4.2\n##contig=<ID=c>\n#CHROM\tPOS\tID\tREF\tALT\tQUAL\tFILTER\tINFO\n"
    + "".join(f"c\t{n}\tr\tA\tC,G\t.\t.\t.\n" for n in range(1, 30))
)


def save_model(folder: Path) -> CausalLM:
    """A tiny saved model without the digests of manifest.json: whoever changes a file may change
    its digest too."""
    torch.manual_seed(0)
    model = CausalLM(
        TextConfig(dim=8, num_layers=1, num_heads=2, hidden_dim=8, position="nope", vocab_size=264)
    )
    model.save_pretrained(folder)
    (folder / "manifest.json").unlink()
    return model


def whole_files() -> dict[str, bytes]:
    """By name, a file that its reader takes."""
    return {
        "a.txt": "Some words, ünd\n".encode() * 30,
        "a.jsonl": b"".join(json.dumps({"text": f"röw {n}"}).encode() + b"\n" for n in range(20)),
        "a.jsonl.gz": gzip.compress(b'{"text": "x"}\n' * 999, mtime=0),
        "a.png": encoded(solid(1, (40, 40))),
        "a.tar": tar((str(n), {"png": encoded(solid(n)), "cls": b"0"}) for n in range(3)),
        "a.fa": b">a\nACGTNNACGT\n>b x\nacgtac\n",
        "a.fa.gz": gzip.compress(b">a\n" + b"ACGTTGAC" * 999, mtime=0),
        "a.vcf": RECORDS.encode(),
    }


class Runs:
    """Unpickles by making a folder."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


class Peak:
    """Most bytes that Python and NumPy had within a block, beyond those before it."""

    def __enter__(self) -> Peak:
        tracemalloc.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
