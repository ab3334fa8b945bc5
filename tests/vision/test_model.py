"""The vision transformer at any size, what positions must and must not do, and timm's interface to
it."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from torch import nn

from modalities.vision import VisionTransformer
from modalities.vision.architectures import SIZES
from tests.refusals import refuses
from zoo import create_model, list_models, pretrained
from zoo.methods import list_grid_positions
from zoo.priors import Prior

import timm  # isort: skip  (after the project: on a CPU build of torchvision it does not load before)

NAMES = [name for name in list_models("vision_*_tiny_patch8") if "ssmax" not in name]
SMALL = {"num_layers": 2, "dim": 64, "num_heads": 2, "hidden_dim": 48}
TRAINED = "vision_learned_ssmax_tiny_patch8.glyphs"


def small(name: str, **options) -> VisionTransformer:
    torch.manual_seed(0)
    return create_model(name, **{**SMALL, **options}).eval()


def moved(model: nn.Module) -> nn.Module:
    """Priors and embeddings off their inits, so that no identity holds by accident."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if {"prior", "position_embedding", "ssmax"} & set(name.split(".")):
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def images(height: int = 48, width: int = 64) -> torch.Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def without_gradients(request):
    with torch.set_grad_enabled("gradient" in request.node.name):
        yield


def test_every_method_is_registered() -> None:
    """Every method is registered in every size."""
    ours = set(list_models("vision_*"))
    timms = set(timm.list_models("vision_*"))
    for size, method, ssmax in itertools.product(SIZES, list_grid_positions(), ("", "_ssmax")):
        assert f"vision_{method}{ssmax}_{size}" in ours & timms
    for name, millions in (
        ("vision_nope_small_patch16", 22.05),
        ("vision_nope_base_patch16", 86.6),
    ):
        with torch.device("meta"):
            assert (
                abs(sum(p.numel() for p in create_model(name).parameters()) / 1e6 / millions - 1)
                < 0.02
            )


@pytest.mark.parametrize("name", NAMES)
def test_weights_fit_any_size(name: str) -> None:
    """Neither an earlier image, nor the size that a model was built for, nor bf16 changes what
    weights say."""
    model = moved(small(name))
    rounded = small(name).bfloat16()
    before = model(images())
    for height, width in ((8, 8), (16, 64), (96, 48)):
        assert model(torch.randn(2, 3, height, width)).shape == (2, 26)
    torch.testing.assert_close(model(images()), before, atol=0, rtol=0)
    rounded.load_state_dict(model.state_dict())
    assert (rounded(images()).double() - before).abs().max() < 0.05 * before.abs().max() + 0.02
    if "learned" not in name:  # whose weights have the size of the grid
        other = small(name, img_size=96)
        other.load_state_dict(model.state_dict())
        torch.testing.assert_close(other(images()), before)


@pytest.mark.parametrize("name", NAMES)
def test_positions_off_the_square(name: str) -> None:
    """Without positions a picture with two patches swapped gives swapped features, with one it does
    not."""
    model = moved(small(name, img_size=(16, 32), class_token=True, reg_tokens=1)).double()
    picture = torch.randn(1, 3, 16, 32, dtype=torch.float64)
    swapped = picture.clone()
    swapped[..., :8, :8], swapped[..., 8:, 24:] = picture[..., 8:, 24:], picture[..., :8, :8]
    one = model.forward_features(picture)
    other = model.forward_features(swapped)
    order = torch.arange(10)
    order[[2, 9]] = order[
        [9, 2]
    ]  # prefix tokens are 0 and 1; patch (0, 0) is token 2, patch (1, 3) token 9
    assert torch.allclose(one[:, order], other, atol=1e-9) == (
        model.config.position in ("nope", "sink")
    )
    if model.position_embedding is not None:  # prefix tokens have no place
        added = model.position_embedding(model.positions(16, 32), torch.zeros(1))
        assert added[:, :2].abs().max() == 0
        assert added[:, 2:].abs().max() > 0


def test_unfit_sizes_and_configs() -> None:
    """Sizes and configs that do not fit."""
    model = small("vision_nope_tiny_patch8")
    refuses(
        r"50 is no multiple.*48 and 56; 70 is no multiple.*64 and 72",
        model,
        torch.zeros(1, 3, 50, 70),
    )
    for options, message in (
        ({"img_size": 100}, "nearest sizes are 96 and 104"),
        ({"mlp": "swigli"}, "did you mean 'swiglu'"),
        ({"global_pool": "token"}, "class_token"),
        ({"pad": True}, "went with version 0.6"),
    ):
        refuses(message, create_model, "vision_goat_tiny_patch8", **options)


def test_saved_model_equals_loaded(tmp_path) -> None:
    """By us and by timm: sums, methods by layer, another size and classifier, names of classes."""
    mixed = moved(small("vision_rope2d_mixed_ssmax_tiny_patch8", class_token=True))
    name = "layers.0.attention.rotary.omega"  # learned directions do not decay, and are stored in float32
    assert name in mixed.no_weight_decay()
    assert name in mixed.prior_parameters()
    assert mixed.storable_state(torch.bfloat16)[name].dtype == torch.float32
    options = {
        "position": ["goat", "ggd2d"],
        "position_options": {"goat": {"rank": 2}},
        "img_size": (32, 48),
    }
    by_layer = small("vision_goat_tiny_patch8", **options)
    by_layer.reset_classifier(2)
    by_layer.eval().class_names = ("cat", "dog")
    both = small("vision_ggd+spectral_ssmax_tiny_patch8", lanes="beside")
    for n, model in enumerate((mixed, by_layer, both)):
        model.save_pretrained(tmp_path / f"ours{n}")
        timm.models.save_for_hf(model, tmp_path / f"timm{n}", safe_serialization=True)
        theirs = timm.create_model(f"local-dir:{tmp_path / f'timm{n}'}", pretrained=True).eval()
        for again in (VisionTransformer.from_pretrained(tmp_path / f"ours{n}").eval(), theirs):
            assert again.config == model.config
            assert again.class_names == model.class_names
            assert torch.equal(again(images()), model(images()))


