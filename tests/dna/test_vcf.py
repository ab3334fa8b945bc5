"""VCF and BCF read alike, and written back with INFO fields and nothing else changed."""

from __future__ import annotations

import contextlib
import gzip
import math
import sys

import numpy as np
import pysam
import pytest

from modalities.dna.vcf import InfoField, check_annotation, read_variants, write_annotated

FIELDS = {"a": InfoField("LLR", 'a "score", in nats'), "b": InfoField("LLR_FLANK", "flanks")}
META = [
    "##fileformat=VCFv4.3",
    '##FILTER=<ID=PASS,Description="All filters passed">',
    '##FILTER=<ID=q10,Description="below 10">',
    '##INFO=<ID=AF,Number=A,Type=Float,Description="share">',
    '##INFO=<ID=DB,Number=0,Type=Flag,Description="dbSNP">',
    '##INFO=<ID=END,Number=1,Type=Integer,Description="end">',
    '##FORMAT=<ID=GT,Number=1,Type=String,Description="genotype">',
    "##contig=<ID=c,length=900>",
    "##contig=<ID=d,length=900>",
]
HEAD = "#CHROM\tPOS\tID\tREF\tALT\tQUAL\tFILTER\tINFO\tFORMAT\tann\tbob"
RECORDS = [
    "c\t3\trs1\tA\tG\t29.5\tPASS\tAF=0.25;DB\tGT\t0|1\t1/1",
    "c\t9\t.\tAC\tA,ACC,<DEL>\t.\tq10\tAF=0.5,0.25,.;END=10\tGT\t0/1\t./.",
    "c\t9\t.\tA\t*\t.\t.\t.\tGT\t0/1\t./.",
    "d\t4\tx;y\tG\tT\t.\t.\t.\tGT\t0\t1",
    "d\t800\tlast\tG\tG]c:1]\t3\tPASS\tDB\tGT\t0/0\t0/0",
]
TEXT = "\n".join([*META, HEAD, *RECORDS]) + "\n"


def whole(path):
    """A VCF, bgzipped VCF or BCF with every kind of allele, at `path`, by its suffix."""
    if path.suffix == ".vcf":
        path.write_text(TEXT)
    elif path.suffix == ".gz":
        with pysam.BGZFile(str(path), "wb") as file:
            file.write(TEXT.encode())
    else:
        (path.parent / "text.vcf").write_text(TEXT)
        with (
            pysam.VariantFile(str(path.parent / "text.vcf")) as source,
            pysam.VariantFile(str(path), "wb", header=source.header) as file,
        ):
            for record in source:
                file.write(record)
        (path.parent / "text.vcf").unlink()
    return path


def rows_of(path, values):
    names = ("chrom", "pos", "ref", "alt")
    return [
        {name: getattr(variant, name) for name in names} | {"a": value, "b": 2 * value}
        for variant, value in zip(read_variants(path), values, strict=True)
    ]


def lines_of(path):
    """As `bcftools view` prints a file: header, records."""
    with pysam.VariantFile(str(path)) as file:
        return str(file.header).splitlines(), [str(record).rstrip("\n") for record in file]


VALUES = [1.5, -0.123456789, math.nan, math.nan, math.nan, 1e-7, math.nan]
ADDED = ["LLR=1.5;LLR_FLANK=3", "LLR=-0.123457,.,.;LLR_FLANK=-0.246914,.,.", "", "LLR=1e-07;LLR_FLANK=2e-07", ""]


@pytest.mark.parametrize("name", ["v.vcf", "v.vcf.gz", "v.bcf"])
def test_all_formats_hold_the_same_variants(tmp_path, name):
    found = [(v.chrom, v.pos, v.id, v.ref, v.alt, bool(v.reason)) for v in read_variants(whole(tmp_path / name))]
    assert found == [
        ("c", 3, "rs1", "A", "G", False),
        ("c", 9, ".", "AC", "A", False),
        ("c", 9, ".", "AC", "ACC", False),
        ("c", 9, ".", "AC", "<DEL>", True),
        ("c", 9, ".", "A", "*", True),
        ("d", 4, "x;y", "G", "T", False),
        ("d", 800, "last", "G", "G]c:1]", True),
    ]


