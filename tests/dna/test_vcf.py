"""VCF and BCF read alike; files that are cut or malformed."""

from __future__ import annotations

import gzip

import numpy as np
import pysam
import pytest

from modalities.dna.variants import Variant, read_variants

TEXT = """##fileformat=VCFv4.3
##contig=<ID=c,length=900>
##contig=<ID=d,length=900>
##INFO=<ID=END,Number=1,Type=Integer,Description="end">
#CHROM\tPOS\tID\tREF\tALT\tQUAL\tFILTER\tINFO
c\t3\trs1\tA\tG\t29.5\tPASS\tEND=106
c\t9\t.\tac\tA,aCC,<DEL>\t.\t.\tEND=10
c\t9\t.\tA\t*\t.\t.\t.
d\t4\tx;y\tG\tT\t.\t.\t.
d\t800\tlast\tG\tG]c:1]\t3\tPASS\t.
d\t801\t.\tN\t<DEL>\t.\t.\t.
d\t802\t.\tN\t.\t.\t.\t.
"""
NAMES = ["v.vcf", "v.vcf.gz", "v.bcf"]


def written(path):
    """A VCF, bgzipped VCF or BCF with every kind of allele, at `path`, by its suffix."""
    (path.parent / "v.vcf").write_text(TEXT)
    if path.suffix == ".gz":
        with pysam.BGZFile(str(path), "wb") as file:
            file.write(TEXT.encode())
    elif path.suffix == ".bcf":
        source = pysam.VariantFile(str(path.parent / "v.vcf"))
        with pysam.VariantFile(str(path), "wb", header=source.header) as file:
            for record in source:
                file.write(record)
    return path


@pytest.mark.parametrize("name", NAMES)
def test_variants_and_their_reasons(tmp_path, name):
    variants = list(read_variants(written(tmp_path / name)))
    assert variants[0] == Variant("c", 3, "rs1", "A", "G", "record 1")
    assert [(v.chrom, v.pos, v.id, v.ref, v.alt) for v in variants[1:]] == [
        ("c", 9, ".", "AC", "A"),
        ("c", 9, ".", "AC", "ACC"),
        ("c", 9, ".", "AC", "<DEL>"),
        ("c", 9, ".", "A", "*"),
        ("d", 4, "x;y", "G", "T"),
        ("d", 800, "last", "G", "G]c:1]"),
        ("d", 801, ".", "N", "<DEL>"),
        ("d", 802, ".", "N", "."),
    ]
    symbolic = [False, False, False, True, True, False, True, True, True]
    assert ["symbolic" in v.reason for v in variants] == [bool(v.reason) for v in variants] == symbolic


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_file_cut_anywhere_is_an_error(tmp_path, name, capfd):
    """Also between two blocks, where gzip notices nothing."""
    path = written(tmp_path / name)
    data = path.read_bytes()
    for size in [*np.random.default_rng(0).integers(30, len(data), 20).tolist(), len(data) - 28, len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"v\..*(truncated|damaged)") as caught:
            list(read_variants(path))
        assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


def test_malformed_files(tmp_path):
    for content, message in (
        (TEXT.encode() + b"c\t3\t.\tA\n", r"record 8: truncated, damaged or malformed"),
        (TEXT.encode() + b"c\tthree\t.\tA\tC\t.\t.\t.\n", r"record 8: truncated, damaged or malformed"),
        (TEXT.encode() + b"c\t3\tr\xe9\tA\tC\t.\t.\t.\n", r"record 8: .*utf-8"),
        (gzip.compress(TEXT.encode()), "compressed with gzip and not with bgzip"),
        (b"chrom\tpos\tref\talt\nc\t3\tA\tC\n", r"the header: truncated, damaged or malformed VCF"),
        (b"", r"the header: truncated"),
    ):
        (tmp_path / "v").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            list(read_variants(tmp_path / "v"))