@pytest.mark.parametrize(
    ("method", "shared"), [("goat", True), ("learned", False), ("ggd2d+spectral2d", False)]
)
def test_offloaded_equals_in_memory(method: str, shared: bool, tmp_path) -> None:
    """Offloaded models compute what they compute in memory."""
    model = moved(
        small(f"vision_{method}_ssmax_tiny_patch8", share_prior=shared, class_token=shared)
    )
    expected = model(images())
    device = torch.device("cpu")
    assert torch.equal(
        disk_offload(copy.deepcopy(model), tmp_path, execution_device=device)(images()), expected
    )
    assert torch.equal(cpu_offload(model, device)(images()), expected)


@pytest.mark.parametrize(
    "name", [f"vision_{method}_tiny_patch8" for method in ("goat", "learned", "rope2d_mixed")]
)
def test_timms_interface_and_gradients(name: str) -> None:
    """What timm asks of its own models: default_cfg, features, head, classifier, gradients
    everywhere."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10, **SMALL, class_token=True)
    cfg = model.default_cfg
    modules = dict(model.named_modules())
    assert cfg["input_size"] == (3, 48, 48)
    assert not cfg["fixed_input_size"]
    assert cfg["license"] == "apache-2.0"
    assert cfg["classifier"] in modules
    assert cfg["first_conv"] in modules
    gradients = []
    for recompute in (False, True):
        model.set_grad_checkpointing(recompute)
        gradients.append(torch.autograd.grad(model(images()).square().sum(), [*model.parameters()]))
    torch.testing.assert_close(*gradients)
    model.eval()
    features = model.forward_features(images())
    pooled = model.forward_head(model.forward_features(images()), True)
    torch.testing.assert_close(model.forward_head(features), model(images()))
    assert pooled.shape == (2, model.head_hidden_size)
    assert model.get_classifier().out_features == 10
    model.reset_classifier(0, "")
    assert model(images()).shape == features.shape
    refuses("'avg'", model.reset_classifier, 7, "max")


def test_shipped_weights_through_timm(tmp_path, monkeypatch) -> None:
    """Weights that ship load through timm and are checked."""
    ours = create_model(TRAINED).eval()
    theirs = timm.create_model(TRAINED, pretrained=True).eval()
    assert torch.equal(ours(images()), theirs(images()))
    assert ours.class_names == theirs.class_names == tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    fresh = timm.create_model(
        TRAINED, pretrained=True, num_classes=3
    )  # another classifier on the same features
    assert fresh(images()).shape == (2, 3)
    assert fresh.class_names == ()
    torch.testing.assert_close(fresh.norm.weight, ours.norm.weight)
    damaged = {
        **pretrained.manifest(),
        TRAINED: {**pretrained.manifest()[TRAINED], "sha256": "0" * 64},
    }
    with monkeypatch.context() as patch:
        patch.setattr(pretrained, "manifest", lambda folder=None: damaged)
        refuses("damaged", timm.create_model, TRAINED, pretrained=True)


def test_timm_optimiser_takes_groups() -> None:
    """Timms optimiser takes the exemptions and the depth groups."""
    from timm.optim import create_optimizer_v2

    model = timm.create_model("vision_goat_tiny_patch8", num_layers=2)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.7)
    decayed = {
        id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]
    }
    for module in model.modules():
        if isinstance(module, (Prior, nn.LayerNorm)):
            assert not decayed & {id(p) for p in module.parameters()}
    assert id(model.layers[0].attention.query.weight) in decayed
    assert (
        len({group["lr_scale"] for group in optimizer.param_groups}) == 4
    )  # stem, two blocks, head


def test_timm_keywords_served_or_refused() -> None:
    """Keywords of timms scripts are served or refused."""
    name = "vision_goat_tiny_patch8"
    model = timm.create_model(
        name, dynamic_img_size=True, strict_img_size=False, drop_rate=0.0, in_chans=1
    )
    assert model.config.img_size == 48
    assert model.patch_embed.proj.in_channels == 1
    for options, size in (
        ({"img_size": 96}, 96),
        ({"img_size": 96, "pretrained": True}, 48),
    ):  # weights have theirs
        fresh = timm.create_model(TRAINED, **options)
        input_size = timm.data.resolve_model_data_config(fresh)["input_size"]
        assert input_size == (3, *fresh.config.train_size) == (3, size, size)
    for wrong, message in (
        ({"dynamic_img_size": False}, "dynamic_img_size=True; it reads any size"),
        ({"attn_drop_rate": 0.1}, "attn_drop_rate=0.0.*drop_path_rate"),
    ):
        refuses(message, timm.create_model, name, **wrong)
