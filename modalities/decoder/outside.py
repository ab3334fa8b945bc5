"""Causal decoders of `transformers` behind the interface of `Decoder`, so that evaluators measure
them as the zoo's.

Features are those of the base model, logits those of its own head; that the two are the whole model
is checked when it is opened. Caches are the model's own. Attention is seen where the model takes
its function from `AttentionInterface`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from modalities.tokenizers.outside import call_transformers, open_tokenizer, split_arm
from zoo.adapters import ADAPTER, is_adapted, load_adapted
from zoo.adapters.layer import attending_by, has_priors
from zoo.attention.call import AttentionCall
from zoo.attention.dispatch import Observer
from zoo.files import read_tensors
from zoo.positions import Positions
from zoo.priors.terms import PriorTerms

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


# The attention function that shows its calls.
OBSERVED = "priorzoo_observed"
# The last one is shown all calls.
_OBSERVERS: list[Observer] = []


@dataclass(frozen=True)
class OutsideConfig:
    """What evaluators ask of a model's configuration.

    Attributes:
        position: the last part of the model's name, for figures and tables.
        train_context: `max_position_embeddings`, or the tokenizer's `model_max_length`.
        max_context: the most tokens that it can read, where positions are tables; else None.
        tokenizer: spec of the modality's `load_tokenizer`.
    """

    name: str
    position: str
    vocab_size: int
    num_layers: int
    num_heads: int
    train_context: int
    max_context: int | None
    tokenizer: str


class OutsideCache:
    """The cache that a model makes when it reads its first tokens, with the marks of
    `zoo.decoding.KVCache`."""

    def __init__(self) -> None:
        self.held: Any = None
        self.length = 0
        # (B, length) bool, where rows are padded.
        self.real: Tensor | None = None

    def mark(self) -> int:
        if self.held is not None:
            self.held.activate_past_recording()
        return self.length

    def rewind(self, mark: int) -> None:
        """Drop the tokens after `mark`."""
        if not mark:
            self.held = None
        elif mark < self.length:
            # A negative number is that of tokens to drop; a positive one is refused.
            self.held.crop(mark - self.length)
        self.length = mark
        if self.real is not None:
            self.real = self.real[:, :mark]


class OutsideDecoder(nn.Module):
    """A causal decoder of `transformers`; `forward_features`, `forward_head` and `new_cache` as
    those of `Decoder`.

    Raises ValueError for logits that are not the head's on the base model's features, or an unknown
    training context.
    """

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        super().__init__()
        self.model = model.eval()
        config = model.config.get_text_config()
        self.config = OutsideConfig(
            name=name,
            position=PurePath(name).name,
            vocab_size=config.vocab_size,
            num_layers=config.num_hidden_layers,
            num_heads=getattr(config, "num_attention_heads", 0),
            train_context=_train_context(config, name),
            max_context=_max_context(model, config),
            tokenizer=f"hf:{split_arm(name)[0]}",
        )
        rotations = " ".join(str(getattr(module, "rope_type", "")) for module in model.modules())
        # Angles that depend on the length of the text.
        self.by_length = "dynamic" in rotations or "longrope" in rotations
        # Class of the base model's output.
        self._kind: Any = None
        self._base = self._find_base()
        self._takes = set(inspect.signature(self._base[0].forward).parameters)

    @torch.inference_mode()
    def _find_base(self) -> list[Any]:
        """The module (in a list, so that it is registered once) on whose features the head gives
        the model's logits."""
        vocab_size = self.model.config.get_text_config().vocab_size
        tokens = torch.arange(4, device=self.model.device)[None] % vocab_size
        expected = self.model(input_ids=tokens, use_cache=False).logits.float()
        for base in (self.model.base_model, self.model.get_decoder()):
            if base is None or base is self.model:
                continue
            self._base = [base]
            features = self._read(tokens).last_hidden_state
            logits = OutsideDecoder.forward_head(self, features)
            if logits.shape != expected.shape:
                continue
            if torch.allclose(logits, expected, rtol=1e-4, atol=1e-4):
                return self._base
        kind = type(self.model).__name__
        raise ValueError(
            f"hf:{self.config.name}: logits of {kind} are not those of its head on its base model"
        )

    @property
    def embedding(self) -> nn.Module:
        return self.model.get_input_embeddings()

    @property
    def layers(self) -> nn.ModuleList:
        """Its blocks: the list of modules that is as long as the model is deep."""
        for module in self.model.modules():
            if isinstance(module, nn.ModuleList) and len(module) == self.config.num_layers:
                return module
        return nn.ModuleList()

    def train_positions(self) -> Positions:
        return Positions.line(self.config.train_context)

    def to(  # type: ignore[override]
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """Parameters on a device and in a dtype; buffers keep theirs, as angles in bfloat16 are
        wrong far along."""
        self.model.to(device=device)
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(dtype)
        return self

    def new_cache(self, capacity: int = 0) -> OutsideCache:
        if self.by_length:
            # A short text brings back the angles that a longer one changed.
            self._read(torch.zeros(1, 1, dtype=torch.int64, device=self.model.device))
        return OutsideCache()

    def _read(self, tokens: Tensor, **options: Any) -> Any:
        options.setdefault("use_cache", False)
        output = self._base[0](input_ids=tokens, return_dict=True, **options)
        self._kind = type(output)
        return output

    def forward_features(
        self,
        tokens: Tensor,
        *,
        segments: Tensor | None = None,
        cache: OutsideCache | None = None,
        kernel: str | Observer = "auto",
        last: int | None = None,
    ) -> Tensor:
        """As `Decoder.forward_features`.

        Raises ValueError beyond the model's table of positions, for rows of several documents, for
        a cache of a model with recurrent states, or where attention cannot be seen.
        """
        name = self.config.name
        most = self.config.max_context
        reach = tokens.shape[1] + (cache.length if cache else 0)
        if most and reach > most:
            raise ValueError(
                f"hf:{name} has positions for {most} tokens and is given {reach}: "
                "choose --lengths to fit"
            )
        options = self._padding(segments, cache)
        if cache is not None:
            if "past_key_values" not in self._takes:
                kind = self.model.config.model_type
                raise ValueError(f"hf:{name}: {kind} keeps no keys and values to go on from")
            options["use_cache"] = True
            options["past_key_values"] = cache.held
        with self._shown(kernel):
            output = self._read(tokens, **options)
        if cache is not None:
            cache.held = output.past_key_values
            cache.length = reach
            kinds = {type(layer).__name__ for layer in cache.held.layers}
            if not kinds <= {"DynamicLayer", "DynamicSlidingWindowLayer"}:
                kind = self.model.config.model_type
                raise ValueError(f"hf:{name}: {kind} keeps states, which cannot be rewound")
        features = output.last_hidden_state
        return features if last is None else features[:, -last:]

    def _padding(self, segments: Tensor | None, cache: OutsideCache | None) -> dict[str, Any]:
        """attention_mask and position_ids of rows that are padded on the left; nothing where none
        is."""
        if segments is None:
            return {}
        if int(segments.max()) > 0:
            raise ValueError(f"hf:{self.config.name} reads one document a row, got rows of several")
        real = segments >= 0
        if cache is not None:
            if cache.real is not None:
                real = torch.cat([cache.real, real], dim=1)
            cache.real = real
        options = {"attention_mask": real.long()}
        if "position_ids" in self._takes:
            places = (real.long().cumsum(1) - 1).clamp(min=0)
            options["position_ids"] = places[:, -segments.shape[1] :]
        return options

    @cached_property
    def separates(self) -> bool:
        """Whether documents of a packed row do not see one another; it is tried on two, whose
        position_ids begin again."""
        if "position_ids" not in self._takes:
            return False
        # Two rows with different first documents and the same second one.
        tokens = torch.arange(12, device=self.model.device).view(2, 6) % self.config.vocab_size
        tokens[:, 3:] = tokens[0, 3:]
        position_ids = torch.arange(6, device=tokens.device).expand(2, 6) % 3
        training = self.model.training
        self.model.eval()
        with torch.no_grad():
            features = self._read(tokens, position_ids=position_ids).last_hidden_state
        self.model.train(training)
        first, second = features[:, 3:].float()
        return torch.allclose(first, second, rtol=0, atol=1e-3 * float(first.abs().max()))

    def packed_features(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        """(B, T, C) features of packed rows; a document at a time where the model would let them
        see one another."""
        if self.separates:
            return self._read(tokens, position_ids=position_ids).last_hidden_state
        rows = []
        for row, places in zip(tokens, position_ids, strict=True):
            starts = (places == 0).nonzero().flatten().tolist()
            features = []
            for document in row.tensor_split(starts):
                if len(document):
                    features.append(self._read(document[None]).last_hidden_state[0])
            rows.append(torch.cat(features))
        return torch.stack(rows)

    def forward_head(self, features: Tensor) -> Tensor:
        """(…, V) float32 logits from (…, C) features, by the model itself around a base model that
        gives them."""
        base = self._base[0]
        flat = features.reshape(1, -1, features.shape[-1])
        tokens = torch.zeros(flat.shape[:2], dtype=torch.int64, device=flat.device)
        # For this call the base model gives these features, whatever the tokens.
        base.forward = lambda *_, **__: self._kind(last_hidden_state=flat)
        try:
            logits = self.model(input_ids=tokens, use_cache=False).logits
        finally:
            del base.forward
        return logits.float().reshape(*features.shape[:-1], -1)

    def forward(self, tokens: Tensor, **options: Any) -> Tensor:
        return self.forward_head(self.forward_features(tokens, **options))

    @contextmanager
    def _shown(self, kernel: str | Observer) -> Iterator[None]:
        """Inside the context every attention call is shown to `kernel`."""
        if not isinstance(kernel, Observer):
            yield
            return
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

        AttentionInterface.register(OBSERVED, _observed)
        AttentionMaskInterface.register(OBSERVED, sdpa_mask)
        implementation = self.model.config._attn_implementation
        adapted = has_priors(self.model)
        calls = 0
        see = kernel.see

        def count_and_see(call: AttentionCall) -> None:
            nonlocal calls
            calls += 1
            see(call)

        observer = Observer(count_and_see)
        _OBSERVERS.append(observer)
        try:
            if not adapted:
                self.model.set_attn_implementation(OBSERVED)
            with attending_by(observer):
                yield
        finally:
            _OBSERVERS.pop()
            if not adapted:
                self.model.set_attn_implementation(implementation)
        if calls != self.config.num_layers:
            kind = self.model.config.model_type
            raise ValueError(
                f"hf:{self.config.name}: attention of {kind} cannot be seen: {calls} of "
                f"{self.config.num_layers} layers use transformers' AttentionInterface"
            )


def open_causal_lm(name: str) -> PreTrainedModel:
    """The causal LM in a folder or repository, with its priors where `zoo.adapt` gave it some.
    Errors as in `call_transformers`.

    Settings behind the name, FOLDER@KEY=VALUE,…, change it as in `open_released`; `adapter` puts an
    adapter folder on it. An adapter folder by itself is opened on the base that it names.
    """
    # A missing tokenizer is reported before the weights are read.
    open_tokenizer(name)
    folder, settings = split_arm(name)
    return call_transformers(folder, "causal LM", lambda _: load_arm(folder, settings, merge=True))


def load_arm(folder: str, settings: dict[str, str], *, merge: bool) -> PreTrainedModel:
    """A folder's model under settings, one of which may be an `adapter` for it.

    merge: add its LoRA to the weights.
    """
    from zoo.adapters.released import open_released

    if is_adapted(folder):
        if settings:
            raise ValueError(f"a whole adapted model takes no settings, got {', '.join(settings)}")
        return load_adapted(folder)
    rest = dict(settings)
    base = None
    if "adapter" in rest:
        base = folder
        folder = rest.pop("adapter")
    if base or (Path(folder) / ADAPTER).is_file():
        return load_adapted(folder, base=base, merge=merge, settings=rest)
    peft_adapter = Path(folder) / "adapter_model.safetensors"
    if peft_adapter.is_file() and any("position_bias" in key for key in read_tensors(peft_adapter)):
        cure = "load it on zoo.load_adapted(BASE), merge_and_unload(), then zoo.save_adapted"
        raise ValueError(f"its adapter of PEFT has priors, without which it would be read: {cure}")
    return open_released(folder, settings)


def _train_context(config: PreTrainedConfig, name: str) -> int:
    length = (
        getattr(config, "max_position_embeddings", None)
        or getattr(config, "max_seq_len", None)
        or open_tokenizer(name).model_max_length
    )
    # transformers writes 10³⁰ where it is not known.
    if not length or length >= 1 << 30:
        raise ValueError(
            f"hf:{name}: unknown training length: add max_position_embeddings to config.json"
        )
    return int(length)


def _max_context(model: PreTrainedModel, config: PreTrainedConfig) -> int | None:
    """`max_position_embeddings` where a table of positions ends there: an embedding, or a buffer of
    that size."""
    most = getattr(config, "max_position_embeddings", None)
    if most is None:
        return None
    token_tables = (model.get_input_embeddings(), model.get_output_embeddings())
    for module in model.modules():
        if not isinstance(module, nn.Embedding) or any(module is table for table in token_tables):
            continue
        # OPT's has two more.
        if most <= module.num_embeddings <= most + 2:
            return most
    if any(most in buffer.shape for buffer in model.buffers()):
        return most
    return None


def _observed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """An attention function of `transformers` that shows its call.

    Rotations are in q and k, so all is content.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise ValueError(
                f"attention with {name} is no softmax of q·k alone and cannot be analysed"
            )
    scaling = options.get("scaling")
    scaled = query
    if scaling is not None:
        # The call divides by √d itself.
        scaled = query * (scaling * query.shape[-1] ** 0.5)
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise ValueError("attention with a bias beside its mask cannot be analysed")
    call = AttentionCall(scaled, key, value, PriorTerms(), causal=True, mask=attention_mask)
    _OBSERVERS[-1].see(call)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
