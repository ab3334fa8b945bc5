"""Text models as `transformers` models (`modalities.decoder.hf` says what they serve).

    from modalities.text.hf import wrap
    # A PreTrainedModel.
    model = wrap(zoo.create_model("text_ggd_ssmax_tiny.facts"))
    model.save_pretrained("folder")
    pipeline("text-generation", "folder")

Needs the extra `hf`. For lm-evaluation-harness there is `lm_eval.py`.
"""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from modalities.decoder.hf import PriorzooConfig, PriorzooForCausalLM, PriorzooModel, register
from modalities.decoder.model import Decoder
from modalities.text.model import CausalLM
from modalities.text.tokenizers import load_tokenizer
from modalities.tokenizers.encoding import BPETokenizer, OutsideTokenizer
from modalities.tokenizers.outside import make_fast


def fast_tokenizer(spec: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a spec as one of `transformers`; errors as in `load_tokenizer`.

    It gives the same ids with BOS before them. Text that spells "<bos>" stays plain text.
    """
    tokenizer = load_tokenizer(spec)
    special_ids = dict(bos=tokenizer.bos_id, eos=tokenizer.eos_id, pad=tokenizer.pad_id)
    if isinstance(tokenizer, BPETokenizer):
        return make_fast(Tokenizer.from_str(tokenizer.backend.to_str()), **special_ids)
    if isinstance(tokenizer, OutsideTokenizer):
        backend = getattr(tokenizer.inner, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(
                f"tokenizer {spec!r} is not of the library `tokenizers`, "
                "which transformers' form needs"
            )
        return make_fast(Tokenizer.from_str(backend.to_str()), **special_ids)
    # A token is a byte: BPE without merges over the letters by which ByteLevel writes bytes.
    vocabulary = {letter: byte for byte, letter in bytes_to_unicode().items()}
    vocabulary |= {f"<{role}>": token_id for role, token_id in special_ids.items()}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return make_fast(backend, **special_ids)


class PriorzooTextConfig(PriorzooConfig):
    """`PriorzooConfig` of a `CausalLM`."""

    model_type = "priorzoo_text"
    decoder_class = CausalLM
    fast_tokenizer = staticmethod(fast_tokenizer)


class PriorzooTextModel(PriorzooModel):
    """`PriorzooModel` of text."""

    config_class = PriorzooTextConfig


class PriorzooTextForCausalLM(PriorzooForCausalLM):
    """`PriorzooForCausalLM` of text."""

    config_class = PriorzooTextConfig


register(PriorzooTextConfig, PriorzooTextModel, PriorzooTextForCausalLM)


def wrap(model: Decoder) -> PriorzooTextForCausalLM:
    """A `transformers` model that shares the weights of `model`."""
    return PriorzooTextForCausalLM.of(model)
