"""What heads look at where a stretch of DNA comes again."""

from __future__ import annotations

import numpy as np
import torch

from modalities.attention import Heads, Probe
from modalities.decoder.scoring import device_of
from modalities.dna.model import DnaDecoder
from modalities.dna.probes import DnaProbes

__all__ = ["COPY", "DnaHeads"]

COPY = 32  # tokens that come again, at most a quarter of the sample


class DnaHeads(DnaProbes, Heads):
    __doc__ = f"""{Heads.__doc__}
    The answer is the base that followed the first time: a sample ends with up to {COPY} tokens of itself once more.
    """

    def probe(self, model: DnaDecoder, index: int) -> Probe:
        """A held-out stretch and, behind it, a part of it again; its last query and the token that followed that part."""
        length = self.length(model)
        copied = min(COPY, length // 4)
        if copied < 1:
            raise ValueError(
                f"a sample of {length} tokens has no room for a copy of a part of itself; choose 4 or more"
            )
        first = self.tokens(model, index, length - copied)
        rng = np.random.default_rng([self.settings.seed, index])
        start = int(rng.integers(1, max(2, len(first) - copied)))
        follows = start + copied
        ids = np.concatenate([first, first[start:follows]])
        tokens = torch.as_tensor(ids, device=device_of(model))
        places = torch.arange(len(tokens))[:, None]
        return Probe((tokens[None],), places, rows=[len(tokens) - 1], spans=[(follows, follows + 1)])
