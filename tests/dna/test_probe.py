"""The linear probe: which windows it reads, its AUC against scikit-learn's, and controls that can fail."""

from __future__ import annotations

import gzip
import json
import math
import sys

import numpy as np
import pytest
import torch
from Bio import SeqIO
from Bio.Seq import Seq
from Bio.SeqFeature import BeforePosition, CompoundLocation, SeqFeature, SimpleLocation
from Bio.SeqRecord import SeqRecord
from sklearn.metrics import roc_auc_score

from modalities.dna.baselines import create_baseline
from modalities.dna.bases import decode, reverse_complement
from modalities.dna.evaluators import probe
from modalities.dna.evaluators.probe import FOLDS, LinearProbe, LinearProbeSettings, auc, mean_features
from modalities.dna.formats import read_codes, read_features
from modalities.dna.model import DnaConfig, DnaDecoder
from modalities.dna.tokenizers import load_tokenizer
from modalities.evaluation import ModelResult

WINDOW = 32


def record(name, codes, features):
    return SeqRecord(
        Seq(decode(codes)),
        id=name,
        name=name,
        annotations={"molecule_type": "DNA"},
        features=[SeqFeature(location, type=kind) for kind, location in features],
    )


def annotated(path, *, skew, bases=16_000, contigs=2):
    """Stretches of 160 bases, coding and not in turn; coding ones have `skew` as G and C's share."""
    rng, records = np.random.default_rng(4), []
    for n in range(contigs):
        parts, features = [], []
        for k, at in enumerate(range(0, bases, 160)):
            share = skew if k % 2 else 0.5
            parts.append(rng.choice(4, 160, p=[(1 - share) / 2, share / 2, share / 2, (1 - share) / 2]))
            if k % 2:
                features.append(("CDS", SimpleLocation(at, at + 160, strand=1 if k % 4 == 1 else -1)))
        records.append(record(f"c{n}", np.concatenate(parts).astype(np.uint8), features))
    with open(path, "w") as file:
        SeqIO.write(records, file, "genbank")
    return str(path)


@pytest.fixture(scope="module")
def genome(tmp_path_factory):
    return annotated(tmp_path_factory.mktemp("genome") / "g.gb", skew=0.62)


def tiny(tokenizer="bases", **options):
    torch.manual_seed(2)
    vocabulary = load_tokenizer(tokenizer)
    sizes = dict(vocab_size=vocabulary.vocab_size, num_targets=vocabulary.num_targets, tokenizer=tokenizer)
    return DnaDecoder(
        DnaConfig(
            dim=16, num_layers=1, num_heads=2, hidden_dim=24, train_context=WINDOW, position="alibi", **sizes, **options
        )
    ).eval()


def of(genbank, **options):
    return LinearProbe(LinearProbeSettings(genbank=genbank, **{"samples": 150, "window": WINDOW, **options}))


