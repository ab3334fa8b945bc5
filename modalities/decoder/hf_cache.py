"""A KV cache of the zoo as a `transformers` Cache, for `generate` and loops written for one."""

from __future__ import annotations

from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache

from zoo.decoding import Cache, PagedCache

__all__ = ["PriorzooCache"]


class PriorzooCache(TransformersCache):
    """What `transformers` asks of a cache, answered by one of `zoo.decoding`.

    A layer's keys and values belong to its prior (lanes, pages, running sums), so the cache has no `layers` to be looked into.

    Args:
        held: the cache, as `Decoder.new_cache` makes it.
    """

    def __init__(self, held: Cache) -> None:
        super().__init__(layers=[])
        self.held = held
        self._mark: object = None

    def __len__(self) -> int:
        return len(self.held.layers)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.held).__name__}, {self.held.length} tokens)"

    @property
    def paged(self) -> bool:
        """Whether keys are held in pages, and some are evicted."""
        return isinstance(self.held, PagedCache)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens held; every layer holds as many."""
        return self.held.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Most tokens of a paged cache; −1, no limit, of a dense one."""
        return self.held.horizon if isinstance(self.held, PagedCache) else -1

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last −`tokens_to_remove` tokens. ValueError for a number above 0, or where needed pages are gone."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the number of tokens to remove, got {tokens_to_remove}")
        self.held.crop(self.held.length + tokens_to_remove)

    def reset(self) -> None:
        """Drop all tokens."""
        self.held.crop(0)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows of the batch by number (B',), as beams are kept and dropped."""
        self.held.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """As `reorder_cache`."""
        self.held.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Not served: NotImplementedError. `batch_select_indices` takes a row as often as it is named."""
        raise NotImplementedError("this cache repeats rows by batch_select_indices")

    def activate_past_recording(self) -> None:
        """Evict nothing from here on, so that any later token can be cropped."""
        self._mark = self.held.mark()
