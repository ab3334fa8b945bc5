"""The causal LM as a `transformers` model, for tools that take one. (For lm-evaluation-harness there is `lm_eval.py`.)

    from modalities.text.hf import wrap
    model = wrap(zoo.create_model("text_ggd_ssmax_tiny.facts"))      # a PreTrainedModel
    model.save_pretrained("folder");  AutoModelForCausalLM.from_pretrained("folder")

Needs the extra `hf`. Its `generate` reads the whole row again for each token; `CausalLM.generate` decodes with the cache.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from modalities.text.model import CausalLM, TextConfig

__all__ = ["PriorzooConfig", "PriorzooForCausalLM", "wrap"]


class PriorzooConfig(PretrainedConfig):
    """`text` holds the entries of a `TextConfig`."""

    model_type = "priorzoo_text"

    def __init__(self, text: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.text = asdict(TextConfig(**(text or {})))
        kwargs.setdefault("vocab_size", self.text["vocab_size"])
        kwargs.setdefault("hidden_size", self.text["dim"])
        kwargs.setdefault("num_hidden_layers", self.text["num_layers"])
        kwargs.setdefault("num_attention_heads", self.text["num_heads"])
        kwargs.setdefault("use_cache", False)
        kwargs.setdefault("tie_word_embeddings", False)  # tying happens inside CausalLM, which has one matrix then
        super().__init__(**kwargs)


class PriorzooForCausalLM(PreTrainedModel, GenerationMixin):
    """`CausalLM` behind the interface of `transformers`; an attention mask of zeros and ones may pad on the left."""

    config_class = PriorzooConfig
    base_model_prefix = "model"

    def __init__(self, config: PriorzooConfig) -> None:
        super().__init__(config)
        self.model = CausalLM(TextConfig(**config.text))
        self.post_init()

    def _init_weights(self, module) -> None:
        """CausalLM has initialised itself, and priors must keep the inits of their papers."""

    def get_input_embeddings(self):
        return self.model.embedding

    def prepare_inputs_for_generation(  # type: ignore[override]  # no cache: the arguments about one are not used
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> dict:
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None, **_: Any
    ) -> CausalLMOutput:
        """Logits (B, T, V) of tokens (B, T); with labels (−100 is ignored) the loss of predicting each from those before."""
        segments = None if attention_mask is None or bool(attention_mask.all()) else attention_mask.long() - 1
        logits = self.model(input_ids, segments=segments)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return CausalLMOutput(loss=loss, logits=logits)


AutoConfig.register("priorzoo_text", PriorzooConfig)
AutoModelForCausalLM.register(PriorzooConfig, PriorzooForCausalLM)


def wrap(model: CausalLM) -> PriorzooForCausalLM:
    """A `transformers` model that shares the weights of `model`."""
    wrapped = PriorzooForCausalLM(PriorzooConfig(text=asdict(model.config)))
    wrapped.model = model
    return wrapped
