"""Causal decoders as `transformers` models: Trainer, `generate`, pipelines, PEFT, Auto classes,
folders for the hub.

`wrap` of `modalities.text.hf` and `modalities.dna.hf` makes one of a model of the zoo. Needs the
extra `hf`.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import asdict, replace
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.cache_utils import Cache as TransformersCache
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.trainer import Trainer
from transformers.utils.generic import can_return_tuple

from modalities.decoder.model import IGNORED, Decoder
from zoo.adapters.hf import load_whole
from zoo.decoding import KVCache
from zoo.model import ZooModel
from zoo.positions import check_runs

# Names of `transformers` → of a `DecoderConfig`.
NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
}
# The file that auto_map names.
REMOTE_CODE = "modeling_priorzoo"


class PriorzooConfig(PreTrainedConfig):
    """The configuration of a decoder: `architecture` has the entries of its own config, a
    `DecoderConfig`; for other readers vocab_size, hidden_size, num_hidden_layers and
    num_attention_heads repeat it, and a ValueError says where they disagree."""

    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    decoder_class: ClassVar[type[Decoder]]

    # JSON values.
    architecture: dict[str, Any] | None = None
    use_cache: bool = True

    def __post_init__(self, **kwargs: object) -> None:
        self.architecture = asdict(self.decoder_class.config_class(**(self.architecture or {})))
        for theirs, ours in NAMES.items():
            value = self.architecture[ours]
            other = kwargs.pop(theirs, value)
            if other != value:
                raise ValueError(
                    f"{theirs}={other} disagrees with architecture[{ours!r}]={value}: "
                    "set that alone"
                )
            setattr(self, theirs, value)
        # The decoder itself has one matrix then.
        kwargs["tie_word_embeddings"] = self.architecture["tied"]
        name = type(self).__name__.removesuffix("Config")
        kwargs["auto_map"] = {
            "AutoConfig": f"{REMOTE_CODE}.{name}Config",
            "AutoModel": f"{REMOTE_CODE}.{name}Model",
            "AutoModelForCausalLM": f"{REMOTE_CODE}.{name}ForCausalLM",
        }
        super().__post_init__(**kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: `auto_map` is always written."""

    @staticmethod
    def fast_tokenizer(spec: str) -> PreTrainedTokenizerFast:
        """The tokenizer of a spec. FileNotFoundError where its files are missing."""
        raise NotImplementedError


