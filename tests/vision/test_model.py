"""The vision transformer: every registered model at any size, timm's interface, and what positions must and must not do."""

from __future__ import annotations

import itertools

import pytest
import timm
import torch
from torch import nn

from modalities.vision import VisionConfig, VisionTransformer
from modalities.vision.architectures import SIZES, vision_config
from zoo import create_model, list_models
from zoo.methods import list_grid_positions
from zoo.priors import Prior

NAMES = list_models("vision_*_tiny_patch8", modality="vision")
SMALL = dict(num_layers=2, dim=64, num_heads=2, hidden_dim=48)


def small(name: str, **options) -> VisionTransformer:
    torch.manual_seed(0)
    return create_model(name, **{**SMALL, **options}).eval()


def moved(model: nn.Module, seed: int = 0) -> nn.Module:
    """Priors and embeddings off their inits, so that no identity holds by accident."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if {"prior", "position_embedding", "ssmax"} & set(name.split(".")):
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def test_a_config_of_ones_own_is_of_what_is_recommended() -> None:
    recommended = vision_config("ggd2d_separable", "small_patch16", ssmax=True)
    assert VisionConfig(position_options={"train_mu": True}) == recommended


def test_every_method_is_registered_in_every_size() -> None:
    ours, timms = set(list_models(modality="vision")), set(timm.list_models("vision_*"))
    for size, method, ssmax in itertools.product(SIZES, list_grid_positions(), ("", "_ssmax")):
        assert f"vision_{method}{ssmax}_{size}" in ours & timms


@pytest.mark.parametrize("name", NAMES)
def test_any_size_that_divides_square_or_not(name: str) -> None:
    model = small(name)
    with torch.no_grad():
        for height, width in ((48, 48), (8, 8), (16, 64), (96, 48)):
            assert model(torch.randn(2, 3, height, width)).shape == (2, 26)
        before = model(torch.ones(1, 3, 48, 48))
        model(torch.ones(1, 3, 32, 16))
        torch.testing.assert_close(model(torch.ones(1, 3, 48, 48)), before, atol=0, rtol=0)  # no state


@pytest.mark.parametrize("name", [n for n in NAMES if "ssmax" not in n])
def test_rows_and_columns_on_a_non_square_grid(name: str) -> None:
    """A picture with two patches swapped gives the features of the model without positions, swapped; with one it does not.

    Transposing the picture of a model whose prior treats both axes alike transposes its features.
    """
    model = moved(small(name, img_size=(16, 32), class_token=True, reg_tokens=1)).double()
    images = torch.randn(1, 3, 16, 32, dtype=torch.float64)
    swapped = images.clone()
    swapped[..., :8, :8], swapped[..., 8:, 24:] = images[..., 8:, 24:], images[..., :8, :8]
    with torch.no_grad():
        one, other = model.forward_features(images), model.forward_features(swapped)
    order = torch.arange(10)
    order[[2, 9]] = order[[9, 2]]  # prefix tokens are 0 and 1; patch (0, 0) is token 2, patch (1, 3) token 9
    same = torch.allclose(one[:, order], other, atol=1e-9)
    assert same == (model.config.position == "nope")

    if name in (
        "vision_alibi_tiny_patch8",
        "vision_ggd2d_tiny_patch8",
        "vision_kerple_tiny_patch8",
        "vision_fire_tiny_patch8",
    ):
        patch = model.patch_embed.proj.weight  # the patches' own pixels are transposed too
        flipped = moved(small(name, img_size=(16, 32), class_token=True, reg_tokens=1)).double()
        flipped.load_state_dict(model.state_dict())
        with torch.no_grad():
            flipped.patch_embed.proj.weight.copy_(patch.transpose(2, 3))
            turned = flipped.forward_features(images.transpose(2, 3))
        order = [0, 1] + [2 + y * 4 + x for x in range(4) for y in range(2)]
        torch.testing.assert_close(turned, one[:, order], atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", [n for n in NAMES if "ssmax" not in n])
def test_prefix_tokens_have_no_place(name: str) -> None:
    """What a method gives prefix tokens: no relative prior (the key bias's bump apart), no turn, no embedding."""
    model = moved(small(name, class_token=True, reg_tokens=2))
    positions, attention = model.positions(16, 24), model.layers[0].attention
    prior = getattr(attention.prior, "spectral", attention.prior)
    if model.config.position not in ("key_bias", "nope", "sinusoidal", "learned") and attention.rotary is None:
        dense = prior(positions, positions, causal=False).dense().expand(-1, 2, -1, -1)
        assert dense[..., :3, :].abs().max() == 0 and dense[..., :, :3].abs().max() == 0
        assert dense[..., 3:, 3:].abs().max() > 0
    if attention.rotary is not None:
        q = torch.randn(1, 2, 9, 32)
        turned = attention.rotary(q, positions)
        assert torch.equal(turned[:, :, :3], q[:, :, :3]) and not torch.equal(turned[:, :, 4:], q[:, :, 4:])
    if model.position_embedding is not None:
        added = model.position_embedding(positions, torch.zeros(1))
        assert added[:, :3].abs().max() == 0 and added[:, 3:].abs().max() > 0


@pytest.mark.parametrize("side", [1, 15, 90, 100])
def test_sizes_that_do_not_divide(side: int) -> None:
    model = small("vision_nope_tiny_patch8")
    with pytest.raises(ValueError, match=r"no multiple; the nearest sizes are"):
        model(torch.zeros(1, 3, side, 96))
    padded = small("vision_nope_tiny_patch8", pad=True)
    assert padded(torch.zeros(1, 3, side, 96)).shape == (1, 26)


def test_every_wrong_side_is_named() -> None:
    with pytest.raises(ValueError, match=r"50 is no multiple.*48 and 56; 70 is no multiple.*64 and 72"):
        small("vision_nope_tiny_patch8")(torch.zeros(1, 3, 50, 70))


@pytest.mark.parametrize("name", [n for n in NAMES if "ssmax" not in n])
def test_weights_keep_their_meaning_in_a_model_for_another_size(name: str) -> None:
    """Frequencies and buckets belong to the weights: neither the new model's size nor moving it changes a logit."""
    if "learned" in name:
        pytest.skip("its weights have the size of the grid")
    model, other = moved(small(name)), small(name, img_size=96)
    other.load_state_dict(model.state_dict())
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = model(images)
        torch.testing.assert_close(other(images), expected)
        torch.testing.assert_close(other.to("cpu").float()(images), expected)


@pytest.mark.parametrize("name", NAMES)
def test_bf16_models_take_float32_images(name: str) -> None:
    model, images = moved(small(name)), torch.randn(2, 3, 48, 64)
    with torch.no_grad():
        exact, rounded = model.double()(images.double()), small(name).bfloat16()
        rounded.load_state_dict(model.state_dict())
        assert (rounded(images).double() - exact).abs().max() < 0.05 * exact.abs().max() + 0.02


def test_rotations_are_positions() -> None:
    """Learned directions of mixed RoPE do not decay, learn with the priors' parameters, and are stored in float32."""
    model = small("vision_rope2d_mixed_tiny_patch8")
    name = "layers.0.attention.rotary.omega"
    assert name in model.no_weight_decay() and name in model.prior_parameters()
    assert model.storable_state(torch.bfloat16)[name].dtype == torch.float32


def test_bad_configs_name_the_way_out() -> None:
    for wrong, message in (
        ({"img_size": 100}, "nearest sizes are 96 and 104"),
        ({"img_size": (48,)}, "or 2 values, each a whole number"),
        ({"mlp": "swigli"}, "did you mean 'swiglu'"),
        ({"global_pool": "token"}, "class_token"),
        ({"global_pool": "max"}, "'token', 'avg'"),
    ):
        with pytest.raises(ValueError, match=message):
            create_model("vision_nope_tiny_patch8", **wrong)
    with pytest.raises(ValueError, match="none for content"):
        create_model("vision_goat_tiny_patch8", position_options={"rank": 8})


def test_the_usual_sizes_have_their_parameters() -> None:
    for name, millions in (("vision_nope_small_patch16", 22.05), ("vision_nope_base_patch16", 86.6)):
        with torch.device("meta"):
            count = sum(p.numel() for p in create_model(name).parameters()) / 1e6
        assert abs(count / millions - 1) < 0.02


def test_drop_path_layer_scale_gelu_and_registers() -> None:
    options = dict(
        class_token=True, reg_tokens=4, global_pool="token", drop_path_rate=0.5, init_values=1e-2, mlp="gelu"
    )
    model = small("vision_ggd2d_ssmax_tiny_patch8", **options)
    images = torch.randn(4, 3, 48, 48)
    assert torch.equal(model(images), model(images))
    model.train()
    assert not torch.equal(model(images), model(images))
    assert model.layers[0].drop_path.__class__ is nn.Identity and model.layers[1].drop_path.drop_prob == 0.5


@pytest.mark.parametrize("name", ["vision_ggd2d_ssmax_tiny_patch8", "vision_goat_tiny_patch8"])
def test_recomputing_blocks_changes_no_gradient(name: str) -> None:
    model, images = small(name).train(), torch.randn(2, 3, 48, 48)
    grads = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        model(images).square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(grads[0]) == len(grads[1])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["vision_goat_tiny_patch8", "vision_ggd2d_ssmax_tiny_patch8"])
