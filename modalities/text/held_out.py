"""The held-out documents of a source, tokenised once per process and shared by all evaluators and models."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from modalities.text.data import heldout_documents
from modalities.text.tokenizers import Tokenizer, load_tokenizer

DEFAULT_SOURCE = "sotu-excerpt"
MOST_DOCUMENTS = 2000  # of a source without end; the files of the reachable corpora hold fewer


@dataclass(frozen=True)
class HeldOut:
    """One document: its text, its ids without BOS or EOS, and the UTF-8 bytes those ids stand for."""

    text: str
    tokens: np.ndarray
    bytes: int

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / len(self.tokens)


@lru_cache(maxsize=4)
def held_out_documents(tokenizer_name: str, source: str | None) -> tuple[Tokenizer, tuple[HeldOut, ...]]:
    """The tokenizer and the first ``MOST_DOCUMENTS`` documents of the "heldout" split of ``source``.

    Raises ValueError when the split is empty: measuring on text that was trained on is no way out.
    """
    spec = source or DEFAULT_SOURCE
    tokenizer = load_tokenizer(tokenizer_name)
    texts = [document.text for document in heldout_documents(spec, limit=MOST_DOCUMENTS)]
    if not texts:
        raise ValueError(f"source {spec!r} has no held-out document (5% are held out, by hash of their text)")
    encoded = tokenizer.encode_many(texts)
    return tokenizer, tuple(
        HeldOut(text, tokens, tokenizer.count_bytes(text)) for text, tokens in zip(texts, encoded, strict=True)
    )


@lru_cache(maxsize=4)
def held_out_fingerprint(tokenizer_name: str, source: str | None) -> str:
    """Hash of the tokenizer and the held-out ids: what a stored number must be keyed by."""
    tokenizer, documents = held_out_documents(tokenizer_name, source)
    digest = hashlib.sha256(tokenizer.fingerprint.encode())
    for document in documents:
        digest.update(len(document.tokens).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(document.tokens).tobytes())
    return digest.hexdigest()[:16]
