"""The KV cache: memory in blocks, positions with documents and padding, and precision a million tokens in."""

from __future__ import annotations

import pytest
import torch

from zoo import KVCache, Positions, create_model


def test_positions_with_padding_and_documents_go_on_across_calls() -> None:
    segments = torch.tensor([[-1, -1, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1, 2]])
    expected = Positions.documents(segments).index()
    cache, found = KVCache(1), []
    for part in segments.split([3, 1, 2, 1], dim=1):
        positions, held = cache.positions(part.shape[1], part)
        assert positions.offset == cache.length
        cache.advance(part.shape[1])
        assert torch.equal(held, segments[:, : cache.length])
        found.append(positions.index())
    assert torch.equal(torch.cat(found, dim=1), expected)


@pytest.mark.parametrize("name", ["goat", "cable", "ggd"])
@torch.no_grad()
def test_cropped_and_with_other_rows(name: str) -> None:
    """After tokens that no mark preceded are dropped and rows are chosen, what follows reads what is left, and nothing else."""
    torch.manual_seed(0)
    model = create_model(f"text_{name}_ssmax_tiny", num_layers=2, dim=64, num_heads=2, hidden_dim=64).eval()
    ids, rows = torch.randint(0, 256, (3, 90)), torch.tensor([2, 0, 0, 1])
    segments = torch.zeros_like(ids)
    segments[1, :7] = -1
    cache = model.new_cache(100)
    for part in (slice(70), *(slice(n, n + 1) for n in range(70, 80))):
        model(ids[:, part], segments=segments[:, part], cache=cache)
    cache.crop(75)
    cache.select(rows)
    out = model(ids[rows, 75:], segments=segments[rows, 75:], cache=cache)
    expected = model(ids[rows], segments=segments[rows])[:, 75:]
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    for wrong in (-1, cache.length + 1):
        with pytest.raises(ValueError, match="cannot be cropped"):
            cache.crop(wrong)
    cache.crop(0)
    torch.testing.assert_close(model(ids[rows], cache=cache), model(ids[rows]), atol=1e-4, rtol=1e-4)
