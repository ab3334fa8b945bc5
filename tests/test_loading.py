"""The two loaders on the smallest data there is: order, shares, resuming, held-out batches,
reports."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch

from modalities.loading import FirstBatches, IndexedLoader, RowBatches, StreamLoader, permuted
from tests.refusals import refuses


class Report(list):
    def __str__(self):
        return f"{len(self)} strange"


class Numbers:
    """Sample n is the number n, weighed 0 beyond the end; every fifth is worth an event."""

    def __init__(self, size=None):
        self.size = size
        self.report = Report()

    def __getitem__(self, numbers):
        inside = [self.size is None or n < self.size for n in numbers]
        batch = {"n": np.array(numbers), "weights": np.array(inside, np.float32)}
        return batch, [n for n, real in zip(numbers, inside, strict=True) if real and n % 5 == 0]

    def identity(self):
        return {"kind": "numbers", "size": self.size}


class Rows:
    """Row n is [n, n + 1], as `Rows` have it."""

    def __init__(self, size=None):
        self.size = size

    def __getitem__(self, index):
        tokens = torch.tensor([index, index + 1])
        row = {"tokens": tokens, "segments": torch.zeros_like(tokens)}
        return row | ({"weights": torch.full((2,), 3.0)} if index % 4 == 1 else {})

    def padding_row(self):
        return {"tokens": torch.zeros(2, dtype=torch.int64), "segments": torch.full((2,), -1)}

    def identity(self):
        return {"kind": "rows"}


class Counting:
    """A stream whose slot s gives s·1000, s·1000 + 1, …; its states say where it is."""

    def __init__(self, seeks=False):
        self.seeks = seeks
        self.report = Report()

    def batches(self, slot, slots, done, state):
        at = done if self.seeks else (state or {"at": 0})["at"]
        assert at == done
        while True:
            at += 1
            yield {"n": np.array([slot * 1000 + at - 1])}, [at], None if self.seeks else {"at": at}

    def identity(self):
        return {"kind": "shards", "seed": 0} if self.seeks else {"kind": "counting"}


def take(loader, count):
    return [batch["n"].tolist() for batch in itertools.islice(loader, count)]


def saved(loader):
    return json.loads(json.dumps(loader.state_dict()))


def indexed(size=None, micro_batch=2, **share):
    return IndexedLoader(Numbers(size), micro_batch, **share)


def streamed(seeks=False, micro_batch=1, **share):
    return StreamLoader(Counting(seeks), micro_batch, **share)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches(workers):
    loader = indexed(num_workers=workers)
    assert take(loader, 6) == [[n, n + 1] for n in range(0, 12, 2)]
    # of what was handed out, not fetched
    assert loader.report == [0, 5, 10]
    assert str(loader.report) == "3 strange"
    batch = next(iter(loader))
    assert batch["n"].dtype == torch.int64
    assert batch["weights"].dtype == torch.float32


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0)])
def test_resume_with_other_workers(before, after):
    """Resume with other workers and ranks."""
    first = indexed(micro_batch=4, num_workers=before)
    take(first, 3)
    state = saved(first)
    assert state == {"kind": "numbers", "size": None, "next_sample": 12}
    second = indexed(micro_batch=4, num_workers=after)
    second.load_state_dict(state)
    assert take(second, 2) == [[12, 13, 14, 15], [16, 17, 18, 19]]
    ranks = [indexed(micro_batch=1, rank=rank, world=3) for rank in range(3)]
    for rank in ranks:
        rank.load_state_dict(state)
    assert [take(rank, 2) for rank in ranks] == [[[12], [15]], [[13], [16]], [[14], [17]]]


def test_pass_ends_alike_on_ranks():
    """A pass ends alike on all ranks and starts over."""
    loaders = [indexed(size=7, rank=rank, world=2) for rank in range(2)]
    passes = [[batch["n"].tolist() for batch in loader] for loader in loaders]
    assert passes == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    assert {len(loader) for loader in loaders} == {2}
    assert [b["weights"].tolist() for b in loaders[1]] == [
        [1, 1],
        [1, 0],
    ]  # sample 7 is padding; the pass started over
    interrupted = indexed(size=7)
    interrupted.load_state_dict(saved(interrupted) | {"next_sample": 4})
    assert take(interrupted, 9) == [[4, 5], [6, 7]]
    assert take(interrupted, 1) == [[0, 1]]
    for rank, workers in ((0, 0), (1, 2)):
        heldout = FirstBatches(
            indexed(size=100, rank=rank, world=2, num_workers=workers), samples=9
        )
        passes = [[batch["n"].tolist() for batch in heldout] for _ in range(3)]
        assert passes[0] == passes[1] == passes[2] == [[n + rank, n + 2 + rank] for n in (0, 4, 8)]
    assert len(list(FirstBatches(indexed(size=3), samples=50))) == 2  # more than there are


def test_wrong_shares_and_foreign_states():
    for share in ({"micro_batch": 0}, {"rank": 2, "world": 2}, {"rank": -1}):
        for make in (indexed, streamed):
            refuses(" ".join(map(str, next(iter(share.items())))), make, **share)
    refuses(r"size=7\b.*\b9\b", indexed(size=9).load_state_dict, saved(indexed(size=7)))
    states = [
        saved(loader)
        for loader in [streamed(rank=rank, world=2) for rank in range(2)]
        if take(loader, 1)
    ]
    for share, word in (
        ({"rank": 1, "world": 2}, r"rank=0\b.*\b1\b"),  # batches that carry states have one a rank
        ({"world": 3}, "world=2"),
        ({"num_workers": 3, "world": 2}, "workers=1"),
    ):
        refuses(word, streamed(**share).load_state_dict, states[0])


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_are_stacked(workers):
    """Where one row has weights, those of the others are 1."""
    first, second = IndexedLoader(RowBatches(Rows(3)), 2, num_workers=workers)
    assert first["tokens"].tolist() == [[0, 1], [1, 2]]
    assert first["weights"].tolist() == [
        [1, 1],
        [3, 3],
    ]
    assert second["tokens"].tolist() == [[2, 3], [0, 0]]
    assert second["segments"].tolist() == [
        [0, 0],
        [-1, -1],
    ]
    assert "weights" not in second
    assert {first[name].dtype for name in ("tokens", "segments")} == {torch.int64}


@pytest.mark.slow
@pytest.mark.parametrize("seeks", [False, True])
def test_streams_resume_exactly(seeks):
    share = {"rank": 1, "world": 2, "num_workers": 2}
    whole = take(streamed(seeks, **share), 9)
    assert whole[:4] == [[2000], [3000], [2001], [3001]]  # slots 2 and 3 of 4
    for stop in (0, 1, 4):
        first = streamed(seeks, **share)
        take(first, stop)
        second = streamed(seeks, **share)
        second.load_state_dict(saved(first))
        assert take(second, 9 - stop) == whole[stop:]
    assert list(first.report) == [1, 1, 2, 2]


def test_states_of_streams():
    """Of streams that seek batches handed out and the set-up, as before 0.5; a state is not changed
    by later batches."""
    old = {"batches": 3, "kind": "shards", "seed": 0, "world": 1, "workers": 1, "micro_batch": 1}
    loader = streamed(seeks=True)
    loader.load_state_dict(old)
    assert take(loader, 2) == [[3], [4]]
    assert saved(loader) == old | {"batches": 5}
    loader = streamed()
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    before = saved(loader)
    next(batches)
    assert state == before


def test_permutations():
    for size in (1, 2, 3, 64, 1000):
        index = np.arange(size)
        orders = [permuted(index, size, seed, 7) for seed in range(3)]
        assert all(sorted(order) == list(range(size)) for order in orders)
        assert size < 64 or not (orders[0] == orders[1]).all()
        assert (
            permuted(np.tile(index, 3), size, np.arange(3).repeat(size), 7)
            == np.concatenate(orders)
        ).all()
