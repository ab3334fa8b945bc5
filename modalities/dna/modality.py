"""DNA as the rest of the project knows it: building a model, its loss, data and evaluators."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from modalities.contract import Evaluators, Modality, Outside
from modalities.decoder.model import (
    batch_weight,
    causal_lm_loss,
    check_tokenizer,
    decoder_cost,
    target_weights,
)
from modalities.dna import RECIPES_MODULE
from modalities.dna.baselines import BASELINES
from modalities.dna.config import DnaDataConfig
from modalities.dna.data import build_loader
from modalities.dna.model import DnaDecoder
from modalities.dna.tokenizers import load_tokenizer
from modalities.loading import Batch, first_heldout
from zoo.catalog import create_model
from zoo.model import ZooModel


def build(name: str, options: Mapping[str, object], data: DnaDataConfig) -> ZooModel:
    """A registered model with fresh weights at the data's context and tokenizer; `options` override
    its configuration. ValueError where options name another tokenizer than the data, or a setting
    that the model does not have."""
    if options.get("strands") == "both":
        raise ValueError(
            "strands='both' cannot be trained: leave it out, and evaluate with --strands both"
        )
    check_tokenizer(options, data.tokenizer)
    tokenizer = load_tokenizer(data.tokenizer)
    fields: dict[str, object] = {
        "train_context": data.context,
        "tokenizer": data.tokenizer,
        "vocab_size": tokenizer.vocab_size,
        "num_targets": tokenizer.num_targets,
    }
    return create_model(name, **fields | dict(options))


def next_token_loss(model: DnaDecoder, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """`causal_lm_loss` of a batch, and its bits per base: the loss in bits over the mean number of
    bases of a target. A copy expert in training then keeps the rows."""
    loss, _ = causal_lm_loss(model, batch)
    if model.copy_expert is not None and model.copy_expert.training:
        model.copy_expert.remember(batch["tokens"], batch["segments"])
    weights = target_weights(batch)
    widths = torch.from_numpy(load_tokenizer(model.config.tokenizer).widths)
    bases_of_targets = widths.to(weights.device)[batch["tokens"][:, 1:]]
    bases = (weights * bases_of_targets).sum() / weights.sum()
    return loss, {"bits_per_base": loss.detach() / (math.log(2) * bases)}


def _open_outside(name: str) -> tuple[nn.Module, bool]:
    # Imports transformers.
    from modalities.dna.outside import open_outside

    return open_outside(name)


def _claim_outside(name: str) -> float:
    from modalities.dna.outside import claim_outside

    return claim_outside(name)


MODALITY = Modality(
    name="dna",
    unit="tokens",
    model=DnaDecoder,
    config=DnaDataConfig,
    build=build,
    loader=build_loader,
    heldout=partial(first_heldout, build_loader),
    loss=next_token_loss,
    weight=batch_weight,
    cost=decoder_cost,
    evaluators=Evaluators("modalities.dna.evaluators"),
    baselines=BASELINES,
    outside={"hf": Outside(_open_outside, _claim_outside)},
    metrics=("bits_per_base",),
    headline=("bits_per_base",),
    recipes=RECIPES_MODULE,
    task="text-generation",
)
