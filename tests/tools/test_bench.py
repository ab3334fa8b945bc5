"""tools/bench.py: the harness, and each problem at a size too small to mean anything."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from tools import bench
from tools.benches import harness
from zoo import create_model

COMMITTED = Path(__file__).parents[2] / "benchmarks" / "cpu" / "attention.json"


def invoke(name: str, *arguments: str):
    return CliRunner().invoke(bench.application(name), [name, *arguments])


def recorded(path: Path, *arguments: str) -> dict:
    """The record that a command writes; it must end with status 0."""
    done = invoke(*arguments, "--out", str(path))
    assert done.exit_code == 0, done.output
    record = json.loads(path.read_text())
    assert record["torch"] == torch.__version__ and record["threads"] == torch.get_num_threads() and record["results"]
    return record


# ---- the harness


class Squares(harness.Benchmark):
    """Each cell is a number; `stop_at` interrupts."""

    stop_at = 99

    def about(self):
        return {"device": "cpu"}

    def cells(self):
        return [harness.Cell(f"n={n}", "squares", n) for n in (1, 2, 3)]

    def measure(self, cell):
        if cell.value == self.stop_at:
            raise KeyboardInterrupt
        with self.findings.guard("cube", cell.name):
            raise ValueError(f"no cube of {cell.value}")
        return [{"n": cell.value, "square": cell.value**2}]

    def title(self, record):
        return record["device"]

    def columns(self):
        return [harness.Column("n", lambda row: str(row["n"])), harness.Column("none", harness.text_of("none", "d"))]

    def failed(self):
        return False


def test_a_run_cut_short_keeps_its_cells_and_is_resumed(tmp_path, capsys):
    out, console = tmp_path / "new" / "squares.json", harness.Console()
    first = Squares(harness.Settings(out=out, commit="abc"))
    first.stop_at = 3
    with pytest.raises(KeyboardInterrupt):
        harness.run(first, console)
    assert json.loads(out.read_text())["cells"] == ["n=1", "n=2"]
    second = Squares(harness.Settings(out=out, resume=True))
    second.stop_at = 1  # would interrupt if it were measured again
    harness.run(second, console)
    record = json.loads(out.read_text())
    assert [row["square"] for row in record["results"]] == [1, 4, 9] and record["failed"]["cube"].endswith("cube of 3")
    for settings, named in (
        (harness.Settings(out=out, resume=True, seconds=3), "seconds"),
        (harness.Settings(out=tmp_path / "none.json", resume=True), "none.json"),
        (harness.Settings(resume=True), "--out"),
    ):
        with pytest.raises(typer.BadParameter, match=named):
            harness.run(Squares(settings), console)


def test_a_budget_drops_the_dearest_cells(monkeypatch):
    now, budget = [0.0], harness.Budget
    monkeypatch.setattr(harness, "Budget", lambda minutes: budget(minutes, lambda: now[0]))
    squares = Squares(harness.Settings(minutes=1))
    measure = squares.measure
    squares.measure = lambda cell: now.__setitem__(0, now[0] + 19.9) or measure(cell)
    harness.run(
        squares, harness.Console(quiet=True)
    )  # the second starts, for twice 19.9 seconds fit; the third does not
    assert squares.findings.cells == ["n=1", "n=2"] and squares.findings.dropped[0].startswith("n=3")


def test_a_ratio_is_the_median_over_rounds():
    rounds = harness.Rounds([{"a": 1.0, "b": 2.0}, {"a": 2.0, "b": 4.0}, {"a": 1.0, "b": 9.0}])
    assert rounds.ratio("b", "a") == 2.0 and rounds.ratio("a", "b") == 0.5 and rounds.ms("b") == 4.0
    order: list[str] = []
    rounds = harness.in_turns({name: lambda name=name: order.append(name) for name in "ab"}, 0.0, timed)
    assert len(rounds) == 3 and order == list("ab" * 4)  # a warm-up and three rounds


def timed(run) -> float:
    run()
    return 1.0


@pytest.mark.skipif(harness.Meter("cpu").peak_bytes is None, reason="reads /proc")
def test_what_is_returned_is_not_extra_memory():
    size = 64 * 2**20
    assert abs(harness.extra_bytes(lambda: torch.ones(size // 4), "cpu")) < size / 4
    assert harness.extra_bytes(lambda: torch.ones(size // 4).sum(), "cpu") > size / 2


def test_a_fresh_process_is_another():
    assert harness.in_fresh_process(os.getpid) != os.getpid()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("attention", "--clock", "sun"), ("clock", "sun", "wall")),
        (("attention", "--dtype", "int8"), ("dtype", "int8")),
        (("attention", "--device", "tpu"), ("device", "tpu")),
        (("attention", "--device", "cuda"), ("cuda",)),
        (("attention", "--lengths", "1k"), ("lengths", "1k")),
        (("training", "--model", "tinny"), ("model", "'tiny'")),
        (("training", "--methods", "roper"), ("methods", "'rope'")),
        (("training", "--engine", "jax"), ("engine", "deepspeed")),
        (("training", "--methods", ","), ("methods",)),
        (("vision", "--methods", "alibbi"), ("methods", "'alibi'")),
        (("vision", "--model", "tinny"), ("model", "'tiny'")),
        (("dna", "--methods", "ropee"), ("methods", "'rope'")),
        (("dna-data", "--source", "yeast-chr1"), ("'yeast-chr01'",)),
        (("dna-data", "--tokenizers", "base"), ("'bases'",)),
        (("dna-data", "--lengths", "0"), ("context 0",)),
        (("plot", str(COMMITTED), "--show", "speed"), ("show", "memory")),
        (("plot", "none.json"), ("none.json",)),
    ],
)
def test_wrong_options_are_named(arguments, named):
    if arguments[0].startswith("dna"):
        pytest.importorskip("Bio")
    done = invoke(*arguments)
    assert done.exit_code == 2 and all(word in done.output for word in named), done.output


# ---- training


@pytest.mark.parametrize(("engine", "name"), [("torch", "plain torch"), ("deepspeed", "DeepSpeed ZeRO-0")])
def test_training(tmp_path, engine, name):
    options = ("--lengths", "16,8", "--tokens", "32", "--seconds", "0.01", "--datasheet-tflops", "2")
    record = recorded(tmp_path / "t.json", "training", "--engine", engine, "--methods", "rope,ggd_ssmax", *options)
    assert (record["engine"], record["model"], record["device"]) == (name, "tiny", "cpu")
    rows = record["results"]
    found = [(r["context"], r["batch"], r["method"]) for r in rows]
    assert found == [(c, 32 // c, m) for c in (8, 16) for m in ("rope", "ggd_ssmax")] and rows[0]["speed_ratio"] == 1
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(32e3 / row["ms"]) and row["rounds"] >= 3
        assert row["datasheet_mfu"] == pytest.approx(row["tflops"] / 2)
        rate = row["tokens_per_s"] * row["flops_per_token"] / 1e12
        assert row["mfu"] == pytest.approx(rate / record["matmul_tflops"])


def test_operations_are_those_torch_counts():
    """All matrix products of a forward pass as torch sees them, three times, with attention's cut to the visible pairs."""
    from torch.utils.flop_counter import FlopCounterMode

    from tools.benches import training

    context, model = 32, create_model("text_rope_tiny")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, context, dtype=torch.long), kernel="reference")
    counts = counter.get_flop_counts()["Global"]
    attention = sum(n for op, n in counts.items() if "bmm" in str(op))  # the oracle's products; layers are no batches
    assert attention > 0
    visible = attention * (context + 1) / (2 * context)
    expected = 3 * (counter.get_total_flops() - attention + visible) / context
    assert training.flops_per_token(model, context) == pytest.approx(expected, rel=1e-6)


