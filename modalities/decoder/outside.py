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

from modalities.decoder.tokenizers import open_tokenizer, opened, split_arm
from zoo.adapters import ADAPTER, is_adapted, load_adapted
from zoo.adapters.layer import attending_by, has_priors
from zoo.attention.call import AttentionCall
from zoo.attention.dispatch import Observer
from zoo.files import read_tensors
from zoo.positions import Positions
from zoo.priors.terms import PriorTerms

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


OBSERVED = "priorzoo_observed"  # the attention function that shows its calls
_OBSERVERS: list[Observer] = []  # the last one is shown all calls


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
        self.real: Tensor | None = None  # (B, length) bool, where rows are padded

    def mark(self) -> int:
        if self.held is not None:
            self.held.activate_past_recording()
        return self.length

    def rewind(self, mark: int) -> None:
        """Drop the tokens after `mark`."""
        if not mark:
            self.held = None
        elif mark < self.length:
            self.held.crop(mark - self.length)
        self.length = mark
        self.real = None if self.real is None else self.real[:, :mark]


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
        sizes = (
            config.vocab_size,
            config.num_hidden_layers,
            getattr(config, "num_attention_heads", 0),
        )
        contexts = _train_context(config, name), _max_context(model, config)
        self.config = OutsideConfig(
            name, PurePath(name).name, *sizes, *contexts, f"hf:{split_arm(name)[0]}"
        )
        rotations = " ".join(str(getattr(module, "rope_type", "")) for module in model.modules())
        self.by_length = (
            "dynamic" in rotations or "longrope" in rotations
        )  # angles depend on the length of the text
        self._kind: Any = None  # class of the base model's output
        self._base = self._find_base()
        self._takes = set(inspect.signature(self._base[0].forward).parameters)

    @torch.inference_mode()
    def _find_base(self) -> list[Any]:
        """The module (in a list, so that it is registered once) on whose features the head gives
        the model's logits."""
        tokens = (
            torch.arange(4, device=self.model.device)[None]
            % self.model.config.get_text_config().vocab_size
        )
        whole = self.model(input_ids=tokens, use_cache=False).logits.float()
        for base in (self.model.base_model, self.model.get_decoder()):
            if base is not None and base is not self.model:
                self._base = [base]
                logits = OutsideDecoder.forward_head(self, self._read(tokens).last_hidden_state)
                if logits.shape == whole.shape and torch.allclose(
                    logits, whole, rtol=1e-4, atol=1e-4
                ):
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
        lists = (m for m in self.model.modules() if isinstance(m, nn.ModuleList))
        return next((m for m in lists if len(m) == self.config.num_layers), nn.ModuleList())

    def train_positions(self) -> Positions:
        return Positions.line(self.config.train_context)

    def to(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Self:  # type: ignore[override]
        """Parameters on a device and in a dtype; buffers keep theirs, as angles in bfloat16 are
        wrong far along."""
        self.model.to(device=device)
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(dtype)
        return self

    def new_cache(self, capacity: int = 0) -> OutsideCache:
        if self.by_length:  # a short text brings back the angles that a longer one changed
            self._read(torch.zeros(1, 1, dtype=torch.int64, device=self.model.device))
        return OutsideCache()

    def _read(self, tokens: Tensor, **options: Any) -> Any:
        output = self._base[0](input_ids=tokens, return_dict=True, **{"use_cache": False} | options)
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
                f"hf:{name} has positions for {most} tokens and is given {reach}: choose --lengths to fit"
            )
        options = self._padding(segments, cache)
        if cache is not None:
            if "past_key_values" not in self._takes:
                raise ValueError(
                    f"hf:{name}: {self.model.config.model_type} keeps no keys and values to go on from"
                )
            options |= {"use_cache": True, "past_key_values": cache.held}
        with self._shown(kernel):
            output = self._read(tokens, **options)
        if cache is not None:
            cache.held = output.past_key_values
            cache.length = reach
            kinds = {type(layer).__name__ for layer in cache.held.layers}
            if not kinds <= {"DynamicLayer", "DynamicSlidingWindowLayer"}:
                raise ValueError(
                    f"hf:{name}: {self.model.config.model_type} keeps states, which cannot be rewound"
                )
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
            real = real if cache.real is None else torch.cat([cache.real, real], dim=1)
            cache.real = real
        places = (real.long().cumsum(1) - 1).clamp(min=0)[:, -segments.shape[1] :]
        return {"attention_mask": real.long()} | (
            {"position_ids": places} if "position_ids" in self._takes else {}
        )

    @cached_property
    def separates(self) -> bool:
        """Whether documents of a packed row do not see one another; it is tried on two, whose
        position_ids begin again."""
        if "position_ids" not in self._takes:
            return False
        tokens = torch.arange(12, device=self.model.device).view(2, 6) % self.config.vocab_size
        tokens[:, 3:] = tokens[0, 3:]
        training = self.model.training
        self.model.eval()
        with torch.no_grad():
            places = torch.arange(6, device=tokens.device).expand(2, 6) % 3
            first, second = self._read(tokens, position_ids=places).last_hidden_state[:, 3:].float()
        self.model.train(training)
        return torch.allclose(first, second, rtol=0, atol=1e-3 * float(first.abs().max()))

    def packed_features(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        """(B, T, C) features of packed rows; a document at a time where the model would let them
        see one another."""
        if self.separates:
            return self._read(tokens, position_ids=position_ids).last_hidden_state
        rows = []
        for row, places in zip(tokens, position_ids, strict=True):
            documents = row.tensor_split((places == 0).nonzero().flatten().tolist())
            rows.append(
                torch.cat(
                    [self._read(one[None]).last_hidden_state[0] for one in documents if len(one)]
                )
            )
        return torch.stack(rows)

    def forward_head(self, features: Tensor) -> Tensor:
        """(…, V) float32 logits from (…, C) features, by the model itself around a base model that
        gives them."""
        base = self._base[0]
        flat = features.reshape(1, -1, features.shape[-1])
        tokens = torch.zeros(flat.shape[:2], dtype=torch.int64, device=flat.device)
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
            name = f"hf:{self.config.name}: attention of {self.model.config.model_type}"
            layers = self.config.num_layers
            raise ValueError(
                f"{name} cannot be seen: {calls} of {layers} layers use transformers' AttentionInterface"
            )


def open_causal_lm(name: str) -> PreTrainedModel:
    """The causal LM in a folder or repository, with its priors where `zoo.adapt` gave it some.
    Errors as in `opened`.

    Settings behind the name, FOLDER@KEY=VALUE,…, change it as in `open_released`; `adapter` puts an
    adapter folder on it. An adapter folder by itself is opened on the base that it names.
    """
    open_tokenizer(name)  # looked for first
    folder, settings = split_arm(name)
    return opened(folder, "causal LM", lambda _: load_arm(folder, settings, merge=True))


def load_arm(folder: str, settings: dict[str, str], *, merge: bool) -> PreTrainedModel:
    """A folder's model under settings, one of which may be an `adapter` for it. merge: add its LoRA
    to the weights."""
    from zoo.adapters.released import open_released

    if is_adapted(folder):
        if settings:
            raise ValueError(f"a whole adapted model takes no settings, got {', '.join(settings)}")
        return load_adapted(folder)
    folder, base = (settings["adapter"], folder) if "adapter" in settings else (folder, None)
    rest = {key: text for key, text in settings.items() if key != "adapter"}
    if base or (Path(folder) / ADAPTER).is_file():
        return load_adapted(folder, base=base, merge=merge, settings=rest)
    saved = Path(folder) / "adapter_model.safetensors"  # of PEFT
    if saved.is_file() and any("position_bias" in key for key in read_tensors(saved)):
        cure = "load it on zoo.load_adapted(BASE), merge_and_unload(), then zoo.save_adapted"
        raise ValueError(f"its adapter of PEFT has priors, without which it would be read: {cure}")
    return open_released(folder, settings)


def _train_context(config: PreTrainedConfig, name: str) -> int:
    length = getattr(config, "max_position_embeddings", None) or getattr(
        config, "max_seq_len", None
    )
    length = length or open_tokenizer(name).model_max_length
    if not length or length >= 1 << 30:  # transformers writes 10³⁰ where it is not known
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
    tokens = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and id(m) not in tokens]
    learned = any(
        most <= table.num_embeddings <= most + 2 for table in tables
    )  # OPT's has two more
    return most if learned or any(most in buffer.shape for buffer in model.buffers()) else None


def _observed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """An attention function of `transformers` that shows its call. Rotations are in q and k, so all
    is content."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise ValueError(
                f"attention with {name} is no softmax of q·k alone and cannot be analysed"
            )
    scaling = options.get("scaling")
    scaled = query if scaling is None else query * (scaling * query.shape[-1] ** 0.5)
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise ValueError("attention with a bias beside its mask cannot be analysed")
    _OBSERVERS[-1].see(
        AttentionCall(scaled, key, value, PriorTerms(), causal=True, mask=attention_mask)
    )
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
