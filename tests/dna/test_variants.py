"""Variants: files and their faults, windows of equal length, ratios against direct computation."""

from __future__ import annotations

import csv
import gzip
import json
import math

import numpy as np
import pytest
import torch
from rich.console import Console

from modalities.dna.baselines import create_baseline
from modalities.dna.baselines.base import BaselineConfig
from modalities.dna.bases import decode, encode, reverse_complement
from modalities.dna.evaluators import variants
from modalities.dna.evaluators.variants import Placed, Variants, VariantSettings, allele_windows, place_windows
from modalities.dna.genome import open_genome
from modalities.dna.model import DnaConfig, DnaDecoder
from modalities.dna.scoring import Scores, WindowScorer, score_windows
from modalities.dna.sources import find_source
from modalities.dna.tokenizers import load_tokenizer
from modalities.dna.vcf import Variant, read_variants
from modalities.evaluation import ModelResult

HEADER = "##fileformat=VCFv4.2\n##contig=<ID=c>\n#CHROM\tPOS\tID\tREF\tALT\tQUAL\tFILTER\tINFO\n"
COSTS = np.array([0.25, 2.0, 3.0, 0.5])  # nats of A, C, G, T


class Composed(WindowScorer):
    """A base costs what its letter does, wherever it stands."""

    def __init__(self, costs=COSTS):
        super().__init__()
        self.config = BaselineConfig("composed", train_context=16)
        self.costs, self.windows = costs, []

    def score(self, windows):
        self.windows += [decode(window) for window in windows]
        known = torch.from_numpy(windows < 4)
        nll = torch.from_numpy(self.costs[np.minimum(windows, 3)])
        return Scores(nll.where(known, 0.0), known.long(), known.double())


def tiny(tokenizer="bases", **options):
    torch.manual_seed(2)
    vocabulary = load_tokenizer(tokenizer)
    sizes = dict(vocab_size=vocabulary.vocab_size, num_targets=vocabulary.num_targets, tokenizer=tokenizer)
    config = DnaConfig(
        dim=32, num_layers=1, num_heads=2, hidden_dim=48, train_context=16, position="alibi", **sizes, **options
    )
    model = DnaDecoder(config).eval()
    with torch.no_grad():
        model.embedding.weight *= 4  # far from uniform
    return model


@pytest.fixture
def files(tmp_path):
    """Writes a reference and a file of variants, and makes settings of them."""

    def write(contigs, text, name="v.vcf", **options):
        (tmp_path / "ref.fa").write_text("".join(f">{name}\n{letters}\n" for name, letters in contigs.items()))
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return VariantSettings(fasta=str(tmp_path / "ref.fa"), variants=str(tmp_path / name), **options)

    return write


def letters(count, seed=0):
    return decode(np.random.default_rng(seed).integers(0, 4, count).astype(np.uint8))


def vcf(*rows):
    return HEADER + "".join("\t".join(map(str, row)) + "\t.\t.\t.\n" for row in rows)


def rows_of(model, chosen):
    return Variants(chosen).rows(json.loads(json.dumps(dict(Variants(chosen).run(model)))))


# ----------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("how", ["plain", "gzip", "windows"])
def test_vcf(files, tmp_path, how):
    text = vcf(
        ("c", 3, "rs1", "a", "G,<DEL>,*"),
        ("c", 9, ".", "AC", "."),
        ("d", 1, "x", "G", "G]17:1]"),
        ("c", 4, ".", "N", "A"),
    )
    content = {
        "plain": text.encode(),
        "gzip": gzip.compress(text.encode()),
        "windows": text.replace("\n", "\r\n").encode(),
    }
    (tmp_path / "v.vcf").write_bytes(content[how])
    found = list(read_variants(tmp_path / "v.vcf"))
    assert found[0] == Variant("c", 3, "rs1", "A", "G", 4) and found[0].kind == "snv"
    assert [(v.alt, v.line) for v in found] == [("G", 4), ("<DEL>", 4), ("*", 4), (".", 5), ("G]17:1]", 6), ("A", 7)]
    words = ["symbolic", "deletion upstream", "no alternative", "breakend", "not all A, C, G, T"]
    assert all(word in v.reason for word, v in zip(words, found[1:], strict=True)) and not any(
        v.kind for v in found[1:]
    )


