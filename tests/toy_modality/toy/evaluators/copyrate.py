from dataclasses import dataclass

import torch

from modalities.evaluation import Cell, Evaluator
from modalities.results import Score
from modalities.settings import LengthSettings, option
from toy.model import ToyModel


@dataclass(frozen=True)
class CopySettings(LengthSettings):
    repeats: int = option(2, "times that the symbols are written")


class CopyRate(Evaluator[CopySettings, ToyModel]):
    name = "copyrate"
    summary = "share of the repeated symbols that are predicted"
    scores = (Score("copied", unit_interval=True),)

    def cells(self, model):
        return [
            Cell(f"length={n}", n, {"length": n})
            for n in self.settings.resolved_lengths(self.trained_at(model))
        ]

    @torch.inference_mode()
    def measure(self, model, cell):
        shape = (self.settings.samples or 4, cell.data["length"] // self.settings.repeats)
        drawn = torch.randint(
            model.config.symbols, shape, generator=torch.Generator().manual_seed(self.settings.seed)
        )
        tokens = drawn.repeat(1, self.settings.repeats)
        right = model(tokens[:, :-1]).argmax(-1) == tokens[:, 1:]
        return {
            "length": cell.data["length"],
            "copied": right[:, shape[1] - 1 :].double().mean().item(),
        }
