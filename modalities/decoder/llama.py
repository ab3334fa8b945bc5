"""A decoder with RoPE as the Llama of `transformers`, which other tools read without this
package."""

from __future__ import annotations

from typing import cast

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from modalities.decoder.model import Decoder
from zoo.layers import Block
from zoo.rotary import Rotary

# Of a block here → of a LlamaDecoderLayer.
NAMES = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def as_llama(model: Decoder) -> LlamaForCausalLM:
    """A `LlamaForCausalLM` with copies of the weights, and equal logits to rounding.

    ValueError for what is no Llama.
    """
    config = model.config
    rotary = cast(Block, model.layers[0]).attention.rotary
    differs = {
        f"style={config.style!r}": config.style != "llama",
        f"position={config.position!r}": config.position != "rope"
        or not isinstance(rotary, Rotary),
        f"position_options={config.position_options}": getattr(rotary, "scaling", "none") != "none"
        or getattr(rotary, "partial", 1.0) != 1,
        "ssmax": config.ssmax,
        "qk_norm": config.qk_norm,
        "output_gate": config.output_gate,
        "scale_content=False": not config.scale_content,
    }
    if differences := [what for what, wrong in differs.items() if wrong]:
        raise ValueError(
            f"a Llama has RMSNorm, SwiGLU and plain RoPE; this model has {', '.join(differences)}"
        )
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            intermediate_size=config.hidden_dim,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads or config.num_heads,
            max_position_embeddings=config.train_context,
            rms_norm_eps=model.norm.eps,
            rope_parameters={"rope_type": "default", "rope_theta": cast(Rotary, rotary).theta},
            tie_word_embeddings=config.tied,
        )
    )
    state = model.state_dict()
    named = {
        "model.embed_tokens.weight": state["embedding.weight"],
        "model.norm.weight": state["norm.weight"],
    }
    named["lm_head.weight"] = state["embedding.weight"] if config.tied else state["head.weight"]
    for n in range(config.num_layers):
        for ours, theirs in NAMES.items():
            named[f"model.layers.{n}.{theirs}.weight"] = state[f"layers.{n}.{ours}.weight"]
    with torch.no_grad():
        llama.load_state_dict(named)
    return llama.to(state["embedding.weight"].device, state["embedding.weight"].dtype)
