"""Composition against counts of the letters themselves, in chunks of any size."""

from __future__ import annotations

import json

import numpy as np
import pytest

from modalities.dna import composition as statistics
from modalities.dna.composition import contig_statistics, total
from modalities.dna.genome import open_genome
from modalities.dna.sources import find_source


def letters(seed, size):
    return "".join(np.random.default_rng(seed).choice(list("ACGTNacgtn"), size))


def counted(tmp_path, contigs):
    path = tmp_path / "a.fa"
    path.write_text("".join(f">{name}\n{text}\n" for name, text in contigs.items()))
    genome = open_genome(find_source(str(path)))
    return [contig_statistics(genome, contig) for contig in genome.contigs]


@pytest.mark.parametrize("chunk", [1, 5, 1 << 22])
def test_counts_are_those_of_the_letters(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(statistics, "_CHUNK", chunk)
    contigs = {"a": letters(0, 700), "b": "CG" * 20, "c": "CGn" + letters(1, 300)}
    found = counted(tmp_path, contigs)
    for part, (name, text) in zip(found, contigs.items(), strict=True):
        upper = text.upper()
        assert (part.name, part.length) == (name, len(text))
        assert part.counts == tuple(upper.count(base) for base in "ACGT")
        assert part.known == len(text) - upper.count("N") and part.cpg == upper.count("CG")
        assert part.soft_masked == sum(letter.islower() for letter in text)
        runs = [len(run) for run in "".join("N" if x == "N" else " " for x in upper).split()]
        assert (part.unknown_runs, part.longest_unknown_run) == (len(runs), max(runs, default=0))
        assert part.gc == pytest.approx((upper.count("G") + upper.count("C")) / part.known)


def test_the_total_and_json(tmp_path):
    contigs = {"a": "ACGTN", "b": "ccggNNN", "c": "NN"}
    parts = counted(tmp_path, contigs)
    whole = total(parts)
    assert (whole.length, whole.known, whole.counts) == (14, 8, (1, 3, 3, 1))
    assert (whole.unknown_runs, whole.longest_unknown_run, whole.soft_masked) == (3, 3, 4)
    assert whole.gc == 6 / 8 and whole.cpg_ratio == 2 * 8 / 9
    unknown = parts[2].as_dict()
    assert unknown["gc"] is None and unknown["cpg_observed_over_expected"] is None
    back = json.loads(json.dumps(whole.as_dict(), allow_nan=False))
    assert back["counts"] == {"A": 1, "C": 3, "G": 3, "T": 1} and back["soft_masked_share"] == 4 / 14
    with pytest.raises(ValueError, match="no contig to add up"):
        total([])
