"""`priorzoo predict`: names of classes with probabilities, and errors of one line."""

from __future__ import annotations

import pytest

import zoo
from modalities.vision.sources import open_images
from recipes.cli import main

GLYPHS, TEXT = "vision_goat_ssmax_tiny_patch8.glyphs", "text_ggd_tiny.facts"


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


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["predict", TEXT, "a.png"], "models of text name nothing"),
        (["predict", "vision_goat_tiny_patch8", "a.png"], "untrained"),
        (["predict", GLYPHS, "none.png"], "none.png"),
        (["predict", GLYPHS, "A", "--size", "50"], "nearest sizes are 48 and 56"),
    ],
)
def test_what_cannot_be_done_is_one_line(words, named, letters, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([letters.get(word, word) for word in words]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and named in message and len(message.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())
