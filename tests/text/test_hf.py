"""The bridge to `transformers`: same logits, padding, loss, files, generation."""

from __future__ import annotations

import pytest
import torch

from zoo import create_model

transformers = pytest.importorskip("transformers")
from modalities.text import hf  # noqa: E402


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    model = create_model("text_goat_ssmax_tiny", num_layers=2).eval()
    return model, hf.wrap(model).eval()


@torch.no_grad()
def test_same_logits_loss_and_padding(models) -> None:
    model, wrapped = models
    tokens = torch.randint(0, 256, (2, 12))
    out = wrapped(input_ids=tokens, labels=tokens)
    torch.testing.assert_close(out.logits, model(tokens))
    expected = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(out.loss, expected)
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.int64), tokens], dim=1)
    mask = torch.cat([torch.zeros(2, 3, dtype=torch.int64), torch.ones_like(tokens)], dim=1)
    torch.testing.assert_close(wrapped(padded, attention_mask=mask).logits[:, 3:], out.logits, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_generation_equals_ours(models) -> None:
    model, wrapped = models
    prompt = torch.tensor([[256, 65, 66, 67]])
    theirs = wrapped.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=258)[0, 4:].tolist()
    assert theirs == model.generate(prompt, max_new_tokens=6)[0]


@torch.no_grad()
def test_auto_classes_load_what_was_saved(models, tmp_path) -> None:
    _, wrapped = models
    wrapped.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokens = torch.randint(0, 256, (1, 9))
    torch.testing.assert_close(again(tokens).logits, wrapped(tokens).logits)
