"""Links in a tar: a hard link or a symlink has no data of its own, and names another member."""

from __future__ import annotations

import posixpath
import tarfile
from collections.abc import Iterable

# Links on the way to one member, as in Linux.
MOST_LINKS = 40
# (offset, size) of a member's data.
Place = tuple[int, int]


class TarLinks:
    """The members of a tar by their paths, as links name them.

    An absolute path begins at the tar's root. What is above the root, or outside the tar on
    this machine, is never read.
    """

    def __init__(self, members: Iterable[tarfile.TarInfo]) -> None:
        self._files: dict[str, Place] = {}
        self._targets: dict[str, str] = {}
        for member in members:
            path = posixpath.normpath(member.name.lstrip("/"))
            if member.isreg():
                self._files[path] = (member.offset_data, member.size)
            elif member.islnk():
                # Other than a symlink's, its path is that of a member.
                self._targets[path] = "/" + member.linkname
            elif member.issym():
                self._targets[path] = member.linkname

    def place(self, path: str) -> Place | None:
        """Where the data of a member is, through folders that are links too; None where a link
        leads to no file of the tar, above its root, or in a circle."""
        parts = _reversed_parts(path)
        folders: list[str] = []
        links = 0
        while parts:
            part = parts.pop()
            if part == "..":
                if not folders:
                    return None
                folders.pop()
                continue
            target = self._targets.get("/".join([*folders, part]))
            if target is None:
                folders.append(part)
                continue
            links += 1
            if links > MOST_LINKS:
                return None
            if target.startswith("/"):
                folders.clear()
            parts += _reversed_parts(target)
        return self._files.get("/".join(folders))


def _reversed_parts(path: str) -> list[str]:
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]
