"""The one attention call, its kernels (a file each), and the KV caches."""

from zoo.attention.base import AttentionCall
from zoo.attention.cache import Cache, KVCache
from zoo.attention.dispatch import KERNELS, MaskWarning, prior_attention
from zoo.attention.paged import PagedCache

__all__ = ["KERNELS", "AttentionCall", "Cache", "KVCache", "MaskWarning", "PagedCache", "prior_attention"]