@pytest.mark.parametrize(
    "text",
    [
        "chrom\tpos\tref\talt\nc\t3\tAC\tA\n",
        "Ref,ALT,pos,id,chrom\r\nAC,A,3,n1,c\r\n\r\n",
        'chrom,pos,ref,alt\nc,3,AC,"A"\n',
    ],
)
def test_tables(tmp_path, text):
    (tmp_path / "v.tsv").write_bytes(text.encode())
    (found,) = read_variants(tmp_path / "v.tsv")
    assert (found.chrom, found.pos, found.ref, found.alt, found.line, found.kind) == ("c", 3, "AC", "A", 2, "deletion")
    assert found.id == ("n1" if "n1" in text else ".")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (HEADER + "c\t3\t.\tA\n", r"line 4: 4 tab-separated columns"),
        (HEADER + "c\tthree\t.\tA\tC\n", r"line 4: position 'three'"),
        (HEADER + "c\t-3\t.\tA\tC\n", r"line 4: position '-3'"),
        ("chrom,po,ref,alt\nc,3,A,C\n", r"line 1: no column 'pos' .* did you mean 'po'"),
        ("c\t3\t.\tA\tC\n", r"line 1: no column 'chrom'.*expected a VCF"),
        ("chrom,pos,ref,alt\nc,3,A\n", r"line 2: 3 columns; the header has 4"),
        (gzip.compress(HEADER.encode() * 99, mtime=0)[:60], r"truncated or damaged"),
        (b"\x89BCF\xff\xfe", r"not text: convert BCF"),
        ("", r"line 1: no column 'chrom'"),
    ],
)
def test_malformed_files(tmp_path, content, message):
    (tmp_path / "v").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        list(read_variants(tmp_path / "v"))


def test_kinds():
    pairs = {"A>C": "snv", "AC>GT": "mnv", "A>AT": "insertion", "AC>A": "deletion", "ACG>TT": "deletion"}
    assert {pair: Variant("c", 1, ".", *pair.split(">"), 2).kind for pair in pairs} == pairs


# --------------------------------------------------------------------------------------------------------------- windows


def test_windows_are_equally_long_and_hold_the_allele_everywhere():
    """Every place, length of alleles, contig and window up to a size, against the two sequences as text."""
    placed = without = 0
    for length in (1, 5, 12, 30):
        for window in (1, 4, 9, 16):
            for ref in (1, 2, 4):
                for alt in (1, 2, 4):
                    for at in range(length - ref + 1):
                        found = place_windows(at, ref, alt, length, window)
                        more = max(0, ref - alt)
                        if found is None:
                            without += 1
                            # windows of one length that begin together and hold both alleles: none that starts anywhere
                            size = min(window, length - more)
                            starts = range(max(0, length - more - size) + 1)
                            assert not any(s <= at and at - s + max(ref, alt) <= size for s in starts)
                            continue
                        placed += 1
                        start, size = found
                        assert size == min(window, length - more) and 0 <= start <= at
                        assert at - start + max(ref, alt) <= size and start + size + more <= length
                        centred = at - (size - max(ref, alt)) // 2
                        assert start == centred or start == 0 or start + size + more == length
    assert placed > 1000 and without > 100


@pytest.mark.parametrize(
    ("pos", "ref", "alt", "expected"),
    [
        (21, "C", "T", ("AAAAAAACGATTGCCA", "AAAAAAATGATTGCCA")),
        (21, "C", "CTT", ("AAAAAACGATTGCCAT", "AAAAAACTTGATTGCC")),
        (21, "CGA", "C", ("AAAAAACGATTGCCAT", "AAAAAACTTGCCATAG")),
        (20, "AC", "GT", ("AAAAAAAACGATTGCC", "AAAAAAAGTGATTGCC")),
        (1, "A", "T", ("AAAAAAAAAAAAAAAA", "TAAAAAAAAAAAAAAA")),
        (41, "T", "G", ("GCCATAGGCTTAACGT", "GCCATAGGCTTAACGG")),
    ],
)
def test_windows_by_hand(files, pos, ref, alt, expected):
    text = "A" * 20 + "C" + "GATTGCCATAGGCTTAACGT"
    chosen = files({"c": text}, "", window=16)
    variant = Variant("c", pos, ".", ref, alt, 1)
    place = place_windows(pos - 1, len(ref), len(alt), len(text), 16)
    found = allele_windows(open_genome(find_source(chosen.fasta)), Placed(variant, *place))
    assert tuple(map(decode, found)) == expected


# ---------------------------------------------------------------------------------------------------------------- ratios


