"""Variants: files and their faults, haplotypes and their spellings, windows, ratios against direct
computation."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace

import numpy as np
import pysam
import pytest
import torch

from modalities.dna.evaluators import variants
from modalities.dna.evaluators.variants import Variants, VariantSettings
from modalities.dna.genome import open_genome
from modalities.dna.sources import find_source
from modalities.dna.tokenizers import decode, load_tokenizer, reverse_complement
from modalities.dna.variants import Change, Variant, normalize, read_variants
from recipes.evaluate import main
from tests.dna.models import Composed, genome_of, letters, tiny, write_fasta
from tests.launching import call
from tests.refusals import refuses

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
HEADER = "".join(line for line in TEXT.splitlines(keepends=True) if line.startswith("#"))
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
    assert (
        ["symbolic" in v.reason for v in variants] == [bool(v.reason) for v in variants] == symbolic
    )


@pytest.mark.parametrize("name", NAMES[1:])
def test_cut_file_is_an_error(tmp_path, name, capfd):
    """Also between two blocks, where gzip notices nothing."""
    path = written(tmp_path / name)
    data = path.read_bytes()
    for size in [
        *np.random.default_rng(0).integers(30, len(data), 20).tolist(),
        len(data) - 28,
        len(data) - 1,
    ]:
        path.write_bytes(data[:size])
        refuses(r"v\..*(truncated|damaged)", list, read_variants(path))
    assert capfd.readouterr().err == ""


def test_malformed_files(tmp_path):
    for content, message in (
        (TEXT.encode() + b"c\t3\t.\tA\n", r"record 8: truncated, damaged or malformed"),
        (
            TEXT.encode() + b"c\tthree\t.\tA\tC\t.\t.\t.\n",
            r"record 8: truncated, damaged or malformed",
        ),
        (TEXT.encode() + b"c\t3\tr\xe9\tA\tC\t.\t.\t.\n", r"record 8: .*utf-8"),
        (gzip.compress(TEXT.encode()), "compressed with gzip and not with bgzip"),
        (b"chrom\tpos\tref\talt\nc\t3\tA\tC\n", r"the header: truncated, damaged or malformed VCF"),
        (b"", r"the header: truncated"),
    ):
        (tmp_path / "v").write_bytes(content)
        refuses(message, list, read_variants(tmp_path / "v"))


@pytest.fixture
def files(tmp_path):
    """Writes a reference and a file of variants, and makes settings of them."""

    def write(contigs, text, **options):
        (tmp_path / "v.vcf").write_text(text)
        return VariantSettings(
            fasta=write_fasta(tmp_path, **contigs), variants=str(tmp_path / "v.vcf"), **options
        )

    return write


def vcf(*rows):
    return HEADER + "".join("\t".join(map(str, row)) + "\t.\t.\t.\n" for row in rows)


def rows_of(model, chosen):
    return Variants(chosen).rows(json.loads(json.dumps(dict(Variants(chosen).run(model)))))


def spellings(text, haplotype):
    """Every (at, REF, ALT) of up to 14 bases that makes `haplotype` of `text`."""
    for at in range(len(text)):
        for stop in range(at + 1, min(len(text), at + 14) + 1):
            alt = haplotype[at : len(haplotype) - (len(text) - stop)]
            if alt and haplotype == text[:at] + alt + text[stop:] and (alt != text[at:stop]):
                yield at, text[at:stop], alt


def test_normal_form():
    for text, at, ref, alt, expected in (
        ("GGCACACATT", 6, "CAT", "T", Change("c", 2, "CA", "", 4)),  # Tan et al., figure 1
        ("GGCACACATT", 1, "GCA", "G", Change("c", 2, "CA", "", 4)),
        ("GGCACACATT", 7, "A", "ACA", Change("c", 2, "", "CA", 6)),
        ("ACGTACGT", 1, "CGTA", "CCTA", Change("c", 2, "G", "C")),
        ("ACGTACGT", 1, "CGT", "CAAA", Change("c", 2, "GT", "AAA")),
        ("AAAAC", 4, "C", "CC", Change("c", 4, "", "C", 1)),
        ("AAAA", 0, "AAAA", "A", Change("c", 0, "AAA", "", 1)),
        ("ANAAC", 2, "A", "AA", Change("c", 2, "", "A", 2)),  # an unknown base ends a repeat
    ):
        assert normalize(genome_of(c=text), "c", at, ref, alt) == expected


def test_unread_flanks_have_no_ratio(files):
    """On one strand behind a contig's last base; on both the other strand reads the bases before
    it."""
    text = letters(40)
    rows = [
        ("c", at, ".", text[at - 1], "ACGT"[("ACGT".index(text[at - 1]) + 1) % 4])
        for at in (40, 39, 1)
    ]
    for strands in ("one", "both"):
        last, before, first = rows_of(
            tiny(), files({"c": text}, vcf(*rows), strands=strands, window=16)
        )
        assert math.isnan(last["flank_llr_nats"]) is (strands == "one")
        assert math.isfinite(last["llr_nats"])
        assert all(
            math.isfinite(row["flank_llr_nats"]) and row["flank_llr_nats"]
            for row in (before, first)
        )


@torch.no_grad()
@pytest.mark.parametrize(
    ("tokenizer", "strands", "size"), [("bases", "both", 16), ("kmer:3", "one", 18)]
)
def test_ratios_equal_separate_passes(files, tokenizer, strands, size):
    """Ratios against passes of their own."""
    text = letters(300)
    spots = [
        (8, 1, "T"),
        (100, 1, "TGT"),
        (101, 3, "G"),
        (150, 1, "GACT"),
        (200, 4, "AAAAA"),
        (290, 1, "AC"),
    ]
    lines = [
        ("c", at + 1, f"v{at}", text[at : at + r], alt)
        for at, r, alt in spots
        if text[at : at + r] != alt
    ]
    model = tiny(tokenizer)
    k = 3 if tokenizer == "kmer:3" else 1
    chosen = files({"c": text}, vcf(*lines), window=size + k // 2, strands=strands, batch_tokens=40)
    genome = open_genome(find_source(chosen.fasta))
    rows = rows_of(model, chosen)
    vocabulary = load_tokenizer(tokenizer)

    def by_base(codes):
        """Nats of each base, by the chain rule over tokens."""
        ids = vocabulary.encode(codes).ids.tolist()
        nats = []
        logits = model(torch.tensor([[vocabulary.bos_id, *ids]]))[0].double().log_softmax(-1)
        for n, token in enumerate(ids):
            nats += [-float(logits[n, token]) / k] * k
        return np.array(nats)

    for row in rows:
        change = normalize(genome, "c", row["pos"] - 1, row["ref"], row["alt"])
        if change.growth % k:  # one of the windows is no whole number of k-mers
            assert row["reason"] == variants.UNEVEN
            assert math.isnan(row["llr_nats"])
            continue
        where = variants.place(change, 300, size, k)
        windows = variants.haplotypes(genome, where)
        haplotype = text[: row["pos"] - 1] + row["alt"] + text[row["pos"] - 1 + len(row["ref"]) :]
        assert decode(windows[1]) == haplotype[where.start :][: len(windows[1])]
        nats = [by_base(codes) for codes in windows]
        if strands == "both":
            nats = [
                (a + by_base(reverse_complement(w))[::-1]) / 2
                for a, w in zip(nats, windows, strict=True)
            ]
        flank = [n[: where.left].sum() + n[len(n) - where.right :].sum() for n in nats]
        assert row["llr_nats"] == pytest.approx(nats[0].sum() - nats[1].sum(), abs=1e-5)
        assert row["flank_llr_nats"] == pytest.approx(flank[0] - flank[1], abs=1e-5)
        assert row["window"] == size
        assert not row["reason"]


def test_spellings_are_one_change():
    """60 insertions and deletions in repeats, each in all its spellings; windows and scores follow
    from the change alone."""
    rng = np.random.default_rng(11)
    text = letters(50)
    starts = []
    for n in range(60):
        starts.append(len(text) + 1)
        text += letters(int(rng.integers(1, 5)), 1000 + n) * int(rng.integers(3, 6)) + letters(
            20, 2000 + n
        )
    genome = genome_of(c=text)
    for n, at in enumerate(starts):
        local = text[at - 8 : at + 26]
        unit = text[at : at + int(rng.integers(1, 4))]
        haplotype = local[:9] + unit + local[9:] if n % 2 else local[:9] + local[9 + len(unit) :]
        spelled = list(spellings(local, haplotype))
        changes = {
            normalize(genome, "c", at - 8 + place_, ref, alt) for place_, ref, alt in spelled
        }
        assert len(spelled) > 3
        assert len(changes) == 1


def test_variants_have_reasons(files, tmp_path):
    """Every variant is listed with its reason."""
    text = letters(100)[:-1] + "A"
    other = {"A": "C", "C": "A", "G": "A", "T": "A"}
    known = text[49]
    rows = [
        ("c", 50, "fine", known, other[known]),
        ("c", 51, "wrong", other[text[50]], text[50]),
        ("chrC", 50, "where", "A", "C"),
        ("c", 99, "end", text[98:], text[98]),  # up to the contig's end
        ("c", 100, "beyond", "AAAA", "C"),
        ("gap", 20, "uneven", "AC", "A"),
        ("c", 40, "long", text[39:60], text[39]),
        ("c", 7, "none", text[6], "<INS>"),
        (
            "c",
            60,
            "full",
            text[59],
            text[59] + other[text[60]] + "ACGTACGTACGTAC" + other[text[59]],
        ),
    ]
    chosen = files({"c": text, "gap": "G" * 19 + "AC" + "G" * 5 + "N" * 30}, vcf(*rows), window=16)
    reasons = {row["id"]: row["reason"] for row in rows_of(Composed(), chosen)}
    assert list(reasons) == [row[2] for row in rows]
    assert [name for name, reason in reasons.items() if not reason] == ["fine", "end", "uneven"]
    assert (
        f"record 2: REF is {rows[1][3]}, c:51 of the reference has {text[50]}" in reasons["wrong"]
    )
    assert "'chrC'" in reasons["where"]
    assert "c:100 of the reference has A" in reasons["beyond"]
    assert "symbolic" in reasons["none"]
    assert reasons["long"].startswith(f"{variants.NO_ROOM}: the alleles")
    assert reasons["full"].endswith("span 16 bases; the longer window has 16, the other 0")
    kmers = {row["id"]: row for row in rows_of(tiny("kmer:3"), chosen)}
    # the frame moves
    assert kmers["uneven"]["reason"] == variants.UNEVEN
    assert math.isnan(kmers["uneven"]["llr_nats"])
    unscored = files({"c": text}, vcf(rows[7]))
    words = [
        "dna_goat_tiny.genomes",
        "variants",
        "--fasta",
        unscored.fasta,
        "--variants",
        unscored.variants,
    ]
    assert call(main, *words, "--out", tmp_path / "out").exit_code == 0


def test_requests_that_cannot_be_served(files, tmp_path):
    text = letters(300)
    starts = range(0, 280, 20)
    path = str(tmp_path / "v.vcf")
    other = [("c", at + 1, ".", "GGGGGGGGGG", "A") for at in starts]
    named = [("cc", at + 1, ".", text[at : at + 8], "A") for at in starts]
    for rows, options, message in (
        (other, {}, r"none of the 14 variants .*another base in the reference(?!.*did you mean)"),
        (named, {}, "none of the 14 variants .*did you mean 'c'.*reference: c, e"),
        ([], {}, r"v\.vcf has no variants"),
        (other, {"variants": None}, "--variants"),
        (other, {"fasta": None}, "--fasta"),
        (
            other,
            {"variants": path[:-3] + "vfc"},
            r"no file of variants .*; did you mean '.*v\.vcf'",
        ),
    ):
        chosen = replace(files({"c": text, "e": "ACGT"}, vcf(*rows)), **options)
        refuses(message, Variants(chosen).cells, Composed(), error=(ValueError, FileNotFoundError))
