"""(name, letters) of each contig of FASTA, of a zip with GenBank files, and of a multiple
alignment, by Biopython."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from Bio import AlignIO, SeqIO
from Bio.Seq import reverse_complement
from Bio.SeqIO.FastaIO import SimpleFastaParser

from zoo.files import opened


def read_fasta(path: Path) -> Iterator[tuple[str, str]]:
    """Contigs of FASTA, gzip or plain; a name ends at the first white space."""
    with opened(path) as stream:
        for title, sequence in SimpleFastaParser(io.TextIOWrapper(stream, encoding="ascii")):
            yield (title.split() or [""])[0], sequence


def read_genbank(path: Path) -> Iterator[tuple[str, str]]:
    """Contigs of a zip's GenBank files, named as the files are. Nothing else in it is opened: it
    has pickles."""
    with zipfile.ZipFile(path) as archive:
        for member in sorted(name for name in archive.namelist() if name.endswith(".gb")):
            yield (
                Path(member).stem,
                str(SeqIO.read(io.StringIO(archive.read(member).decode("ascii")), "genbank").seq),
            )


def read_maf(path: Path) -> Iterator[tuple[str, str]]:
    """Contigs of the reference (the first row of each block) of a multiple alignment, by name;
    bases in no block are N. Gaps are taken out; a row on the minus strand counts from the end of
    the contig and is turned round."""
    contigs: dict[str, np.ndarray] = {}
    with opened(path) as stream:
        for block in AlignIO.parse(io.TextIOWrapper(stream, encoding="ascii"), "maf"):
            row = block[0]
            start, size, length = (row.annotations[key] for key in ("start", "size", "srcSize"))
            text = str(row.seq).replace("-", "")
            if row.annotations["strand"] == -1:
                start = length - start - size
                text = reverse_complement(text)
            contig = contigs.setdefault(row.id, np.full(length, ord("N"), np.uint8))
            if len(contig) != length or len(text) != size or not 0 <= start <= length - size:
                raise ValueError(
                    f"a block says that {row.id} has {size} bases at {start} of {length}, and it has not"
                )
            here = contig[start : start + size]
            np.copyto(
                here, np.frombuffer(text.encode(), np.uint8), where=(here & 0xDF) == ord("N")
            )  # n is N
    for name in sorted(
        contigs, key=lambda name: [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", name)]
    ):
        yield name, contigs.pop(name).tobytes().decode()
