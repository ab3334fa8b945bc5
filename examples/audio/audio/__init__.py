"""Sounds as log-mel spectrograms: a modality outside the project."""

from functools import partial

from audio import data, model
from modalities.contract import Evaluators, Modality
from modalities.encoder import training
from modalities.loading import first_heldout

MODALITY = Modality(
    name="audio",
    unit="clips",
    model=model.AudioTransformer,
    config=data.AudioData,
    build=model.build,
    loader=data.build_loader,
    heldout=partial(first_heldout, data.build_loader),
    loss=training.loss,
    weight=training.weight,
    cost=training.cost,
    evaluators=Evaluators("audio.evaluators"),
    metrics=training.METRICS,
    recipes="audio.recipes",
)
