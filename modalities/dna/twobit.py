"""2bit, the format of UCSC: an index of sequences, each four bases a byte with runs of N and of soft mask beside them.

A file's own numbers are checked against its size and the sequence's length before anything is read or allocated by them, so
what a file makes is at most four bytes of codes for each of its own. (Biopython's reader in C trusts them.)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from modalities.dna.bases import SOFT, UNKNOWN

__all__ = ["SIGNATURES", "TwoBit"]

SIGNATURES = {b"\x43\x27\x41\x1a": "<u4", b"\x1a\x41\x27\x43": ">u4"}  # and the byte order of a file that begins so
_BLOCK = 1 << 22  # bytes of packed bases at a time
# By byte the codes of its four bases, four bytes as one number: T, C, A, G are 0 to 3, the first in the highest bits.
_UNPACKED = np.array([3, 1, 0, 2], np.uint8)[np.arange(256)[:, None] >> np.array([6, 4, 2, 0]) & 3].view(np.uint32)[
    :, 0
]


class _Record(NamedTuple):
    bases: int
    unknown: np.ndarray  # (n, 2), the runs [start, stop) of N, sorted and disjoint
    masked: np.ndarray
    at: int  # where the packed bases begin


class TwoBit:
    """The sequences of a 2bit file.

    Attributes:
        names: of its sequences, in its order.

    Raises:
        ValueError: for a number in the file that cannot be right; it names the field, its value and the limit.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file = path, file
        self.size = file.seek(0, os.SEEK_END)
        file.seek(0)
        signature = file.read(4)
        if signature not in SIGNATURES:
            raise ValueError(f"{path}: not a 2bit file: it begins with {signature.hex(' ')}, not 1a 41 27 43")
        self.dtype = np.dtype(SIGNATURES[signature])
        version, count, reserved = self._numbers(3, "its header")
        for field, value in (("version", version), ("reserved field", reserved)):
            if value:
                raise ValueError(f"{path}: {field} {value:,}; expected 0")
        if 16 + 5 * count > self.size:
            raise ValueError(f"{path}: truncated: {self.size:,} bytes cannot hold the index of {count:,} sequences")
        places = [self._entry(number) for number in range(1, count + 1)]
        self.names = [name for name, _ in places]
        if len(set(self.names)) < count:
            raise ValueError(f"{path}: a name occurs twice among its {count:,} sequences")
        self._places = [place for _, place in places]
        self._unread = 4 * self.size  # bases that records of their own bytes can still have

    def codes(self, number: int) -> Iterator[bytes]:
        """The sequence at a place in `names`, a byte each as `bases.LETTERS` translates letters, in pieces."""
        record = self._record(number)
        self.file.seek(record.at)
        for start in range(0, record.bases, 4 * _BLOCK):
            stop = min(start + 4 * _BLOCK, record.bases)
            packed = self.file.read(-(-(stop - start) // 4))
            if 4 * len(packed) < stop - start:
                raise ValueError(f"{self._called(number)}: truncated while it was read")
            found = _UNPACKED[np.frombuffer(packed, np.uint8)].view(np.uint8)[: stop - start]
            for first, last in _within(record.unknown, start, stop).tolist():
                found[first:last] = UNKNOWN
            for first, last in _within(record.masked, start, stop).tolist():
                found[first:last] |= SOFT
            yield found.tobytes()

    def _called(self, number: int) -> str:
        return f"{self.path}, sequence {number + 1} ({self.names[number]!r})"

    def _numbers(self, count: int, what: str) -> list[int]:
        data = self.file.read(4 * count)
        if len(data) < 4 * count:
            raise ValueError(f"{self.path}: truncated: its {self.size:,} bytes end in {what}")
        return np.frombuffer(data, self.dtype).tolist()

    def _entry(self, number: int) -> tuple[str, int]:
        """(name, offset) of the index."""
        name = self.file.read((self.file.read(1) or b"\0")[0])
        (offset,) = self._numbers(1, f"the index, at sequence {number}")
        try:
            text = name.decode("ascii")
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}: the name of sequence {number} is {name!r}; expected ASCII") from error
        if not 16 <= offset <= self.size - 16:
            raise ValueError(
                f"{self.path}: sequence {number} ({text!r}): offset {offset:,}; expected 16 to {self.size - 16:,}, so "
                "that a record fits: truncated or damaged"
            )
        return text, offset

    def _record(self, number: int) -> _Record:
        self.file.seek(self._places[number])
        (bases,) = self._numbers(1, f"the length of sequence {number + 1}")
        if bases > self._unread:  # all together: records that share bytes would make more of them than there are
            raise ValueError(
                f"{self._called(number)}: dnaSize {bases:,}; the file's {self.size:,} bytes have room for at most "
                f"{self._unread:,}: truncated or damaged"
            )
        self._unread -= bases
        unknown, masked = (self._runs(number, field, bases) for field in ("nBlock", "maskBlock"))
        (reserved,) = self._numbers(1, f"the header of sequence {number + 1}")
        if reserved:
            raise ValueError(f"{self._called(number)}: reserved field {reserved:,}; expected 0")
        at = self.file.tell()
        if at + -(-bases // 4) > self.size:
            raise ValueError(
                f"{self._called(number)}: truncated: dnaSize {bases:,} from byte {at:,} on; the file has {self.size:,}"
            )
        return _Record(bases, unknown, masked, at)

    def _runs(self, number: int, field: str, bases: int) -> np.ndarray:
        """The runs of a field, those without a base left out."""
        (count,) = self._numbers(1, f"the header of sequence {number + 1}")
        if 8 * count > self.size - self.file.tell():
            raise ValueError(
                f"{self._called(number)}: {field}Count {count:,}; the file has room for at most "
                f"{(self.size - self.file.tell()) // 8:,}: truncated or damaged"
            )
        starts, sizes = np.frombuffer(self.file.read(8 * count), self.dtype).reshape(2, count).astype(np.int64)
        found = np.stack([starts, starts + sizes], axis=1)
        if len(beyond := np.flatnonzero(found[:, 1] > bases)):
            start, stop = found[beyond[0]].tolist()
            raise ValueError(
                f"{self._called(number)}: {field} {beyond[0] + 1} is {start:,} to {stop:,}; dnaSize is {bases:,}"
            )
        found = found[sizes > 0]
        if (found[1:, 0] < found[:-1, 1]).any():
            raise ValueError(f"{self._called(number)}: {field}Starts are not sorted, or blocks overlap")
        return found


def _within(runs: np.ndarray, start: int, stop: int) -> np.ndarray:
    """The parts of sorted, disjoint runs that lie in [start, stop), counted from `start`."""
    first = np.searchsorted(runs[:, 1], start, side="right")
    last = np.searchsorted(runs[:, 0], stop, side="left")
    return np.clip(runs[first:last] - start, 0, stop - start)
