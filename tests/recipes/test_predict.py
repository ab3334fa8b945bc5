"""`priorzoo predict` and `priorzoo embed`: names of classes from training to the table, features, and errors of one line."""

from __future__ import annotations

import io
import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

import zoo
from modalities.contract import Classifier, Embedder
from modalities.vision.sources import open_images
from recipes.cli import main

GLYPHS = "vision_goat_ssmax_tiny_patch8.glyphs"
TEXT = "text_ggd_tiny.facts"
DNA = "dna_goat_tiny.genomes"
SMALL = dict(num_layers=1, dim=32, num_heads=2, hidden_dim=32)


@pytest.fixture(scope="module")
def letters(tmp_path_factory) -> dict[str, str]:
    """Held-out pictures of A and B."""
    folder, images = tmp_path_factory.mktemp("letters"), open_images("glyphs-builtin", "heldout", size=64)
    for label, name in enumerate("AB"):
        stored, _ = images.read(label)
        assert isinstance(stored, Image.Image)
        stored.save(folder / f"{name}.png")
    return {name: str(folder / f"{name}.png") for name in "AB"}


def test_predict_prints_names_and_probabilities(letters, capsys):
    assert main(["predict", GLYPHS, letters["A"], letters["B"], "--top", "2", "--size", "72"]) == 0
    printed = capsys.readouterr().out
    model = zoo.create_model(GLYPHS).eval()
    for image in letters.values():
        classes, shares = model.classify(image, size=72), model(model.read(image, size=72))[0].softmax(-1)
        assert sum(share for _, share in classes) == pytest.approx(1) and len(classes) == 26
        assert all(f"{share:.4f}" in printed for _, share in classes[:2])
        assert classes[0][0] == "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[int(shares.argmax())]


@pytest.mark.parametrize(("name", "given"), [(TEXT, ["The people", "é"]), (DNA, ["ACGTTGCA", "GATTACA"])])
def test_features_of_sequences(name, given, tmp_path, monkeypatch):
    """The mean over the tokens, or the last one; "-" reads an input a line."""
    out = tmp_path / "f.safetensors"
    model = zoo.create_model(name).eval()
    with torch.no_grad():
        tokens = [model.forward_features(model.read(one))[0] for one in given]
    assert main(["embed", name, *given, "--out", str(out)]) == 0
    with safe_open(out, "pt") as file:
        assert json.loads(file.metadata()["inputs"]) == given and file.metadata()["model"] == name
        torch.testing.assert_close(file.get_tensor("features"), torch.stack([x[1:].mean(0) for x in tokens]))
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(given) + "\n"))
    assert main(["embed", name, "-", "--pool", "last", "--out", str(out)]) == 0
    with safe_open(out, "pt") as file:
        torch.testing.assert_close(file.get_tensor("features"), torch.stack([x[-1] for x in tokens]))
    assert isinstance(model, Embedder) and not isinstance(model, Classifier)


def test_features_of_files_and_regions(tmp_path):
    """Records of a sequence file, rows of a BED file, and bases beside them, with their names."""
    (tmp_path / "g.fa").write_text(">one\nACGTTGCA\nGATTACA\n>two\nTTTT\n")
    (tmp_path / "r.bed").write_text("one\t2\t9\tgene\none\t2\t9\ntwo\t0\t4\n")
    model, out, fasta = zoo.create_model(DNA).eval(), tmp_path / "f.safetensors", str(tmp_path / "g.fa")

    def read(*words):
        assert main(["embed", DNA, *words, "--out", str(out)]) == 0
        with safe_open(out, "np") as file:
            assert file.metadata()["model"] == DNA
            return json.loads(file.metadata()["inputs"]), file.get_tensor("features")

    for words, names, bases in (
        ([fasta, "GATT"], ["one", "two", "GATT"], ["ACGTTGCAGATTACA", "TTTT", "GATT"]),
        ([fasta, "--regions", str(tmp_path / "r.bed")], ["gene", "one:3-9", "two:1-4"], ["GTTGCAG", "GTTGCAG", "TTTT"]),
    ):
        found, features = read(*words)
        assert found == names and features.dtype == np.float32
        np.testing.assert_array_equal(features, np.stack([model.represent(one).numpy() for one in bases]))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["predict", TEXT, "a.png"], "models of text name nothing"),
        (["predict", "vision_goat_tiny_patch8", "a.png"], "untrained"),
        (["predict", GLYPHS, "none.png"], "none.png"),
        (["predict", GLYPHS, "A", "--size", "50"], "nearest sizes are 48 and 56"),
        (["embed", TEXT, "a", "--pool", "first"], "valid: last, mean"),
        (["embed", DNA, "g.faa"], "neither bases nor a sequence file"),
        (["embed", GLYPHS, "A", "--out", "f.txt"], ".npy or .safetensors"),
        (["embed", DNA, "none.fa"], "no file 'none.fa'"),
        (["embed", TEXT, "a", "--regions", "r.bed"], "reads no sequence files"),
    ],
)
def test_what_cannot_be_done_is_one_line(words, named, letters, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([letters.get(word, word) for word in words]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and named in message and len(message.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())
