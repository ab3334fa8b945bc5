"""Loops that people have already: timm's validation and a torchvision dataset, run on our models unchanged."""

from __future__ import annotations

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.data import create_dataset, create_loader, create_transform, resolve_model_data_config
from timm.utils import AverageMeter, accuracy
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

import modalities.vision.registry  # noqa: F401  timm knows our models
from modalities.vision.sources import open_images


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """52 letters as a folder of class folders."""
    root = tmp_path_factory.mktemp("letters")
    letters = open_images("glyphs-builtin", "heldout")
    for n in range(52):
        image, label = letters.read(n)
        (root / letters.classes[label]).mkdir(exist_ok=True)
        image.save(root / letters.classes[label] / f"{n}.png")
    return root


def validate(model: torch.nn.Module, loader) -> tuple[float, float]:
    """The heart of timm's validate.py."""
    top1, top5 = AverageMeter(), AverageMeter()
    model.eval()
    with torch.inference_mode():
        for images, target in loader:
            one, five = accuracy(model(images), target, topk=(1, 5))
            top1.update(one.item(), len(target))
            top5.update(five.item(), len(target))
    return top1.avg, top5.avg


def counted(model: torch.nn.Module, folder, config: dict) -> tuple[float, float]:
    """Percent right and percent among the best five, counted image by image without timm's loader."""
    images = ImageFolder(str(folder), create_transform(**_loader_keys(config), is_training=False))
    one = five = 0
    for pixels, label in images:
        with torch.inference_mode():
            best = model(pixels[None])[0].argsort(descending=True)
        one += int(best[0]) == label
        five += label in best[:5].tolist()
    assert 0 < five < len(images)  # neither is so by chance
    return 100 * one / len(images), 100 * five / len(images)


@pytest.mark.slow
def test_timms_validation_loop(folder) -> None:
    model = timm.create_model("vision_goat_tiny_patch8")
    config = resolve_model_data_config(model)
    assert config["input_size"] == (3, 48, 48) and config["crop_pct"] == 1.0
    options = {"use_prefetcher": False, "num_workers": 0, "batch_size": 16}
    loader = create_loader(create_dataset("", folder), is_training=False, **options, **_loader_keys(config))
    assert validate(model, loader) == pytest.approx(counted(model, folder, config))
    large = config | {"input_size": (3, 96, 96)}
    loader = create_loader(create_dataset("", folder), is_training=False, **options, **_loader_keys(large))
    assert next(iter(loader))[0].shape == (16, 3, 96, 96)
    assert validate(model, loader) == pytest.approx(counted(model, folder, large))


def _loader_keys(config: dict) -> dict:
    return {key: config[key] for key in ("input_size", "interpolation", "mean", "std", "crop_pct")}


def test_a_torchvision_dataset_and_one_step_of_training(folder) -> None:
    model = timm.create_model("vision_ggd2d_tiny_patch8", num_layers=2)
    transform = create_transform(**resolve_model_data_config(model), is_training=True)
    loader = DataLoader(ImageFolder(str(folder), transform), batch_size=13, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = [p.detach().clone() for p in model.parameters()]
    for images, target in loader:
        loss = torch.nn.functional.cross_entropy(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert torch.isfinite(loss)
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True) if b.requires_grad)


def test_weights_that_ship_load_through_timm_and_are_checked(tmp_path, monkeypatch) -> None:
    from zoo import create_model, list_models, pretrained

    names = list_models("vision_*", pretrained=True)
    if not names:
        pytest.skip("no vision weights ship yet")
    name, images = names[0], torch.randn(1, 3, 48, 48)
    ours, theirs = create_model(name).eval(), timm.create_model(name, pretrained=True).eval()
    with torch.no_grad():
        assert torch.equal(ours(images), theirs(images))
    fresh = timm.create_model(name, pretrained=True, num_classes=3)  # another classifier on the same features
    assert fresh(images).shape == (1, 3)
    torch.testing.assert_close(fresh.norm.weight, ours.norm.weight)
    damaged = {**pretrained.manifest(), name: {**pretrained.manifest()[name], "sha256": "0" * 64}}
    monkeypatch.setattr(pretrained, "manifest", lambda folder=None: damaged)
    with pytest.raises(ValueError, match="damaged"):
        timm.create_model(name, pretrained=True)
    state = load_file(pretrained.WEIGHTS / pretrained.manifest()[name]["file"])
    state["head.bias"] += 1
    save_file(state, tmp_path / "fetched.safetensors")
    monkeypatch.setattr(pretrained, "verified_file", lambda full: tmp_path / "fetched.safetensors")
    assert torch.equal(timm.create_model(name, pretrained=True).head.bias, state["head.bias"])  # wherever it lies


def test_a_model_saved_by_timm_is_loaded_by_it(tmp_path) -> None:
    """timm writes img_size as a list."""
    from timm.models import save_for_hf

    model, images = timm.create_model("vision_goat_tiny_patch8", num_layers=1).eval(), torch.randn(1, 3, 48, 48)
    save_for_hf(model, tmp_path)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    with torch.no_grad():
        assert torch.equal(again(images), model(images))
