"""The one attention call, and its kernels, a file each."""

from zoo.attention.call import AttentionCall, Kernel
from zoo.attention.dispatch import KERNELS, MaskWarning, prior_attention, skipped_share, skipping

__all__ = [
    "KERNELS",
    "AttentionCall",
    "Kernel",
    "MaskWarning",
    "prior_attention",
    "skipped_share",
    "skipping",
]