def test_features_of_genbank(tmp_path):
    features = [
        ("CDS", SimpleLocation(2, 9)),
        ("CDS", CompoundLocation([SimpleLocation(40, 50, strand=-1), SimpleLocation(20, 30, strand=-1)])),
        ("gene", SimpleLocation(0, 60)),
        ("CDS", SimpleLocation(BeforePosition(50), 60)),
    ]
    records = [record("a", np.zeros(60, np.uint8), features), record("b", np.ones(5, np.uint8), [])]
    path = tmp_path / "a.gb"
    with open(path, "w") as file:
        SeqIO.write(records, file, "genbank")
    text = path.read_text()
    expected = [("a.1", [(2, 9), (40, 50), (20, 30), (50, 60)]), ("b.1", [])]
    names = [piece.name for piece in read_codes(path) if not isinstance(piece, bytes)]
    expected = [(name, found) for name, (_, found) in zip(names, expected, strict=True)]
    assert [(name, sorted(found)) for name, found in read_features(path, "CDS")] == [
        (n, sorted(f)) for n, f in expected
    ]
    assert next(read_features(path, "gene"))[1] == [(0, 60)]
    (tmp_path / "b.gbk.gz").write_bytes(gzip.compress(text.replace("<51..60", "J00194.1:51..60").encode()))
    assert (50, 60) not in next(read_features(tmp_path / "b.gbk.gz", "CDS"))[1]  # another record's
    path.write_text(text.replace("<51..60", "51..99"))  # beyond the end
    assert len(next(read_features(path, "CDS"))[1]) == 3
    path.write_text(text[: len(text) // 2])
    with pytest.raises(ValueError, match=r"a\.gb, line \d+"):
        list(read_features(path, "CDS"))
    with pytest.raises(ValueError, match=r"a\.fa: features are read of GenBank alone"):
        list(read_features(tmp_path / "a.fa", "CDS"))


def test_windows_are_of_one_class_and_equally_many(genome):
    evaluator = of(genome)
    examples = evaluator.examples(WINDOW)
    assert len(examples.labels) == 300 and examples.labels.sum() == 150
    assert len(set(zip(examples.contigs, examples.starts, strict=True))) == 300
    for start, label in zip(examples.starts, examples.labels, strict=True):
        assert start % WINDOW == 0 and start // 160 % 2 == label
    shares = np.isin(evaluator._codes(WINDOW), (1, 2)).mean(1)
    assert shares[examples.labels].mean() > 0.6 > 0.52 > shares[~examples.labels].mean()
    folds = probe._folds(examples.labels, examples.blocks, 42)
    assert set(folds.tolist()) == set(range(FOLDS))
    assert all(len(set(folds[examples.blocks == block].tolist())) == 1 for block in set(examples.blocks.tolist()))
    other = of(genome, seed=43).examples(WINDOW)
    assert other.starts != examples.starts and of(genome).identity(tiny()) != of(genome, seed=43).identity(tiny())


def test_auc_is_that_of_scikit_learn():
    rng = np.random.default_rng(0)
    labels, scores = rng.random(400) < 0.3, rng.normal(size=400).round(1)  # with ties
    folds, weights = rng.integers(0, FOLDS, 400), rng.integers(0, 3, 400).astype(float)
    expected = [
        roc_auc_score(labels[folds == fold], scores[folds == fold], sample_weight=weights[folds == fold])
        for fold in range(FOLDS)
    ]
    assert auc(labels, scores, folds, weights) == pytest.approx(np.mean(expected), abs=1e-12)
    assert math.isnan(auc(labels[:1], scores[:1], folds[:1], weights[:1]))


@pytest.mark.parametrize(("tokenizer", "options"), [("bases", {}), ("kmer:3", {}), ("bases", {"copy_orders": (8,)})])
def test_features_are_means_over_tokens(tokenizer, options):
    model, codes = tiny(tokenizer, **options), np.random.default_rng(1).integers(0, 4, (3, WINDOW)).astype(np.uint8)
    expected = [model.represent(decode(one)).numpy() for one in codes]
    np.testing.assert_allclose(mean_features(model, codes), expected, atol=1e-6)


@pytest.mark.slow
def test_controls(genome, tmp_path, monkeypatch):
    """Composition tells the classes apart here and nowhere else; shuffled labels tell nothing."""
    monkeypatch.setattr(probe, "STRENGTHS", (1e-2,))
    monkeypatch.setattr(probe, "DRAWS", 200)
    model, evaluator = tiny(), of(genome, strands="both")
    cells = json.loads(json.dumps(dict(evaluator.run(model))))
    features = np.concatenate(
        [np.frombuffer(probe.base64.b64decode(cell["features"]), "<f4").reshape(-1, 16) for cell in cells.values()]
    )
    codes = evaluator._codes(WINDOW)
    expected = (mean_features(model, codes) + mean_features(model, reverse_complement(codes))) / 2
    np.testing.assert_allclose(features, expected, atol=1e-6)
    rows = {row["probe"]: row for row in evaluator.rows(cells)}
    assert list(rows) == list(probe.ROWS)
    for row in rows.values():
        assert row["low"] < row["auc"] < row["high"] and row["windows"] == 300 and row["blocks"] >= 10
    assert rows["features"]["low"] > 0.6 and rows["k-mers"]["low"] > 0.6
    assert rows["shuffled labels"]["low"] < 0.5 < rows["shuffled labels"]["high"]
    difference = rows["features"]["auc"] - rows["k-mers"]["auc"]
    assert rows["features − k-mers"]["auc"] == pytest.approx(difference)
    assert evaluator.rows(cells) == list(rows.values())  # again, to the bit
    evaluator.draw([ModelResult("a", WINDOW, list(rows.values()))], tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 5000

    flat = of(annotated(tmp_path / "flat.gb", skew=0.5))
    nothing = {row["probe"]: row for row in flat.rows(dict(flat.run(model)))}
    assert nothing["k-mers"]["low"] < 0.5 < nothing["k-mers"]["high"]


def test_requests_that_cannot_be_served(genome, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="--genbank"):
        of(None).cells(tiny())
    with pytest.raises(ValueError, match="markov-2 has no features to probe"):
        of(genome).cells(create_baseline("markov-2"))
    with pytest.raises(
        ValueError, match=r"g\.gb has 0 windows of 320 bases in CDS features and 0 outside, in 0 blocks"
    ):
        of(genome, window=320).cells(tiny())
    for feature, message in (("tRNA", "'tRNA'; valid: CDS"), ("cds", r"'cds'; did you mean 'CDS'\?")):
        with pytest.raises(ValueError, match=rf"g\.gb has no features {message}"):
            of(genome, feature=feature).cells(tiny())
    with pytest.raises(ValueError, match="at least 50 windows"):
        of(genome, samples=20)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match="probe needs the package `scikit-learn`: pip install scikit-learn"):
        of(genome).cells(tiny())
