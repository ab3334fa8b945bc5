"""DNA: the causal decoder on single bases, k-mers or BPE; its data, baselines and evaluators."""

from __future__ import annotations

from functools import partial

from torch import nn

from modalities.contract import Evaluators, Modality, Outside
from modalities.decoder.model import decoder_cost, target_weight
from modalities.dna.baselines import BASELINES
from modalities.dna.data import DnaDataConfig, build_loader
from modalities.dna.model import DnaConfig, DnaDecoder, build, next_token_loss
from modalities.loading import first_heldout

__all__ = ["MODALITY", "DnaConfig", "DnaDecoder"]


def _open_outside(name: str) -> tuple[nn.Module, bool]:
    from modalities.dna.hf import open_outside  # imports transformers

    return open_outside(name)


def _claim_outside(name: str) -> float:
    from modalities.dna.hf import claim_outside

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
    weight=target_weight,
    cost=decoder_cost,
    evaluators=Evaluators("modalities.dna.evaluators"),
    baselines=BASELINES,
    outside={"hf": Outside(_open_outside, _claim_outside)},
    metrics=("bits_per_base",),
    headline=("bits_per_base",),
    recipes="recipes.dna",
    task="text-generation",
)
