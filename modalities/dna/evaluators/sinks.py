"""The attention sink on held-out DNA."""

from __future__ import annotations

import torch

from modalities.attention import Probe, Sinks
from modalities.decoder.scoring import device_of
from modalities.dna.model import DnaDecoder
from modalities.dna.probes import DnaProbes

__all__ = ["DnaSinks"]


class DnaSinks(DnaProbes, Sinks):
    __doc__ = Sinks.__doc__

    def probe(self, model: DnaDecoder, index: int) -> Probe:
        """The start token, which is the sink, and a held-out stretch."""
        tokens = torch.as_tensor(self.tokens(model, index, self.length(model)), device=device_of(model))
        return Probe((tokens[None],), torch.arange(len(tokens))[:, None])
