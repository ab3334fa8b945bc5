"""tools/bench_attention.py at lengths too short to mean anything: it checks, measures, judges, and says what is missing."""

from __future__ import annotations

import json
import math
import time

import pytest
import torch
from typer.testing import CliRunner

from tools import bench_attention as bench
from tools.benches import kit as bench_kit
from tools.benches import ours as bench_ours
from tools.benches import peers as bench_peers
from tools.benches import problem as bench_problem
from tools.benches import sweep as bench_sweep
from tools.benches.kit import Shape

CPU = torch.device("cpu")


def invoke(*arguments: str):
    app = bench.typer.Typer()
    app.command()(bench.main)
    return CliRunner().invoke(app, list(arguments))


def swept(contenders, shape: Shape, **options) -> bench_sweep.Sweep:
    """Check at a short shape of the same width, and measure."""
    sweep = bench_sweep.Sweep(CPU, torch.float32, bench_kit.by_clock(time.perf_counter), 0.01, meter=False, **options)
    short = Shape(1, shape.heads, 48, shape.width, queries=shape.queries)
    able = sweep.right(sweep.able(contenders), [short])
    sweep.measure(shape, able)
    return sweep


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setitem(bench.CHECK_LENGTH, "cpu", 48)
    monkeypatch.setattr(bench, "TRAINING", Shape(1, 2, 32, 16))
    monkeypatch.setitem(bench.QUICK_LENGTHS, "cpu", "48,64")


class Wrong(bench_peers.Sdpa):
    """Plain attention with its last row lost."""

    def prepare(self, problem):
        run = super().prepare(problem)
        right = run.forward
        run.forward = lambda: torch.cat([right()[:, :, :-1], right()[:, :, -1:] * 0], dim=2)
        return run


class Broken(bench_peers.Sdpa):
    def prepare(self, problem):
        raise RuntimeError("no such instruction")


def named(contender, kernel: str, ours: bool = False):
    contender.kernel, contender.ours = kernel, ours
    return contender


def test_the_command_saves_what_it_prints(tmp_path):
    out = tmp_path / "bench.json"
    done = invoke(
        "--quick", "--seconds", "0.01", "--decode", "64", "--minutes", "5", "--commit", "abc", "--out", str(out)
    )
    assert done.exit_code == 0, done.output
    record = json.loads(out.read_text())
    assert record["torch"] == torch.__version__ and record["commit"] == "abc" and record["baseline"] == "sdpa"
    assert record["dtype"] == "float32" and record["clock"] == "wall" and record["matmul_tflops"] > 0
    found = {(r["shape"]["length"], r["method"], r["kernel"], r["what"]) for r in record["results"]}
    for length in (48, 64):
        for what in ("forward", "fwd+bwd"):
            for key in (("none", "sdpa"), ("goat", "sdpa"), ("ggd", "toeplitz"), ("ggd", "sdpa dense bias")):
                assert (length, *key, what) in found
    assert (64, "ggd", "gathered paged", "decode") in found and (32, "ggd+ssmax", "toeplitz", "fwd+bwd") in found
    assert all(r["ratio"] > 0 and r["ms"] > 0 and r["tflops"] > 0 and r["pairs"] >= 3 for r in record["results"])
    # No peer is silently missing: each is measured, or its reason is in the record and below the table.
    for peer in bench_peers.peers_on(CPU):
        missing = record["left_out"].get(peer.name)
        assert missing or any((r["method"], r["kernel"]) == peer.key for r in record["results"]), peer.name
        assert missing is None or peer.name in " ".join(done.output.split())
    assert record["left_out"]["ggd, flex table"].startswith("left out by --quick")
    assert record["wrong"] == {} and record["failed"] == {} and record["dropped"] == []


def test_options_leave_out_by_name(tmp_path):
    out = tmp_path / "bench.json"
    done = invoke(
        "--quick", "--seconds", "0.01", "--no-peers", "--without", "goat", "--lengths", "32", "--out", str(out)
    )
    assert done.exit_code == 0, done.output
    record = json.loads(out.read_text())
    assert {r["method"] for r in record["results"]} == {"none", "ggd", "ggd+ssmax"}
    assert record["left_out"]["ours: goat, auto"] == "left out by --without"
    assert record["left_out"]["ggd, sdpa dense bias"] == "left out by --no-peers"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--clock", "sun"), "--clock must be wall or cpu"),
        (("--dtype", "int8"), "--dtype must be float32"),
        (("--device", "tpu"), "--device must be auto, cuda or cpu"),
        (("--device", "cuda"), "torch sees no CUDA device"),
        (("--lengths", "1k"), "--lengths takes whole numbers"),
    ],
)
def test_bad_options_are_named(option, message):
    done = invoke(*option)
    assert done.exit_code == 2 and message in " ".join(done.output.replace("│", " ").split())