def test_ratios_by_composition(files):
    """Alike windows but for the allele: a substitution's ratio is the difference of two letters; of an indel, that of the
    letters that came in or went and of those at the right end."""
    text = "A" * 20 + "C" + "G" * 20
    chosen = files({"c": text}, vcf(("c", 21, "s", "C", "T"), ("c", 21, "i", "C", "CTT"), ("c", 19, "d", "AAC", "A")))
    snv, insertion, deletion = rows_of(Composed(), chosen)
    assert snv["llr_nats"] == pytest.approx(2.0 - 0.5) and snv["llr_bits"] == pytest.approx(1.5 / math.log(2))
    assert insertion["llr_nats"] == pytest.approx(2 * 3.0 - 2 * 0.5)
    assert deletion["llr_nats"] == pytest.approx((0.25 + 2.0) - 2 * 3.0)
    assert [row["kind"] for row in (snv, insertion, deletion)] == ["snv", "insertion", "deletion"]
    assert snv["window"] == 16 and snv["id"] == "s" and (snv["chrom"], snv["pos"]) == ("c", 21)
    reference = (7 * 0.25 + 2.0 + 8 * 3.0) / 16 / math.log(2)
    assert snv["ref_bits_per_base"] == pytest.approx(reference)
    assert rows_of(create_baseline("uniform"), chosen)[1]["llr_nats"] == 0


@torch.no_grad()
@pytest.mark.parametrize(
    ("tokenizer", "strands", "size"), [("bases", "one", 16), ("bases", "both", 16), ("kmer:3", "one", 18)]
)
def test_ratios_against_a_pass_of_their_own(files, tokenizer, strands, size):
    text = letters(300)
    spots = [(8, 1), (100, 1), (101, 2), (200, 4), (290, 1)]
    lines = [
        ("c", at + 1, f"v{at}", text[at : at + r], "TTT" if text[at : at + r] != "TTT" else "G") for at, r in spots
    ]
    model = tiny(tokenizer)
    chosen = files({"c": text}, vcf(*lines), window=size + 1 if size == 18 else size, strands=strands, batch_tokens=40)
    for (at, r), row in zip(spots, rows_of(model, chosen), strict=True):
        start, _ = place_windows(at, r, len(row["alt"]), 300, size)
        windows = text[start : start + size], (text[start:at] + row["alt"] + text[at + r :])[:size]

        def nats(window):
            every = [encode(window)] if strands == "one" else [encode(window), reverse_complement(encode(window))]
            return sum(float(score_windows(model, codes[None]).nats) for codes in every) / len(every)

        assert row["llr_nats"] == pytest.approx(nats(windows[0]) - nats(windows[1]), abs=1e-5)
        assert row["ref_bits_per_base"] == pytest.approx(nats(windows[0]) / size / math.log(2), rel=1e-5)
        assert row["window"] == size and not row["reason"]


def test_every_variant_is_listed_with_its_reason(files):
    text = letters(100)[:-1] + "A"
    other = {"A": "C", "C": "A", "G": "A", "T": "A"}
    known = text[49]
    rows = [
        ("c", 50, "fine", known, other[known]),
        ("c", 51, "wrong", other[text[50]], text[50]),
        ("chrC", 50, "where", "A", "C"),
        ("c", 99, "end", text[98:], text[98]),
        ("c", 100, "beyond", "AAAA", "C"),
        ("gap", 20, "uneven", "AC", "A"),
        ("c", 7, "none", text[6], "<INS>"),
    ]
    chosen = files({"c": text, "gap": "G" * 19 + "AC" + "G" * 7 + "N" * 30}, vcf(*rows), window=16)
    found = {row["id"]: row for row in rows_of(Composed(), chosen)}
    assert list(found) == [row[2] for row in rows]
    assert not found["fine"]["reason"] and all(
        math.isnan(row["llr_nats"]) == bool(row["reason"]) for row in found.values()
    )
    assert f"line 5: REF is {rows[1][3]}, c:51 of the reference has {text[50]}" in found["wrong"]["reason"]
    assert "'chrC'" in found["where"]["reason"] and "c:100 of the reference has A" in found["beyond"]["reason"]
    assert found["end"]["reason"] == variants.NO_ROOM and "symbolic" in found["none"]["reason"]
    assert found["uneven"]["reason"] == variants.UNEVEN  # the filled-up window alone reaches the gap


