"""The causal decoder on DNA: its vocabulary, its sizes and its copy expert."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from modalities.decoder.generation import stream_text
from modalities.decoder.model import Decoder, DecoderConfig, register_decoders
from modalities.dna.copying import LONGEST, CopyExpert
from modalities.dna.tokenizers import decode, encode, load_tokenizer
from zoo.decoding import KVCache
from zoo.errors import LONGEST_CONTEXT, bounded


@dataclass(frozen=True)
class DnaConfig(DecoderConfig):
    """`DecoderConfig` with DNA's vocabulary.

    Attributes:
        num_targets: ids below it can be predicted; those of unknown bases, start and padding are
            above.
        strands: what evaluators score by default: "one", or "both", the mean over a sequence and
            its reverse complement.
        copy_orders: of the copy expert, bases of the contexts that it looks for, ascending; none:
            no expert (`CopyExpert`). Its experts of the row alone see the last `train_context`
            bases.
        copy_memory: most bases of training rows that it keeps. It is meant for training that reads
            no base twice: rows that are in the memory already teach it to trust that too far.
    """

    vocab_size: int = bounded(7, 1, 2**24)
    position: str | list[str] = "goat"
    num_targets: int = 4
    train_context: int = bounded(256, 1, LONGEST_CONTEXT)
    tokenizer: str = "bases"
    strands: str = "one"
    copy_orders: list[int] = field(default_factory=list)
    copy_memory: int = bounded(0, 0, 2**32)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_copies()
        if self.strands not in ("one", "both"):
            raise ValueError(f"strands {self.strands!r}: expected 'one' or 'both'")
        if not 0 < self.num_targets <= self.vocab_size:
            raise ValueError(
                f"num_targets {self.num_targets} must lie in 1..vocab_size={self.vocab_size}"
            )
        # Other tokenizers are files, opened when they are used.
        if self.tokenizer == "bases" or self.tokenizer.startswith("kmer:"):
            self._check_vocabulary()

    def _check_copies(self) -> None:
        orders = list(self.copy_orders)
        if orders != sorted(set(orders)) or not all(1 <= order <= LONGEST for order in orders):
            raise ValueError(
                f"copy_orders={orders}: expected ascending numbers of bases from 1 to {LONGEST}"
            )
        if orders and self.tokenizer != "bases":
            raise ValueError(
                f"copy_orders={orders} with tokenizer {self.tokenizer!r}: "
                "copies are of single bases, 'bases'"
            )
        if self.copy_memory and not orders:
            example = "such as [11, 12, 14, 16, 20, 24]"
            raise ValueError(f"copy_memory={self.copy_memory} without copy_orders, {example}")

    def _check_vocabulary(self) -> None:
        tokenizer = load_tokenizer(self.tokenizer)
        if tokenizer.vocab_size > self.vocab_size or tokenizer.num_targets != self.num_targets:
            raise ValueError(
                f"tokenizer {self.tokenizer!r} has {tokenizer.num_targets} targets in "
                f"{tokenizer.vocab_size} ids; the model has num_targets {self.num_targets}, "
                f"vocab_size {self.vocab_size}: weights are of one tokenizer"
            )


TINY: dict[str, object] = dict(dim=128, num_layers=4, num_heads=4, hidden_dim=344)
# Of the copy expert: contexts that 8 million bases repeat by chance, to those that copies alone
# share; and a memory of 8.4 million bases, for the 8.2 million of tiny training and the starts of
# rows. At 3M it has room for 67 million.
COPY: dict[str, object] = dict(copy_orders=[11, 12, 14, 16, 20, 24], copy_memory=1 << 23)
SIZES: Mapping[str, Mapping[str, object]] = {
    # Before "tiny", in which its names end too.
    "copy_tiny": TINY | COPY | dict(train_context=1024),
    "copy_3m": COPY
    | dict(
        dim=256,
        num_layers=4,
        num_heads=4,
        hidden_dim=688,
        train_context=1024,
        copy_memory=1 << 26,
    ),
    "tiny": TINY | dict(train_context=256),
    "small": dict(
        dim=384,
        num_layers=6,
        num_heads=6,
        hidden_dim=1024,
        train_context=1024,
    ),
    # GOAT, human genome: the released script.
    "25m": dict(
        dim=512,
        num_layers=8,
        num_heads=8,
        hidden_dim=1376,
        train_context=1024,
    ),
    # 125M parameters on single bases, where the paper names the size and no layers.
    "125m": dict(
        dim=768,
        num_layers=18,
        num_heads=12,
        hidden_dim=2048,
        train_context=1024,
    ),
}


class DnaDecoder(Decoder):
    """A decoder of DNA.

    Ids that are not targets (unknown bases, start, padding) have logits of −inf: on single bases an
    untrained model costs about 2 bits per base, not log₂ 7.
    """

    config_class = DnaConfig
    config: DnaConfig
    modality = "dna"

    def __init__(self, config: DnaConfig) -> None:
        super().__init__(config)
        self.copy_expert: CopyExpert | None = None
        if config.copy_orders:
            self.copy_expert = CopyExpert(
                config.dim,
                config.copy_orders,
                memory=config.copy_memory,
                recent=config.train_context,
            )

    def refuses_sequence(self, size: int) -> str | None:
        if self.copy_expert is not None:
            return "its copy expert searches whole rows for what followed the same bases"
        return super().refuses_sequence(size)

    def forward_features(
        self,
        tokens: Tensor,
        *,
        segments: Tensor | None = None,
        cache: KVCache | None = None,
        **options: Any,
    ) -> Tensor:
        """As `Decoder.forward_features`; with a copy expert (B, T, C + 4), its logits behind the
        features, in float32 or wider. ValueError with a copy expert for embeddings instead of
        ids."""
        features = super().forward_features(tokens, segments=segments, cache=cache, **options)
        if self.copy_expert is None:
            return features
        if tokens.is_floating_point():
            raise ValueError(
                "a copy expert looks for bases: pass ids of tokens, not their embeddings"
            )
        if cache is not None:
            tokens = cache.keep(tokens)
            segments = cache.segments
        copied = self.copy_expert(tokens, features, segments)
        return torch.cat([features.to(copied.dtype), copied], -1)

    def forward_head(self, features: Tensor) -> Tensor:
        """(…, V) float32 logits from what `forward_features` gives; −inf from `num_targets` on."""
        if self.copy_expert is None:
            logits = super().forward_head(features)
        else:
            decoded, copied = features.split([self.config.dim, 4], -1)
            logits = super().forward_head(decoded.to(self.embedding.weight.dtype))
            logits = logits + F.pad(copied, (0, logits.shape[-1] - 4))
        never = torch.arange(logits.shape[-1], device=logits.device) >= self.config.num_targets
        return logits.masked_fill(never, -torch.inf)

    def stream_text(
        self, prompt: str = "", *, max_new_tokens: int = 200, **sampling: float | None
    ) -> Iterator[str]:
        """Bases that follow those of the prompt, yielded as they are written.

        Where it is not a whole number of k-mers, its first bases are left out. `sampling`: as in
        `modalities.decoder.generation.stream`. ValueError for other letters.
        """
        tokenizer = load_tokenizer(self.config.tokenizer)
        left_over = tokenizer.encode(encode(prompt)).left_over
        ids = self.read(prompt[left_over:])[0].tolist()

        def letters(new: list[int]) -> str:
            return decode(tokenizer.decode(new))

        return stream_text(self, ids, letters, max_new_tokens=max_new_tokens, **sampling)  # type: ignore[arg-type]

    def read(self, bases: str) -> Tensor:
        """(1, T) ids: the start token and the tokens of bases.

        ValueError for other letters than those of bases.
        """
        tokenizer = load_tokenizer(self.config.tokenizer)
        ids = tokenizer.encode(encode(bases)).ids.tolist()
        return torch.tensor([[tokenizer.bos_id, *ids]], device=self.device)


# Every position method × SSMax on and off × size.
register_decoders("dna", SIZES, DnaConfig, lambda **config: DnaDecoder(DnaConfig(**config)))
