"""How far a cell is, on a terminal and in a log."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
import torch
from rich.console import Console

from modalities.decoder.scoring import token_nll
from modalities.dna import DnaConfig, DnaDecoder
from modalities.dna.scoring import score_windows
from modalities.text.evaluators import EVALUATORS
from modalities.text.model import CausalLM, TextConfig
from recipes import console as display
from recipes.console import CellProgress

SMALL = dict(dim=32, num_layers=3, num_heads=2, hidden_dim=32, train_context=16)


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(display.time, "perf_counter", lambda: now[0])
    return now


def test_a_log_has_a_line_now_and_then(clock):
    out = io.StringIO()
    with CellProgress("perplexity  model", 4000, "tokens", Console(file=out, width=200)) as progress:
        for second in range(0, 100, 10):
            clock[0] = second
            progress.advance(100)
        clock[0] = 100.0
        progress.finish(2000)
    assert out.getvalue().splitlines() == [
        "perplexity  model  400/4k tokens  13.3/s  left 4:30",
        "perplexity  model  700/4k tokens  11.7/s  left 4:43",
        "perplexity  model  1k/4k tokens  11.1/s  left 4:30",
    ]
    assert (progress.finished, progress.part) == (2000, 0)


def test_a_terminal_has_a_bar_that_moves_within_a_cell():
    out = io.StringIO()
    with CellProgress("name", 100, "tokens", Console(file=out, force_terminal=True, width=120)) as progress:
        progress.advance(40)
        assert progress.bar.tasks[0].completed == 40
        progress.advance(90)  # never beyond the end
        assert progress.bar.tasks[0].completed == 100
    assert re.search("name", out.getvalue())


@pytest.mark.parametrize("name", ["perplexity", "passkey"])
def test_a_cell_tells_all_that_it_reads(name):
    model = CausalLM(TextConfig(**SMALL)).eval()
    kind = EVALUATORS[name]
    evaluator = kind(kind.settings_class(lengths=(96,), samples=2))
    cell, told = evaluator.cells(model)[0], []
    evaluator.advance = told.append
    evaluator.measure(model, cell)
    assert sum(told) == cell.cost and min(told) > 0
    assert len(told) >= (3 if name == "perplexity" else 1)  # one long window is told layer by layer


def test_scoring_tells_every_layer_and_leaves_no_hook():
    model, told = CausalLM(TextConfig(**SMALL)).eval(), []
    tokens = torch.arange(17)[None]
    token_nll(model, tokens[:, :-1], tokens[:, 1:], advance=told.append)
    assert told == [5, 5, 6] and not any(layer._forward_hooks for layer in model.layers)
    dna = DnaDecoder(DnaConfig(**SMALL)).eval()
    for strands in ("one", "both"):
        told.clear()
        score_windows(dna, np.zeros((2, 30), np.uint8), strands=strands, batch_tokens=30, advance=told.append)
        assert sum(told) == 60