@pytest.mark.parametrize("name", ["v.vcf", "v.vcf.gz", "v.bcf"])
def test_written_back_but_for_the_fields(tmp_path, name):
    path, out = whole(tmp_path / name), tmp_path / f"out{name[1:]}"
    before = path.read_bytes()
    write_annotated(path, out, FIELDS, rows_of(path, VALUES))
    assert path.read_bytes() == before and {p.name for p in tmp_path.iterdir()} == {name, out.name}
    (old_head, old), (new_head, new) = lines_of(path), lines_of(out)
    headers = [field.header for field in FIELDS.values()]
    assert [line for line in new_head if line not in headers] == old_head
    assert [line for line in new_head if line in headers] == headers
    for was, now, added in zip(old, new, ADDED, strict=True):
        was, now = was.split("\t"), now.split("\t")
        info = now.pop(7)
        assert info == (was.pop(7) + ";" + added if added else was.pop(7)).removeprefix(".;")
        assert now == was
    if name != "v.bcf":  # every byte, floats and the header's order too
        text = (gzip.decompress(out.read_bytes()) if name.endswith("gz") else out.read_bytes()).decode()
        kept = TEXT.splitlines()
        at = kept.index(HEAD)
        expected = [*kept[:at], *headers, *kept[at:]]
        for n, added in enumerate(ADDED):
            columns = kept[at + 1 + n].split("\t")
            columns[7] = f"{columns[7]};{added}".removeprefix(".;") if added else columns[7]
            expected[at + 3 + n] = "\t".join(columns)
        assert text == "\n".join(expected) + "\n"
    if name != "v.vcf":
        with open(out, "rb") as file:
            assert file.read(4) == b"\x1f\x8b\x08\x04"  # BGZF


def test_lines_keep_their_ends_and_oddities(tmp_path):
    text = f"\ufeff{META[0]}\r\n{HEAD}\r\n{RECORDS[0]}\r\n\r\n#a remark\r\n{RECORDS[3].replace('ann', 'é')}"
    (tmp_path / "v.vcf").write_bytes(text.encode())
    write_annotated(tmp_path / "v.vcf", tmp_path / "o.vcf", FIELDS, rows_of(tmp_path / "v.vcf", [0.5, -1]))
    found = (tmp_path / "o.vcf").read_bytes().decode()
    for field in FIELDS.values():
        assert f"\r\n{field.header}\r\n" in found
        found = found.replace(f"{field.header}\r\n", "")
    for added in ("LLR=0.5;LLR_FLANK=1", "LLR=-1;LLR_FLANK=-2"):
        assert added in found
    assert found.replace(";LLR=0.5;LLR_FLANK=1", "").replace("LLR=-1;LLR_FLANK=-2", ".") == text


@pytest.mark.parametrize("name", ["v.vcf", "v.vcf.gz", "v.bcf"])
def test_a_field_that_is_there_already(tmp_path, name):
    path = whole(tmp_path / name)
    with pytest.raises(ValueError, match=r"v\..* has an INFO field AF already: choose another name"):
        check_annotation(path, [InfoField("AF", "")])
    check_annotation(path, [InfoField("A", ""), InfoField("F", "")])
    out = tmp_path / f"out{name[1:]}"
    write_annotated(path, out, FIELDS, rows_of(path, VALUES))
    with pytest.raises(ValueError, match="INFO field LLR already"):
        check_annotation(out, [InfoField("LLR", "")])


@pytest.mark.parametrize(
    ("line", "there"),
    [
        ('##INFO=<Number=1,ID=LLR,Type=Float,Description="">', True),
        ('##INFO=<Number=1,Description="a, \\"ID=LLR\\", b",ID=LLR>', True),
        ('##INFO=<ID=B,Number=1,Type=Float,Description="as ,ID=LLR, was">', False),
        ('##INFO=<Number=1,ID=LLR2,Type=Float,Description="">', False),
    ],
)
def test_a_field_is_found_wherever_its_id_stands(tmp_path, line, there):
    (tmp_path / "v.vcf").write_text(f"{META[0]}\n{line}\n{HEAD}\n")
    with pytest.raises(ValueError, match="INFO field LLR already") if there else contextlib.nullcontext():
        check_annotation(tmp_path / "v.vcf", [InfoField("LLR", "")])


@pytest.mark.parametrize(("info", "there"), [("DB;LLR", True), ("LLR=9", True), ("XLLR=1;S=LLR", False)])
def test_a_field_is_found_in_a_line_that_the_header_does_not_announce(tmp_path, info, there):
    (tmp_path / "v.vcf").write_text(f"{META[0]}\n{HEAD}\n{RECORDS[0].replace('AF=0.25;DB', info)}\n")
    with pytest.raises(ValueError, match="line 3 has an INFO field LLR already") if there else contextlib.nullcontext():
        check_annotation(tmp_path / "v.vcf", [InfoField("LLR", "")])