class PriorzooCache(TransformersCache):
    """`held`, a cache of `Decoder.new_cache`, as one of `transformers`; without `layers`, since
    lanes and sums are in it."""

    def __init__(self, held: KVCache) -> None:
        super().__init__(layers=[])
        self.held = held

    def __len__(self) -> int:
        return len(self.held.layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.held.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last −`tokens_to_remove` tokens."""
        self.held.crop(self.held.length + tokens_to_remove)

    def reset(self) -> None:
        self.held.crop(0)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Take rows of the batch by number (B',)."""
        self.held.select(indices)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.held.select(beam_idx)


class PriorzooModel(PreTrainedModel):
    """A decoder, `model`, without its head: features of tokens."""

    config_class = PriorzooConfig
    config: PriorzooConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    # As in `ZooModel.storable_state`.
    _keep_in_fp32_modules_strict = ["prior", "ssmax"]  # noqa: RUF012

    def __init__(self, config: PriorzooConfig) -> None:
        super().__init__(config)
        decoder = config.decoder_class
        self.model = decoder(decoder.config_class(**(config.architecture or {})))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """The decoder has initialised itself, and priors must keep the inits of their papers."""

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embedding = cast(nn.Embedding, value)

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        embedding = super().resize_token_embeddings(
            new_num_tokens, pad_to_multiple_of, mean_resizing
        )
        self.model.config = replace(self.model.config, vocab_size=embedding.weight.shape[0])
        self.config.architecture = asdict(self.model.config)
        return embedding

    def _set_gradient_checkpointing(
        self, enable: bool = True, *_: object, **options: object
    ) -> None:
        """Recompute each block in the backward pass, in the decoder's own way whatever the
        options."""
        self.model.gradient_checkpointing = enable

    def new_cache(self, capacity: int = 0) -> PriorzooCache:
        """An empty cache for `past_key_values`. It grows beyond `capacity`."""
        return PriorzooCache(self.model.new_cache(capacity))

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: PriorzooCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        last: int | None = None,
    ) -> BaseModelOutputWithPast:
        """Features (B, T, C) of tokens (B, T), or of inputs_embeds (B, T, C).

        ValueError for arguments that are not served.

        attention_mask: (B, past + T), 0 on padding, which is before or behind a row's tokens and
            never between them.
        past_key_values: a cache of `new_cache`; the tokens follow those it holds.
        use_cache: None: as the config says where no gradient is recorded, else not.
        last: features of so many tokens at the end suffice; all are given with states.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("expected either input_ids or inputs_embeds")
        tokens = cast(Tensor, inputs_embeds if input_ids is None else input_ids)
        cache = past_key_values
        if cache is not None and not isinstance(cache, PriorzooCache):
            raise ValueError(
                f"past_key_values is a {type(cache).__name__}; "
                "expected a cache that new_cache() makes"
            )
        if use_cache is None:
            use_cache = self.config.use_cache and not torch.is_grad_enabled()
        if use_cache and cache is None:
            cache = self.new_cache()
        if output_attentions or self.config.output_attentions:
            raise ValueError(
                "output_attentions is not served: "
                "modalities.analysis.analyse(…, full=True) has weights"
            )
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        states: list[Tensor] | None = [] if output_hidden_states else None
        if states is not None:
            last = None
        elif last is not None:
            last = min(last, tokens.shape[1])
        features = self.model.forward_features(
            tokens,
            segments=_segments(attention_mask, tokens, cache),
            cache=None if cache is None else cache.held,
            last=last,
            states=states,
        )
        hidden_states = None
        if states is not None:
            hidden_states = cast(tuple[torch.FloatTensor, ...], (*states, features))
        return BaseModelOutputWithPast(
            last_hidden_state=cast(torch.FloatTensor, features),
            past_key_values=cache if use_cache else None,
            hidden_states=hidden_states,
        )

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, *args: object, **kwargs: object
    ) -> Any:
        """As transformers' own. Raises ValueError where the folder lacks a tensor."""
        return load_whole(super().from_pretrained, pretrained_model_name_or_path, *args, **kwargs)

    def save_pretrained(
        self, save_directory: str | Path, is_main_process: bool = True, **kwargs: Any
    ) -> None:
        """Save also a tokenizer where there is none, and the file for `trust_remote_code`."""
        super().save_pretrained(save_directory, is_main_process, **kwargs)
        if is_main_process:
            complete_folder(Path(save_directory), self.config)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing, as in `PriorzooConfig`."""


class TiedHead(nn.Module):
    """The embedding's matrix as the head of a model that has no other, for libraries that read a
    head's weight and bias."""

    bias = None

    def __init__(self, wrapped: PriorzooModel) -> None:
        super().__init__()
        # In a list, or it would be a part of this module.
        self._wrapped = [wrapped]

    @property
    def weight(self) -> Tensor:
        return self._wrapped[0].model.embedding.weight

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(features, self.weight)


class PriorzooForCausalLM(PriorzooModel, GenerationMixin):
    """A decoder that predicts the next token."""

    # Trainer then passes num_items_in_batch and leaves the division to the loss.
    accepts_loss_kwargs = True

    def __init__(self, config: PriorzooConfig) -> None:
        super().__init__(config)
        self.lm_head = TiedHead(self)

    @classmethod
    def of(cls, model: Decoder) -> Self:
        """The `transformers` model around `model`, sharing its weights; its special tokens are
        those of its tokenizer."""
        kind = cls.config_class
        ids: dict[str, int] = {}
        try:
            tokenizer = kind.fast_tokenizer(model.config.tokenizer)
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                number = getattr(tokenizer, name)
                if number is not None:
                    ids[name] = number
        except FileNotFoundError:
            # A warning says so when the model is saved.
            pass
        with torch.device("meta"):
            wrapped = cls(kind(architecture=asdict(model.config), **ids))
        wrapped.model = model
        return wrapped.train(model.training)

    @property
    def base_model(self) -> PriorzooModel:
        """The same modules without the head, a model of transformers, as TRL's trainers call it."""
        base = copy.copy(self)
        base.__class__ = PriorzooModel
        # A forward that trainers have put there is that of the head.
        base.__dict__.pop("forward", None)
        return base

    def get_output_embeddings(self) -> nn.Module | None:
        # A subclass may add to the logits, as DNA's does: then no matrix is the whole head.
        plain = type(self.model).forward_head is Decoder.forward_head
        if self.model.head is None and plain:
            return self.lm_head
        return self.model.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.model.head = cast(nn.Linear, new_embeddings)

    def targets(self, labels: Tensor) -> Tensor:
        """Labels (B, T) with −100 where the model cannot predict them."""
        return labels

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: PriorzooCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
    ) -> CausalLMOutputWithPast:
        """Logits (B, T, V) float32 of the next token, and with labels (B, T), the tokens
        themselves, the loss in nats.

        logits_to_keep: of so many tokens at the end alone, 0 for all; or indices (n,).
        num_items_in_batch: what the sum of losses is divided by; None for their number here.
        """
        tail = logits_to_keep if isinstance(logits_to_keep, int) else 0
        output = super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            last=tail or None,
            return_dict=True,
        )
        features = cast(Tensor, output.last_hidden_state)
        # The slice from −0 is the whole.
        chosen = slice(-tail, None) if isinstance(logits_to_keep, int) else logits_to_keep
        features = features[:, chosen]
        logits = self.model.forward_head(features)
        loss = None
        if labels is not None:
            # Where nothing is to be predicted the mean is of none; a sum over num_items_in_batch
            # stays 0.
            loss = self.loss_function(
                logits,
                self.targets(labels),
                logits.shape[-1],
                num_items_in_batch,
                ignore_index=IGNORED,
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=cast(torch.FloatTensor, logits),
            past_key_values=output.past_key_values,
            hidden_states=output.hidden_states,
        )

    # `generate` reads the names of its arguments.
    @wraps(GenerationMixin.prepare_inputs_for_generation)
    def prepare_inputs_for_generation(self, *args: object, **kwargs: object) -> dict[str, object]:
        """As `GenerationMixin`'s, without the tokenizers that stop_strings need and `transformers`
        hands on to `forward`."""
        kwargs.pop("tokenizer", None)
        kwargs.pop("assistant_tokenizer", None)
        return super().prepare_inputs_for_generation(*args, **kwargs)

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, object],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation={kind!r} is not served; "
                "past_key_values=model.new_cache(tokens) is"
            )
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = self.new_cache(max_cache_length + 1)
        else:
            super()._prepare_cache_for_generation(
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )


