"""Picture sets out of packages: the raw material of `tools/fetchers/vision.py`."""

from __future__ import annotations

from pathlib import Path

from tools.fetchers.common import console
from tools.fetchers.offline.packages import apt_download, unpack_deb

FONT_PACKAGES = Path(__file__).with_name("font-packages.txt")
FEWEST_PACKAGES = 380  # of the list; other releases of Debian may have dropped or renamed a few


def glyphs(folder: Path) -> list[tuple[str, str]]:
    """(font file, package) of every outline font in the Debian packages of FONT_PACKAGES, unpacked one folder each."""
    names = [line for line in FONT_PACKAGES.read_text().splitlines() if line and not line.startswith("#")]
    fonts = []
    for package in apt_download(names, component="main", folder=folder, at_least=FEWEST_PACKAGES):
        name = package.name.split("_")[0]
        place = folder / "unpacked" / name
        place.mkdir(parents=True)
        with console.status(f"unpacking {package.name}"):
            unpack_deb(package, place)
            package.unlink()
        for path in sorted((place / "usr/share/fonts").rglob("*")):
            if path.suffix.lower() in (".ttf", ".otf") and path.is_file() and not path.is_symlink():
                fonts.append((str(path), name))
    return fonts
