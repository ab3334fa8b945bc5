"""`priorzoo attention`: what is read is what is drawn, for every modality; what cannot be shown is one line."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

import modalities.attention_maps as maps
from recipes.attention import main
from zoo import create_model
from zoo.analysis import analyse

TEXT = "The pass key is 71432. Remember it.\nThe wind goes round the mill. What is the pass key? The pass key is"


@pytest.fixture
def picture(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "picture.png"
    Image.fromarray(rng.integers(0, 255, (70, 90, 3), dtype=np.uint8)).save(path)
    return str(path)


def test_a_figure_of_every_modality(picture, tmp_path):
    for name, given in (
        ("text_ggd_ssmax_tiny.facts,text_alibi_tiny.facts", TEXT),
        ("dna_goat_tiny.genomes", "ACGTTGCAACGATTACAGATTACACCGG"),
        ("vision_goat_ssmax_tiny_patch8.glyphs", picture),
    ):
        row = ["--row", "centre"] if name.startswith("vision") else []
        out = tmp_path / f"{name[:4]}.png"
        assert main([name, given, *row, "--out", str(out)]) == 0
        width, height = Image.open(out).size
        assert width > height / 2 and width > 500


def test_the_head_is_the_one_whose_content_says_most(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("recipes.attention.draw_attention", lambda views, *_, **__: drawn.extend(views))
    assert main(["text_ggd_ssmax_tiny.facts", TEXT, "--out", str(tmp_path / "a.png")]) == 0
    assert main(["text_ggd_ssmax_tiny.facts", TEXT, "--layer", "1", "--head", "-1", "--row", "40"]) == 0
    model = create_model("text_ggd_ssmax_tiny.facts", pretrained=True).eval()
    reading = model.read(TEXT)
    gains = torch.stack([layer.divergence[0, :, -1] for layer in analyse(model, *reading.inputs)])
    best, asked = drawn
    assert (best.found.layer, int(best.found.heads[best.head])) == divmod(int(gains.argmax()), 4)
    assert (asked.found.layer, int(asked.found.heads[0]), asked.found.rows.tolist()) == (1, 3, [40])
    whole = analyse(model, *reading.inputs, full=True)[1].weights[0, 3, 40]
    torch.testing.assert_close(torch.from_numpy(asked.values("weights")), whole)
    assert np.allclose(sum(asked.values(part).sum() for part in maps.PARTS), 3)


def test_tokens_stand_in_lines_without_overlap():
    names = ("⟨bos⟩", *"The pass key is 71432. ", "\n", *("word " * 40))
    places = maps._laid_out(names)
    taken = [(x + k, y) for name, (x, y) in zip(names, places, strict=True) for k in range(len(maps._shown(name)))]
    assert len(set(taken)) == len(taken) and max(x for x, _ in taken) < maps.LINE
    line_break = names.index("\n")
    assert places[line_break + 1] == (0, places[line_break][1] + 1)


def test_a_reading_holds_what_the_model_reads(picture):
    text = create_model("text_ggd_tiny", tokenizer="bytes", vocab_size=264).read("day 1")
    assert text.names == ("⟨bos⟩", *"day 1") and text.inputs[0].shape == (1, 6)
    dna = create_model("dna_goat_tiny").read("acgn")
    assert dna.names[1:] == tuple("ACGN")
    model = create_model("vision_goat_tiny_patch8", class_token=True, global_pool="token")
    image = model.read(picture)
    assert image.grid == (6, 6) and image.prefix == 1 and image.image.shape == (48, 48, 3)
    assert model(image.inputs[0]).shape == (1, 26)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["text_ggd_tiny", "a"], "random weights"),
        (["text_ggd_ssmax_tiny.facts", TEXT, "--layer", "7"], "layers [7]"),
        (["text_ggd_ssmax_tiny.facts", TEXT, "--row", "centre"], "--row 'centre': expected a number"),
        (["text_ggd_ssmax_tiny.facts", TEXT, "--parts", "priors"], "did you mean 'prior'"),
        (["text_ggd_ssmax_tiny.facts,dna_goat_tiny.genomes", "ACGT"], "dna"),
        (["dna_goat_tiny.genomes", "PROTEIN"], "'P'"),
        (["vision_goat_ssmax_tiny_patch8.glyphs", "none.png"], "none.png"),
    ],
)
def test_what_cannot_be_shown_is_one_line(words, named, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    captured = capsys.readouterr()
    assert named in captured.err and len(captured.err.strip().splitlines()) == 1 and not list(tmp_path.iterdir())
