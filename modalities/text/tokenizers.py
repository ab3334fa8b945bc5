"""The tokenizers of text by their specs.

`load_tokenizer(spec)` knows seven kinds:

    "bytes"          UTF-8 bytes; ids 0..255 are the bytes, 256 BOS, 257 EOS, 258 PAD; needs nothing
    "bpe-1k"         byte-level BPE that ships with the package (assets/README.md); each digit is a
                     token of its own
    "bpe-4k"         the same with 4,096 entries instead of 1,024
    "gpt2[:FOLDER]"  GPT-2's byte-level BPE from encoder.json + vocab.bpe (or vocab.json +
                     merges.txt)
    "FILE.json"      any tokenizer saved by the `tokenizers` library
    "hf:NAME"        the tokenizer of a folder or repository of `transformers`
    "symbols:N"      numbers below N and a few marks, for sequence tasks (tasks.py)

Options `bos`, `eos` and `pad` name special tokens, as in "FILE.json?bos=[GO]&pad=[FILL]". A model's
config keeps the whole string. A text of "hf:NAME" begins with the tokenizer's BOS, else EOS, else
[CLS].
"""

from __future__ import annotations

from pathlib import Path

from modalities.tokenizers.copies import load_outside, tokenizer_file
from modalities.tokenizers.encoding import (
    ByteTokenizer,
    OutsideTokenizer,
    Tokenizer,
    open_gpt2,
    open_json,
)
from modalities.tokenizers.symbols import SymbolTokenizer
from zoo.errors import did_you_mean

_ASSETS = Path(__file__).parent / "assets"
# Files assets/NAME.json; assets/README.md says how they were made.
SHIPPED = ("bpe-1k", "bpe-4k")


def load_tokenizer(spec: str = "bytes") -> Tokenizer:
    """The tokenizer of a spec string. ValueError for an unknown one, FileNotFoundError, ImportError
    for what is missing."""
    if not isinstance(spec, str) or not spec:
        raise ValueError(f"tokenizer must be a non-empty string such as 'bytes', got {spec!r}")
    if spec == "bytes":
        return ByteTokenizer()
    if spec in SHIPPED:
        return open_json(spec, _ASSETS / f"{spec}.json")
    if spec.startswith("hf:"):
        return load_outside(spec.removeprefix("hf:"), OutsideTokenizer)
    if spec == "gpt2" or spec.startswith("gpt2:"):
        return open_gpt2(spec)
    if spec.startswith("symbols:") and spec.removeprefix("symbols:").isdigit():
        return SymbolTokenizer(int(spec.removeprefix("symbols:")))
    file = tokenizer_file(spec)
    if file is not None:
        return open_json(spec, file)
    names = ["bytes", *SHIPPED, "gpt2", "gpt2:FOLDER", "hf:NAME", "symbols:N"]
    listed = ", ".join(map(repr, names))
    hint = did_you_mean(spec, [*names, "tokenizer.json"], cutoff=0.3)
    expected = f"expected {listed} or 'FILE.json'; {hint}".rstrip("; ")
    raise ValueError(f"unknown tokenizer {spec!r}: {expected}")