def test_logit_scale_multiplies_every_logit(name: str) -> None:
    """Scale 0 attends evenly, whatever the content and the prior; 1 is the model itself."""
    model, images = moved(small(name)), torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        torch.testing.assert_close(model(images, logit_scale=1.0), model(images))
        values = []
        hook = model.layers[0].attention.out.register_forward_pre_hook(lambda _, inputs: values.append(inputs[0]))
        model(images, logit_scale=0.0)
        hook.remove()
    torch.testing.assert_close(values[0], values[0].mean(1, keepdim=True).expand_as(values[0]), atol=1e-5, rtol=0)


# ------------------------------------------------------------------------------------------ timm


@pytest.mark.parametrize("name", [n for n in NAMES if "ssmax" not in n])
def test_timm_makes_it(name: str) -> None:
    """What timm asks of its own models: default_cfg, features, head, classifier, gradients everywhere."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10, num_layers=2, drop_path_rate=0.1)
    cfg = model.default_cfg
    assert cfg["input_size"] == (3, 48, 48) and not cfg["fixed_input_size"]
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    assert cfg["classifier"] in modules and cfg["first_conv"] + ".weight" in parameters
    images = torch.randn(2, *cfg["input_size"])
    logits = model(images)
    assert logits.shape == (2, 10) and torch.isfinite(logits).all()
    logits.mean().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)

    model.eval()
    with torch.no_grad():
        features = model.forward_features(images)
        assert features.shape[-1] == model.num_features
        torch.testing.assert_close(model.forward_head(features), model(images))
        pre_logits = model.forward_head(features, pre_logits=True)
        assert pre_logits.shape == (2, model.head_hidden_size)
        assert model.get_classifier().out_features == 10
        model.reset_classifier(0)
        torch.testing.assert_close(model(images), pre_logits)
        model.reset_classifier(0, "")
        assert model(images).shape == features.shape
        model.reset_classifier(7, "avg")
        assert model(images).shape == (2, 7) and model.num_classes == 7
    with pytest.raises(ValueError, match="'avg'"):
        model.reset_classifier(7, "max")


def test_timms_usual_keywords() -> None:
    name = "vision_goat_tiny_patch8"
    model = timm.create_model(name, drop_rate=0.0, proj_drop_rate=0.0, drop_path_rate=0.1, in_chans=1)
    assert model.patch_embed.proj.in_channels == 1
    with pytest.raises(ValueError, match="has no attn_drop_rate"):
        timm.create_model(name, attn_drop_rate=0.1)
    tokens = timm.create_model(name, num_classes=0, global_pool="")
    assert tokens(torch.randn(1, 3, 48, 48)).shape == (1, 36, 96)
    assert len(timm.create_model(name, features_only=True)(torch.randn(1, 3, 48, 48))) == 3


def test_a_pruned_model_is_saved_as_what_it_is(tmp_path) -> None:
    model = small("vision_ggd2d_tiny_patch8").eval()
    assert model.prune_intermediate_layers([0]) == [0]
    model.save_pretrained(tmp_path)
    again, images = VisionTransformer.from_pretrained(tmp_path).eval(), torch.randn(1, 3, 48, 48)
    with torch.no_grad():
        assert torch.equal(again(images), model(images))


def test_timm_features_only_and_intermediates() -> None:
    backbone = timm.create_model("vision_ggd2d_tiny_patch8", features_only=True, out_indices=(1, 3), reg_tokens=2)
    maps = backbone(torch.randn(2, 3, 32, 48))
    assert [tuple(m.shape) for m in maps] == [(2, 96, 4, 6)] * 2
    assert backbone.feature_info.channels() == [96, 96] and backbone.feature_info.reduction() == [8, 8]

    model = create_model("vision_ggd2d_tiny_patch8", class_token=True, reg_tokens=1).eval()
    images = torch.randn(2, 3, 32, 48)
    with torch.no_grad():
        last, found = model.forward_intermediates(images, indices=2, norm=True, return_prefix_tokens=True)
        patches, prefix = found[-1]
        torch.testing.assert_close(last, model.forward_features(images))
        torch.testing.assert_close(patches.flatten(2).transpose(1, 2), last[:, 2:])
        torch.testing.assert_close(prefix, last[:, :2])
        (only,) = model.forward_intermediates(images, [0], stop_early=True, intermediates_only=True, output_fmt="NLC")
    assert only.shape == (2, 24, 96)
    with pytest.raises(ValueError, match="NHWC"):
        model.forward_intermediates(images, output_fmt="NHWC")


def test_timm_optimiser_and_layer_decay() -> None:
    """timm's own factory takes the exemptions and the depth groups."""
    from timm.optim import create_optimizer_v2

    model = timm.create_model("vision_goat_tiny_patch8", num_layers=2)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.7)
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    for module in model.modules():
        if isinstance(module, (Prior, nn.LayerNorm)):
            assert not decayed & {id(p) for p in module.parameters()}
    assert id(model.layers[0].attention.query.weight) in decayed
    assert len({group["lr_scale"] for group in optimizer.param_groups}) == 4  # stem, two blocks, head


def test_a_model_saved_is_the_model_loaded(tmp_path) -> None:
    model = moved(small("vision_rope2d_mixed_ssmax_tiny_patch8", class_token=True)).eval()
    model.save_pretrained(tmp_path)
    again = VisionTransformer.from_pretrained(tmp_path).eval()
    assert again.config == model.config == VisionConfig(**vars(model.config))
    images = torch.randn(1, 3, 48, 32)
    with torch.no_grad():
        assert torch.equal(again(images), model(images))
