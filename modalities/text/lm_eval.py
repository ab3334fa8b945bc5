"""Text models in lm-evaluation-harness, as its model `priorzoo`.

    priorzoo lm-eval --model priorzoo --model_args pretrained=text_ggd_ssmax_tiny.facts --tasks piqa

In Python, `import modalities.text.lm_eval` comes before
`lm_eval.simple_evaluate(model="priorzoo", ...)`. Needs the extra `lm-eval`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from modalities.decoder.outside import OutsideDecoder, open_causal_lm
from modalities.text.hf import fast_tokenizer, wrap
from modalities.text.model import CausalLM
from modalities.tokenizers.outside import open_tokenizer
from zoo.catalog import list_models, load_model
from zoo.errors import check_options, nearest

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Tokens, more than any text has: the harness cuts nothing.
UNLIMITED = 2**31 - 1


@register_model("priorzoo")
class PriorzooLM(HFLM):
    """A text model in its `transformers` form, as the harness' class for Hugging Face's models.

    BOS precedes every text, as in training.

    pretrained: a name with weights; the folder of a run, of a checkpoint or of `save_pretrained`;
        or hf:NAME, a model of transformers or an adapter, as `priorzoo evaluate` takes it.
    dtype: float32 or bfloat16, of the weights and of the forward pass. Softmaxes are taken in
        float32.
    device: such as cuda:1; the CPU where torch sees no CUDA device.
    max_length: tokens that a prediction sees at most, the newest ones. By default nothing is cut.
    """

    def __init__(
        self,
        pretrained: str,
        *,
        dtype: str = "float32",
        device: str = "cuda:0",
        batch_size: int | str = 1,
        max_length: int | None = None,
        **unknown: object,
    ) -> None:
        # An error for any of `unknown`, with the nearest argument of this class.
        check_options(
            "the model priorzoo", type(self), {"pretrained", *unknown}, fixed=("unknown",)
        )
        if dtype not in DTYPES:
            raise ValueError(f"dtype={dtype!r}: {nearest(dtype, DTYPES)}")
        if device.startswith("cuda") and not torch.cuda.is_available():
            device = "cpu"
        if pretrained.startswith("hf:"):
            name = pretrained.removeprefix("hf:")
            outside = OutsideDecoder(open_causal_lm(name), name)
            model = outside.to(device=device, dtype=DTYPES[dtype]).model
            tokenizer = open_tokenizer(name)
        else:
            decoder = _load(pretrained).to(device=device, dtype=DTYPES[dtype]).eval()
            model = wrap(decoder)
            tokenizer = fast_tokenizer(decoder.config.tokenizer)
        super().__init__(
            model,
            tokenizer=tokenizer,
            batch_size=batch_size,
            max_length=UNLIMITED if max_length is None else max_length,
            softmax_dtype="float32",
            add_bos_token=True,
        )

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, object], additional_config: dict[str, object] | None = None
    ) -> Self:
        """The model of `--model_args`, which win over the harness' other options.

        Those always name a batch size, and are None where they were not given.
        """
        config = additional_config or {}
        options = {name: value for name, value in config.items() if value is not None}
        options |= arg_dict
        return cls(**options)  # type: ignore[arg-type]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-probability of each text in nats; with `max_length`, in windows."""
        # The windows begin with BOS already.
        self.add_bos_token = False
        try:
            return super().loglikelihood_rolling(requests, disable_tqdm)
        finally:
            self.add_bos_token = True


def _load(name: str) -> CausalLM:
    """The text model with weights of this name, or in this folder."""
    if not Path(name).is_dir():
        names = list_models("text_*", pretrained=True)
        if name not in names:
            raise ValueError(f"{name!r} is no folder, and has no weights: {nearest(name, names)}")
    model = load_model(name)
    if not isinstance(model, CausalLM):
        raise ValueError(
            f"{name}: a model of {model.modality}; the harness asks for models of text"
        )
    return model
