"""Held-out stretches: where they lie, what they depend on, and errors where there is no room."""

from itertools import pairwise

import numpy as np
import pytest

from modalities.dna.baselines import fit
from modalities.dna.bases import decode
from modalities.dna.data import open_heldout
from modalities.dna.evaluators import EVALUATORS
from modalities.dna.sources import find_source


def write(folder, contigs, rows):
    """A FASTA and a BED in `folder`, as a source."""
    folder.mkdir(exist_ok=True)
    fasta, bed = folder / "g.fa", folder / "g.bed"
    fasta.write_text("".join(f">{name}\n{letters}\n" for name, letters in contigs.items()))
    bed.write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))
    return find_source(str(fasta), bed)


def texts(data):
    return {contig.name: decode(data.genome.codes(contig.name)) for contig in data.genome.contigs}


@pytest.fixture
def source(tmp_path):
    rng = np.random.default_rng(0)
    a, b = (decode(rng.integers(0, 4, n).astype(np.uint8)) for n in (4000, 900))
    a = a[:1500] + "N" * 700 + a[2200:]
    rows = [("a", 0, 1000, "train"), ("a", 1000, 3000, "heldout"), ("a", 3100, 4000, "test"), ("b", 0, 900, "heldout")]
    return write(tmp_path, {"a": a, "b": b}, rows)


def test_stretches_lie_apart_inside_held_out_regions_with_few_unknown_bases(source):
    data = open_heldout(source).items
    found = data.stretches(50, 12, seed=1)
    assert {name: len(stretches) for name, stretches in found.items()} == {"a": 12, "b": 12}
    for name, stretches in found.items():
        assert all(before.stop <= after.start for before, after in pairwise(stretches))
        for s in stretches:
            assert any(r.start <= s.start and s.stop <= r.stop for r in data.contigs[name])
            assert (data.codes(s) == 4).mean() <= 0.1
    starts = [s.start for s in found["a"]]
    assert min(starts) < 1500 and max(starts) > 3100, "spread over all regions"


def test_stretches_depend_on_the_seed_and_on_nothing_else(source, tmp_path):
    data = open_heldout(source).items
    assert data.stretches(64, 4, seed=3) == open_heldout.__wrapped__(source).items.stretches(64, 4, seed=3)
    assert data.stretches(64, 4, seed=3) != data.stretches(64, 4, seed=4)
    alone = write(tmp_path, {"b": decode(data.genome.codes("b"))}, [("b", 0, 900, "heldout")])
    assert open_heldout(alone).items.stretches(64, 4, seed=3)["b"] == data.stretches(64, 4, seed=3)["b"]


def test_contigs_without_room_are_left_out_and_none_at_all_is_an_error(source, tmp_path):
    data = open_heldout(source).items
    assert list(data.stretches(800, 5, seed=0)) == ["a", "b"]
    (stretch,) = data.stretches(900, 5, seed=0)["a"]  # 1000 to 3000 has no 900 bases beside its gap
    assert (stretch.start, stretch.stop) == (3100, 4000)
    tail = [("a", 0, 1000, "train"), ("a", 1000, 4000, "heldout"), ("b", 0, 900, "heldout")]
    assert list(open_heldout(write(tmp_path / "tail", texts(data), tail)).items.stretches(1800, 5, seed=0)) == ["a"]
    with pytest.raises(
        ValueError, match=r"no held-out region .* has 2001 bases in one piece.* longest region has 2000"
    ):
        data.stretches(2001, 1, seed=0)
    with pytest.raises(ValueError, match="at most 10% of them unknown"):
        data.stretches(2000, 1, seed=0)


def test_reaching_is_the_length_that_most_held_out_bases_have_room_for(source):
    data = open_heldout(source).items
    assert data.reaching(0.5) == 2000  # a has 2900 of 3800 bases, in pieces of 2000 and 900
    assert data.reaching(0.9) == 900


def test_fingerprint_follows_bases_and_split(source, tmp_path):
    before = open_heldout(source).fingerprint
    bed = tmp_path / "other.bed"
    bed.write_text("a\t0\t1000\ttrain\nb\t0\t900\theldout\n")
    assert open_heldout(find_source(str(source.files[0]), bed)).fingerprint != before
    assert open_heldout.__wrapped__(source).fingerprint == before


def test_a_source_is_that_of_settings_or_of_training(source):
    kind = EVALUATORS["bits"]
    fasta, bed = str(source.files[0]), str(source.bed)
    trained_on = {"source": fasta, "split": bed, "tokenizer": "kmer:6", "context": 9}
    assert kind(None, trained_on).source == kind(kind.settings_class(source=fasta, split=bed)).source == source
    assert kind(None, trained_on).source_name == f"{fasta} split by {bed}"
    assert kind(kind.settings_class(source="yeast-chr01"), trained_on).source == kind().source == find_source()
    assert kind().source_name == "yeast-chr01" and kind().heldout is open_heldout(find_source("yeast-chr01"))


def test_regions_that_share_bases_count_once(tmp_path):
    letters = decode(np.random.default_rng(3).integers(0, 4, 6000).astype(np.uint8))
    once = [("a", 0, 3000, "heldout"), ("a", 3000, 6000, "train")]
    twice = [("a", 0, 2000, "heldout"), ("a", 1000, 3000, "heldout"), *once[1:], ("a", 3500, 5000, "train")]
    plain, shared = (
        open_heldout(write(tmp_path / name, {"a": letters}, rows)).items
        for name, rows in (("once", once), ("twice", twice))
    )
    assert shared.stretches(500, 100, 0) == plain.stretches(500, 100, 0)
    tables = [fit(data.genome, data.regions, 2).tables[-1] for data in (plain, shared)]
    np.testing.assert_array_equal(*tables)
    assert tables[0].sum() == 2 * (3000 - 2)
