"""`sinks` and `heads` of every modality: against attention formed densely, and what they show of shipped weights."""

from __future__ import annotations

import csv
import math

import numpy as np
import pytest
import torch

from modalities.attention import EDGES, SEEN, Probe
from modalities.contract import find_modality, modality_names
from modalities.text.evaluators.heads import HeadSettings
from recipes.evaluate import main
from zoo import create_model
from zoo.analysis import analyse

MODELS = {
    "text": ("text_ggd_ssmax_tiny.facts", {}),
    "vision": ("vision_ggd2d_separable_ssmax_tiny_patch8.glyphs", {"source": "glyphs-builtin"}),
    "dna": ("dna_goat_tiny.genomes", {"source": "yeast-chr01"}),
}


def made(modality: str, name: str, **settings):
    """An evaluator, and the model that it looks into."""
    kind = find_modality(modality).evaluators[name]
    weights, given = MODELS[modality]
    return kind(kind.settings_class(**{"samples": 2, **given, **settings})), create_model(
        weights, pretrained=True
    ).eval()


def test_every_modality_has_both() -> None:
    assert set(MODELS) == set(modality_names()) - {"toy"}
    for name in MODELS:
        assert {"sinks", "heads"} <= set(find_modality(name).evaluators)


@pytest.mark.parametrize("modality", MODELS)
def test_rows_of_sinks_are_means_over_heads_and_long_rows(modality: str) -> None:
    evaluator, model = made(modality, "sinks")
    rows = evaluator.rows(dict(evaluator.run(model)))
    assert [row["layer"] for row in rows] == list(range(len(model.layers)))
    sink = evaluator.sink(model)
    seen = [[] for _ in model.layers]
    for index in range(2):
        probe = evaluator.probe(model, index)
        for layer, found in enumerate(analyse(model, *probe.inputs, full=True)):
            long = found.seen >= SEEN
            mass = found.weights[..., sink][long]
            seen[layer] += [
                (float(mass.mean()), float(found.content_range[long].mean()), mass, found.content_range[long])
            ]
    for row, found in zip(rows, seen, strict=True):
        assert row["sink_mass"] == pytest.approx(np.mean([one[0] for one in found]), rel=1e-6)
        assert row["content_range"] == pytest.approx(np.mean([one[1] for one in found]), rel=1e-6)
        mass, signal = (torch.cat([one[n] for one in found]) for n in (2, 3))
        for low, high, drawn in zip(EDGES, EDGES[1:], row["sink_mass_by_range"], strict=False):
            there = (signal > low) & (signal <= high)
            if not math.isnan(drawn) and low != EDGES[0]:
                assert drawn == pytest.approx(float(mass[there].mean()), rel=1e-6)
        assert sum(not math.isnan(value) for value in row["sink_mass_by_range"]) >= 2


@pytest.mark.parametrize("modality", MODELS)
def test_rows_of_heads_are_means_of_each_head(modality: str) -> None:
    evaluator, model = made(modality, "heads")
    rows = evaluator.rows(dict(evaluator.run(model)))
    heads = model.layers[0].attention.prior.num_heads
    assert [row["head"] for row in rows] == [f"{n}.{h}" for n in range(len(model.layers)) for h in range(heads)]
    probes = [evaluator.probe(model, index) for index in range(2)]
    for layer in range(len(model.layers)):
        found = [analyse(model, *p.inputs, layers=[layer], rows=p.rows, full=True)[0] for p in probes]
        for h in range(heads):
            row = rows[layer * heads + h]
            assert row["entropy"] == pytest.approx(
                np.mean([float(one.entropy[0, h].mean()) for one in found]), rel=1e-6
            )
            if probes[0].spans:
                masses = [
                    sum(float(one.weights[0, h, 0, a:b].sum()) for a, b in p.spans)
                    for one, p in zip(found, probes, strict=True)
                ]
                assert row["answer_mass"] == pytest.approx(np.mean(masses), rel=1e-6, abs=1e-12)
            else:
                assert math.isnan(row["answer_mass"])
    parameters = dict(model.layers[1].attention.prior.named_parameters())
    for name, value in parameters.items():
        if value.shape == (heads,):
            assert rows[heads + 1][name] == pytest.approx(float(value[1]))


