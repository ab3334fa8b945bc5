"""A toy modality: random symbols, written twice. The second time is the target."""

from modalities.contract import Modality
from modalities.evaluation import find_evaluators
from toy import data, model

MODALITY = Modality(
    name="toy",
    unit="symbols",
    model=model.ToyModel,
    config=data.ToyData,
    build=model.build,
    loader=data.loader,
    heldout=data.heldout,
    loss=model.loss,
    weight=model.weight,
    cost=model.cost,
    evaluators=find_evaluators("toy.evaluators"),
    recipes="toy.recipes",
)
