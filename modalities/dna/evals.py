"""DNA evaluators, and the baselines that stand beside models in them."""

from __future__ import annotations

from modalities.dna.baselines import BASELINES
from modalities.dna.completion import Completion, Spectrum
from modalities.dna.likelihood import Bits, Contigs, Strands
from modalities.dna.records import Score
from modalities.dna.settings import DnaSettings
from modalities.dna.variants import Variants
from modalities.evaluation import Evaluator

__all__ = ["BASELINES", "EVALUATORS", "DnaSettings"]

EVALUATORS: dict[str, Evaluator] = {
    e.name: e for e in (Bits(), Contigs(), Strands(), Completion(), Spectrum(), Score(), Variants())
}
