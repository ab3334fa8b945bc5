"""One token more after many: models with a dense and a paged cache beside a transformers Llama of the same shape."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import torch

from modalities.decoder.model import Decoder
from recipes.targets import find_targets
from tools.benches import harness
from tools.benches.harness import Record, Refused, Row, text_of
from tools.benches.screen import BadParameter, Option
from zoo.decoding import Cache, PagedCache
from zoo.slices import slices

LLAMA, CACHES = "transformers Llama", ("dense", "paged")
CHUNK = 1 << 14  # tokens by which a cache is filled
ROOM = 256  # tokens that are decoded at most: a warm-up and 200 rounds
SHAPE = ("dim", "num_layers", "num_heads", "hidden_dim", "vocab_size")


def main(
    models: Annotated[
        str, Option(help="comma-separated names or run folders of text models, of one shape")
    ] = "text_ggd_ssmax_tiny.facts,text_alibi_tiny.facts",
    lengths: Annotated[str, Option(help="tokens that a cache holds, ascending")] = "4096,65536,524288",
    seconds: harness.Seconds = 4.0,
    minutes: harness.Minutes = 0.0,
    out: harness.Out = None,
    commit: harness.Commit = "",
) -> None:
    """Time of a token after many, on the CPU in float32: our models with either cache, and a Llama of the first one's shape.

    The Llama is transformers' (SDPA attention, rotary positions, the cache that its `generate` makes), with fresh weights and
    a cache of random numbers. Ours hold the keys that each layer makes of embedded random tokens, so that a paged cache drops
    what it would drop of a text. All take turns; ratios are to the Llama.
    """
    targets = find_targets(harness.words(models), {}, "cpu", "float32")
    shape = targets[0].model.config
    for target in targets:
        if not isinstance(target.model, Decoder):
            raise BadParameter(f"--models {target.label!r} is no decoder")
        other = [name for name in SHAPE if getattr(target.model.config, name) != getattr(shape, name)]
        if other:
            raise BadParameter(f"--models {target.label!r} has another {', '.join(other)} than {targets[0].label!r}")
    about = {"device": "cpu", "dtype": "float32"} | {name: getattr(shape, name) for name in SHAPE}
    record = Record(about, out=out, commit=commit, minutes=minutes)

    @torch.inference_mode()
    def measure(length: int) -> list[Row]:
        calls: dict[tuple[str, str], Callable[[], object]] = {}
        held: dict[tuple[str, str], tuple[float, float | None]] = {}  # MiB, share of the pages
        with record.guard(LLAMA, f"{length}"):
            step, mib = llama(shape, length)
            calls[LLAMA, "dynamic"], held[LLAMA, "dynamic"] = step, (mib, None)
        for target in targets:
            for kind in CACHES:
                with record.guard(f"{target.label}, {kind}", f"{length}"):
                    cache = filled(target.model, length, kind)
                    calls[target.label, kind] = partial(token, target.model, cache)
                    pages = cache.held().float().mean() / -(-length // cache.block) if kind == "paged" else None
                    held[target.label, kind] = cache.memory() / 2**20, None if pages is None else float(pages)
        record.status.update(f"{length}: timing {len(calls)} in turns")
        rounds = harness.in_turns(calls, (seconds or 4.0) * len(calls), harness.by_clock(torch.device("cpu")))
        return [
            {
                "length": length, "model": model, "cache": kind, "ms": rounds.ms(name := (model, kind)),
                "tokens_per_second": 1e3 / rounds.ms(name), "pairs": len(rounds.rows),
                "ratio": rounds.ratio(name, (LLAMA, "dynamic")) if (LLAMA, "dynamic") in calls else None,
                "mib": held[name][0], "pages": held[name][1],
            }
            for model, kind in calls
        ]  # fmt: skip

    with record.status:
        record.measure([(f"{n}", "tokens", partial(measure, n)) for n in sorted(harness.numbers("lengths", lengths))])
    columns = {
        "model": lambda row: f"{row['model']}, {row['cache']}",
        "ms": text_of("ms", ".2f"),
        "tokens/s": text_of("tokens_per_second", ",.0f"),
        "ratio to Llama": text_of("ratio", ".2f"),
        "cache, MiB": text_of("mib", ",.1f"),
        "pages held": text_of("pages", ".0%"),
    }
    title = f"a token on the CPU, {record.about['threads']} threads, float32, {shape.num_layers} layers of {shape.dim}"
    record.show(title, columns, section=lambda row: f"after {row['length']:,} tokens")
    harness.end(record)


def filled(model: Decoder, length: int, kind: str) -> Cache:
    """A cache that holds the keys of `length` random tokens, each layer reading their embeddings: work is O(length), for
    attention is computed for one token of a chunk."""
    cache = model.new_cache(length + ROOM, kind)
    if kind == "paged" and not isinstance(cache, PagedCache):
        raise Refused("it has no paged cache")
    tokens = torch.randint(0, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    for part in slices(length, CHUNK):
        ids = tokens[:, part]
        cache.reserve(ids.shape[1])
        positions, _ = cache.positions(ids.shape[1], None)
        for layer, held in zip(model.layers, cache.layers, strict=True):
            layer.attention(layer.attention_norm(model.embedding(ids)), positions, cache=held, last=1)
        cache.advance(ids.shape[1])
    return cache


def token(model: Decoder, cache: Cache) -> torch.Tensor:
    """The logits after one token more."""
    return model.forward_head(model.forward_features(torch.ones(1, 1, dtype=torch.int64), cache=cache))


def llama(shape: Any, length: int) -> tuple[Callable[[], object], float]:
    """A step of a Llama whose cache holds `length` tokens, and the MiB of that cache."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.dim,
        intermediate_size=shape.hidden_dim,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        max_position_embeddings=length + ROOM,
        tie_word_embeddings=True,
    )
    model, cache = LlamaForCausalLM(config).eval(), DynamicCache(config=config)
    wide = (1, shape.num_heads, length, shape.dim // shape.num_heads)
    for layer in range(shape.num_layers):
        cache.update(torch.randn(wide), torch.randn(wide), layer)
    mib = 2 * 4 * shape.num_layers * length * shape.dim / 2**20
    ids = torch.ones(1, 1, dtype=torch.int64)
    return lambda: model(input_ids=ids, past_key_values=cache, use_cache=True).logits, mib
