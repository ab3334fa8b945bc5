"""The patch grid of an adapted image model is its patch projection's own, and its tokens are the prefix and all patches."""

import pytest
import timm
import torch
from torch.nn import functional as F
from transformers import YolosConfig, YolosModel

import zoo


@torch.inference_mode()
def test_images_padded_by_the_model():
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, dynamic_img_size=True, dynamic_img_pad=True, depth=2)
    zoo.adapt(model, "alibi").eval()
    image = torch.randn(2, 3, 40, 56, generator=torch.Generator().manual_seed(0))
    padded = F.pad(image, (0, 8, 0, 8))
    torch.testing.assert_close(model.forward_features(image), model.forward_features(padded), rtol=0, atol=0)
    assert model.blocks[0].attn.position_bias.grid.shape == (3, 4)


def test_tokens_behind_the_patches_are_refused():
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, patch_size=8)
    model = zoo.adapt(YolosModel(YolosConfig(image_size=[32, 32], **sizes)), "ggd_goat")
    with pytest.raises(ValueError, match="117 tokens: expected 1 prefix tokens and 16 patches of a 4×4 grid"):
        model(torch.zeros(1, 3, 32, 32))
