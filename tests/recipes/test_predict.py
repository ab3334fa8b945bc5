"""`priorzoo predict` and `priorzoo embed`: names of classes, features, and errors of one line."""

from __future__ import annotations

import io
import json
import sys

import pytest
import torch
from safetensors import safe_open

import zoo
from modalities.vision.sources import open_images
from recipes.cli import main

GLYPHS, TEXT, DNA = "vision_goat_ssmax_tiny_patch8.glyphs", "text_ggd_tiny.facts", "dna_goat_tiny.genomes"


@pytest.fixture(scope="module")
def letters(tmp_path_factory) -> dict[str, str]:
    """Held-out pictures of A and B."""
    folder, images = tmp_path_factory.mktemp("letters"), open_images("glyphs-builtin", "heldout", size=64)
    for label, name in enumerate("AB"):
        images.read(label)[0].save(folder / f"{name}.png")
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


def embed(folder, *words: str) -> tuple[list[str], torch.Tensor]:
    """(names of the inputs, features) that the command writes."""
    assert main(["embed", *words, "--out", str(folder / "f.safetensors")]) == 0
    with safe_open(folder / "f.safetensors", "pt") as file:
        assert file.metadata()["model"] == words[0]
        return json.loads(file.metadata()["inputs"]), file.get_tensor("features")


@pytest.mark.parametrize(("name", "inputs"), [(TEXT, ["The people", "é"]), (DNA, ["ACGTTGCA", "GATTACA"])])
def test_features_of_sequences(name, inputs, tmp_path, monkeypatch):
    """The mean over the tokens, or the last one; "-" reads an input a line."""
    model = zoo.create_model(name).eval()
    with torch.no_grad():
        tokens = [model.forward_features(model.read(one))[0] for one in inputs]
    names, features = embed(tmp_path, name, *inputs)
    torch.testing.assert_close(features, torch.stack([x[1:].mean(0) for x in tokens]))
    assert names == inputs
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(inputs) + "\n"))
    torch.testing.assert_close(embed(tmp_path, name, "-", "--pool", "last")[1], torch.stack([x[-1] for x in tokens]))


def test_features_of_files_and_regions(tmp_path):
    """Records of a sequence file, rows of a BED file, and bases beside them, with their names."""
    (tmp_path / "g.fa").write_text(">one\nACGTTGCA\nGATTACA\n>two\nTTTT\n")
    (tmp_path / "r.bed").write_text("one\t2\t9\tgene\none\t2\t9\ntwo\t0\t4\n")
    model, fasta = zoo.create_model(DNA).eval(), str(tmp_path / "g.fa")
    for words, names, bases in (
        ([fasta, "GATT"], ["one", "two", "GATT"], ["ACGTTGCAGATTACA", "TTTT", "GATT"]),
        ([fasta, "--regions", str(tmp_path / "r.bed")], ["gene", "one:3-9", "two:1-4"], ["GTTGCAG", "GTTGCAG", "TTTT"]),
    ):
        labels, features = embed(tmp_path, DNA, *words)
        assert labels == names and torch.equal(features, torch.stack([model.represent(one) for one in bases]))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["predict", TEXT, "a.png"], "models of text name nothing"),
        (["predict", "vision_goat_tiny_patch8", "a.png"], "untrained"),
        (["predict", GLYPHS, "none.png"], "none.png"),
        (["predict", GLYPHS, "A", "--size", "50"], "nearest sizes are 48 and 56"),
        (["embed", TEXT, "a", "--pool", "first"], "valid: last, mean"),
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
