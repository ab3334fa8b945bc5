"""VCF and BCF read alike, and written with INFO fields and nothing else changed."""

from __future__ import annotations

import gzip
import math

import numpy as np
import pysam
import pytest

from modalities.dna.vcf import InfoField, Variant, check_annotation, read_variants, write_annotated

FIELDS = {"a": InfoField("LLR", 'a "score", in nats'), "b": InfoField("LLR_FLANK", "flanks")}
HEAD = """##fileformat=VCFv4.3
##FILTER=<ID=PASS,Description="All filters passed">
##INFO=<ID=AF,Number=A,Type=Float,Description="share">
##INFO=<ID=DB,Number=0,Type=Flag,Description="dbSNP">
##INFO=<ID=END,Number=1,Type=Integer,Description="end">
##FORMAT=<ID=GT,Number=1,Type=String,Description="genotype">
##contig=<ID=c,length=900>
#CHROM\tPOS\tID\tREF\tALT\tQUAL\tFILTER\tINFO\tFORMAT\tann\tbob
"""
# END beside alleles of bases and beside symbolic ones: pysam's writer of records changes it.
RECORDS = [
    "c\t3\trs1\tA\tG\t29.5\tPASS\tAF=0.25;DB;END=106\tGT\t0|1\t1/1",
    "c\t9\t.\tac\tA,aCC,<DEL>\t.\tq10\tAF=0.5,0.25,.;END=10\tGT\t0/1\t./.",
    "c\t9\t.\tA\t*\t.\t.\t.\tGT\t0/1\t./.",
    "d\t4\tx;y\tG\tT\t.\t.\tUNDECLARED=9.50\tGT\t0\t1",
    "d\t800\tlast\tG\tG]c:1]\t3\tPASS\tDB\tGT\t0/0\t0/0",
    "d\t801\t.\tN\t<DEL>\t.\t.\t.\tGT\t0/0\t0/0",
    "d\t802\t.\tN\t.\t.\t.\t.\tGT\t0/0\t0/0",
]
TEXT = HEAD + "\n".join(RECORDS) + "\n"
VALUES = [1.5, -0.123456789, math.nan, math.nan, math.nan, 1e-7, math.nan, math.nan, math.nan]
ADDED = [
    "LLR=1.5;LLR_FLANK=3",
    "LLR=-0.123457,.,.;LLR_FLANK=-0.246914,.,.",
    "",
    "LLR=1e-07;LLR_FLANK=2e-07",
    "",
    "",
    "",
]
NAMES = ["v.vcf", "v.vcf.gz", "v.bcf"]


def whole(path):
    """A VCF, bgzipped VCF or BCF with every kind of allele, at `path`, by its suffix."""
    if path.suffix == ".vcf":
        path.write_text(TEXT)
    elif path.suffix == ".gz":
        with pysam.BGZFile(str(path), "wb") as file:
            file.write(TEXT.encode())
    else:
        (path.parent / "text.vcf").write_text(TEXT)
        header = check_annotation(path.parent / "text.vcf", [])
        with pysam.VariantFile(str(path.parent / "text.vcf")) as source:
            source.header.merge(header)
            with pysam.VariantFile(str(path), "wb", header=source.header) as file:
                for record in source:
                    file.write(record)
        (path.parent / "text.vcf").unlink()
    return path


def rows_of(path):
    names = ("chrom", "pos", "ref", "alt")
    return [
        {name: getattr(variant, name) for name in names} | {"a": value, "b": 2 * value}
        for variant, value in zip(read_variants(path), VALUES, strict=True)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_variants_and_their_reasons(tmp_path, name):
    variants = list(read_variants(whole(tmp_path / name)))
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


@pytest.mark.parametrize("name", NAMES)
def test_records_are_written_with_the_fields(tmp_path, name):
    path, out = whole(tmp_path / name), tmp_path / ("out.vcf" if name == "v.vcf" else "out.vcf.gz")
    before = path.read_bytes()
    write_annotated(path, out, FIELDS, rows_of(path))
    assert path.read_bytes() == before and {p.name for p in tmp_path.iterdir()} == {name, out.name}
    text = gzip.decompress(out.read_bytes()) if out.suffix == ".gz" else out.read_bytes()
    header, records = text.decode().split("\tann\tbob\n")
    assert {field.header for field in FIELDS.values()} | set(HEAD.splitlines()[:7]) <= set(header.splitlines())
    for old, new, added in zip(RECORDS, records.splitlines(), ADDED, strict=True):
        columns = old.replace("9.50", "9.5").split("\t")
        columns[7] = f"{columns[7]};{added}".removeprefix(".;") if added else columns[7]
        if name != "v.bcf":  # pysam itself, which makes it here, drops END
            assert new.replace("9.50", "9.5").split("\t") == columns
    with pytest.raises(ValueError, match="has an INFO field LLR already: choose another name"):
        check_annotation(out, [InfoField("LLR", "")])
    with pytest.raises(ValueError, match="INFO field UNDECLARED already"):
        check_annotation(path, [InfoField("UNDECLARED", "")])


@pytest.mark.parametrize("change", [lambda rows: rows[:-1], lambda rows: [*rows, rows[0]], lambda rows: rows[::-1]])
def test_rows_of_another_file(tmp_path, change):
    path = whole(tmp_path / "v.vcf")
    with pytest.raises(ValueError, match="has changed since it was read"):
        write_annotated(path, tmp_path / "out.vcf", FIELDS, change(rows_of(path)))
    assert [p.name for p in tmp_path.iterdir()] == ["v.vcf"]


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_file_cut_anywhere_is_an_error(tmp_path, name, capfd):
    """Also between two blocks, where gzip notices nothing."""
    path = whole(tmp_path / name)
    data = path.read_bytes()
    for size in [*np.random.default_rng(0).integers(30, len(data), 20).tolist(), len(data) - 28, len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"v\..*(truncated|damaged)") as caught:
            list(read_variants(path))
        assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (TEXT + "c\t3\t.\tA\n", r"record 8: truncated, damaged or malformed"),
        (TEXT + "c\tthree\t.\tA\tC\t.\t.\t.\tGT\t0\t0\n", r"record 8: truncated, damaged or malformed"),
        (TEXT.encode() + b"c\t3\tr\xe9\tA\tC\t.\t.\t.\tGT\t0\t0\n", r"record 8: .*utf-8"),
        (gzip.compress(TEXT.encode()), "compressed with gzip and not with bgzip"),
        ("chrom\tpos\tref\talt\nc\t3\tA\tC\n", r"the header: truncated, damaged or malformed VCF"),
        (b"BCF\x02\x02" + bytes(9), r"the header: truncated, damaged"),
        ("", r"the header: truncated"),
    ],
)
def test_malformed_files(tmp_path, content, message):
    (tmp_path / "v").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        list(read_variants(tmp_path / "v"))


@pytest.mark.parametrize("name", ["", "1st", "A;B"])
def test_names_that_vcf_cannot_have(name):
    with pytest.raises(ValueError, match="expected letters, digits"):
        InfoField(name, "")
