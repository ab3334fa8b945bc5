"""timm's classifiers under the evaluators of images: timm's own numbers, sizes, checkpoints that do not fit."""

from __future__ import annotations

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.data import create_transform, resolve_model_data_config

from modalities.vision import MODALITY
from modalities.vision.evaluators.resolution import Resolution, ResolutionSettings
from modalities.vision.model import VisionTransformer
from modalities.vision.outside import OutsideClassifier
from tests.recipes.test_evaluate import invoke

VIT = "vit_tiny_patch16_224"
OUTSIDE = MODALITY.outside["timm"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Pictures of three classes, larger than what is read, and a checkpoint of a ViT of three classes."""
    folder = tmp_path_factory.mktemp("timm")
    rng = np.random.default_rng(0)
    for label in "abc":
        for n in range(3):
            path = folder / "images" / ("val" if n else "train") / label / f"{n}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            small = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
            small.resize((320, 300), Image.Resampling.BICUBIC).save(path)
    torch.manual_seed(1)
    model = timm.create_model(VIT, num_classes=3)
    torch.nn.init.normal_(model.head.weight)
    save_file(model.state_dict(), folder / "vit.safetensors")
    torch.save(model.state_dict(), folder / "vit.pth")
    (folder / "broken.pth").write_bytes(b"nothing")
    return folder


def test_rows_are_those_of_a_loop_over_timm_s_own_transform(files):
    model, trained = OUTSIDE.load(f"{VIT}@{files}/vit.safetensors")
    settings = ResolutionSettings(source=f"folder:{files}/images", sizes=(160, 224), mode="resized")
    evaluator = Resolution(settings)
    rows = {row["size"]: row for row in evaluator.rows(dict(evaluator.run(model)))}
    ours = timm.create_model(VIT, num_classes=3, checkpoint_path=f"{files}/vit.pth", dynamic_img_size=True).eval()
    data = resolve_model_data_config(ours)
    assert trained and data["crop_pct"] == 0.9
    for size in (160, 224):
        transform = create_transform(**{**data, "input_size": (3, size, size)})
        right, nats = 0, 0.0
        for label, name in enumerate("abc"):
            for path in sorted((files / "images" / "val" / name).iterdir()):
                with torch.inference_mode():
                    logits = ours(transform(Image.open(path).convert("RGB"))[None])[0].log_softmax(-1)
                right, nats = right + int(logits.argmax() == label), nats - float(logits[label])
        assert rows[size]["images"] == 6 and rows[size]["top1"] == right / 6
        assert rows[size]["nll"] == pytest.approx(nats / 6, rel=1e-4)


# Any image; resampled at every call; fixed.
@pytest.mark.parametrize("name", ["resnet10t", VIT, "mixer_s32_224"])
def test_sizes_are_changed_as_timm_changes_them(name):
    works = name != "mixer_s32_224"
    # Few layers: what a size needs is not their number.
    options = {"num_classes": 4} | ({"depth": 1} if name == VIT else {})
    options |= {"dynamic_img_size": True} if name == VIT else {}
    model = OutsideClassifier(timm.create_model(name, **options), name)
    images = torch.rand(2, 3, 96, 96)
    with torch.inference_mode():
        assert model(torch.rand(1, 3, *model.config.train_size)).shape == (1, 4)
        if works:
            assert model(images).shape == (2, 4)
        else:
            with pytest.raises(ValueError, match="takes images of 224×224 alone, not 96×96"):
                model(images)
    assert model.config.fixed is not works


def test_what_cannot_be_loaded_is_one_line(files):
    for word, message in (
        ("vit_tiny_patch16_22", "did you mean 'vit_tiny_patch16_224'"),
        (VIT + "@{}/none.pth", "no such file"),
        (VIT + "@{}/broken.pth", "no checkpoint"),
        ("resnet10t@{}/vit.pth", "has no fc.weight, the classifier of resnet10t"),
        ("vit_small_patch16_224@{}/vit.pth", "does not fit"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            OUTSIDE.load(word.format(files))
        assert "\n" not in str(error.value)
    assert isinstance(OUTSIDE.load("vision_goat_tiny_patch8")[0], VisionTransformer)  # registered with timm by the zoo


def test_the_command_measures_timm_s_models(files, tmp_path):
    words = (f"timm:{VIT}@{files}/vit.pth", "resolution", "--source", f"folder:{files}/images")
    done = invoke(*words, "--sizes", "224", "--samples", 3, "--out", tmp_path)
    assert done.exit_code == 0, done.stderr
    assert (tmp_path / "resolution.png").exists() and "top1" in done.output and "untrained" not in done.output
