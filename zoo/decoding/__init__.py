"""The KV cache of causal decoding."""

from zoo.decoding.cache import KVCache

Cache = KVCache
__all__ = ["Cache", "KVCache"]
