"""`sinks` and `heads` of text: against attention formed densely, and what they show of shipped weights."""

from __future__ import annotations

import csv
import math

import numpy as np
import pytest
import torch

from modalities.attention import EDGES, SEEN
from modalities.contract import find_modality
from modalities.text.evaluators.heads import HeadSettings
from recipes.evaluate import main
from zoo import create_model
from zoo.analysis import analyse

MODELS = {
    "text": ("text_ggd_ssmax_tiny.facts", {}),
}


def evaluator_and_model(modality: str, name: str, **settings):
    kind = find_modality(modality).evaluators[name]
    weights, options = MODELS[modality]
    settings = kind.settings_class(**{"samples": 2, **options, **settings})
    return kind(settings), create_model(weights, pretrained=True).eval()


@pytest.mark.parametrize("modality", MODELS)
def test_sinks(modality: str) -> None:
    """Rows are means over heads and rows that see enough keys."""
    evaluator, model = evaluator_and_model(modality, "sinks")
    rows = evaluator.rows(dict(evaluator.run(model)))
    assert [row["layer"] for row in rows] == list(range(len(model.layers)))
    probes = [evaluator.probe(model, index) for index in range(2)]
    analyses = [analyse(model, *probe.inputs, full=True) for probe in probes]
    for row, layers in zip(rows, zip(*analyses, strict=True), strict=True):
        mass = [layer.weights[..., evaluator.sink(model)][layer.seen >= SEEN] for layer in layers]
        signal = [layer.content_range[layer.seen >= SEEN] for layer in layers]
        assert row["sink_mass"] == pytest.approx(np.mean([float(m.mean()) for m in mass]), rel=1e-6)
        assert row["content_range"] == pytest.approx(np.mean([float(s.mean()) for s in signal]), rel=1e-6)
        masses, signals = torch.cat(mass), torch.cat(signal)
        bins = zip(EDGES[1:], EDGES[2:], row["sink_mass_by_range"][1:], strict=False)
        drawn = [(low, high, value) for low, high, value in bins if not math.isnan(value)]
        assert len(drawn) >= 2
        for low, high, value in drawn:
            assert value == pytest.approx(float(masses[(signals > low) & (signals <= high)].mean()), rel=1e-6)


@pytest.mark.parametrize("modality", MODELS)
def test_heads(modality: str) -> None:
    """Rows are means of each head, with its parameters."""
    evaluator, model = evaluator_and_model(modality, "heads")
    rows = evaluator.rows(dict(evaluator.run(model)))
    heads = model.layers[0].attention.prior.num_heads
    assert [row["head"] for row in rows] == [f"{n}.{h}" for n in range(len(model.layers)) for h in range(heads)]
    probes = [evaluator.probe(model, index) for index in range(2)]
    layers = [analyse(model, *probe.inputs, layers=[1], rows=probe.rows, full=True)[0] for probe in probes]
    for h, row in enumerate(rows[heads : 2 * heads]):
        assert row["entropy"] == pytest.approx(np.mean([float(one.entropy[0, h].mean()) for one in layers]), rel=1e-6)
        masses = [
            sum(float(layer.weights[0, h, 0, a:b].sum()) for a, b in probe.spans) if probe.spans else math.nan
            for layer, probe in zip(layers, probes, strict=True)
        ]
        assert row["answer_mass"] == pytest.approx(np.mean(masses), rel=1e-6, abs=1e-12, nan_ok=True)
    for name, value in model.layers[1].attention.prior.named_parameters():
        if value.shape == (heads,):
            assert rows[heads + 1][name] == pytest.approx(value[1].item())


def test_retrieval_heads_hold_the_answer_and_local_ones_do_not() -> None:
    """BAM, fig. 5, of shipped weights: a head of θβ < 0 looks at the key, those whose prior forgets at none of it."""
    evaluator, model = evaluator_and_model("text", "heads", samples=6, length=1024)
    rows = evaluator.rows(dict(evaluator.run(model)))
    away = [row["answer_mass"] for row in rows if row["retrieval"]]
    near = [row["answer_mass"] for row in rows if row["theta_beta"] > 0.5]
    assert max(away) > 0.5 and max(near) < 0.05 and len(near) >= 4


def test_where_answers_are() -> None:
    settings = HeadSettings(length=400, samples=1)
    probe = find_modality("text").evaluators["heads"](settings).probe(create_model("text_ggd_tiny"), 3)
    assert probe.rows == [probe.inputs[0].shape[1] - 1] and len(probe.spans) == 1


def test_the_command_writes_table_and_figure(tmp_path) -> None:
    names = ["text_ggd_ssmax_tiny.facts", "text_rope_tiny.facts"]
    assert main([*names, "sinks,heads", "--samples", "1", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "sinks.png").is_file() and (tmp_path / "heads.png").is_file()
    with open(tmp_path / "heads.text_ggd_ssmax_tiny.facts.tsv") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    assert len(rows) == 16 and {"theta_beta", "ssmax.s", "retrieval", "answer_mass"} <= set(rows[0])


def test_errors() -> None:
    for modality, name, settings, message in (
        ("text", "heads", {"length": 5}, "heads: length 5 is too short for template 'own'"),
        ("text", "sinks", {"length": 10**7}, "no held-out document"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluator, model = evaluator_and_model(modality, name, **settings)
            evaluator.cells(model)
