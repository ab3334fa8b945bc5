"""tools/bench.py: the harness, whole models and data at a size too small to mean anything, the figure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tools import bench
from tools.benches import adapting, decoding, far, harness, models
from zoo import create_model

CPU = torch.device("cpu")
COMMITTED = Path(__file__).parents[2] / "benchmarks" / "cpu" / "attention.json"
reads_proc = pytest.mark.skipif(harness.Meter("cpu").peak_bytes is None, reason="reads /proc")


def invoke(name: str, *arguments: str):
    return CliRunner().invoke(bench.application(name), [name, *arguments])


BARE = """import runpy, sys
for missing in ("typer", "click", "rich", "deepspeed", "datasets", "matplotlib"):
    sys.modules[missing] = None
sys.argv = ["bench.py", *sys.argv[1:]]
runpy.run_path("tools/bench.py", run_name="__main__")"""


def bare(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A command where neither typer nor rich is installed, as on a GPU machine that has torch alone."""
    call = [sys.executable, "-c", BARE, *arguments]
    return subprocess.run(call, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=120)


def recorded(path: Path, *arguments: str) -> dict:
    """The record that a command writes; it must end with status 0."""
    done = invoke(*arguments, "--out", str(path))
    assert done.exit_code == 0, done.output
    record = json.loads(path.read_text())
    assert record["torch"] == torch.__version__ and record["threads"] == torch.get_num_threads() and record["results"]
    return record


def test_benchmarks_run_without_typer_and_rich(tmp_path: Path) -> None:
    options = ("--device", "cpu", "--model", "tiny", "--methods", "rope,nope", "--contexts", "16", "--tokens", "16")
    done = bare("training", *options, "--engine", "torch", "--seconds", "0.01", "--out", str(tmp_path / "t.json"))
    assert done.returncode == 0, done.stderr
    assert {row["method"] for row in json.loads((tmp_path / "t.json").read_text())["results"]} == {"rope", "nope"}
    head, rope = (done.stdout.splitlines()[n].split() for n in (1, 5))
    assert head[:4] == ["method", "pass", "ms", "tokens/s"] and rope[:2] == ["rope", "step"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "python tools/bench.py attention"),
        (("atention",), "no command 'atention'"),
        (("attention", "--lengths", "x"), "--lengths takes whole numbers above 0, such as 1024,4096; got 'x'"),
        (("attention", "--seconds", "x"), "invalid float value: 'x'"),
    ],
)
def test_without_typer_wrong_input_is_refused_too(arguments: tuple[str, ...], said: str) -> None:
    done = bare(*arguments)
    assert done.returncode == 2 and said in done.stdout + done.stderr and "Traceback" not in done.stderr


# ---- the harness


def test_a_run_cut_short_keeps_its_cells(tmp_path):
    def stop():
        raise KeyboardInterrupt

    record = harness.Record({}, out=tmp_path / "new" / "r.json", commit="abc")
    with pytest.raises(KeyboardInterrupt):
        record.measure([("a", "k", lambda: [{"n": 1}]), ("b", "k", stop)])
    assert json.loads(record.out.read_text())["results"] == [{"n": 1}]


