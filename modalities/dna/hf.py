"""DNA models as `transformers` models (`modalities.decoder.hf` says what they serve).

    from modalities.dna.hf import wrap
    wrap(zoo.create_model("dna_goat_tiny")).save_pretrained("folder")
    pipeline("text-generation", "folder")("ACGT")

One strand is read, as in `DnaDecoder.stream_text`. Needs the extra `hf`.
"""

from __future__ import annotations

from typing import cast

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from modalities.decoder.hf import PriorzooConfig, PriorzooForCausalLM, PriorzooModel, register
from modalities.decoder.model import IGNORED
from modalities.dna.model import DnaDecoder
from modalities.dna.tokenizers import KmerTokenizer, decode, load_tokenizer
from modalities.tokenizers.outside import make_fast


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
    """`PriorzooForCausalLM` of DNA.

    Logits of ids that are no targets are −∞, and as labels they are ignored.
    """

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
