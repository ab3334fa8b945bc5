"""KV caches: a dense one, and a paged one that evicts keys no later query can use."""

from zoo.decoding.cache import Cache, KVCache
from zoo.decoding.eviction import EvictionBound
from zoo.decoding.paged import PagedCache

__all__ = ["Cache", "EvictionBound", "KVCache", "PagedCache"]
