"""Shipped weights: every entry loads, is what the manifest says, and small; damaged or missing files are errors."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from modalities.dna.data import open_heldout
from modalities.dna.scoring import score_windows
from modalities.dna.sources import find_source
from modalities.text.tokenizers import load_tokenizer
from modalities.vision.transforms import eval_transform
from recipes.fetchers.glyphs.crowds import crowd, draw, texture
from recipes.fetchers.glyphs.letters import CLASSES, builtin_fonts
from tools.glyphs.builtin import BuiltinGlyphs
from zoo import create_model, list_models, pretrained
from zoo.files import file_sha256

SHIPPED = list_models(pretrained=True)


def test_the_promised_methods_ship() -> None:
    promised = ["ggd_goat", "ggd", "goat", "rope"]
    promised = [*promised, *(f"{method}_ssmax" for method in promised), "alibi", "cable", "t5"]
    assert {f"text_{method}_tiny.facts" for method in promised} <= set(SHIPPED)
    promised = [
        "goat",
        "ggd2d",
        "ggd2d_separable",
        "alibi",
        "rope2d_axial",
        "rope2d_mixed",
        "learned",
        "sinusoidal",
        "nope",
    ]
    assert {f"vision_{method}_ssmax_tiny_patch8.glyphs" for method in promised} <= set(SHIPPED)
    promised = ["goat", "ggd_ssmax", "alibi", "rope", "nope", "cable"]
    assert {f"dna_{method}_tiny.genomes" for method in promised} <= set(SHIPPED)


def letters(count: int) -> tuple[list[Image.Image], list[int]]:
    """One letter in a picture."""
    drawn = BuiltinGlyphs("heldout", size=72, scenes_per_letter=1, seed=0)
    images, labels = zip(*(drawn[n] for n in range(count)), strict=True)
    return list(images), list(labels)


def crowds(count: int, size: int, *, counted: bool = False) -> tuple[list[Image.Image], list[int]]:
    """Many letters over a texture, one of them ringed, which is the label; or none to four, which is how many they are."""
    fonts, rng = [str(path) for path in builtin_fonts("heldout")], np.random.default_rng(0)
    images, labels = [], [n % (5 if counted else len(CLASSES)) for n in range(count)]
    for n, label in enumerate(labels):
        shown = [n + other for other in range(label)] if counted else [label]
        marked = [(fonts[n % len(fonts)], CLASSES[letter % len(CLASSES)]) for letter in shown]
        what = crowd(rng, fonts, (size, size), marked=marked, within=size)
        images.append(draw(what, texture(rng, size, size))[0])
    return images, labels


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
@torch.no_grad()
def test_weights_load_and_have_a_card(name: str) -> None:
    entry, file = pretrained.manifest()[name], pretrained.verified_file(name)
    assert file.stat().st_size == entry["bytes"]
    assert file.parent == (pretrained.WEIGHTS if entry["bytes"] <= pretrained.BUNDLED else pretrained.RELEASE)
    assert f"\n# {name}\n" in (pretrained.WEIGHTS / f"{name}.md").read_text()
    assert {"data", "recipe", "seed", "commit", "license", "measured"} <= set(entry)
    with safe_open(file, "pt") as tensors:
        dtypes = {tensors.get_slice(key).get_dtype() for key in tensors.keys() if "query" in key}  # noqa: SIM118
    assert dtypes == {"BF16"}
    model = create_model(name).eval()
    if name.startswith("vision"):
        assert model.config.img_size == entry["image_size"]
        size = entry["image_size"]
        counted = name.endswith(".count")
        images, labels = letters(104) if name.endswith(".glyphs") else crowds(104, size, counted=counted)
        logits = model(torch.stack([eval_transform(size, model.config.mean, model.config.std)(i) for i in images]))
        if logits.ndim == 3:  # of a map: the class token's, less the background, or of counts
            logits = logits[:, 0] if counted else logits[:, 0, 1:]
        right = (logits.argmax(1) == torch.tensor(labels)).float().mean()
        assert right > 0.4  # of fonts not trained with; chance is 0.04, of counts 0.2
        return
    assert model.config.train_context == entry["train_context"]
    if name.startswith("dna"):
        data = open_heldout(find_source("yeast-chr01")).items
        ((region, *_),) = data.contigs.values()
        codes = data.genome.codes(region.contig, region.start, region.start + 16 * 512).reshape(16, 512)
        if name.endswith(".human"):
            following = model(torch.from_numpy(codes).long())[..., :4].softmax(-1)[:, :-1, 2]  # of G behind each base
            after_c = torch.from_numpy(codes)[:, :-1] == 1
            # Human DNA has a fifth of the CpG that its composition would give, yeast four fifths; an untrained model is at 1.
            assert following[after_c].mean() < 0.4 * following[~after_c].mean()
            return
        scores = score_windows(model, codes)
        shares = torch.bincount(torch.from_numpy(codes).flatten().int(), minlength=4) / codes.size
        by_composition = -(shares * shares.log2()).sum()  # of the stretch itself: 1.975
        assert 1.85 < scores.bits.sum() / scores.counted.sum() < by_composition - 0.005
        return
    tokenizer = load_tokenizer(model.config.tokenizer)
    ids = tokenizer.encode("Mr. Speaker, Mr. Vice President, Members of Congress, my fellow citizens:")
    text = torch.tensor([[tokenizer.bos_id, *ids]])
    logits = model(text[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits[0], text[0, 1:])
    assert loss < 3.0  # English is learned: an untrained model is at ln 1,024 = 6.9 or more


def test_pretrained_takes_the_first_tag() -> None:
    tagged = create_model("text_ggd_ssmax_tiny.facts")
    plain = create_model("text_ggd_ssmax_tiny", pretrained=True)
    assert all(torch.equal(a, b) for a, b in zip(tagged.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: create_model("text_ggd_ssmax_tiny.factss"), "it has: facts"),
        (lambda: create_model("text_ggd_ssmax_small", pretrained=True), "no weights ship"),
        (lambda: create_model("text_ggd_ssmax_tiny.facts", dim=64), "do not fit this model"),
    ],
)
def test_weights_that_are_not_there(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_damaged_and_missing_files(tmp_path, monkeypatch) -> None:
    name = "text_ggd_ssmax_tiny.facts"
    file, content = pretrained.manifest()[name]["file"], bytearray(pretrained.verified_file(name).read_bytes())
    (tmp_path / "manifest.json").write_text(json.dumps(pretrained.manifest()))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(pretrained, "RELEASE", tmp_path / "release")  # of a checkout
    pretrained.RELEASE.mkdir()
    (pretrained.RELEASE / file).write_bytes(content)
    assert pretrained.verified_file(name, tmp_path) == pretrained.RELEASE / file
    (pretrained.RELEASE / file).unlink()
    content[-1] ^= 1
    with pytest.raises(FileNotFoundError, match=r"neither in the package nor in .*: set PRIORZOO_WEIGHTS to a folder"):
        pretrained.verified_file(name, tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match="is damaged: its SHA-256 is"):
        pretrained.verified_file(name, tmp_path)


def test_every_digest_of_the_manifest_is_right() -> None:
    for name, entry in pretrained.manifest().items():
        assert file_sha256(pretrained.verified_file(name)) == entry["sha256"]
