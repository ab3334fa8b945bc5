"""Folders of adapted models of transformers, and encoders whose learned positions were taken out."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTModel,
    RobertaConfig,
    RobertaModel,
)

import zoo

SIZES = dict(vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)


def test_transformers_alone_does_not_load_a_folder_without_its_priors(tmp_path: Path) -> None:
    model = zoo.adapt(LlamaForCausalLM(LlamaConfig(**SIZES)), "ggd", keep_rope=False)
    model.save_pretrained(tmp_path)
    for auto in (AutoModel, AutoModelForCausalLM):
        with pytest.raises(ValueError, match=r"llama with priors, which zoo\.load_adapted loads"):
            auto.from_pretrained(tmp_path)
    loaded = zoo.load_adapted(tmp_path)
    assert loaded.config.model_type == "llama" and loaded.config.vocab_size == 40
    again = pickle.loads(pickle.dumps(copy.deepcopy(loaded.config)))
    assert again.to_json_string() == model.config.to_json_string()
    assert get_peft_model(loaded, LoraConfig(task_type="CAUSAL_LM")).num_parameters() > 0


@pytest.mark.parametrize(
    ("make", "config"),
    [
        (BertModel, BertConfig),
        (RobertaModel, RobertaConfig),
        (DistilBertModel, DistilBertConfig),
        (OPTModel, OPTConfig),
    ],
)
@torch.inference_mode()
def test_reading_past_the_table_of_positions(make: type, config: type) -> None:
    torch.manual_seed(0)
    model = zoo.adapt(make(config(**SIZES, max_position_embeddings=16)), "alibi", keep_rope=False).eval()
    tokens = torch.randint(3, 40, (2, 32))
    long = model(tokens).last_hidden_state
    roomy = zoo.adapt(make(config(**SIZES, max_position_embeddings=64)), "alibi", keep_rope=False).eval()
    roomy.load_state_dict(model.state_dict())
    torch.testing.assert_close(long, roomy(tokens).last_hidden_state, rtol=0, atol=0)
