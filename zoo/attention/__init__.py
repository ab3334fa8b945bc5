"""The one attention call, its kernels (a file each), and the KV cache."""

from zoo.attention.cache import KVCache
from zoo.attention.dispatch import KERNELS, prior_attention

__all__ = ["KERNELS", "KVCache", "prior_attention"]
