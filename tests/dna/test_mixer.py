"""The context mixer beside a plain one of dictionaries: what it counts, how it mixes, and that it does not look ahead."""

from __future__ import annotations

import math
import re
from collections import Counter

import numpy as np
import pytest

from modalities import native
from modalities.dna.baselines import create_baseline, mixer
from modalities.dna.baselines.mixer import LEARNING, ORDERS, RATE, RECENT, ContextMixer, Mixer, draw_rows
from modalities.dna.bases import reverse_complement
from modalities.dna.config import DnaDataConfig
from modalities.dna.data import build_loader, open_heldout
from modalities.dna.sources import find_source

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="needs a C compiler")
LENGTH = 90


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, 4, shape).astype(np.uint8)


def material() -> tuple[np.ndarray, np.ndarray]:
    """Rows, and windows with repeats of themselves, of the other strand and of a row, and unknown bases."""
    rows, windows = draw(6, LENGTH), draw(2, LENGTH)
    rows[1, 10:60], rows[2, 40:80] = rows[0, 20:70], reverse_complement(rows[0, 20:60])
    windows[:, 30:60] = windows[:, :30]
    windows[0, 60:] = reverse_complement(windows[0, 5:35])
    windows[1, 60:] = rows[0, 30:60]
    windows[1, [12, 77]] = 4
    return rows, windows


def add(counts: Counter[bytes], codes: np.ndarray, sizes: tuple[int, ...], *, last: bool = False) -> None:
    """Words of known bases of a sequence and of its reverse complement; last: only those that end where it ends."""
    for size in sizes:
        for at in range(max(0, len(codes) - size) if last else 0, len(codes) - size + 1):
            word = codes[at : at + size]
            if (word < 4).all():
                counts[word.tobytes()] += 1
                counts[reverse_complement(word).tobytes()] += 1


def opinions(rows: np.ndarray, window: np.ndarray, *, own: bool) -> tuple[np.ndarray, np.ndarray]:
    sizes = tuple(k + 1 for k in ORDERS)
    trained, whole, read = Counter[bytes](), Counter[bytes](), Counter[bytes]()
    for row in rows:
        add(trained, row, sizes)
    if own:
        add(whole, window, sizes)
    logs, longest = np.zeros((len(window), len(ORDERS) + len(RECENT), 4)), np.zeros(len(window), int)
    for t in range(len(window)):
        for i, k in enumerate(ORDERS):
            context = window[t - k : t] if t >= k else np.full(1, 4)
            if (context < 4).all():
                words = [np.append(context, np.uint8(x)).tobytes() for x in range(4)]
                inside = np.array([read[word] for word in words])
                counts = np.array([trained[word] - whole[word] for word in words]) + inside
                pairs = [(i, counts, 1 if k < 12 else 1 / 16)]
                if k in RECENT:
                    pairs.append((len(ORDERS) + RECENT.index(k), inside, 1 if k < 8 else 1 / 16))
                for place, n, a in pairs:
                    p = (n + a) / (n.sum() + 4 * a)
                    logs[t, place] = np.log(p) - np.log(p).mean()
                longest[t] = i + 1 if counts.sum() else longest[t]
        add(read, window[: t + 1], sizes, last=True)
    return logs, longest


def mixed(windows: np.ndarray, told: list, weights: np.ndarray, rate: float) -> np.ndarray:
    nats = np.zeros(windows.shape)
    for t in range(windows.shape[1]):
        steps = np.zeros_like(weights)
        for n, (logs, longest) in enumerate(told):
            if (true := windows[n, t]) < 4:
                score = weights[longest[t]] @ logs[t]
                p = np.exp(score) / np.exp(score).sum()
                nats[n, t] = -math.log(p[true])
                steps[longest[t]] += rate * (logs[t][:, true] - logs[t] @ p)
        weights += steps
    return nats