@pytest.mark.parametrize(
    ("contig", "shift", "alleles", "message"),
    [
        ("c", -1, None, "counted from 0"),
        ("c", 0, ("GGGGGGGGGG", "A"), "another assembly"),
        ("chrc", 0, None, r"reference calls it 'c': rename"),
        ("cc", 0, None, "Did you mean 'c'"),
    ],
)
def test_a_file_that_does_not_fit_at_all_is_an_error(files, contig, shift, alleles, message):
    text = letters(300)
    rows = [(contig, at + 1 + shift, ".", *(alleles or (text[at : at + 8], "A"))) for at in range(0, 280, 20)]
    with pytest.raises(ValueError, match=rf"none of the 14 variants .*{message}"):
        Variants(files({"c": text, "d": "ACGT"}, vcf(*rows))).cells(Composed())


def test_requests_that_cannot_be_served(files, tmp_path):
    chosen = files({"c": "ACGT"}, HEADER)
    with pytest.raises(ValueError, match=r"v\.vcf has no variants"):
        Variants(chosen).cells(Composed())
    with pytest.raises(ValueError, match="--variants"):
        Variants(VariantSettings(fasta=chosen.fasta)).cells(Composed())
    with pytest.raises(ValueError, match="--fasta"):
        Variants(VariantSettings(variants=chosen.variants)).cells(Composed())
    with pytest.raises(FileNotFoundError, match=r"absent\.vcf"):
        Variants(VariantSettings(fasta=chosen.fasta, variants=str(tmp_path / "absent.vcf"))).cells(Composed())


def test_cells_resume_and_batches_change_nothing(files, monkeypatch):
    text = letters(2000)
    rows = [("c", at + 1, f"v{at}", text[at], "ACGT"[("ACGT".index(text[at]) + 1) % 4]) for at in range(3, 2000, 20)]
    chosen, model = files({"c": text}, vcf(*rows)), tiny()
    whole = rows_of(model, chosen)
    monkeypatch.setattr(variants, "LEAST_PART", 7)
    cells = dict(Variants(chosen).run(model))
    assert len(cells) == 15 and [row["id"] for row in Variants().rows(cells)] == [row[2] for row in rows]
    small = VariantSettings(fasta=chosen.fasta, variants=chosen.variants, batch_tokens=1)
    for a, b, c in zip(whole, Variants().rows(cells), rows_of(model, small), strict=True):
        assert a["llr_nats"] == pytest.approx(b["llr_nats"], abs=1e-5) == pytest.approx(c["llr_nats"], abs=1e-5)
    half = dict(list(cells.items())[::2])
    assert dict(Variants(chosen).run(model, half)) == cells


def test_identity_holds_what_changes_a_number(files):
    model, contigs = tiny(), {"c": letters(100)}
    base = Variants(files(contigs, vcf(("c", 5, ".", "A", "C")))).identity(model)
    assert Variants(files(contigs, vcf(("c", 6, ".", "A", "C")))).identity(model) != base
    for options in ({"window": 8}, {"strands": "both"}):
        assert Variants(files(contigs, vcf(("c", 5, ".", "A", "C")), **options)).identity(model) != base
    assert Variants(files({"c": letters(101)}, vcf(("c", 5, ".", "A", "C")))).identity(model) != base


def test_tables_figures_and_terminal(files, tmp_path):
    text = letters(400)
    lines = [("c", at + 1, f"v{at}", text[at], "ACGT"[("ACGT".index(text[at]) + 2) % 4]) for at in range(20, 380, 10)]
    chosen = files(
        {"c": text}, vcf(*lines, ("c", 5, "gone", text[4], "<DEL>"), ("c", 300, "ins", text[299], text[299] + "ACG"))
    )
    results = []
    for label, model in (("one", Composed()), ("two", create_baseline("uniform"))):
        cells = dict(Variants(chosen).run(model))
        results.append(ModelResult(label, 16, Variants().rows(cells), cells, method=model.config.position))
    out = tmp_path / "out"
    Variants().draw(results, out / "variants.png")
    Variants().write(results, out)
    assert {p.name for p in out.iterdir()} == {"variants.png", "variants.one.tsv", "variants.two.tsv"}
    with open(out / "variants.one.tsv") as file:
        table = list(csv.DictReader(file, delimiter="\t"))
    columns = "chrom pos id ref alt kind llr_nats llr_bits ref_bits_per_base window reason"
    assert list(table[0]) == columns.split() and len(table) == 38
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    Variants().show(results, console)
    shown = console.export_text()
    scored = [row for row in results[0].rows if not row["reason"]]
    worst = min(scored, key=lambda row: row["llr_nats"])
    assert f"{worst['llr_nats']:+.3f}" in shown and "37 scored" in shown and "1 with a symbolic allele" in shown
