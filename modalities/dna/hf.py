"""DNA models as `transformers` models (`modalities.decoder.hf` says what they serve); and causal
LMs of `transformers` over bases, k-mers or BPE of DNA as models of DNA, `hf:NAME`.

    from modalities.dna.hf import wrap
    wrap(zoo.create_model("dna_goat_tiny")).save_pretrained("folder")
    pipeline("text-generation", "folder")("ACGT")

One strand is read, as in `DnaDecoder.stream_text`. Needs the extra `hf`.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from modalities.decoder.hf import PriorzooConfig, PriorzooForCausalLM, PriorzooModel, register
from modalities.decoder.model import IGNORED
from modalities.decoder.outside import OutsideConfig, OutsideDecoder, open_causal_lm
from modalities.dna.model import DnaDecoder
from modalities.dna.tokenizers import KmerTokenizer, OutsideDnaTokenizer, decode, load_tokenizer
from modalities.tokenizers.outside import make_fast, open_tokenizer, spells


def fast_tokenizer(spec: str) -> PreTrainedTokenizerFast:
    """The tokenizer of bases or k-mers for `transformers`: letters in, the same ids out, behind the
    start token. It cannot refuse a letter: one that is no nucleotide code, an error of
    `modalities.dna.tokenizers`, is an unknown base here."""
    tokenizer = load_tokenizer(spec)
    if not isinstance(tokenizer, KmerTokenizer):
        raise ValueError(
            f"tokenizer {spec!r} is not served in transformers' form; only bases and k-mers are"
        )
    unknown = "N" * tokenizer.k
    words = {decode(tokenizer.decode([n])): n for n in range(tokenizer.num_targets)}
    words[unknown] = tokenizer.unknown_id
    words["<start>"] = tokenizer.bos_id
    words["<pad>"] = tokenizer.pad_id
    backend = Tokenizer(models.WordLevel(words, unk_token=unknown))
    # Whole k-mers; what is left over at the end makes no token.
    kmer = Regex(f"(?m).{{{tokenizer.k}}}")
    backend.pre_tokenizer = pre_tokenizers.Split(kmer, behavior="removed", invert=True)
    letters = [normalizers.Replace(a, b) for a, b in zip("acgtuU", "ACGTTT", strict=True)]
    backend.normalizer = normalizers.Sequence(letters)
    backend.decoder = decoders.Fuse()
    return make_fast(backend, bos=tokenizer.bos_id, pad=tokenizer.pad_id)


class PriorzooDnaConfig(PriorzooConfig):
    """`PriorzooConfig` of a `DnaDecoder`."""

    model_type = "priorzoo_dna"
    decoder_class = DnaDecoder
    fast_tokenizer = staticmethod(fast_tokenizer)


class PriorzooDnaModel(PriorzooModel):
    """The base model."""

    config_class = PriorzooDnaConfig


class PriorzooDnaForCausalLM(PriorzooForCausalLM):
    """`PriorzooForCausalLM` of DNA. Logits of ids that are no targets are −∞, and as labels they
    are ignored."""

    config_class = PriorzooDnaConfig

    def targets(self, labels: Tensor) -> Tensor:
        """Labels (B, T) with −100 for unknown bases, start and padding."""
        return labels.masked_fill(
            labels >= cast(DnaDecoder, self.model).config.num_targets, IGNORED
        )


register(PriorzooDnaConfig, PriorzooDnaModel, PriorzooDnaForCausalLM)


def wrap(model: DnaDecoder) -> PriorzooDnaForCausalLM:
    """A `transformers` model that shares the weights of `model`."""
    return PriorzooDnaForCausalLM.of(model)


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
