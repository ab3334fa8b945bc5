"""What the recipes of decoders (text, DNA) have in common: rows of tokens in, cross-entropy of the next token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

from recipes.config import ConfigError, Recipe
from recipes.estimate import Cost


def decoder_cost(recipe: Recipe, model: Any) -> Cost:
    """One row of L tokens. FLOPs: 6 a matrix parameter and token, and 6·C a visible (query, key) pair and layer.

    (Attention's two products are 4·C forward and 8·C backward a pair, and half of the L² pairs are visible.)
    Activations in numbers a token: per layer 10·C + 4·hidden (norms, q, k, v, output, residuals, SwiGLU), or 2·C where
    blocks are recomputed; at the head three float32 copies of the logits.
    """
    config, length = model.config, recipe.data.context
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and name != "embedding.weight")
    matrices += config.vocab_size * config.dim if config.tied else 0  # tied: the embedding is the head's matrix
    flops = 6.0 * matrices * length + 6.0 * config.dim * length**2 * config.num_layers
    per_layer = 2 * config.dim if config.activation_checkpointing else 10 * config.dim + 4 * config.hidden_dim
    width = 2 if recipe.train.precision == "bf16" else 4
    return Cost(length, flops, length * (width * config.num_layers * per_layer + 3 * 4 * config.vocab_size))


def every_method(modality: str, sizes: dict[str, Callable[[str], Recipe]]) -> dict[str, Callable[[], Recipe]]:
    """`<method>_<size>` for every model of those sizes in the registry, by what builds a size's recipe of a method."""
    from zoo import list_models

    found = {}
    for size, build in sizes.items():
        for model in list_models(f"{modality}_*_{size}", modality=modality):
            method = model.removeprefix(f"{modality}_").removesuffix(f"_{size}")
            found[f"{method}_{size}"] = partial(build, method)
    return found


def tokenizer_of(recipe: Recipe) -> str:
    """The data's tokenizer, which is the model's too; ConfigError where model.options names another."""
    spec = recipe.data.tokenizer
    given = recipe.model.options.get("tokenizer", spec)
    if given != spec:
        raise ConfigError(
            f"model.options.tokenizer={given} and data.tokenizer={spec} disagree; set data.tokenizer alone"
        )
    return spec


def first_held_out(recipe: Recipe, build_loader: Callable[..., Any], *, rank: int, world: int) -> list[dict[str, Any]]:
    """The batches of this rank among the first `evaluate.samples` held-out samples; equally many on every rank."""
    micro = min(recipe.train.micro_batch or 1, -(-recipe.evaluate.samples // world))
    loader = build_loader(recipe.data, split="heldout", rank=rank, world=world, micro_batch=micro)
    return list(islice(loader, -(-recipe.evaluate.samples // (micro * world))))


def target_weight(batch: dict[str, Any]) -> tuple[float, int]:
    """What a batch's targets weigh together, which its mean loss is to be weighted by, and how many they are."""
    from modalities.text.model import target_weights

    weights = target_weights(batch)
    return float(weights.sum()), int((weights > 0).sum())
