"""Tokenizers of text behind one small interface: text in, int64 ids out.

Bytes; BPE of a tokenizer.json, whose options name special tokens, as in
"FILE.json?bos=[GO]&pad=[FILL]"; GPT-2's BPE; and tokenizers of `transformers`. Specs are those of
`modalities.text.tokenizers.load_tokenizer`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import parse_qsl

import numpy as np

from modalities.tokenizers.files import no_panic, read_backend
from modalities.tokenizers.outside import fingerprint_of_tokenizer, start_id
from zoo.errors import nearest, require
from zoo.files import data_folder, near_file

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerBase

# What special tokens are usually called, in the order in which they are looked for.
SPECIAL_NAMES = {
    "bos": (
        "<s>",
        "<|begin_of_text|>",
        "<bos>",
        "[BOS]",
        "<|startoftext|>",
        "<|endoftext|>",
        "[CLS]",
    ),
    "eos": ("</s>", "<|end_of_text|>", "<eos>", "[EOS]", "<|endoftext|>", "[SEP]"),
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>"),
}


class Tokenizer:
    """A tokenizer; equal fingerprints (hex) give equal ids for every text."""

    name: str
    vocab_size: int
    bos_id: int
    eos_id: int
    pad_id: int
    fingerprint: str

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, int64, shape (N,). No BOS or EOS is added."""
        raise NotImplementedError

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of several texts; the BPE kinds use all cores for it."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; BOS, EOS and PAD are left out, broken UTF-8 becomes U+FFFD."""
        raise NotImplementedError

    def ends(self, text: str) -> list[int] | None:
        """Characters of `text` up to the end of each of its ids; None where a tokenizer does not
        tell."""
        return None


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes. 256 bytes + BOS, EOS, PAD, rounded up to 264 (a multiple of 8); ids 259..263
    never occur."""

    name = "bytes"
    vocab_size = 264
    bos_id = 256
    eos_id = 257
    pad_id = 258
    fingerprint = hashlib.blake2b(b"bytes-264", digest_size=16).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        text = bytes(i for i in _as_ints(ids, self.vocab_size) if i < 256)
        return text.decode("utf-8", errors="replace")


class BPETokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library, `backend`."""

    def __init__(
        self, backend: Backend, *, name: str, bos_id: int, eos_id: int, pad_id: int
    ) -> None:
        self.backend = backend
        self.name = name
        self.vocab_size = int(backend.get_vocab_size(with_added_tokens=True))
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.pad_id = pad_id
        # Special tokens that the file has as plain ones become special; their ids stay.
        added = backend.get_added_tokens_decoder()
        plain = [n for n in {bos_id, eos_id, pad_id} if n in added and not added[n].special]
        backend.add_special_tokens([added[n].content for n in plain])
        # A text that spells a special token is encoded as text.
        backend.encode_special_tokens = True
        content = f"{backend.to_str()}|{bos_id}|{eos_id}|{pad_id}"
        self.fingerprint = hashlib.blake2b(content.encode("utf-8"), digest_size=16).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.asarray(encoding.ids, dtype=np.int64) for encoding in self._encodings(texts)]

    def ends(self, text: str) -> list[int]:
        return [end for _, end in self._encodings([text])[0].offsets]

    def _encodings(self, texts: Sequence[str]) -> list[Encoding]:
        with no_panic(self.name):
            return self.backend.encode_batch(list(texts), add_special_tokens=False)

    def decode(self, ids: Iterable[int]) -> str:
        special = (self.bos_id, self.eos_id, self.pad_id)
        plain = [i for i in _as_ints(ids, self.vocab_size) if i not in special]
        return self.backend.decode(plain, skip_special_tokens=False)