@pytest.mark.parametrize(
    "contender",
    [*bench_ours.ours_on(CPU), bench_ours.scaled_ggd(), bench_peers.Sdpa(), bench_peers.DenseBias()]
    + [
        bench_problem.Ours(prior.__name__, "auto", prior, gradient=gradient)
        for prior, gradient in ((bench_peers.ggd, "law"), (bench_peers.alibi, "none"), (bench_peers.cable, "given"))
    ],
    ids=lambda c: f"{c.name} {getattr(c, 'gradient', '')}",
)
def test_contenders_agree_with_float64(contender):
    """In float64 to rounding, so that the check compares the same function and not one like it."""
    problem = bench_problem.Problem(Shape(2, 4, 40, 32), torch.float64)
    verdict = bench_problem.check(contender, problem, backward=True)
    assert verdict.right and verdict.error < 1e-6 and verdict.deterministic


@pytest.mark.parametrize("contender", [*bench_ours.decoders_on(CPU), bench_ours.Paged("triton")], ids=lambda c: c.name)
def test_decoding_agrees_with_float64(contender):
    problem = bench_problem.Problem(Shape(1, 4, 200, 32, queries=1), torch.float32)
    assert bench_problem.check(contender, problem, backward=False).error < 1e-5


def test_pages_of_decaying_heads_are_dropped():
    """Three heads of twelve look away and keep all; the reported share is that of the pages gone."""
    run = bench_ours.Paged("gathered").prepare(bench_problem.Problem(Shape(1, 12, 2048, 16, queries=1), torch.float32))
    assert run.skipped is not None and 0.1 < run.skipped() < 9 / 12


def test_a_wrong_kernel_is_reported_and_not_timed():
    shape = Shape(1, 2, 64, 16)
    sweep = swept([bench_peers.Sdpa(), named(Wrong(), "lost", ours=True)], shape)
    assert "output is off by 1" in sweep.findings.wrong["ours: lost"]
    assert {r.kernel for r in sweep.findings.results} == {"sdpa"} and sweep.findings.ours_fail
    assert any(line.startswith("WRONG, not timed: ours: lost") for line in bench_sweep.footnotes(sweep.findings))


def test_a_missing_gradient_is_wrong():
    class Forgetful(bench_peers.Sdpa):
        """Right forward; backward knows queries alone, and those wrongly."""

        def prepare(self, problem):
            run = super().prepare(problem)
            right = run.forward
            run.forward = lambda: right().detach() + 0 * run.leaves["q"]
            return run

    verdict = bench_problem.check(Forgetful(), bench_problem.Problem(Shape(1, 2, 40, 16), torch.float32), backward=True)
    assert not verdict.right and verdict.error == math.inf and verdict.worst.startswith("gradient of")


def test_a_contender_that_raises_does_not_end_the_run():
    sweep = swept([bench_peers.Sdpa(), named(Broken(), "broken")], Shape(1, 2, 64, 16))
    assert "RuntimeError: no such instruction" in sweep.findings.failed["broken"]
    assert {r.kernel for r in sweep.findings.results} == {"sdpa"} and not sweep.findings.ours_fail


def test_a_run_cut_short_leaves_what_it_found(tmp_path, monkeypatch):
    """The record is written after each shape."""
    measure, shapes = bench_sweep.Sweep.measure, []

    def stop_at_the_second(self, shape, contenders):
        shapes.append(shape)
        if len(shapes) == 2:
            raise KeyboardInterrupt
        return measure(self, shape, contenders)

    monkeypatch.setattr(bench_sweep.Sweep, "measure", stop_at_the_second)
    out = tmp_path / "bench.json"
    assert invoke("--quick", "--seconds", "0.01", "--no-peers", "--out", str(out)).exit_code != 0
    assert {r["shape"]["length"] for r in json.loads(out.read_text())["results"]} == {48}


def test_promises_are_judged_from_the_rounds_of_the_run(monkeypatch):
    """Times as if the second took twice the first, and the third half of it."""
    a, b, c = (named(bench_peers.Sdpa(), kernel, ours=True) for kernel in "abc")
    promises = [
        bench_sweep.Promise("b slow", b.key, None, ("forward",), most=1.5, shortest=1),
        bench_sweep.Promise("c fast", c.key, b.key, ("forward",), least=3.9, shortest=1),
        bench_sweep.Promise("long only", c.key, b.key, ("forward",), least=3.9, shortest=128),
    ]
    rounds = [[1.0, 2.0, 0.5], [2.0, 4.0, 1.0], [1.0, 9.0, 0.5]]
    monkeypatch.setattr(bench_sweep, "in_turns", lambda runs, *_: [row[: len(runs)] for row in rounds])
    sweep = swept([a, b, c], Shape(1, 2, 64, 16), promises=promises)
    assert [(j.name, j.value, j.met) for j in sweep.findings.judgements] == [
        ("b slow", 2.0, False),
        ("c fast", 4.0, True),
    ]
    forward = {r.kernel: r for r in sweep.findings.results if r.what == "forward"}
    assert (forward["b"].ratio, forward["b"].target, forward["c"].ms) == (2.0, 1.5, 0.5)


