"""DNA: the causal decoder on single bases, k-mers or BPE; its data, baselines and evaluators."""

from collections.abc import Callable
from functools import partial

from modalities.contract import Evaluators, Modality
from modalities.decoder.training import decoder_cost, heldout_prompts, random_rows, target_weight
from modalities.dna.baselines import BASELINES
from modalities.dna.bases import decode
from modalities.dna.config import DnaDataConfig
from modalities.dna.data import build_loader
from modalities.dna.model import DnaConfig, DnaDecoder, build_model, next_token_loss, register_dna_models
from modalities.dna.outside import OUTSIDE
from modalities.dna.tokenizers import load_tokenizer
from modalities.loading import first_heldout

__all__ = ["MODALITY", "DnaConfig", "DnaDecoder"]

register_dna_models()

_heldout = partial(first_heldout, build_loader)


def _decoder(data: DnaDataConfig) -> Callable[[list[int]], str]:
    tokenizer = load_tokenizer(data.tokenizer)
    return lambda ids: decode(tokenizer.decode(ids))


MODALITY = Modality(
    name="dna",
    unit="tokens",
    model=DnaDecoder,
    config=DnaDataConfig,
    build=build_model,
    loader=build_loader,
    heldout=_heldout,
    loss=next_token_loss,
    weight=target_weight,
    cost=decoder_cost,
    example=lambda model, data, rows: random_rows(model.config.num_targets, data.context, rows),
    prompts=partial(heldout_prompts, _heldout, _decoder),
    evaluators=Evaluators("modalities.dna.evaluators"),
    baselines=BASELINES,
    outside={"hf": OUTSIDE},
    metrics=("bits_per_base",),
    recipes="recipes.dna",
    task="text-generation",
)