def test_a_method_that_fails_is_named_and_the_others_are_measured(tmp_path, monkeypatch):
    from tools.benches import training

    def step(model, device):
        if "goat" in model.config.position:
            raise RuntimeError("no room")
        return made(model, device)

    made = training.TorchStep
    monkeypatch.setattr(training, "TorchStep", step)
    monkeypatch.setattr(training.importlib.util, "find_spec", lambda name: None)  # and without DeepSpeed
    out = tmp_path / "t.json"
    options = ("--lengths", "8", "--tokens", "16", "--seconds", "0.01", "--out", str(out))
    assert invoke("training", "--methods", "rope,goat", *options).exit_code == 1
    record = json.loads(out.read_text())
    assert [r["method"] for r in record["results"]] == ["rope"] and record["engine"] == "plain torch"
    assert "no room" in record["failed"]["goat"] and any("deepspeed" in note for note in record["notes"])


# ---- whole models, data


def test_vision(tmp_path):
    size = ("--model", "tiny", "--size", "16", "--memory-size", "32", "--seconds", "0.01", "--batch", "2")
    record = recorded(tmp_path / "v.json", "vision", "--methods", "nope,goat,ggd2d", *size)
    assert [(r["method"], r["what"]) for r in record["results"]] == [
        (method, what) for method in ("nope", "goat", "ggd2d") for what in harness.PASSES
    ]
    for r in record["results"]:
        assert r["ratio"] > 0 and r["pairs"] >= 3 and (r["batch"], r["tokens"]) == (2, 4)
        assert r["model"] == f"vision_{r['method']}_tiny_patch8"
    # Lanes need no table, so goat's memory is not measured.
    assert {r["method"] for r in record["results"] if r["attention_extra_mib"] is not None} == {"nope", "ggd2d"}


@pytest.mark.skipif(harness.Meter("cpu").peak_bytes is None, reason="reads /proc")
def test_memory_shows_a_matrix(monkeypatch):
    """The same attention by the oracle, which makes the whole matrix."""
    from tools.benches import vision

    ours = vision.attention_mib("vision_t5_tiny_patch8", 512, torch.float32)
    attention = vision.prior_attention
    monkeypatch.setattr(vision, "prior_attention", lambda *a, **k: attention(*a, **k, kernel="reference"))
    whole = vision.attention_mib("vision_t5_tiny_patch8", 512, torch.float32)
    assert whole > 3 * 4096**2 * 4 / 2**20 > 2 * ours


