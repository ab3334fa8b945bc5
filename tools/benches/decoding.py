"""One token after many: models compared with a transformers Llama of the same shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from modalities.decoder.model import Decoder, DecoderConfig
from tools.benches.timing import Record, device_of, numbers, parser, words
from tools.benches.training import LLAMA, llama_like
from zoo import create_model
from zoo.decoding import KVCache
from zoo.positions import slices

# Tokens by which a cache is filled.
CHUNK = 1 << 14
# Tokens decoded at most: warm-up, memory and 200 rounds.
ROOM = 256
MODELS = ["text_ggd_ssmax_tiny.facts", "text_alibi_tiny.facts"]


def fill_cache(model: Decoder, length: int) -> KVCache:
    """A cache with the keys of `length` random tokens, each layer reading their embeddings: work is
    O(length), for attention is computed for one token of a chunk."""
    cache = model.new_cache(length + ROOM)
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.config.vocab_size, (1, length), generator=generator)
    for part in slices(length, CHUNK):
        ids = tokens[:, part].to(device)
        cache.reserve(ids.shape[1])
        positions, _ = cache.positions(ids.shape[1], None)
        for layer, states in zip(model.layers, cache.layers, strict=True):
            x = layer.attention_norm(model.embedding(ids))
            layer.attention(x, positions, cache=states, last=1)
        cache.advance(ids.shape[1])
    return cache


def decode(model: Decoder, cache: KVCache) -> torch.Tensor:
    """The logits after one token more."""
    token = torch.ones(1, 1, dtype=torch.int64, device=model.embedding.weight.device)
    return model.forward_head(model.forward_features(token, cache=cache))


def llama_step(
    config: DecoderConfig, length: int, device: torch.device, dtype: torch.dtype
) -> Callable[[], torch.Tensor]:
    """A step of a Llama whose cache, the one that its `generate` makes, holds `length` random
    keys."""
    model = llama_like(config, length + ROOM).to(device, dtype).eval()
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    shape = (1, config.num_heads, length, config.dim // config.num_heads)
    states = torch.randn(shape, device=device, dtype=dtype)
    for layer in range(config.num_layers):
        cache.update(states.clone(), states.clone(), layer)
    ids = torch.ones(1, 1, dtype=torch.int64, device=device)

    def step() -> torch.Tensor:
        return model(input_ids=ids, past_key_values=cache, use_cache=True).logits

    return step


@torch.inference_mode()
def main(argv: Sequence[str]) -> int:
    """Time of a token after many; MiB are what the step adds, `cache_mib` in the record is the
    cache."""
    options = parser("decoding", main.__doc__)
    options.add_argument("--models", type=words, default=MODELS, help="text models of one shape")
    options.add_argument(
        "--lengths", type=numbers, default=[4096, 65536, 524288], help="tokens that a cache holds"
    )
    args = options.parse_args(argv)
    device = device_of(args)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    record = Record(args, device, dtype=str(dtype))
    models = {name: create_model(name).to(device, dtype).eval() for name in args.models}
    config = next(iter(models.values())).config
    for length in args.lengths:
        shape = f"after {length} tokens"
        steps = {}
        memory = {}
        with record.guard(LLAMA, shape):
            steps[LLAMA] = llama_step(config, length, device, dtype)
        for name, model in models.items():
            with record.guard(name, shape):
                cache = fill_cache(model, length)
                memory[name] = cache.memory() / 2**20
                steps[name] = partial(decode, model, cache)
        first = len(record.rows)
        record.compare(shape, "one token", steps, [LLAMA], tokens=1)
        for row in record.rows[first:]:
            row["cache_mib"] = memory.get(str(row["name"]))
    return record.finish()
