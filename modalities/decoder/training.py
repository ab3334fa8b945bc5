"""What training asks of every modality whose models are causal decoders: one tokenizer, weight, cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from modalities.contract import Cost
from modalities.decoder.model import LOGIT_BYTES, Decoder, target_weights


class RowData(Protocol):
    """A recipe's data section with rows of tokens."""

    @property
    def context(self) -> int: ...


def check_tokenizer(options: Mapping[str, object], spec: str) -> None:
    """ValueError where a model's options name another tokenizer than the data's."""
    if (name := options.get("tokenizer", spec)) != spec:
        raise ValueError(f"model.options.tokenizer={name} and data.tokenizer={spec} disagree; set data.tokenizer alone")


def target_weight(batch: dict[str, Tensor]) -> tuple[float, int]:
    """(Σ of the weights of a batch's targets, by which its mean loss is weighted; number of targets that count)."""
    weights = target_weights(batch)
    return float(weights.sum()), int((weights > 0).sum())


def decoder_cost(model: Decoder, data: RowData, width: int) -> Cost:
    """One row of L tokens. FLOPs: 6 a matrix parameter and token, and 6·C a visible (query, key) pair and layer.

    Activations in numbers a token: per layer 10·C + 4·hidden, or 2·C where blocks are recomputed, and then those of one block;
    at the head three float32 copies of the logits, or of a chunk of them.
    """
    config, length = model.config, data.context
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and name != "embedding.weight")
    matrices += config.vocab_size * config.dim if config.tied else 0  # tied: the embedding is the head's matrix
    flops = 6.0 * matrices * length + 6.0 * config.dim * length**2 * config.num_layers
    block = 10 * config.dim + 4 * config.hidden_dim
    recomputed = config.activation_checkpointing
    layers = config.num_layers * 2 * config.dim + block if recomputed else config.num_layers * block
    logits = min(4.0 * config.vocab_size * length, LOGIT_BYTES)
    return Cost(length, flops, length * width * layers + 3 * logits)