def test_dna(tmp_path, monkeypatch):
    pytest.importorskip("Bio")
    monkeypatch.setattr(harness, "in_fresh_process", lambda function, *arguments: function(*arguments))
    record = recorded(tmp_path / "d.json", "dna", "--model", "tiny", "--context", "32", "--seconds", "0.01")
    rope, goat = record["results"]
    assert (rope["method"], goat["method"], rope["peak_ratio"]) == ("rope", "goat", 1.0)
    assert {"attention", "MLP", "norms", "rotary"} <= rope["kept_bytes"].keys() and "rotary" not in goat["kept_bytes"]
    assert all(r["tokens_per_s"] > 0 and r["pairs"] >= 3 for r in record["results"])


def test_dna_data(tmp_path):
    pytest.importorskip("Bio")
    (tmp_path / "g.fa").write_text(">a\n" + "ACGTTgca" * 100 + "\n>b\n" + "CCGA" * 50 + "\n")
    words = ("--source", str(tmp_path / "g.fa"), "--tokenizers", "bases,kmer:3", "--lengths", "8,16", "--clock", "cpu")
    record = recorded(tmp_path / "d.json", "dna-data", *words, "--seconds", "0.001", "--micro-batch", "2")
    assert record["parsed"]["bases"] == 1000 and record["clock"] == "cpu"
    assert [(r["tokenizer"], r["context"], r["window"], r["soft_mask_weight"]) for r in record["results"]] == [
        (name, context, context * width, weight)
        for name, width in (("bases", 1), ("kmer:3", 3))
        for context in (8, 16)
        for weight in (1.0, 0.1)
    ]


def test_the_rate_of_reading_is_bases_over_time(monkeypatch):
    pytest.importorskip("Bio")
    from tools.benches import dna_data

    ticks = iter(range(100))
    monkeypatch.setitem(harness.CLOCKS, "wall", lambda: float(next(ticks)))
    found = dna_data.read(dna_data.DnaDataConfig(context=50), 4, 10.0, "wall")
    # The clock is read once before, after each batch, and at the end: 10 batches and 11 ticks.
    assert found["batches"] == 10 and found["bases_per_s"] == pytest.approx(10 * 4 * 50 / 11)
    ended = iter([3.0, 5.0])
    monkeypatch.setitem(harness.CLOCKS, "wall", lambda: 0.0)
    monkeypatch.setattr(dna_data, "processor_of_ended_children", lambda: next(ended))
    found = dna_data.read(dna_data.DnaDataConfig(context=50, num_workers=2), 4, 0.0, "cpu")
    assert found["batches"] == 1 and found["bases_per_s"] == pytest.approx(4 * 50 / 2.0 / 2)


# ---- the figure


def test_the_committed_record_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "new" / "attention.png"
    assert invoke("plot", str(COMMITTED), "--out", str(out)).exit_code == 0
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("show", ["ratio", "tflops"])
def test_panels_are_widths_by_passes(tmp_path, monkeypatch, show):
    pytest.importorskip("matplotlib")
    from tools.benches import plot

    rows = [
        {"shape": {"length": length, "width": width}, "method": method, "kernel": kernel, "what": what, "ratio": 2.0,
         "tflops": 3.0}
        for width in (64, 128) for what in ("forward", "fwd+bwd", "decode") for length in (1024, 8192)
        for method, kernel in (("none", "sdpa flash"), ("ggd", "triton"), ("ggd", "flex table"))
    ]  # fmt: skip
    about = {"device": "a GPU", "dtype": "bfloat16", "torch": "2", "threads": 1, "baseline": "sdpa flash"}
    source, seen = tmp_path / "attention.json", []
    monkeypatch.setattr(plot, "save_figure", lambda figure, path: seen.append((figure, path)))
    source.write_text(json.dumps(about | {"results": rows}))
    assert invoke("plot", str(source), "--show", show).exit_code == 0
    figure, path = seen[0]
    assert path.name == {"ratio": "attention.png", "tflops": "attention_tflops.png"}[show]
    titles = [axis.get_title() for axis in figure.axes]
    assert titles[:2] == ["forward, D = 64", "forward and backward, D = 64"] and len(titles) == 6
    names = {line.get_label() for line in figure.axes[0].get_lines() if not line.get_label().startswith("_")}
    # The baseline is the line at 1 of a ratio, and a curve of its own as a rate.
    assert names == {"ggd, triton", "ggd, flex table"} | ({"sdpa flash"} if show == "tflops" else set())
    source.write_text(json.dumps(about | {"results": [r for r in rows if r["shape"]["length"] == 1024]}))
    assert invoke("plot", str(source)).exit_code == 2


def test_ours_are_told_from_peers():
    from tools.benches.contenders import Ours, decoders_on, ours_on, peers_on
    from tools.benches.plot import is_ours

    cuda = torch.device("cuda")
    for contender in [*ours_on(cuda), *decoders_on(cuda), *peers_on(cuda), Ours("ggd", "toeplitz", None)]:
        assert is_ours(*contender.key) == contender.ours, contender.name
