"""DNA: the causal decoder of text on single bases, k-mers or BPE; its data, its evaluators."""

from modalities.dna.model import DnaConfig, DnaDecoder, register_dna_models

__all__ = ["DnaConfig", "DnaDecoder"]

register_dna_models()
