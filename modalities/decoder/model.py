"""One causal decoder for every position method.

Blocks are pre-norm, with Llama's layers (RMSNorm, SwiGLU, no biases) or GPT-2's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from modalities.contract import Cost
from modalities.cost import activation_numbers
from modalities.decoder.generation import generate
from modalities.starts import check_start, deviation, start_weights
from modalities.tokenizers.copies import save_copy, use_copy
from zoo.attention.call import Kernel
from zoo.attention.masks import single_documents
from zoo.attention.tracing import has_values
from zoo.catalog import ModelFamily, register_family
from zoo.decoding import KVCache
from zoo.errors import LONGEST_CONTEXT, bounded, check_fields, check_parameters, nearest
from zoo.files import file_digests, write_json
from zoo.layers import Attention, Block, GeluMLP, SSMax, SwiGLU, share_prior
from zoo.methods import (
    LayerPosition,
    check_position,
    create_position,
    layer_methods,
    list_layered_positions,
    shared_embedding,
    stored_options,
)
from zoo.model import MANIFEST, SAVED, ZooModel
from zoo.offload import execution_device, is_offloaded, loaded
from zoo.positions import Positions

# The target id of tokens that do not count in a loss.
IGNORED = -100
# Most bytes of float32 logits that a loss holds at a time.
LOGIT_BYTES = 1 << 29
NORMALISERS = ("softmax", "entmax")
# Norm and MLP of each style; "gpt2" also has biases in attention.
STYLES: dict[str, tuple[Callable[..., nn.Module], Callable[[int, int], nn.Module]]] = {
    "llama": (nn.RMSNorm, SwiGLU),
    "gpt2": (nn.LayerNorm, GeluMLP),
}


@dataclass(frozen=True)
class DecoderConfig:
    """Everything that makes a decoder, in types of JSON.

    ValueError for a field of another type or out of bounds.

    Attributes:
        vocab_size: V.
        dim: C.
        num_layers: number of blocks.
        num_heads: H.
        num_kv_heads: G, heads of keys and values; None for H.
        hidden_dim: width of the MLP.
        style: "llama" (RMSNorm, SwiGLU, no biases) or "gpt2" (LayerNorm, GELU, biases).
        position: a name of `zoo.methods.list_positions()` or a sum of them; or a list of names, one
            per layer or repeated. An embedding enters once, before the layers.
        position_options: options of the method; by its name where there are several, as in a
            hybrid.
        ssmax: scale logits by s·ln n, see `SSMax`.
        scale_prior: SSMax scales the prior's logits too.
        scale_content: divide the content's logits by √d_c, d_c content columns of a head.
        ssmax_start: initial s of SSMax.
        ssmax_positive: keep s > 0.
        normaliser: "softmax", or "entmax": α-entmax with α = 1.5 and the adaptive row scale of
            ASEntmax, see `zoo.layers.EntmaxScale`; not with `ssmax`.
        qk_norm: normalise queries and keys, see `Attention`.
        output_gate: gate the output of attention, see `Attention`.
        share_prior: one prior for all layers instead of one each.
        train_context: tokens per training row.
        tied: one matrix for the embedding and the head.
        tokenizer: spec of the vocabulary's tokenizer, for the modality's `load_tokenizer`.
        activation_checkpointing: recompute each block in the backward pass.
        lanes: the prior's lanes "inside" the head width, at the cost of content columns, or
            "beside" it, see `Attention`.
        weight_init: how weights start, a key of `modalities.starts.STARTS`.
        logit_options: empty; configs of version 0.5 have it.
    """

    vocab_size: int = bounded(264, 1, 2**24)
    dim: int = bounded(128, 1, 2**17)
    num_layers: int = bounded(4, 1, 1024)
    num_heads: int = bounded(4, 1, 2**12)
    num_kv_heads: int | None = bounded(None, 1, 2**12)
    hidden_dim: int = bounded(344, 1, 2**20)
    style: str = "llama"
    position: str | list[str] = "ggd"
    position_options: dict[str, Any] = field(default_factory=dict)
    ssmax: bool = False
    scale_prior: bool = True
    scale_content: bool = True
    ssmax_start: float | None = None
    ssmax_positive: bool = False
    normaliser: str = "softmax"
    qk_norm: bool = False
    output_gate: bool = False
    share_prior: bool = False
    train_context: int = bounded(128, 1, LONGEST_CONTEXT)
    tied: bool = True
    tokenizer: str = "bytes"
    activation_checkpointing: bool = False
    lanes: str = "inside"
    weight_init: str = "small"
    logit_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.logit_options:
            raise ValueError(
                f"logit_options={self.logit_options}: "
                "gates and temperatures of logits are gone since 0.6"
            )
        if self.style not in STYLES:
            raise ValueError(f"style={self.style!r}: {nearest(self.style, STYLES)}")
        if self.normaliser not in NORMALISERS:
            raise ValueError(
                f"normaliser={self.normaliser!r}: {nearest(self.normaliser, NORMALISERS)}"
            )
        check_start(self.weight_init)
        # Columns of a layer's matrices, at most: four of attention and three of the MLP.
        columns = 4 * self.dim + 3 * self.hidden_dim
        check_parameters(self.dim * (self.vocab_size + self.num_layers * columns))


class Decoder(ZooModel):
    """A decoder-only language model: a token sees its document up to itself."""

    config_class = DecoderConfig
    config: DecoderConfig
    position_embedding: nn.Module | None

    def save_pretrained(self, folder: str | os.PathLike[str], **options: Any) -> None:
        """As `ZooModel.save_pretrained`; a user's tokenizer files are copied to the folder."""
        super().save_pretrained(folder, **options)
        copies = save_copy(self.config.tokenizer, Path(folder))
        if copies:
            write_json(Path(folder) / MANIFEST, file_digests(folder, [*SAVED, *copies]))

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str], **overrides: Any) -> Self:
        model = super().from_pretrained(folder, **overrides)
        use_copy(model.config.tokenizer, Path(folder))
        return model

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        methods = layer_methods(config.position, config.position_options, config.num_layers)
        # Holds its place before the layers in the order of modules; it is made from theirs.
        self.register_module("position_embedding", None)
        self.layers = nn.ModuleList()
        positions: list[LayerPosition] = []
        for name, options in methods:
            position = create_position(
                name,
                dim=config.dim,
                num_heads=config.num_heads,
                train_context=config.train_context,
                options=options,
                lanes=config.lanes,
            )
            positions.append(position)
            self.layers.append(_block(config, position))
        if config.share_prior:
            share_prior([cast(Block, layer).attention for layer in self.layers], methods)
        self.position_embedding = shared_embedding(methods, positions)
        self.config = replace(config, position_options=stored_options(config.position, positions))
        norm, _ = STYLES[config.style]
        self.norm = norm(config.dim, eps=1e-5)
        self.head = None if config.tied else nn.Linear(config.dim, config.vocab_size, bias=False)
        self.gradient_checkpointing = config.activation_checkpointing
        start_weights(self, config.weight_init, depth=config.num_layers)
        for layer in self.layers:
            entmax_scale = cast(Block, layer).attention.entmax_scale
            if entmax_scale is not None:
                entmax_scale.reset()
        nn.init.normal_(self.embedding.weight, std=deviation(config.weight_init, config.dim))

    def train_positions(self) -> Positions:
        return Positions.line(self.config.train_context)

    def refuses_sequence(self, size: int) -> str | None:
        config = self.config
        counts = {"num_heads": config.num_heads, "train_context": config.train_context}
        for name, count in counts.items():
            if count % size:
                return f"{name}={count} of the model is no multiple of {size}"
        # Each call below raises ValueError for a prior that cannot be cut by heads.
        one = Positions.line(1)
        for layer in self.layers:
            prior = cast(Block, layer).attention.prior
            try:
                prior.of_heads([0])
                prior.content(self.embedding.weight.new_zeros(1, 1, config.dim))
                bias = prior.beside_lanes(one, one, causal=True).bias
            except ValueError as error:
                return str(error)
            if isinstance(bias, Tensor):
                matrix = f"{type(prior).__name__} makes a T × T matrix for each head"
                return f"{matrix}, too large for lines that need sharing"
        return None

    def new_cache(self, capacity: int = 0) -> KVCache:
        """An empty KV cache with room for `capacity` tokens; it grows beyond when needed."""
        return KVCache(self.config.num_layers, capacity=capacity)

    @property
    def device(self) -> torch.device:
        """The device on which tokens are expected."""
        return execution_device(self.embedding)

    def _small_modules(self) -> list[nn.Module]:
        """Priors and SSMax of all layers, whose weights are read outside their `forward` too."""
        modules: list[nn.Module] = []
        for layer in self.layers:
            attention = cast(Block, layer).attention
            modules.append(attention.prior)
            if attention.ssmax is not None:
                modules.append(attention.ssmax)
        return modules

    def forward_features(
        self,
        tokens: Tensor,
        *,
        segments: Tensor | None = None,
        cache: KVCache | None = None,
        kernel: str | Kernel = "auto",
        last: int | None = None,
        states: list[Tensor] | None = None,
    ) -> Tensor:
        """(B, T, C) after the last norm.

        Where N ranks share the rows: (B, T/N, C), this rank's tokens.

        tokens: ids (B, T), or embeddings (B, T, C).
        segments: document ids (B, T) of rows that are packed or padded.
        last: compute this many last tokens only, (B, last, C).
        states: a list to which the input (B, T, C) of every layer is appended.
        """
        length = tokens.shape[1]
        if cache is not None:
            cache.reserve(length)
            positions, segments = cache.positions(length, segments)
        elif segments is not None:
            positions = Positions.documents(segments)
        else:
            positions = Positions.line(length)
        rank_positions = positions
        if self.sequence is not None:
            tokens = self.sequence.part(tokens)
            rank_positions = self.sequence.part_of(positions)
        x = tokens if tokens.is_floating_point() else self.embedding(tokens)
        if self.position_embedding is not None:
            x = x + self.position_embedding(rank_positions, x)
        recompute = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        weights_in_memory: AbstractContextManager[None] = nullcontext()
        if is_offloaded(self.embedding):
            weights_in_memory = loaded(self._small_modules())
        with weights_in_memory:
            for n, layer in enumerate(self.layers):
                options: dict[str, Any] = {
                    "segments": segments,
                    "kernel": kernel,
                    "sequence": self.sequence,
                }
                if cache is not None:
                    options["cache"] = cache.layers[n]
                if layer is self.layers[-1]:
                    options["last"] = last
                if states is not None:
                    states.append(x)
                if recompute:
                    x = checkpoint(layer, x, positions, use_reentrant=False, **options)
                else:
                    x = layer(x, positions, **options)
        if cache is not None:
            cache.advance(tokens.shape[1])
        return self.norm(x)

    def forward_head(self, features: Tensor) -> Tensor:
        """(…, V) float32 logits from (…, C) features."""
        if self.head is not None:
            return self.head(features).float()
        weight = self.embedding.weight
        if weight.is_meta:
            # The embedding is offloaded: only a call of the module loads its weight.
            every_id = torch.arange(len(weight), device=features.device)
            weight = self.embedding(every_id).to(features.device)
        return F.linear(features, weight).float()

    def forward(
        self,
        tokens: Tensor,
        *,
        segments: Tensor | None = None,
        cache: KVCache | None = None,
        kernel: str | Kernel = "auto",
        targets: Tensor | None = None,
    ) -> Tensor:
        """(B, T, V) float32 logits, or `token_losses` (B, T) of targets.

        With a cache, `tokens` and `segments` are the new ones only.
        """
        features = self.forward_features(tokens, segments=segments, cache=cache, kernel=kernel)
        if targets is None:
            return self.forward_head(features)
        return self.token_losses(features, targets)

    def token_losses(self, features: Tensor, targets: Tensor) -> Tensor:
        """(B, T) float32 −ln softmax(logits)[target]; 0 where a target is −100.

        features: (B, T, C).
        targets: (B, T).

        Logits of more than `LOGIT_BYTES` are computed in chunks of tokens, and once more in the
        backward pass.
        """
        if 4 * targets.numel() * self.config.vocab_size <= LOGIT_BYTES:
            return self._losses(features, targets)
        rows = max(1, LOGIT_BYTES // (4 * self.config.vocab_size))
        feature_parts = features.flatten(0, 1).split(rows)
        target_parts = targets.flatten().split(rows)
        losses = []
        for part in zip(feature_parts, target_parts, strict=True):
            # Nothing in it is random, so no state of a generator is kept.
            loss = checkpoint(self._losses, *part, use_reentrant=False, preserve_rng_state=False)
            losses.append(loss)
        return torch.cat(losses).view(targets.shape)

    def _losses(self, features: Tensor, targets: Tensor) -> Tensor:
        logits = self.forward_head(features).flatten(0, -2)
        losses = F.cross_entropy(logits, targets.flatten(), reduction="none", ignore_index=IGNORED)
        return losses.view(targets.shape)

    def generate(
        self,
        prompts: Tensor | Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        **options: float | torch.Generator | None,
    ) -> list[list[int]]:
        """New tokens of each prompt; arguments as in `modalities.decoder.generation.generate`."""
        return generate(self, prompts, max_new_tokens=max_new_tokens, **options)  # type: ignore[arg-type]


def target_weights(batch: Mapping[str, Any]) -> Tensor:
    """(B, L) float32: what each target of a packed batch counts in the loss.

    0 for padding (segment −1) and for a target in another document than its input; else its entry
    of "weights", 1 for a batch without them.
    """
    segments = batch["segments"][:, 1:]
    inputs = batch["segments"][:, :-1]
    counts = (segments == inputs) & (segments >= 0)
    if "weights" in batch:
        return counts * batch["weights"][:, 1:]
    return counts.float()


def batch_weight(batch: dict[str, Tensor]) -> tuple[float, int]:
    """(sum of a batch's target weights, number of targets that count).

    The sum is the weight of the batch's mean loss in a mean over batches.
    """
    weights = target_weights(batch)
    return float(weights.sum()), int((weights > 0).sum())


def causal_lm_loss(model: ZooModel, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """(weighted mean next-token cross-entropy of a packed batch in nats, {"tokens": its targets}).

    Targets of weight 0 are not counted. Where ranks share the rows: this rank's shares of both.

    batch: "tokens" and "segments", int64 (B, L+1); optional "weights" (`target_weights`) and
        "packed" (`modalities.loading.to_device`).
    """
    tokens = batch["tokens"]
    segments = batch["segments"]
    weights = target_weights(batch)
    # Rows of one document, the usual case, need no document mask.
    packed = batch.get("packed")
    if packed is None:
        packed = not has_values(segments) or not bool(single_documents(segments).all())
    # A target that does not count may have the logit −inf (DNA's unknown base), and 0 · inf is NaN.
    targets = tokens[:, 1:].masked_fill(weights == 0, IGNORED)
    total = weights.sum()
    if model.sequence is not None:
        targets = model.sequence.part(targets)
        weights = model.sequence.part(weights)
    inputs = tokens[:, :-1]
    input_segments = segments[:, :-1] if packed else None
    losses = model(inputs, segments=input_segments, targets=targets)
    loss = (losses.flatten() * weights.flatten()).sum() / total
    return loss, {"tokens": (weights > 0).sum()}


class RowData(Protocol):
    """A recipe's data section with rows of tokens."""

    @property
    def context(self) -> int: ...


def decoder_cost(model: Decoder, data: RowData, width: int) -> Cost:
    """Cost of a row of L tokens, in numbers of `width` bytes.

    FLOPs, forward and backward: 6 for each matrix parameter and token, and 6·C·L² for each layer
    (12·C for each visible pair of query and key, of which a row has L²/2).
    """
    config = model.config
    length = data.context
    matrix_numbers = 0
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and name != "embedding.weight":
            matrix_numbers += parameter.numel()
    if config.tied:
        # The embedding is also the head's matrix; as an embedding it multiplies nothing.
        matrix_numbers += config.vocab_size * config.dim
    flops = 6.0 * matrix_numbers * length + 6.0 * config.dim * length**2 * config.num_layers
    # Tensors that the MLP keeps for the backward pass: gate, SiLU of it, up and their product of
    # SwiGLU; input and output of GELU.
    kept_tensors = 4 if config.style == "llama" else 2
    numbers = activation_numbers(
        config.num_layers,
        config.dim,
        kept_tensors * config.hidden_dim,
        config.activation_checkpointing,
        width,
    )
    return Cost(
        units=length,
        flops=flops,
        activation_bytes=length * width * numbers,
        logit_bytes=4.0 * config.vocab_size * length,
        most_logit_bytes=LOGIT_BYTES,
    )


def check_tokenizer(options: Mapping[str, object], spec: str) -> None:
    """ValueError where a model's options name another tokenizer than the data's."""
    name = options.get("tokenizer", spec)
    if name != spec:
        raise ValueError(
            f"model.options.tokenizer={name} and data.tokenizer={spec} disagree; "
            "set data.tokenizer alone"
        )


def _block(config: DecoderConfig, position: LayerPosition) -> Block:
    """One layer: attention with the position's prior or rotation, and the style's MLP and norms."""
    ssmax = None
    if config.ssmax:
        ssmax = SSMax(
            config.num_heads,
            train_context=config.train_context,
            start=config.ssmax_start,
            positive=config.ssmax_positive,
            window=position.reach,
        )
    attention = Attention(
        config.dim,
        config.num_heads,
        prior=position.prior,
        num_kv_heads=config.num_kv_heads,
        rotary=position.rotary,
        ssmax=ssmax,
        lanes=config.lanes,
        window=position.window,
        bias=config.style == "gpt2",
        scale_prior=config.scale_prior,
        sinks=position.sinks,
    )
    attention.scale_content = config.scale_content
    if config.normaliser == "entmax":
        attention.normalise_by_entmax()
    if config.qk_norm:
        attention.norm_heads()
    if config.output_gate:
        attention.gate_output()
    norm, mlp = STYLES[config.style]
    return Block(config.dim, attention, mlp(config.dim, config.hidden_dim), norm=norm)


def register_decoders(
    modality: str,
    sizes: Mapping[str, Mapping[str, Any]],
    config: type[DecoderConfig],
    build: Callable[..., Decoder],
) -> None:
    """Register `<modality>_<position>[_ssmax]_<size>` for every position method and size."""

    def config_of(position: str, size: str, ssmax: bool) -> dict[str, Any]:
        return asdict(config(**sizes[size], position=position, ssmax=ssmax))

    family = ModelFamily(
        modality,
        build=build,
        sizes=sizes,
        config=config_of,
        methods=list_layered_positions,
        check=check_position,
    )
    register_family(family)
