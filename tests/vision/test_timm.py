"""timm's interface beyond making a model: saving and loading, input sizes, intermediate layers, what newer scripts pass."""

from __future__ import annotations

import pytest
import torch

from modalities.vision import VisionTransformer
from zoo import create_model
from zoo.methods import list_grid_positions

import timm  # isort: skip  (after the project: on a CPU build of torchvision it does not load before)

SMALL = dict(num_layers=2, dim=64, num_heads=2, hidden_dim=48)
TRAINED = "vision_learned_ssmax_tiny_patch8.glyphs"


def images(height: int = 48, width: int = 64) -> torch.Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))


def through_timm(model: VisionTransformer, folder, **options) -> VisionTransformer:
    timm.models.save_for_hf(model, folder, safe_serialization=True)
    return timm.create_model(f"local-dir:{folder}", pretrained=True, **options).eval()


@pytest.mark.parametrize("ssmax", ["", "_ssmax"])
@pytest.mark.parametrize("method", list_grid_positions())
def test_saved_by_timm_and_loaded_again(method: str, ssmax: str, tmp_path) -> None:
    torch.manual_seed(0)
    model = timm.create_model(f"vision_{method}{ssmax}_tiny_patch8", **SMALL, class_token=True, reg_tokens=1).eval()
    again = through_timm(model, tmp_path)
    assert again.config == model.config
    with torch.no_grad():
        assert torch.equal(again(images()), model(images()))


def test_models_that_timm_has_no_name_for(tmp_path) -> None:
    """Sums, methods by layer, another size and classifier, a pruned model: made by the zoo and saved by timm."""
    torch.manual_seed(0)
    config = dict(**SMALL, position=["goat", "ggd2d"], position_options={"goat": {"rank": 2}}, img_size=(32, 48))
    by_layer = create_model("vision_goat_tiny_patch8", **config).eval()
    by_layer.reset_classifier(5)
    by_layer.eval()
    pruned = create_model("vision_ggd+spectral_ssmax_tiny_patch8", **SMALL, lanes="beside").eval()
    pruned.prune_intermediate_layers([0], prune_head=False)
    for n, model in enumerate((by_layer, pruned)):
        again = through_timm(model, tmp_path / str(n))
        assert again.config == model.config
        with torch.no_grad():
            assert torch.equal(again(images()), model(images()))


def test_an_input_size_is_what_timm_prepares_images_for_and_no_number_of_the_model(tmp_path) -> None:
    """`img_size=` with weights and `set_input_size`: the data configuration changes; logits at any size do not."""
    model = timm.create_model(TRAINED, pretrained=True).eval()
    larger = timm.create_model(TRAINED, pretrained=True, img_size=96).eval()
    resized = timm.create_model(TRAINED, pretrained=True).eval()
    resized.set_input_size((96, 96))
    saved = through_timm(larger, tmp_path)
    for other in (larger, resized, saved):
        assert timm.data.resolve_model_data_config(other)["input_size"] == (3, 96, 96)
        assert other.config == model.config
        for size in (48, 96):
            with torch.no_grad():
                assert torch.equal(other(images(size, size)), model(images(size, size)))
    assert timm.data.resolve_model_data_config(model)["input_size"] == (3, 48, 48)
    backbone = timm.create_model(TRAINED, pretrained=True, img_size=96, features_only=True)
    assert timm.data.resolve_model_data_config(backbone)["input_size"] == (3, 96, 96)
    fresh = timm.create_model("vision_learned_tiny_patch8", img_size=96)
    assert fresh.position_embedding.weight.shape[-2:] == (12, 12)  # without weights it is the training size
    with pytest.raises(ValueError, match="nearest sizes are 96 and 104"):
        model.set_input_size(100)
    with pytest.raises(ValueError, match="not resampled"):
        model.set_input_size(96, patch_size=16)


def test_the_pretrained_cfg_has_licence_and_papers() -> None:
    cfg = timm.create_model("vision_ggd_goat_ssmax_tiny_patch8").pretrained_cfg
    assert cfg["license"] == "apache-2.0"
    assert cfg["paper_ids"] == ("arXiv:2505.22842", "arXiv:2601.15380", "arXiv:2501.19399", "arXiv:2010.11929")
    assert "You Need Better Attention Priors" in cfg["paper_name"]
    assert timm.models.get_pretrained_cfg(TRAINED).license == "apache-2.0"


def test_names_of_classes_go_through_timm(tmp_path) -> None:
    letters = create_model(TRAINED).class_names
    assert letters == timm.create_model(TRAINED, pretrained=True).class_names == tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    assert timm.create_model(TRAINED, pretrained=True, num_classes=5).class_names == ()
    model = create_model("vision_nope_tiny_patch8", **SMALL, num_classes=2).eval()
    model.class_names = ("cat", "dog")
    assert through_timm(model, tmp_path).class_names == ("cat", "dog")


def test_intermediate_layers() -> None:
    model = create_model("vision_goat_tiny_patch8", **SMALL, class_token=True).eval()
    with torch.no_grad():
        last, maps = model.forward_intermediates(images(), norm=True)
        found = model.forward_intermediates(images(), norm=True, output_dict=True, return_prefix_tokens=True)
        assert torch.equal(found["image_features"], last)
        assert all(map(torch.equal, found["image_intermediates"], maps))
        assert torch.equal(found["image_intermediates_prefix"][-1], last[:, :1])
        only = model.forward_intermediates(images(), [0], intermediates_only=True, output_dict=True)
        assert list(only) == ["image_intermediates"]
        (tokens,) = model.get_intermediate_layers(images(), norm=True)
        assert torch.equal(tokens, last[:, 1:])
        ((grid, prefix),) = model.get_intermediate_layers(
            images(), [1], reshape=True, return_prefix_tokens=True, norm=True
        )
        assert torch.equal(grid, maps[1]) and torch.equal(prefix, last[:, :1])
    with pytest.raises(ValueError, match="whole image"):
        model.forward_intermediates(images(), is_causal=True)


def test_keywords_of_newer_scripts_are_served_or_refused() -> None:
    name = "vision_goat_tiny_patch8"
    assert timm.create_model(name, dynamic_img_size=True, strict_img_size=False, drop_rate=0.0).config.img_size == 48
    for wrong, message in (
        ({"dynamic_img_size": False}, "images of any size"),
        ({"strict_img_size": True}, "images of any size"),
        ({"drop_rate": 0.1}, "drop_path_rate"),
        ({"embed_dim": 64}, "give dim"),
        ({"depth": 2}, "give num_layers"),
        ({"dynamic_img_pad": True}, "give pad"),
        ({"global_pool": "map"}, "'token', 'avg'"),
        ({"features_only": True, "feature_cls": "fx"}, "torch.export"),
    ):
        with pytest.raises(ValueError, match=message):
            timm.create_model(name, **wrong)
