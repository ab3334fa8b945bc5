"""Text: one causal LM for every position method, its data, its evaluators."""

from modalities.text.model import CausalLM, TextConfig, causal_lm_loss, register_text_models

__all__ = ["CausalLM", "TextConfig", "causal_lm_loss"]

register_text_models()