class OutsideTokenizer(Tokenizer):
    """A tokenizer of `transformers`. Nothing is cut off or padded, and special tokens are not
    added.

    Where it puts a space before a text, as sentencepiece does, a space that begins the text is left
    out.
    """

    # Options of a call that encodes the text alone.
    BARE: ClassVar[dict[str, bool]] = {
        "add_special_tokens": False,
        "split_special_tokens": True,
        "verbose": False,
    }

    def __init__(self, inner: PreTrainedTokenizerBase, name: str) -> None:
        self.inner = inner
        self.name = f"hf:{name}"
        self.vocab_size = len(inner)
        self.bos_id = start_id(inner, name)
        self.eos_id = self.bos_id if inner.eos_token_id is None else int(inner.eos_token_id)
        self.pad_id = self.eos_id if inner.pad_token_id is None else int(inner.pad_token_id)
        self.fingerprint = fingerprint_of_tokenizer(inner)
        first = inner.convert_ids_to_tokens(inner("x", add_special_tokens=False)["input_ids"])[0]
        self._puts_space = str(first).startswith("▁")

    def encode(self, text: str) -> np.ndarray:
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        bare = [text[self._skipped(text) :] for text in texts]
        with no_panic(self.name):
            rows = self.inner(bare, **self.BARE)["input_ids"]
        return [np.asarray(ids, dtype=np.int64) for ids in rows]

    def ends(self, text: str) -> list[int] | None:
        if not self.inner.is_fast:
            return None
        skipped = self._skipped(text)
        with no_panic(self.name):
            encoding = self.inner(text[skipped:], **self.BARE, return_offsets_mapping=True)
        return [skipped + end for _, end in encoding["offset_mapping"]]

    def _skipped(self, text: str) -> int:
        """Characters at the start of a text that the tokenizer puts there itself: 1 or 0."""
        return 1 if self._puts_space and text.startswith(" ") else 0

    def decode(self, ids: Iterable[int]) -> str:
        """As `Tokenizer.decode`; ids beyond the vocabulary, which a padded output layer has, are
        left out too."""
        values = ids.tolist() if hasattr(ids, "tolist") else ids
        valid = [i for i in values if i < self.vocab_size]
        return str(
            self.inner.decode(valid, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )


def open_gpt2(spec: str) -> BPETokenizer:
    """GPT-2's tokenizer from the folder of a spec "gpt2[:FOLDER]"."""
    folder = Path(spec[len("gpt2:") :]) if ":" in spec else data_folder() / "gpt2"
    vocabulary = folder / "encoder.json"
    merges = folder / "vocab.bpe"
    if not vocabulary.is_file() or not merges.is_file():
        vocabulary = folder / "vocab.json"
        merges = folder / "merges.txt"
    if not vocabulary.is_file() or not merges.is_file():
        raise FileNotFoundError(
            f"tokenizer {spec!r}: no encoder.json + vocab.bpe or vocab.json + merges.txt in "
            f"{folder}; `priorzoo fetch-data text gpt2` fetches"
        )
    require("tokenizers", f"tokenizer {spec!r}", "text")
    import tokenizers

    # The library raises a bare Exception, as in `read_backend`.
    try:
        backend = tokenizers.ByteLevelBPETokenizer(str(vocabulary), str(merges))._tokenizer
    except Exception as error:
        raise ValueError(
            f"tokenizer {spec!r}: {vocabulary} and {merges.name} are not BPE's: {error}"
        ) from error
    end = backend.token_to_id("<|endoftext|>")
    if end is None:
        raise ValueError(
            f"tokenizer {spec!r}: {vocabulary} has no '<|endoftext|>', so it is not GPT-2's"
        )
    return BPETokenizer(backend, name="gpt2", bos_id=end, eos_id=end, pad_id=end)


def open_json(spec: str, path: Path) -> BPETokenizer:
    """The tokenizer of a tokenizer.json, with the special tokens that the spec's options name."""
    special = dict(parse_qsl(spec.partition("?")[2], keep_blank_values=True))
    for key, value in special.items():
        if key not in SPECIAL_NAMES:
            raise ValueError(
                f"tokenizer {spec!r}: unknown option {key!r}; {nearest(key, SPECIAL_NAMES)}"
            )
        if not value:
            raise ValueError(f"tokenizer {spec!r}: option {key!r} has no value")
    if not path.is_file():
        hint = near_file(path, lambda name: name.endswith(".json"))
        raise FileNotFoundError(f"tokenizer {spec!r}: no file {path}; {hint}".rstrip("; "))
    require("tokenizers", f"tokenizer {spec!r}", "text")
    import tokenizers

    backend = read_backend(spec, path, tokenizers)
    backend.no_padding()
    backend.no_truncation()
    bos = _special_id(backend, spec, "bos", special.get("bos"))
    eos = _special_id(backend, spec, "eos", special.get("eos"), default=bos)
    pad = _special_id(backend, spec, "pad", special.get("pad"), default=eos)
    name = Path(spec.partition("?")[0]).stem
    return BPETokenizer(backend, name=name, bos_id=bos, eos_id=eos, pad_id=pad)


def _special_id(
    backend: Backend, spec: str, role: str, option: str | None, default: int | None = None
) -> int:
    """The id of a special token: the option's, else the first usual name, else the default, else an
    error."""
    names = SPECIAL_NAMES[role] if option is None else (option,)
    for name in names:
        number = backend.token_to_id(name)
        if number is not None:
            return int(number)
    if option is None and default is not None:
        return default
    listed = ", ".join(map(repr, names))
    raise ValueError(
        f"tokenizer {spec!r}: no {role} token; looked for {listed}; "
        f"give one as 'FILE.json?{role}=…'"
    )


def _as_ints(ids: Iterable[int], vocab_size: int) -> list[int]:
    """Plain ints from a list, array or tensor; an id outside the vocabulary is an error, not a
    blank."""
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    values = [int(i) for i in ids]
    for value in values:
        if not 0 <= value < vocab_size:
            raise ValueError(f"token id {value} is outside 0..{vocab_size - 1}")
    return values
