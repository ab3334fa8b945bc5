"""Models whose weights accelerate keeps on the CPU or on disk compute what they compute in
memory."""

import copy
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import zoo
from modalities.text.hf import wrap

TOKENS = torch.arange(3, 15)[None]


@pytest.mark.parametrize(
    "position", ["alibi+key_bias", "ggd_goat", "cable", "fire", "t5", "rope", "learned"]
)
@torch.inference_mode()
def test_wrapped_models(position: str, tmp_path: Path) -> None:
    options = dict(num_layers=2, vocab_size=40, tokenizer="bytes")
    model = wrap(zoo.create_model(f"text_{position}_ssmax_tiny", **options)).eval()
    expected = model(TOKENS).logits
    words = model.generate(TOKENS, max_new_tokens=4, do_sample=False)
    offloaded = disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    assert torch.equal(offloaded(TOKENS).logits, expected)
    assert torch.equal(offloaded.generate(TOKENS, max_new_tokens=4, do_sample=False), words)


@pytest.mark.parametrize("position", ["alibi", "ggd_goat", "fire"])
@torch.inference_mode()
def test_adapted_models(position: str, tmp_path: Path) -> None:
    sizes = dict(
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
    )
    plain = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    model = zoo.adapt(copy.deepcopy(plain), position, ssmax=True)
    for parameter in model.parameters():  # none is what a prior starts with
        parameter += 0.05 * torch.randn_like(parameter)
    expected = model(TOKENS).logits
    zoo.save_adapted(model, tmp_path / "adapted")
    assert torch.equal(cpu_offload(model, torch.device("cpu"))(TOKENS).logits, expected)
    memory = dict(
        device_map="auto", max_memory={"cpu": 20_000}, offload_folder=str(tmp_path / "disk")
    )
    assert torch.equal(
        zoo.load_adapted(tmp_path / "adapted", **memory).eval()(TOKENS).logits, expected
    )
    torch.manual_seed(0)
    fresh = zoo.adapt(copy.deepcopy(plain), position)(TOKENS).logits
    plain.save_pretrained(tmp_path / "plain")
    dispatched = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", **memory)
    torch.manual_seed(0)
    assert torch.equal(zoo.adapt(dispatched, position)(TOKENS).logits, fresh)
