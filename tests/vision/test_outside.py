"""timm's classifiers under the evaluators of images: timm's own numbers, sizes, checkpoints that do not fit."""

from __future__ import annotations

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.data import create_transform, resolve_model_data_config

from modalities.vision.evaluators.resolution import Resolution, ResolutionSettings
from modalities.vision.model import VisionTransformer
from modalities.vision.outside import OutsideClassifier
from recipes.targets import find_outside, find_targets, modality_of
from tests.recipes.test_evaluate import invoke

VIT = "vit_tiny_patch16_224"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Pictures of three classes, larger than what is read, and a checkpoint of a ViT of three classes."""
    folder = tmp_path_factory.mktemp("timm")
    rng = np.random.default_rng(0)
    for label in "abc":
        for n in range(5):
            path = folder / "images" / ("val" if n else "train") / label / f"{n}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            small = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
            small.resize((320, 300), Image.Resampling.BICUBIC).save(path)
    torch.manual_seed(1)
    model = timm.create_model(VIT, num_classes=3)
    torch.nn.init.normal_(model.head.weight)
    save_file(model.state_dict(), folder / "vit.safetensors")
    torch.save(model.state_dict(), folder / "vit.pth")
    return folder


def measured(model, source, **settings):
    made = Resolution(ResolutionSettings(source=source, **settings))
    return {row["size"]: row for row in made.rows(dict(made.run(model)))}


def load(word):
    (target,) = find_targets([word], {}, "cpu", "float32")
    return target


def test_rows_are_those_of_a_loop_over_timm_s_own_transform(files):
    source, word = f"folder:{files}/images", f"timm:{VIT}@{files}/vit.safetensors"
    target = load(word)
    assert (target.modality, target.trained, target.label) == ("vision", True, word)
    found = measured(target.model, source, sizes=(160, 224), mode="resized")
    model = timm.create_model(VIT, num_classes=3, checkpoint_path=f"{files}/vit.pth", dynamic_img_size=True).eval()
    data = resolve_model_data_config(model)
    assert data["crop_pct"] == 0.9
    for size in (160, 224):
        transform = create_transform(**{**data, "input_size": (3, size, size)})
        right, nats = 0, 0.0
        for label, name in enumerate("abc"):
            for path in sorted((files / "images" / "val" / name).iterdir()):
                with torch.inference_mode():
                    logits = model(transform(Image.open(path).convert("RGB"))[None])[0].log_softmax(-1)
                right, nats = right + int(logits.argmax() == label), nats - float(logits[label])
        assert found[size]["images"] == 12 and found[size]["top1"] == right / 12
        assert found[size]["nll"] == pytest.approx(nats / 12, rel=1e-4)


def test_the_command_measures_timm_s_models(files, tmp_path):
    words = (f"timm:{VIT}@{files}/vit.pth", "resolution", "--source", f"folder:{files}/images")
    done = invoke(*words, "--sizes", "224", "--samples", 3, "--out", tmp_path)
    assert done.exit_code == 0, done.stderr
    assert (tmp_path / "resolution.png").exists() and "top1" in done.output and "untrained" not in done.output
    assert modality_of("timm:anything") == "vision" and find_outside("timm:vision:resnet18")[2] == "resnet18"


@pytest.mark.parametrize(
    ("name", "size", "works"),
    [
        ("resnet10t", 96, True),  # takes any image
        ("vit_tiny_patch16_224", 96, True),  # resamples at every call
        ("vit_tiny_r_s16_p8_224", 96, True),
        ("beit_base_patch16_224", 96, True),  # is set to the size
        ("mixer_s32_224", 96, False),
    ],
)
def test_sizes_are_changed_as_timm_changes_them(name, size, works):
    # Few layers: what a size needs is not their number.
    options = {"depth": 1} if name.startswith(("vit", "beit")) else {}
    make = timm.create_model
    try:
        inner = make(name, dynamic_img_size=True, num_classes=4, **options)
    except TypeError:
        inner = make(name, num_classes=4, **options)
    model = OutsideClassifier(inner, name)
    images = torch.rand(2, 3, size, size)
    with torch.inference_mode():
        assert model(torch.rand(1, 3, *model.config.train_size)).shape == (1, 4)
        if works:
            assert model(images).shape == (2, 4)
            torch.testing.assert_close(model(images), model(images))
        else:
            with pytest.raises(ValueError, match="takes images of 224×224 alone, not 96×96"):
                model(images)
    assert model.config.fixed is not works


def test_untrained_models_say_so_and_are_always_the_same():
    one, other = load("timm:resnet10t"), load("timm:resnet10t")
    assert one.label == "timm:resnet10t (untrained)" and not one.trained and one.method == "resnet10t"
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))
    assert isinstance(load("timm:vision_goat_tiny_patch8").model, VisionTransformer)  # registered with timm by the zoo


def test_errors_are_one_line(files, tmp_path):
    source = ("--source", f"folder:{files}/images", "--out", tmp_path)

    def refused(*words):
        done = invoke(*words)
        assert done.exit_code == 2 and done.stderr.count("\n") == 1, done.stderr
        return done.stderr

    assert "has 3 classes and the model 1000" in refused("timm:resnet10t", "resolution", *source)
    assert "did you mean 'vit_tiny_patch16_224'" in refused("timm:vit_tiny_patch16_22", "resolution", *source)
    assert "no such file" in refused(f"timm:{VIT}@{files}/none.pth", "resolution", *source)
    (files / "broken.pth").write_bytes(b"nothing")
    assert "no checkpoint" in refused(f"timm:{VIT}@{files}/broken.pth", "resolution", *source)
    assert "has no fc.weight, the classifier of resnet10t" in refused(
        f"timm:resnet10t@{files}/vit.pth", "resolution", *source
    )
    assert "does not fit" in refused(f"timm:vit_small_patch16_224@{files}/vit.pth", "resolution", *source)
    vit = f"timm:{VIT}@{files}/vit.pth"
    assert "attention of timm's models cannot be seen" in refused(vit, "heads", *source)
    assert "does not divide into patches of 16" in refused(vit, "resolution", "--sizes", "100", *source)
