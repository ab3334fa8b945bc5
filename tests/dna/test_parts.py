"""Repeats and unique sequence: which bases they are, and that their bits make up those of the whole."""

from __future__ import annotations

import numpy as np
import pytest
from rich.console import Console

from modalities.dna.baselines import create_baseline, markov
from modalities.dna.bases import decode, reverse_complement
from modalities.dna.data import open_heldout
from modalities.dna.evaluators.bits import Bits
from modalities.dna.evaluators.contigs import Contigs
from modalities.dna.evaluators.parts import PARTS, Parts
from modalities.dna.repeats import WORD, repeated_words, repetitive
from modalities.dna.sources import find_source
from modalities.evaluation import ModelResult


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> dict[str, str]:
    """Two contigs; in the held-out one a direct repeat, an inverted one of the other contig, lower case and unknown bases."""
    codes = np.random.default_rng(4).integers(0, 4, (2, 900)).astype(np.uint8)
    codes[0, 300:340] = codes[0, 100:140]
    codes[0, 500:550] = reverse_complement(codes[1, 20:70])
    codes[0, 700:705] = 4
    text = [decode(row) for row in codes]
    text[0] = text[0][:600] + text[0][600:650].lower() + text[0][650:]
    folder = tmp_path_factory.mktemp("parts")
    (folder / "g.fa").write_text(f">held\n{text[0]}\n>train\n{text[1]}\n")
    (folder / "g.bed").write_text("held\t0\t900\theldout\ntrain\t0\t900\ttrain\n")
    return {"source": str(folder / "g.fa"), "split": str(folder / "g.bed")}


def test_repeats_are_what_a_plain_search_finds_again(source) -> None:
    data = open_heldout(find_source(*source.values())).items
    codes = data.genome.codes("held")
    strands = [data.genome.codes(name) for name in ("held", "train")]
    texts = [decode(one) for strand in strands for one in (strand, reverse_complement(strand))]
    found = repeated_words(data.genome, "held", codes[None])[0]
    for end in range(900):
        word = decode(codes[max(0, end - WORD + 1) : end + 1])
        expected = len(word) == WORD and "N" not in word and sum(text.count(word) for text in texts) > 1
        assert found[end] == expected
    again = repetitive(data.genome, "held", 0, 900)
    for start, stop in ((100, 140), (300, 340), (500, 550)):
        assert again[start:stop].all() and not again[start - 20 : start - 12].any()
    assert again.sum() < 140
    np.testing.assert_array_equal(repetitive(data.genome, "held", 111, 345), again[111:345])