def test_the_dearest_cells_are_dropped(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(harness.time, "perf_counter", lambda: now[0])
    record = harness.Record({}, commit="abc", minutes=1)
    cells = [(name, "k", lambda n=name: now.__setitem__(0, now[0] + 19.9) or [{"n": n}]) for name in "abc"]
    record.measure(cells)  # the second starts, for twice 19.9 seconds fit; the third does not
    assert [row["n"] for row in record.results] == ["a", "b"] and record.dropped == ["c"]


def test_an_exception_is_one_contenders():
    record = harness.Record({}, commit="abc")
    for name, error in (("a", harness.Refused("too wide")), ("b", ValueError("\nno cube")), ("c", None)):
        with record.guard(name, "n=1"):
            if error:
                raise error
    assert record.left_out == {"a at n=1": "too wide"} and record.failed == {"b": "n=1: ValueError: no cube"}


def test_a_ratio_is_the_median_over_rounds():
    rounds = harness.Rounds([{"a": 1.0, "b": 2.0}, {"a": 2.0, "b": 4.0}, {"a": 1.0, "b": 9.0}])
    assert rounds.ratio("b", "a") == 2.0 and rounds.ratio("a", "b") == 0.5 and rounds.ms("b") == 4.0
    order: list[str] = []
    runs = {name: lambda name=name: order.append(name) for name in "ab"}
    rounds = harness.in_turns(runs, 0.0, lambda run: run() or 1.0)
    assert len(rounds.rows) == 3 and order == list("ab" * 4)  # a warm-up and three rounds


@reads_proc
def test_what_is_returned_is_not_extra_memory():
    size = 64 * 2**20
    assert abs(harness.extra_bytes(lambda: torch.ones(size // 4), CPU)) < size / 4
    assert harness.extra_bytes(lambda: torch.ones(size // 4).sum(), CPU) > size / 2


@pytest.mark.slow
def test_a_fresh_process_is_another():
    assert harness.in_fresh_process(os.getpid) != os.getpid()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("attention", "--device", "tpu"), ("device", "tpu")),
        (("attention", "--device", "cuda"), ("cuda",)),
        (("attention", "--lengths", "1k"), ("lengths", "1k")),
        (("training", "--model", "tinny"), ("model", "'tiny'")),
        (("training", "--methods", "roper"), ("methods", "'rope'")),
        (("training", "--engine", "jax"), ("engine", "deepspeed")),
        (("training", "--methods", ","), ("methods",)),
        (("vision", "--methods", "alibbi"), ("methods", "'alibi'")),
        (("dna", "--methods", "ropee"), ("methods", "'rope'")),
        (("dna-data", "--source", "yeast-chr1"), ("'yeast-chr01'",)),
        (("dna-data", "--tokenizers", "base"), ("'bases'",)),
        (("plot", "none.json"), ("none.json",)),
    ],
)
def test_wrong_options_are_named(arguments, named):
    if arguments[0].startswith("dna"):
        pytest.importorskip("Bio")
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    done = invoke(*arguments)
    assert done.exit_code == 2 and all(word in done.output for word in named), done.output


# ---- heads that forget


@pytest.mark.slow
def test_a_head_that_forgets_leaves_keys_out(tmp_path):
    words = ("far", "--lengths", "4096", "--distances", "8", "--heads", "1", "--without", "flex", "--memory", "0")
    record = recorded(tmp_path / "far.json", *words, "--seconds", "0.01")
    found = {(row["kernel"], row["what"]): row for row in record["results"]}
    assert list(found) == [(kernel, what) for what in harness.PASSES for kernel in ("sdpa", "all keys", "auto")]
    assert {row["heads"] for row in record["results"]} == {"none", "half every 8"}
    assert all(found["auto", what]["skipped"] > 0.6 for what in harness.PASSES)
    assert all(row["mib"] is None for row in record["results"])
    assert record["left_out"] == {"ggd, flex": "left out by --without"}


@pytest.mark.slow
def test_a_head_that_forgets_needs_no_matrix():
    """Gradients of q, k, v and the output have 4 MiB, a matrix 64."""
    mib = harness.in_fresh_process(far.added_mib, [8], 3, 4096, 1, True)
    assert mib is None or 3 < mib < 32


def test_what_would_take_too_long_is_left_out(tmp_path):
    words = ("far", "--lengths", "256,512", "--distances", "8", "--heads", "1", "--without", "flex", "--limit", "1e-9")
    record = recorded(tmp_path / "far.json", *words, "--seconds", "0.01")
    assert {row["length"] for row in record["results"]} == {256}
    assert "sdpa at 512 forward" in record["left_out"]


def test_heads_that_forget_are_expected_to_take_time_by_length_and_others_by_its_square():
    assert far.Took(1024, 2.0, True).at(4096) == 8.0 and far.Took(1024, 2.0, False).at(4096) == 32.0


def test_reading_compares_trained_models_with_and_without_all_keys(tmp_path):
    words = (
        "reading",
        "--models",
        "text_alibi_tiny.facts",
        "--lengths",
        "100,4500",
        "--steps",
        "100",
        "--seconds",
        "0.01",
    )
    record = recorded(tmp_path / "reading.json", *words)
    found = {(row["length"], row["what"], row["kernel"]): row for row in record["results"]}
    passes = [(100, "read"), (100, "attention"), (100, "attention, fwd+bwd"), (4500, "read"), (4500, "attention")]
    assert list(found) == [(*one, kernel) for one in passes for kernel in ("all keys", "auto")]
    assert all(row["ratio"] == 1 for (*_, kernel), row in found.items() if kernel == "all keys")
    (reason,) = record["left_out"].values()
    assert "up to 100 tokens" in reason


def test_decoding_holds_what_it_says(tmp_path):
    pytest.importorskip("transformers")
    words = ("decoding", "--models", "text_alibi_tiny.facts", "--lengths", "300,700", "--seconds", "0.01")
    record = recorded(tmp_path / "decoding.json", *words)
    found = {(row["length"], row["cache"]): row for row in record["results"]}
    assert list(found) == [(n, cache) for n in (300, 700) for cache in ("dynamic", "dense", "paged")]
    assert found[300, "dynamic"]["ratio"] == 1 and found[700, "dynamic"]["mib"] == 700 * 128 * 4 * 2 * 4 / 2**20
    assert found[700, "dense"]["pages"] is None and 0 < found[700, "paged"]["pages"] < 1


@torch.inference_mode()
def test_a_cache_filled_in_no_time_decodes_alike_dense_and_paged():
    model = create_model("text_alibi_tiny.facts").eval()
    dense, paged = (decoding.token(model, decoding.filled(model, 900, kind)) for kind in decoding.CACHES)
    torch.testing.assert_close(paged, dense, atol=1e-4, rtol=0)
    assert not torch.allclose(decoding.token(model, decoding.filled(model, 300, "dense")), dense, atol=1e-2)


# ---- models


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "name"), [("torch", "plain torch"), ("deepspeed", "DeepSpeed ZeRO-0")])
def test_training(tmp_path, engine, name):
    if engine == "deepspeed":
        pytest.importorskip("deepspeed")
    options = ("--contexts", "16,8", "--tokens", "32", "--seconds", "0.01", "--device", "cpu")
    record = recorded(tmp_path / "t.json", "training", "--engine", engine, "--methods", "rope,ggd_ssmax", *options)
    assert (record["engine"], record["model"], record["device"]) == (name, "tiny", "cpu")
    rows = record["results"]
    cells = [(f"{32 // c} × {c} tokens", m) for c in (8, 16) for m in ("rope", "ggd_ssmax")]
    assert [(r["cell"], r["method"]) for r in rows] == cells and rows[0]["speed_ratio"] == 1
    for row in rows:
        assert row["units_per_s"] == pytest.approx(32e3 / row["ms"]) and row["pairs"] >= 3
        rate = row["units_per_s"] * row["flops_per_token"] / 1e12
        assert row["tflops"] == pytest.approx(rate) and row["mfu"] == pytest.approx(rate / record["matmul_tflops"])


def test_operations_are_those_torch_counts():
    """All matrix products of a forward pass as torch sees them, three times, with attention's cut to the visible pairs."""
    from torch.utils.flop_counter import FlopCounterMode

    context, model = 32, create_model("text_rope_tiny")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, context, dtype=torch.long), kernel="reference")
    counts = counter.get_flop_counts()["Global"]
    attention = sum(n for op, n in counts.items() if "bmm" in str(op))  # the oracle's products; layers are no batches
    assert attention > 0
    visible = attention * (context + 1) / (2 * context)
    expected = 3 * (counter.get_total_flops() - attention + visible) / context
    assert models.flops_per_token(model, context) == pytest.approx(expected, rel=1e-6)


