"""`sinks` and `heads` of text: against attention formed densely, and what they show of shipped
weights."""

from __future__ import annotations

import csv
import math

import numpy as np
import pytest
import torch

from modalities.analysis import analyse
from modalities.text.evaluators.attention import (
    MIN_KEYS,
    RANGE_EDGES,
    AttentionSettings,
    Heads,
    Sinks,
)
from recipes.evaluate import main
from zoo import create_model


def weights():
    return create_model("text_ggd_ssmax_tiny.facts").eval()


def test_sinks() -> None:
    """Rows are means over heads and rows that see enough keys."""
    evaluator = Sinks(AttentionSettings(samples=2))
    model = weights()
    rows = evaluator.rows(dict(evaluator.run(model)))
    assert [row["layer"] for row in rows] == list(range(len(model.layers)))
    texts = [torch.as_tensor(evaluator.text(model, 256, index)[0])[None] for index in range(2)]
    analyses = [analyse(model, text, full=True) for text in texts]
    for row, layers in zip(rows, zip(*analyses, strict=True), strict=True):
        mass = [layer.weights[..., 0][layer.seen >= MIN_KEYS] for layer in layers]
        signal = [layer.content_range[layer.seen >= MIN_KEYS] for layer in layers]
        assert row["sink_mass"] == pytest.approx(np.mean([float(m.mean()) for m in mass]), rel=1e-6)
        assert row["content_range"] == pytest.approx(
            np.mean([float(s.mean()) for s in signal]), rel=1e-6
        )
        masses = torch.cat(mass)
        signals = torch.cat(signal)
        bins = zip(RANGE_EDGES[1:], RANGE_EDGES[2:], row["sink_mass_by_range"][1:], strict=False)
        drawn = [(low, high, value) for low, high, value in bins if not math.isnan(value)]
        assert len(drawn) >= 2
        for low, high, value in drawn:
            assert value == pytest.approx(
                float(masses[(signals > low) & (signals <= high)].mean()), rel=1e-6
            )


@pytest.mark.slow
def test_heads() -> None:
    """Rows are means of each head, with its parameters; BAM, fig. 5: a head of θβ < 0 looks at the
    key, local ones do not."""
    evaluator = Heads(AttentionSettings(samples=4, length=1024))
    model = weights()
    rows = evaluator.rows(dict(evaluator.run(model)))
    assert [row["head"] for row in rows] == [
        f"{n}.{h}" for n in range(len(model.layers)) for h in range(4)
    ]
    texts = [evaluator.text(model, 1024, index) for index in range(4)]
    assert all(asked == [len(ids) - 1] and spans for ids, asked, spans in texts)
    layers = [
        analyse(model, torch.as_tensor(ids)[None], rows=asked, full=True)[1]
        for ids, asked, _ in texts
    ]
    for h, row in enumerate(rows[4:8]):
        assert row["entropy"] == pytest.approx(
            np.mean([float(one.entropy[0, h].mean()) for one in layers]), rel=1e-6
        )
        masses = [
            sum(float(layer.weights[0, h, 0, a:b].sum()) for a, b in spans)
            for layer, (_, _, spans) in zip(layers, texts, strict=True)
        ]
        assert row["answer_mass"] == pytest.approx(np.mean(masses), rel=1e-6, abs=1e-12)
        assert row["theta_beta"] == pytest.approx(
            model.layers[1].attention.prior.theta_beta[h].item()
        )
    near = [row["answer_mass"] for row in rows if row["theta_beta"] > 0.5]
    assert max(row["answer_mass"] for row in rows if row["retrieval"]) > 0.5
    assert max(near) < 0.05
    assert len(near) >= 4


@pytest.mark.slow
def test_command_writes_table_and_figure(tmp_path) -> None:
    """The command writes table and figure."""
    names = ["text_ggd_ssmax_tiny.facts", "text_rope_tiny.facts"]
    assert main([*names, "sinks,heads", "--samples", "1", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "sinks.png").is_file()
    with open(tmp_path / "heads.text_ggd_ssmax_tiny.facts.tsv") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    assert len(rows) == 16
    assert {"theta_beta", "ssmax.s", "retrieval", "answer_mass"} <= set(rows[0])


@pytest.mark.parametrize(
    ("kind", "length", "message"),
    [
        (Heads, 5, "heads: length 5 is too short for template 'own'"),
        (Sinks, 10**7, "no held-out document"),
    ],
)
def test_errors(kind, length, message) -> None:
    with pytest.raises(ValueError, match=message):
        kind(AttentionSettings(samples=2, length=length)).cells(weights())