def _segments(mask: Tensor | None, tokens: Tensor, cache: PriorzooCache | None) -> Tensor | None:
    """Document ids (B, T) of new tokens: −1 on padding, 0 else; None where no token so far is
    padding."""
    past = 0 if cache is None else cache.get_seq_length()
    padded_before = past > 0 and cache is not None and cache.held.segments is not None
    if mask is None:
        if not padded_before:
            return None
        return torch.zeros(tokens.shape[:2], dtype=torch.int64, device=tokens.device)
    rows, count = tokens.shape[:2]
    if mask.shape != (rows, past + count):
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; expected {(rows, past + count)}, "
            f"one entry for each of {past} cached and {count} new tokens"
        )
    # Rows without padding take the kernels that need no mask. A compiled graph is of one kind,
    # whatever the mask holds.
    if not padded_before and not torch.compiler.is_compiling() and bool(mask.all()):
        return None
    real = mask > 0
    begins = real.clone()
    begins[:, 1:] &= ~real[:, :-1]
    check_runs(begins.sum(1) <= 1)
    return mask[:, past:].long() - 1


def register(
    config: type[PriorzooConfig], model: type[PriorzooModel], causal_lm: type[PriorzooForCausalLM]
) -> None:
    """Make the Auto classes find a modality's three classes and its tokenizers."""
    AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoModel.register(config, model, exist_ok=True)
    AutoModelForCausalLM.register(config, causal_lm, exist_ok=True)
    AutoTokenizer.register(config, fast_tokenizer_class=PreTrainedTokenizerFast, exist_ok=True)


_decay_parameter_names = Trainer.get_decay_parameter_names


@wraps(_decay_parameter_names)
def _decay_no_prior(self: Trainer, model: nn.Module) -> list[str]:
    """Leave out what `ZooModel.no_weight_decay` names; Trainer knows layers by their types
    alone."""
    exempt: set[str] = set()
    for prefix, module in model.named_modules():
        if isinstance(module, ZooModel):
            for name in module.no_weight_decay():
                exempt.add(f"{prefix}.{name}".lstrip("."))
    return [name for name in _decay_parameter_names(self, model) if name not in exempt]


Trainer.get_decay_parameter_names = _decay_no_prior


def complete_folder(folder: Path, config: PriorzooConfig) -> None:
    """Write what the folder lacks: the tokenizer's files (with a warning where there are none), and
    auto_map's file."""
    kind = type(config)
    spec = (config.architecture or {})["tokenizer"]
    if not (folder / "tokenizer_config.json").exists():
        try:
            # Where the model was read from.
            origin = Path(config.name_or_path or "")
            if (origin / "tokenizer_config.json").is_file():
                tokenizer = AutoTokenizer.from_pretrained(origin)
            else:
                tokenizer = kind.fast_tokenizer(spec)
            tokenizer.save_pretrained(folder)
        except FileNotFoundError as error:
            logging.getLogger(__name__).warning(
                "%s is saved without a tokenizer: %s", folder, error
            )
    classes = sorted(target.split(".")[1] for target in config.auto_map.values())
    (folder / f"{REMOTE_CODE}.py").write_text(
        '"""Loads this model with the installed package priorzoo, '
        'for `trust_remote_code=True`."""\n\n'
        f"from {kind.__module__} import {', '.join(classes)}  # noqa: F401\n"
    )
