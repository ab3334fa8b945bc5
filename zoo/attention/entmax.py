"""α-entmax attention: dense, in blocks of queries.

    p[i,·] = entmax_α(z[i,·]),  entmax_α(z)_j = [(α − 1)·z_j − τ]₊^(1/(α − 1))

with τ such that the weights sum to 1 (arXiv 1905.05702). Keys far below the best of a row get the
weight 0 exactly, however many there are. The logits z are those of `AttentionCall`, so priors, row
scales, masks and sinks are as in softmax attention. Needs the package `entmax`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from zoo.attention.call import AttentionCall
from zoo.attention.heads import repeat_heads
from zoo.attention.reference import logits_of
from zoo.attention.tracing import needs_grad
from zoo.errors import check_number, require
from zoo.positions import slices

# Logits of all heads in a block: 128 MiB of float32.
BLOCK_LOGITS = 1 << 25


@dataclass(frozen=True)
class EntmaxKernel:
    """α-entmax in place of softmax.

    Attributes:
        alpha: α > 1. 1.5 and 2 (sparsemax) have exact algorithms, others take bisection.
    """

    alpha: float = 1.5

    def __post_init__(self) -> None:
        check_number("alpha of entmax", self.alpha, above=1)
        require("entmax", "entmax attention", "entmax")

    def refuses(self, call: AttentionCall) -> str | None:
        if call.terms.sink is not None:
            return "a learned sink is a term of softmax's denominator, which entmax has not"
        return None

    def run(self, call: AttentionCall) -> Tensor:
        """(B, H, T, D) in q's dtype; logits and weights are float32 or wider."""
        batch, num_heads = call.q.shape[:2]
        rows = max(1, BLOCK_LOGITS // (batch * num_heads * call.num_keys))
        values = repeat_heads(call.v, num_heads)
        tracked = needs_grad(call.q, call.k, call.v, call.query_scale)
        parts = []
        for block in slices(call.num_queries, rows):
            if tracked and rows < call.num_queries:
                # Weights are made again in the backward pass: one block of them is in memory.
                part = checkpoint(self._attend, call, values, block, use_reentrant=False)
            else:
                part = self._attend(call, values, block)
            parts.append(part.to(call.q.dtype))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def _attend(self, call: AttentionCall, values: Tensor, rows: slice) -> Tensor:
        """The outputs of some rows."""
        weights = self.weights(logits_of(call, rows))
        if call.dropout:
            weights = F.dropout(weights, call.dropout)
        return weights @ values.to(weights.dtype)

    def weights(self, logits: Tensor) -> Tensor:
        """(B, H, t, S) weights of rows of logits; 0 in rows that see no key."""
        from entmax import entmax15, entmax_bisect, sparsemax

        hidden = logits == -math.inf
        empty = hidden.all(-1, keepdim=True)
        # The package's algorithms subtract and sort: −∞ becomes NaN there. So far below the rest of
        # its row every α gives a logit the weight 0.
        top = logits.detach().masked_fill(empty, 0.0).amax(-1, keepdim=True)
        lowest = top - (2.0 + 2.0 / (self.alpha - 1.0))
        finite = torch.where(hidden, lowest, logits)
        if self.alpha == 1.5:
            weights = entmax15(finite, dim=-1)
        elif self.alpha == 2.0:
            weights = sparsemax(finite, dim=-1)
        else:
            weights = entmax_bisect(finite, alpha=self.alpha, dim=-1)
        return weights.masked_fill(hidden, 0.0)
