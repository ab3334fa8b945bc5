"""Padding between tokens is an error in wrapped and adapted models: positions behind it would count
the gap."""

import pytest
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import zoo
from modalities.text.hf import wrap

SIZES = dict(
    vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
)
GAP = [1, 1, 1, 0, 0, 1, 1, 1]
LEFT = [0, 0, 1, 1, 1, 1, 1, 1]
RIGHT = [1, 1, 1, 1, 1, 1, 0, 0]


def model_of(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "wrapped":
        return wrap(
            zoo.create_model("text_ggd_ssmax_tiny", vocab_size=40, tokenizer="bytes")
        ).eval()
    if kind == "bert":
        return zoo.adapt(BertModel(BertConfig(**SIZES)), "alibi").eval()
    return zoo.adapt(
        LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=1)), kind, keep_rope=False
    ).eval()


@pytest.mark.parametrize("kind", ["wrapped", "bert", "alibi", "ggd_goat", "key_bias", "fire"])
@torch.inference_mode()
def test_gap_is_refused(kind: str) -> None:
    """A gap is refused and ends are not."""
    model = model_of(kind)
    tokens = torch.arange(8)[None] + 3
    whole = model(tokens[:, 2:])[0][0]
    for mask in (GAP, [*RIGHT[:6], 0, 1]):
        with pytest.raises(ValueError, match="hides tokens between tokens"):
            model(tokens, attention_mask=torch.tensor([mask]))
    left = model(tokens, attention_mask=torch.tensor([LEFT]))[0][0]
    if kind != "bert":  # which counts its own positions
        torch.testing.assert_close(left[2:], whole, rtol=1e-4, atol=1e-5)
    right = model(tokens.roll(-2), attention_mask=torch.tensor([RIGHT]))[0][0]
    torch.testing.assert_close(right[:6], whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["wrapped", "alibi"])
@torch.inference_mode()
def test_second_padded_turn_is_refused(kind: str) -> None:
    """A second turn with padding is refused."""
    model = model_of(kind)
    tokens = torch.arange(8)[None] + 3
    mask = torch.tensor([RIGHT])
    cache = model(tokens, attention_mask=mask, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="hides tokens between tokens"):
        model(
            tokens[:, :1],
            attention_mask=torch.cat([mask, mask[:, :1]], 1),
            past_key_values=cache,
            use_cache=True,
        )
