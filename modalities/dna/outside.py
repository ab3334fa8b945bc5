"""Causal LMs of `transformers` over bases, k-mers or BPE of DNA as models of DNA, `hf:NAME`."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

# Its Auto classes read folders of our own format.
import modalities.dna.hf  # noqa: F401
from modalities.decoder.outside import OutsideConfig, OutsideDecoder, open_causal_lm
from modalities.dna.model import DnaDecoder
from modalities.dna.tokenizers import OutsideDnaTokenizer, load_tokenizer
from modalities.tokenizers.outside import open_tokenizer, spells


@dataclass(frozen=True)
class OutsideDnaConfig(OutsideConfig):
    """`OutsideConfig` with what DNA's evaluators ask; `vocab_size` is that of
    `OutsideDnaTokenizer`."""

    num_targets: int = 4
    strands: str = "one"


class OutsideDnaDecoder(OutsideDecoder):
    """An `OutsideDecoder` in the ids of `modalities.dna.tokenizers`.

    Logits of targets are the model's own; that of UNKNOWN is ln Σ exp over everything else in the
    vocabulary, so that a likelihood is the model's, and what it gives to no base costs it. Start
    and padding have −inf.
    """

    config: OutsideDnaConfig
    # (vocab_size,) as in `OutsideDnaTokenizer`.
    library_ids: Tensor
    # The library's ids of what is no target.
    others: Tensor

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        super().__init__(model, name)
        tokenizer = load_tokenizer(self.config.tokenizer)
        assert isinstance(tokenizer, OutsideDnaTokenizer)
        vocabulary = {"vocab_size": tokenizer.vocab_size, "num_targets": tokenizer.num_targets}
        self.config = OutsideDnaConfig(**(asdict(self.config) | vocabulary))
        ids = torch.from_numpy(tokenizer.library_ids)
        self.register_buffer("library_ids", ids, persistent=False)
        others = torch.ones(self.model.config.get_text_config().vocab_size, dtype=torch.bool)
        others[ids[: tokenizer.num_targets]] = False
        self.register_buffer("others", others.nonzero()[:, 0], persistent=False)

    def to(  # type: ignore[override]
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> OutsideDnaDecoder:
        super().to(device=device, dtype=dtype)
        self.library_ids = self.library_ids.to(device)
        self.others = self.others.to(device)
        return self

    def forward_features(self, tokens: Tensor, **options: Any) -> Tensor:
        """As `OutsideDecoder.forward_features`."""
        return super().forward_features(self.library_ids[tokens], **options)

    def forward_head(self, features: Tensor) -> Tensor:
        """(…, vocab_size) float32 logits from (…, C) features."""
        logits = super().forward_head(features)
        targets = logits[..., self.library_ids[: self.config.num_targets]]
        rest = logits[..., self.others].logsumexp(-1, keepdim=True)
        never = torch.full_like(rest, -torch.inf)
        return torch.cat([targets, rest, never, never], dim=-1)


def claim_outside(name: str) -> float:
    """The share of the vocabulary, special tokens aside, that is strings of A, C, G, T and N; 0
    below a half, as of proteins, and where bases get lost."""
    tokenizer = open_tokenizer(name)
    # Whole k-mers of every length up to 8.
    if not spells(tokenizer, "ACGGTTCA" * 105):
        return 0.0
    special = set(tokenizer.all_special_ids)
    entries = [entry for entry, number in tokenizer.get_vocab().items() if number not in special]
    share = float(np.mean([re.fullmatch("[ACGTN]+", entry) is not None for entry in entries]))
    return share if share >= 0.5 else 0.0


def open_outside(name: str) -> tuple[nn.Module, bool]:
    """A folder of our own format is the zoo's model again, behind the folder's tokenizer, which has
    the same ids."""
    model = open_causal_lm(name)
    tokenizer = load_tokenizer(f"hf:{name}")
    decoder = getattr(model, "model", None)
    if not isinstance(decoder, DnaDecoder):
        return OutsideDnaDecoder(model, name), True
    assert isinstance(tokenizer, OutsideDnaTokenizer)
    if (tokenizer.library_ids != np.arange(decoder.config.vocab_size)).any():
        spec = decoder.config.tokenizer
        raise ValueError(f"hf:{name}: its tokenizer has other ids than the model's, {spec!r}")
    decoder.config = replace(decoder.config, tokenizer=tokenizer.name)
    return decoder, True