def test_a_method_that_fails_is_named_and_the_others_are_measured():
    def fail():
        raise RuntimeError("no room")

    record = harness.Record({"matmul_tflops": 1.0}, commit="abc")
    makers = {"rope": lambda: models.Subject({"step": lambda: None}, 4, peak_bytes=2), "goat": fail}
    (row,) = models.compare(record, makers, "4 tokens", 0.0, CPU)
    assert (row["method"], row["ratio"], row["peak_ratio"], row["mfu"]) == ("rope", 1.0, 1.0, None)
    assert record.failed == {"goat": "4 tokens: RuntimeError: no room"}


@pytest.mark.slow
def test_vision(tmp_path):
    size = ("--model", "tiny", "--size", "16", "--memory-size", "32", "--seconds", "0.01", "--batch", "2")
    record = recorded(tmp_path / "v.json", "vision", "--methods", "goat,ggd2d", *size)
    found = [(r["what"], r["method"]) for r in record["results"]]
    assert found == [(what, method) for what in harness.PASSES for method in ("nope", "goat", "ggd2d")]
    assert all(r["ratio"] > 0 and r["pairs"] >= 3 and r["tokens"] == 4 for r in record["results"])
    # Lanes need no table, so goat's memory is not measured.
    assert {r["method"] for r in record["results"] if r["peak_bytes"] is not None} == {"nope", "ggd2d"}


def test_a_prior_without_parameters_makes_its_table_where_the_image_is():
    """As on CUDA; elsewhere attention refuses it."""
    model = create_model("vision_alibi_tiny_patch8", num_layers=1).to("meta")
    models.attention_bytes(model, 64, torch.device("meta"), torch.float32)