def test_costs_are_those_of_plain_dictionaries() -> None:
    rows, windows = material()
    weights = np.full((len(ORDERS) + 1, len(ORDERS) + len(RECENT)), 2 / (len(ORDERS) + len(RECENT)))
    taught = [opinions(rows, row, own=True) for row in rows[:3]]
    for _ in range(2):
        mixed(rows[:3], taught, weights, LEARNING)
    fitted = Mixer.fit(rows, taught=3 * LENGTH)
    np.testing.assert_allclose(fitted.weights, weights, atol=1e-6)
    expected = [mixed(w[None], [opinions(rows, w, own=False)], weights.copy(), RATE)[0] for w in windows]
    nats, hits = fitted.costs(windows)
    np.testing.assert_allclose(nats, expected, atol=2e-5)
    np.testing.assert_array_equal(fitted.costs(windows[1:])[0], nats[1:])  # nothing crosses windows
    assert (nats[1, [12, 77]] == 0).all() and (hits[1, [12, 77]] == 0).all()
    assert nats[0, 66:].mean() < 1.0 and hits[0, 66:].mean() > 0.8  # the other strand of what was read


def test_what_follows_changes_nothing_and_noise_costs_two_bits() -> None:
    fitted, windows = Mixer.fit(draw(200, 256), taught=40 * 256), draw(8, 256)
    nats, others = fitted.costs(windows)[0], windows.copy()
    others[:, 150:] = draw(8, 106)
    assert 1.98 < nats.mean() / math.log(2) < 2.05
    np.testing.assert_array_equal(nats[:, :150], fitted.costs(others)[0][:, :150])


def test_it_is_fitted_on_what_training_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    held = open_heldout(find_source("yeast-chr01"))
    for seed in (1, 0):
        rows = draw_rows(held.items.genome, held.items, bases=20 * 512, row=512, seed=seed)
        batch = next(iter(build_loader(DnaDataConfig(source="yeast-chr01", context=512, seed=seed), micro_batch=20)))
        np.testing.assert_array_equal(rows, batch["tokens"][:, 1:])
    baseline, asked = create_baseline("mixer-s1", train_context=2048), []
    with pytest.raises(RuntimeError, match=r"mixer is not fitted: call fit"):
        baseline.score(draw(1, 30))
    monkeypatch.setattr(mixer, "draw_rows", lambda *_, **options: asked.append(options) or rows)
    monkeypatch.setattr(ContextMixer, "_kept", {})
    baseline.fit(held)
    windows = draw(2, 60)
    windows[0, 7] = 4
    scores = baseline.score(windows)
    assert scores.bases.sum() == 119 and scores.nll[0, 7] == 0
    np.testing.assert_allclose(scores.nll.numpy(), Mixer.fit(rows).costs(windows)[0])
    assert asked == [{"row": 2048, "seed": 1, "bases": mixer.BASES}]
    create = [create_baseline(name, train_context=2048) for name in ("mixer-all", "mixer-s1")]
    for other in create:  # what one name has counted is not another's
        other.fit(held)
        other.score(windows)
    assert asked[1:] == [{"row": 2048, "seed": 0, "bases": None}]


def test_a_small_source_is_counted_once(tmp_path) -> None:
    """What is read again would look like a repeat."""
    text = "".join("ACGT"[k] for k in np.random.default_rng(0).integers(0, 4, 1000))
    (tmp_path / "g.fa").write_text(f">a\n{text}\n>b\n{text[:64]}\n")
    (tmp_path / "g.bed").write_text("a\t0\t1000\ttrain\nb\t0\t64\theldout\n")
    split = open_heldout(find_source(str(tmp_path / "g.fa"), str(tmp_path / "g.bed"))).items
    assert draw_rows(split.genome, split, row=100).shape[0] <= 10
    every = draw_rows(split.genome, split, bases=None, row=100)
    np.testing.assert_array_equal(every, draw_rows(split.genome, split, row=100))
    assert draw_rows(split.genome, split, bases=300, row=100).tolist() == every[:3].tolist()
    with pytest.raises(ValueError, match="stretches of 4,096 known bases: the training regions have none"):
        draw_rows(split.genome, split)


def test_without_a_compiler_it_says_so(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "broken.c"
    source.write_text("int broken(void) { return missing; }\n")
    with pytest.raises(OSError, match=r"cannot compile .*broken\.c: .*missing"):
        native.compile_library(source, tmp_path / "broken.so")
    monkeypatch.setattr(native, "compiler", lambda: None)
    with pytest.raises(OSError, match=re.escape("no C compiler is installed: expected cc, gcc or clang")):
        native.compile_library(source, tmp_path / "broken.so")
