"""DNA: the causal decoder on single bases, k-mers or BPE; its data, baselines and evaluators."""

from functools import partial

from modalities.contract import Evaluators, Modality
from modalities.decoder.model import decoder_cost, target_weight
from modalities.dna.baselines import BASELINES
from modalities.dna.config import DnaDataConfig
from modalities.dna.data import build_loader
from modalities.dna.model import DnaConfig, DnaDecoder, build_model, next_token_loss, register_dna_models
from modalities.dna.outside import OUTSIDE
from modalities.loading import first_heldout

__all__ = ["MODALITY", "DnaConfig", "DnaDecoder"]

register_dna_models()

MODALITY = Modality(
    name="dna",
    unit="tokens",
    model=DnaDecoder,
    config=DnaDataConfig,
    build=build_model,
    loader=build_loader,
    heldout=partial(first_heldout, build_loader),
    loss=next_token_loss,
    weight=target_weight,
    cost=decoder_cost,
    evaluators=Evaluators("modalities.dna.evaluators"),
    baselines=BASELINES,
    outside={"hf": OUTSIDE},
    metrics=("bits_per_base",),
    recipes="recipes.dna",
    task="text-generation",
)
