"""The vocabulary of sequence tasks: numbered symbols and a few marks, written with spaces."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

from modalities.tokenizers.encoding import Tokenizer

# Ids after the symbols, in this order.
MARKS = ("<bos>", "<eos>", "<pad>", "|", ":", "?", "_")
MOST_SYMBOLS = 1 << 16


class SymbolTokenizer(Tokenizer):
    """Symbols "0" … "N−1" as ids 0 … N−1, then `MARKS`; a text is symbols and marks with spaces."""

    def __init__(self, symbols: int) -> None:
        if not 1 <= symbols <= MOST_SYMBOLS:
            raise ValueError(
                f"tokenizer 'symbols:{symbols}': expected 1 to {MOST_SYMBOLS:,} symbols"
            )
        self.symbols = symbols
        self.name = f"symbols:{symbols}"
        self.bos_id = symbols
        self.eos_id = symbols + 1
        self.pad_id = symbols + 2
        self.separator_id = symbols + 3
        self.value_id = symbols + 4
        self.query_id = symbols + 5
        self.blank_id = symbols + 6
        # A multiple of 8.
        self.vocab_size = -(-(symbols + len(MARKS)) // 8) * 8
        content = " ".join([self.name, *MARKS])
        self.fingerprint = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        ids = []
        for word in text.split():
            if word in MARKS:
                ids.append(self.symbols + MARKS.index(word))
            elif word.isascii() and word.isdigit() and int(word) < self.symbols:
                ids.append(int(word))
            else:
                raise ValueError(
                    f"{word!r:.40} is no symbol of {self.name!r}: expected numbers below "
                    f"{self.symbols} and marks {' '.join(MARKS[3:])}, with spaces between"
                )
        return np.array(ids, dtype=np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        special = (self.bos_id, self.eos_id, self.pad_id)
        words = []
        for token in ids:
            number = int(token)
            if not 0 <= number < self.vocab_size:
                raise ValueError(f"id {number} is outside the vocabulary of {self.vocab_size}")
            if number < self.symbols:
                words.append(str(number))
            elif number not in special and number - self.symbols < len(MARKS):
                words.append(MARKS[number - self.symbols])
        return " ".join(words)