def test_semicolons_that_end_info_are_no_empty_fields(tmp_path):
    columns = RECORDS[0].split("\t")
    for info, expected in (("DP=3;", "DP=3;LLR=0.5;LLR_FLANK=1"), (";", "LLR=0.5;LLR_FLANK=1")):
        (tmp_path / "v.vcf").write_text(
            "\n".join((META[0], HEAD, "\t".join([*columns[:7], info, *columns[8:]]))) + "\n"
        )
        write_annotated(tmp_path / "v.vcf", tmp_path / "o.vcf", FIELDS, rows_of(tmp_path / "v.vcf", [0.5]))
        assert (tmp_path / "o.vcf").read_text().splitlines()[-1].split("\t")[7] == expected


@pytest.mark.parametrize("name", ["", "1st", "a b", "A;B", "A=", "é"])
def test_names_that_vcf_cannot_have(name):
    with pytest.raises(ValueError, match="expected letters, digits"):
        InfoField(name, "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chrom,pos,ref,alt\nc,1,A,C\n", "no line of #CHROM"),
        ("##fileformat=VCFv4.3\nc\t1\t.\tA\tC\t.\t.\t.\n", "no line of #CHROM"),
        ("#CHROM\tPOS\tID\tREF\tALT\nc\t1\t.\tA\tC\n", "no INFO column"),
        (f"{HEAD}\nc\t1\t.\tA\tC\n", "line 2: 5 tab-separated columns; INFO is the 8th"),
    ],
)
def test_files_without_a_place_for_info(tmp_path, text, message):
    (tmp_path / "v.vcf").write_text(text)
    row = {"chrom": "c", "pos": 1, "ref": "A", "alt": "C", "a": 1.0, "b": 2.0}
    with pytest.raises(ValueError, match=message):
        write_annotated(tmp_path / "v.vcf", tmp_path / "o.vcf", FIELDS, [row])
    assert [p.name for p in tmp_path.iterdir()] == ["v.vcf"]


@pytest.mark.parametrize("name", ["v.vcf", "v.vcf.gz", "v.bcf"])
@pytest.mark.parametrize("change", [lambda rows: rows[:-1], lambda rows: [*rows, rows[0]], lambda rows: rows[::-1]])
def test_rows_of_another_file(tmp_path, name, change):
    path = whole(tmp_path / name)
    with pytest.raises(ValueError, match="has changed since it was read"):
        write_annotated(path, tmp_path / "out", FIELDS, change(rows_of(path, VALUES)))
    assert [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["v.vcf.gz", "v.bcf"])
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


def test_bcf_without_pysam(tmp_path, monkeypatch):
    path = whole(tmp_path / "v.bcf")
    monkeypatch.setitem(sys.modules, "pysam", None)
    with pytest.raises(ImportError, match=r"v\.bcf: BCF needs the package `pysam`: pip install pysam"):
        list(read_variants(path))
    assert len(list(read_variants(_plain(tmp_path)))) == 7  # VCF needs none


def _plain(folder):
    (folder / "p.vcf").write_text(TEXT)
    return folder / "p.vcf"


def test_a_line_without_room_for_info_is_found_before_anything_is_measured(tmp_path):
    path = tmp_path / "v.vcf"
    path.write_text("\n".join((META[0], HEAD, RECORDS[0], "\t".join(RECORDS[0].split("\t")[:5]))) + "\n")
    with pytest.raises(ValueError, match=r"v.vcf line 4: 5 tab-separated columns; INFO is the 8th"):
        check_annotation(path, [InfoField("LLR", "")])


def test_a_byte_that_is_not_utf8_is_named_with_its_line(tmp_path):
    path = tmp_path / "v.vcf"
    path.write_bytes("\n".join((META[0], HEAD, RECORDS[0])).encode() + b"\n20\t9\tcaf\xe9\tA\tC\n")
    with pytest.raises(ValueError, match=r"v.vcf line 4: byte 0xe9 is not UTF-8; expected a VCF or BCF"):
        list(read_variants(path))


def test_breakends_keep_the_names_of_contigs(tmp_path):
    columns = RECORDS[0].split("\t")
    columns[3:5] = "a", "]chrX:55]a,<del>,t"
    path = tmp_path / "v.vcf"
    path.write_text("\n".join((META[0], HEAD, "\t".join(columns))) + "\n")
    assert [variant.alt for variant in read_variants(path)] == ["]chrX:55]a", "<del>", "T"]
    rows = rows_of(path, [math.nan, math.nan, 0.5])
    write_annotated(path, tmp_path / "o.vcf", FIELDS, rows)
    assert "LLR=.,.,0.5" in (tmp_path / "o.vcf").read_text()


def test_the_header_of_a_table_may_be_quoted(tmp_path):
    (tmp_path / "v.csv").write_text('"chrom","pos","ref","alt"\n"20","9","A","C"\n')
    (variant,) = read_variants(tmp_path / "v.csv")
    assert (variant.chrom, variant.pos, variant.ref, variant.alt) == ("20", 9, "A", "C")