@pytest.mark.parametrize("name", ["sinks", "heads"])
def test_finished_cells_are_handed_on(name: str) -> None:
    evaluator, model = made("text", name)
    full = dict(evaluator.run(model))
    first = next(iter(full))
    again = dict(evaluator.run(model, {first: full[first] | {"kept": 1}}))
    assert again.pop(first) == full[first] | {"kept": 1} and again == {k: v for k, v in full.items() if k != first}
    assert evaluator.identity(model) == made("text", name, samples=1)[0].identity(model)


def test_retrieval_heads_hold_the_answer_and_local_ones_do_not() -> None:
    """BAM, fig. 5, of shipped weights: a head of θβ < 0 looks at the key, those whose prior forgets at none of it."""
    evaluator, model = made("text", "heads", samples=6, length=1024)
    rows = evaluator.rows(dict(evaluator.run(model)))
    away = [row["answer_mass"] for row in rows if row["retrieval"]]
    near = [row["answer_mass"] for row in rows if row["theta_beta"] > 0.5]
    assert max(away) > 0.5 and max(near) < 0.05 and len(near) >= 4, [
        (r["head"], r["theta_beta"], r["answer_mass"]) for r in rows
    ]


@pytest.mark.parametrize("template", ["own", "heldout", "bam", "mohtashami"])
def test_the_answer_of_a_text_is_where_it_is_stated(template: str) -> None:
    length = 900 if template in ("bam", "mohtashami") else 400
    kind = find_modality("text").evaluators["heads"]
    evaluator = kind(HeadSettings(template=template, length=length, samples=1, source=None))
    model = create_model("text_ggd_tiny")
    probe = evaluator.probe(model, 3)
    assert isinstance(probe, Probe) and probe.rows == [probe.inputs[0].shape[1] - 1]
    pieces = {tuple(probe.inputs[0][0, a:b].tolist()) for a, b in probe.spans}
    assert len(pieces) == 1 and len(probe.spans) == (2 if template in ("bam", "mohtashami") else 1)


def test_dna_comes_again_and_the_answer_follows() -> None:
    evaluator, model = made("dna", "heads")
    probe = evaluator.probe(model, 1)
    tokens, ((start, stop),) = probe.inputs[0][0], probe.spans
    assert stop == start + 1 and tokens[start - 32 : start].tolist() == tokens[-32:].tolist() and len(tokens) == 256


def test_the_command_writes_table_and_figure(tmp_path) -> None:
    names = ["text_ggd_ssmax_tiny.facts", "text_rope_tiny.facts"]
    assert main([*names, "sinks,heads", "--samples", "1", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "sinks.png").is_file() and (tmp_path / "heads.png").is_file()
    with open(tmp_path / "heads.text_ggd_ssmax_tiny.facts.tsv") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    assert len(rows) == 16 and {"theta_beta", "ssmax.s", "retrieval", "answer_mass"} <= set(rows[0])


@pytest.mark.parametrize(
    ("modality", "name", "settings", "message"),
    [
        ("text", "heads", {"facts": (1, 2)}, r"facts=\[1, 2\]"),
        ("text", "heads", {"length": 5}, "heads: length 5 is too short for template 'own'"),
        ("text", "heads", {"length": None, "template": "heldout", "facts": (50,)}, "give --length"),
        ("text", "sinks", {"length": 10**7}, "no held-out document"),
        ("dna", "heads", {"length": 3}, "no room for a copy"),
    ],
)
def test_what_cannot_be_looked_at_is_named(modality: str, name: str, settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluator, model = made(modality, name, **settings)
        evaluator.cells(model)
