"""What a block took of memory, and files that take much."""

from __future__ import annotations

import gzip
import tracemalloc


class Peak:
    """Most bytes that Python and numpy had within a block, beyond those before it."""

    def __enter__(self):
        tracemalloc.start()
        return self

    def __exit__(self, *error):
        self.bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()


def gz(path, pieces):
    """A compressed file of the pieces."""
    with gzip.open(path, "wb", compresslevel=1) as file:
        for piece in pieces:
            file.write(piece)
    return path