def test_memory_that_grows_with_the_square_is_found():
    def result(kernel: str, length: int, mib: float):
        return bench_kit.Result(Shape(1, 4, length, 64), "ggd", kernel, "forward", 1, 1, 1, None, 3, extra_mib=mib)

    findings = bench_sweep.Findings()
    findings.results = [result("triton", 8192, 2), result("triton", 32768, 8)]
    findings.results += [result("triton table", 8192, 2), result("triton table", 32768, 32)]
    bench_ours.judge_memory(findings)
    assert [(j.value, j.met) for j in findings.judgements] == [(1.0, True), (4.0, False)]


def test_a_budget_drops_the_longest_shapes(monkeypatch):
    now = [0.0]
    budget = bench_kit.Budget(1.0, clock=lambda: now[0])
    assert budget.allows("a")
    now[0] = 20.0
    assert budget.allows("a")  # twice 20 seconds fit
    now[0] = 41.0
    assert not budget.allows("a") and budget.allows("b")

    out_of_time = bench_kit.Budget(1.0, clock=lambda: now[0])
    sweep = bench_sweep.Sweep(CPU, torch.float32, bench_kit.by_clock(time.perf_counter), 0.01, meter=False)
    monkeypatch.setattr(sweep, "measure", lambda *_: now.__setitem__(0, now[0] + 25))
    shapes = [Shape(1, 2, length, 16) for length in (64, 16, 32)]
    with bench.Progress() as progress:
        sweep.run(shapes, [bench_peers.Sdpa()], out_of_time, progress, "attention")
    assert sweep.findings.dropped == [f"{shapes[n]} (out of time)" for n in (2, 0)]
    assert any(line.startswith("dropped: B1 H2 L32") for line in bench_sweep.footnotes(sweep.findings))


def test_operations_are_those_of_the_visible_pairs():
    assert Shape(2, 3, 8, 16).flops(False) == 4 * 2 * 3 * 16 * (8 * 9 / 2)
    assert Shape(1, 1, 8, 16, queries=1).flops(False) == 4 * 16 * 8
    assert Shape(1, 1, 8, 16).flops(True) == 3.5 * Shape(1, 1, 8, 16).flops(False)


def test_shapes_on_cuda_keep_to_their_memory():
    shapes = bench_ours.shapes_on_cuda([1024, 16384, 131072], [64, 128], 64, 2**20)
    assert [(s.batch, s.heads, s.length) for s in shapes[::2]] == [(4, 16, 1024), (4, 16, 16384), (1, 8, 131072)]
    assert {s.width for s in shapes} == {64, 128}


def test_everything_is_named_once_on_cuda():
    """What a GPU would run can be listed without one, and every promise is about contenders that there are."""
    cuda = torch.device("cuda")
    every = [*bench_peers.peers_on(cuda), *bench_ours.ours_on(cuda), *bench_ours.decoders_on(cuda)]
    keys = {c.key for c in every}
    for group in (bench_ours.ours_on(cuda), bench_ours.decoders_on(cuda)):
        ours = [c.key for c in [*bench_peers.peers_on(cuda), *group]]
        assert len(ours) == len(set(ours))
    assert all(p.ours in keys and (p.theirs is None or p.theirs in keys) for p in bench_ours.PROMISES)


def test_targets_are_those_of_long_sequences():
    assert bench.cpu_target(Shape(1, 2, 8192, 64), "ggd", "forward") == 1.35
    assert bench.cpu_target(Shape(1, 2, 4096, 64), "ggd", "fwd+bwd") == 2.0
    assert bench.cpu_target(Shape(32, 4, 128, 32), "goat", "forward") is None


def test_the_fused_kernel_is_a_contender(monkeypatch):
    """Triton's interpreter runs what CUDA would: skipping tiles, gradients of the law's numbers. One of six is skipped."""
    pytest.importorskip("triton")
    from zoo.attention import triton
    from zoo.attention.triton import common

    monkeypatch.setattr(common, "TILE", 16)
    monkeypatch.setattr(triton, "LEAST_KEYS", 32)
    contender = next(c for c in bench_ours.ours_on(torch.device("cuda")) if c.key == bench_ours.SKIPPING)
    monkeypatch.setattr(contender, "make", lambda heads: steep(bench_peers.ggd(heads)))
    problem = bench_problem.Problem(Shape(1, 1, 48, 16), torch.float32)
    assert contender.available(CPU) is None and contender.refuses(problem) is None
    verdict = bench_problem.check(contender, problem, backward=True)
    assert verdict.right and verdict.error < 1e-5 and verdict.deterministic
    share = contender.prepare(problem).skipped
    assert share is not None and share() == pytest.approx(1 / 6)


def steep(prior):
    """A slope so steep that 17 positions away nothing counts, and not so steep that gradients vanish."""
    with torch.no_grad():
        prior.theta_alpha.fill_(math.log(3))
    return prior
