"""The causal decoder that text and DNA share: model, training interface, generation, scoring."""

from modalities.decoder.model import Decoder, DecoderConfig, causal_lm_loss, target_weights

__all__ = ["Decoder", "DecoderConfig", "causal_lm_loss", "target_weights"]
