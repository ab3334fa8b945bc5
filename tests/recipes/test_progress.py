"""How far a cell is, in a log, and layer by layer."""

from __future__ import annotations

import io

from recipes import report as display
from recipes.commands import Console, facts_table
from recipes.report import CellProgress

SMALL = dict(dim=32, num_layers=3, num_heads=2, hidden_dim=32, train_context=16)


def test_a_log_has_a_line_now_and_then(monkeypatch):
    now, out = [0.0], io.StringIO()
    monkeypatch.setattr(display.time, "perf_counter", lambda: now[0])
    with display.CellProgress("perplexity  model", 4000, "tokens", Console(file=out, width=200)) as progress:
        for now[0] in range(0, 100, 10):
            progress.advance(100)
        now[0] = 100.0
        progress.finish(2000)
    assert out.getvalue().splitlines() == [
        "perplexity  model  400/4k tokens  13.3/s  left 4:30",
        "perplexity  model  700/4k tokens  11.7/s  left 4:43",
        "perplexity  model  1k/4k tokens  11.1/s  left 4:30",
    ]


def test_names_are_printed_as_they_are():
    """In lines, in tables and beside a bar: markup has no meaning, and control characters are not sent to the terminal."""
    name, file = "[bold]a[/red]\x1b[31m", io.StringIO()
    terminal = Console(file=file, force_terminal=True, color_system=None, width=100)
    terminal.print(name)
    terminal.print(facts_table(name, {name: name}))
    with CellProgress(name, 2, "tokens", terminal) as progress:
        progress.finish(2)
    printed = file.getvalue()
    assert printed.count(r"[bold]a[/red]\x1b[31m") >= 5 and "\x1b[31m" not in printed