@reads_proc
@pytest.mark.slow
def test_memory_shows_a_matrix(monkeypatch):
    """The same attention by the oracle, which makes the whole matrix."""
    model, attention = create_model("vision_t5_tiny_patch8"), models.prior_attention
    ours = models.attention_bytes(model, 512, torch.device("cpu"), torch.float32)
    monkeypatch.setattr(models, "prior_attention", lambda *a, **k: attention(*a, **k, kernel="reference"))
    assert models.attention_bytes(model, 512, torch.device("cpu"), torch.float32) > 3 * 4096**2 * 4 > 2 * ours


@pytest.mark.slow
def test_dna(tmp_path):
    pytest.importorskip("Bio")
    record = recorded(tmp_path / "d.json", "dna", "--model", "tiny", "--context", "32", "--seconds", "0.01")
    rope, goat = record["results"]
    assert (rope["model"], goat["model"], rope["peak_ratio"]) == ("dna_rope_tiny", "dna_goat_tiny", 1.0)
    assert all(r["units_per_s"] == pytest.approx(32e3 / r["ms"]) for r in (rope, goat))


def test_dna_data(tmp_path):
    pytest.importorskip("Bio")
    (tmp_path / "g.fa").write_text(">a\n" + "ACGTTgca" * 100 + "\n>b\n" + "CCGA" * 50 + "\n")
    options = ("--tokenizers", "bases,kmer:3", "--lengths", "8,16", "--seconds", "0.001")
    record = recorded(tmp_path / "d.json", "dna-data", "--source", str(tmp_path / "g.fa"), *options)
    assert record["parsed"]["bases"] == 1000 and all(r["bases_per_s"] > 0 for r in record["results"])
    assert [(r["tokenizer"], r["context"], r["window"]) for r in record["results"]] == [
        (name, context, context * width) for name, width in (("bases", 1), ("kmer:3", 3)) for context in (8, 16)
    ]


# ---- the figure


@pytest.mark.slow
def test_the_committed_record_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "new" / "attention.png"
    assert invoke("plot", str(COMMITTED), "--out", str(out)).exit_code == 0
    assert out.read_bytes().startswith(b"\x89PNG")


def test_panels_are_widths_by_passes(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from tools.benches import plot

    rows = [
        {"shape": {"length": length, "width": width}, "method": method, "kernel": kernel, "what": what, "ratio": 2.0}
        for width in (64, 128) for what in ("forward", "fwd+bwd", "decode") for length in (1024, 8192)
        for method, kernel in (("none", "sdpa flash"), ("ggd", "triton"), ("ggd", "flex table"))
    ]  # fmt: skip
    about = {"device": "a GPU", "dtype": "bfloat16", "torch": "2", "threads": 1}
    source, seen = tmp_path / "attention.json", []
    monkeypatch.setattr(plot, "save_figure", lambda figure, path: seen.append((figure, path)))
    source.write_text(json.dumps(about | {"results": rows}))
    assert invoke("plot", str(source)).exit_code == 0
    figure, path = seen[0]
    assert path == tmp_path / "attention.png"
    titles = [axis.get_title() for axis in figure.axes]
    assert titles[:2] == ["forward, D = 64", "forward and backward, D = 64"] and len(titles) == 6
    names = {line.get_label() for line in figure.axes[0].get_lines() if not line.get_label().startswith("_")}
    assert names == {"ggd, triton", "ggd, flex table"}  # the baseline is the line at 1
    source.write_text(json.dumps(about | {"results": [r for r in rows if r["shape"]["length"] == 1024]}))
    assert invoke("plot", str(source)).exit_code == 2


def test_adapting_times_a_model_beside_itself(tmp_path):
    words = (
        "adapting",
        "--positions",
        "nope,ggd",
        "--lengths",
        "48,96",
        "--dim",
        "64",
        "--layers",
        "1",
        "--seconds",
        "0.01",
    )
    record = recorded(tmp_path / "adapting.json", *words)
    found = {(row["length"], row["work"], row["position"]) for row in record["results"]}
    assert found == {(n, w, p) for n in (48, 96) for w in adapting.WORK for p in (adapting.PLAIN, "nope", "ggd")}
    assert all(row["ratio"] == 1 for row in record["results"] if row["position"] == adapting.PLAIN)
    model = adapting.adapted(adapting.llama(64, 1), "ggd")
    tokens = torch.arange(20)[None]
    step, plain = adapting.next_token(model, tokens), model(tokens, use_cache=False).logits
    step()
    step()  # the token that it read before is dropped again
    assert torch.equal(model(tokens, use_cache=False).logits, plain)
