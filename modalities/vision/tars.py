"""Tars, read by headers or as a stream, whose headers are not believed before they are checked.

`tarfile` takes the end of a file, and a damaged header, for the end of the archive, and allocates what headers claim. Here
an archive ends in its two blocks of zeros or is an error, as is a sparse member, which unpacks to more than there is.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Self

from webdataset.tariterators import base_plus_ext

__all__ = ["LARGEST_MEMBER", "scan", "stream_members"]

LARGEST_MEMBER = 1 << 30  # bytes
_LARGEST_EXTENSION = 1 << 20  # bytes of a long name, or of a pax header
_EXTENSIONS = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)
_ZEROS = bytes(tarfile.BLOCKSIZE)
_META = re.compile(r"__[^/]*__($|/)")  # members that webdataset leaves out


class _Header(tarfile.TarInfo):
    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        if bytes(buf) == _ZEROS:
            return super().frombuf(buf, encoding, errors)  # raises what ends the iteration
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:  # of which the iteration would hide most
            what = (
                f"a damaged header ({error})" if len(buf) == len(_ZEROS) else "no end-of-archive mark: it is cut short"
            )
            raise tarfile.ReadError(what) from error
        most = _LARGEST_EXTENSION if header.type in _EXTENSIONS else LARGEST_MEMBER
        if not 0 <= header.size <= most:
            raise tarfile.ReadError(f"{header.name[:80]!r} has {header.size:,} bytes; expected 0 to {most:,}")
        return header


def _members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The regular members that make up samples. Raises TarError."""
    try:
        for member in tar:
            if member.issparse():
                raise tarfile.ReadError(f"{member.name[:80]!r} is a sparse file; archive it without holes")
            if not 0 <= member.size <= LARGEST_MEMBER:  # that a pax header says
                raise tarfile.ReadError(f"{member.name[:80]!r} has {member.size:,} bytes; at most {LARGEST_MEMBER:,}")
            if member.isreg() and not _META.match(member.name):
                yield member
            tar.members = []  # type: ignore[attr-defined]  # tarfile keeps every member otherwise
        if tar.fileobj is not None and tar.fileobj.read(len(_ZEROS)) != _ZEROS:
            raise tarfile.ReadError("no end-of-archive mark: it is cut short")
    except (ValueError, OverflowError, IndexError) as error:  # of numbers in extended headers
        raise tarfile.ReadError(f"a damaged header ({error})") from error


def scan(path: Path) -> list[dict[str, Any]]:
    """Per sample of a local tar {"__key__", extension: (offset, size)}; grouped as webdataset groups them.

    Raises:
        ValueError: for a tar that cannot be read, or has no end.
    """
    samples: list[dict[str, Any]] = []
    size = path.stat().st_size
    try:
        with tarfile.open(path, "r:", tarinfo=_Header) as tar:
            for member in _members(tar):
                if member.offset_data + member.size > size:
                    raise tarfile.ReadError(
                        f"{member.name[:80]!r} has {member.size:,} bytes from byte {member.offset_data:,} on; "
                        f"the file ends at {size:,}"
                    )
                prefix, suffix = base_plus_ext(member.name)
                if prefix is None:
                    continue
                if not samples or samples[-1]["__key__"] != prefix:
                    samples.append({"__key__": prefix})
                samples[-1][suffix.lower()] = (member.offset_data, member.size)
    except tarfile.TarError as error:
        raise ValueError(f"shard {path} cannot be read: {error}") from error
    return samples


def stream_members(stream: IO[bytes], url: str) -> Iterator[dict[str, Any]]:
    """{"fname", "data", "__url__"} of every member of a tar, compressed or not, as `webdataset.group_by_keys` takes them.

    Raises:
        tarfile.TarError: for a tar that cannot be read, or has no end.
    """
    with tarfile.open(fileobj=stream, mode="r|*", tarinfo=_Header) as tar:
        for member in _members(tar):
            data = tar.extractfile(member)
            yield {"fname": member.name, "data": data.read() if data else b"", "__url__": url}