def test_the_parts_make_up_the_whole(source, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(markov, "ORDER", 2)
    monkeypatch.setattr(markov.MarkovChain, "_kept", None)
    monkeypatch.setenv("PRIORZOO_DATA", str(tmp_path))
    settings = {"lengths": (90,), "samples": 10, **source}
    rows = {}
    for kind in (Parts, Contigs):
        evaluator = kind(kind.settings_class(**settings))
        model = create_baseline("markov-1", 30)
        rows[kind] = evaluator.rows(dict(evaluator.run(model)))
    parts = {row["part"]: row for row in rows[Parts]}
    assert tuple(parts) == PARTS
    (whole,) = rows[Contigs]
    assert parts["all"]["bits_per_base"] == pytest.approx(whole["bits_per_base"]) and parts["all"]["bases"] == 895
    bits = sum(parts[part]["bits_per_base"] * parts[part]["bases"] for part in ("unique", "repeats"))
    assert bits / 895 == pytest.approx(whole["bits_per_base"])
    assert 130 <= parts["repeats"]["bases"] < 140 and parts["soft-masked"]["bases"] == 50
    assert parts["repeats"]["share"] == pytest.approx(parts["repeats"]["bases"] / 895)


def rows_of(settings, model) -> list[dict]:
    evaluator = Parts(settings)
    return evaluator.rows(dict(evaluator.run(model)))


def test_coding_and_non_coding_are_those_of_genbank(source, tmp_path) -> None:
    seqio, seqfeature = pytest.importorskip("Bio.SeqIO"), pytest.importorskip("Bio.SeqFeature")
    from Bio.Seq import Seq
    from Bio.SeqRecord import SeqRecord

    def genbank(name: str) -> str:
        record = SeqRecord(Seq("A" * 900), id=name, name=name, annotations={"molecule_type": "DNA"})
        for kind, start, stop, strand in (
            ("CDS", 80, 200, 1),
            ("CDS", 150, 260, -1),
            ("gene", 0, 800, 1),
            ("CDS", 700, 710, 1),
        ):
            record.features.append(seqfeature.SeqFeature(seqfeature.SimpleLocation(start, stop, strand), type=kind))
        seqio.write(record, tmp_path / f"{name}.gb", "genbank")
        return str(tmp_path / f"{name}.gb")

    plain, model = Parts(Parts.settings_class(lengths=(90,), samples=10, **source)), create_baseline("uniform", 30)
    evaluator = Parts(Parts.settings_class(lengths=(90,), samples=10, genbank=genbank("held"), **source))
    assert evaluator.identity(model) != plain.identity(model)
    rows = {row["part"]: row for row in rows_of(evaluator.settings, model)}
    assert tuple(rows) == (*PARTS, "coding", "non-coding") == evaluator.points(model)
    assert rows["coding"]["bases"] == 180 + 5  # 80 to 260, and 700 to 710 without the unknown ones
    assert rows["non-coding"]["bases"] == 895 - 185 and rows["coding"]["bits_per_base"] == 2.0
    both = (tmp_path / "both.bed").absolute()
    both.write_text("held\t0\t900\theldout\ntrain\t0\t900\theldout\n")  # of the other contig nothing is annotated
    chosen = {**source, "split": str(both), "genbank": genbank("held")}
    of_both = {row["part"]: row for row in rows_of(Parts.settings_class(lengths=(90,), samples=10, **chosen), model)}
    assert of_both["coding"]["share"] == rows["coding"]["share"] == pytest.approx(185 / 895)
    assert of_both["non-coding"]["share"] == pytest.approx(710 / 895) and of_both["all"]["contigs"] == 2
    with pytest.raises(ValueError, match="none of the held-out contigs held, but other"):
        Parts(Parts.settings_class(genbank=genbank("other"), **source)).identity(model)


def test_of_several_lengths_it_says_which_is_read(source) -> None:
    for kind, lengths, expected in (
        (Parts, (60, 90), "parts reads windows of one length, here 90"),
        (Parts, (90,), ""),
    ):
        evaluator = kind(kind.settings_class(lengths=lengths, samples=10, **source))
        console = Console(record=True, width=200)
        model = create_baseline("uniform", 30)
        evaluator.show([ModelResult("uniform", 30, evaluator.rows(dict(evaluator.run(model))))], console)
        assert (expected in console.export_text()) if expected else not console.export_text()


def test_a_longest_length_that_makes_stretches_longer_is_told(source) -> None:
    for length, told in ((512, False), (800, True)):
        bits = Bits(Bits.settings_class(lengths=(64, length), samples=1, **source))
        console, model = Console(record=True, width=200), create_baseline("uniform", 30)
        bits.show([ModelResult("uniform", 30, bits.rows(dict(bits.run(model))))], console)
        assert ("stretches have 800 bases, the longest length, and not 512" in console.export_text()) == told


def test_paired_values_are_those_of_the_table(source) -> None:
    """Contigs weigh equally, and in them bases: no window of two repeated bases counts as one of ninety."""
    results = []
    evaluator = Parts(Parts.settings_class(lengths=(90,), samples=10, **source))
    for name in ("uniform", "markov-0"):
        model = create_baseline(name, 30)
        cells = dict(evaluator.run(model))
        for cell in cells.values():  # numbers that vary
            cell["bits"] = [[b * (1 + k % 3) for b in bits] for k, bits in enumerate(cell["bits"])]
        results.append(ModelResult(name, 30, evaluator.rows(cells), cells=cells))
    paired = {row["part"]: row for row in evaluator.paired(results, "markov-0")}
    for mine, theirs in zip(*(result.rows for result in results), strict=True):
        row = paired[mine["part"]]
        assert row["value"] == pytest.approx(mine["bits_per_base"])
        assert row["against_value"] == pytest.approx(theirs["bits_per_base"])
