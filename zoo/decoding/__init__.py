"""The KV cache of causal decoding."""

from zoo.decoding.cache import Cache, KVCache

__all__ = ["Cache", "KVCache"]
