"""`bench.py attention` at lengths too short to mean anything: it checks, measures, judges, and names what is missing."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from tools import bench
from tools.benches import attention, contenders
from tools.benches.contenders import DenseBias, Ours, Paged, Problem, Sdpa, Shape
from tools.benches.harness import Cell, Findings, Rounds
from tools.benches.oracle import check

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPE = Shape(1, 2, 64, 16)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setitem(attention.DEFAULTS, "cpu", replace(attention.DEFAULTS["cpu"], quick="48,64", check=48))
    monkeypatch.setattr(attention, "TRAINING", Shape(1, 2, 32, 16))


def recorded(out, *options: str) -> dict:
    words = ["attention", "--quick", "--seconds", "0.01", "--out", str(out), *options]
    done = CliRunner().invoke(bench.application("attention"), words)
    assert done.exit_code == 0, done.output
    return json.loads(out.read_text()) | {"output": " ".join(done.output.split())}


def swept(*kernels) -> attention.Attention:
    """Check and measure contenders at SHAPE; the first is the baseline."""
    sweep = attention.Attention(attention.AttentionSettings(seconds=0.01))
    usable = sweep.correct(sweep.usable(kernels), [Shape(1, 2, 48, 16)])
    sweep.findings.results += sweep.measure(Cell(str(SHAPE), "attention", (SHAPE, usable)))
    return sweep


def named(contender, kernel: str, ours: bool = False):
    contender.kernel, contender.ours = kernel, ours
    return contender


class Wrong(Sdpa):
    """Plain attention with its last row lost."""

    def prepare(self, problem):
        run = super().prepare(problem)
        whole = run.forward
        run.forward = lambda: torch.cat([whole()[:, :, :-1], whole()[:, :, -1:] * 0], dim=2)
        return run


class WithoutGradients(Sdpa):
    """Forward as it should be; backward computes a gradient of the queries alone, and that is 0."""

    def prepare(self, problem):
        run = super().prepare(problem)
        whole = run.forward
        run.forward = lambda: whole().detach() + 0 * run.leaves["q"]
        return run


class Broken(Sdpa):
    def prepare(self, problem):
        raise RuntimeError("no such instruction")


def test_the_command_saves_what_it_prints(tmp_path):
    record = recorded(tmp_path / "a.json", "--decode", "64", "--minutes", "5", "--commit", "abc")
    assert (record["commit"], record["baseline"], record["dtype"], record["clock"]) == (
        "abc",
        "sdpa",
        "float32",
        "wall",
    )
    found = {(r["shape"]["length"], r["method"], r["kernel"], r["what"]) for r in record["results"]}
    for length in (48, 64):
        for what in ("forward", "fwd+bwd"):
            for key in (("none", "sdpa"), ("goat", "sdpa"), ("ggd", "toeplitz"), ("ggd", "sdpa dense bias")):
                assert (length, *key, what) in found
    assert (64, "ggd", "gathered paged", "decode") in found and (32, "ggd+ssmax", "toeplitz", "fwd+bwd") in found
    assert all(r["ratio"] > 0 and r["ms"] > 0 and r["tflops"] > 0 and r["pairs"] >= 3 for r in record["results"])
    # No peer is silently missing: each is measured, or its reason is in the record and below the table.
    for peer in contenders.peers_on(CPU):
        missing = record["left_out"].get(peer.name)
        assert missing or any((r["method"], r["kernel"]) == peer.key for r in record["results"]), peer.name
        assert missing is None or peer.name in record["output"]
    assert record["wrong"] == record["failed"] == {} and record["dropped"] == []


def test_options_leave_out_by_name(tmp_path):
    options = ("--no-peers", "--without", "goat", "--lengths", "32")
    record = recorded(tmp_path / "a.json", *options)
    assert {r["method"] for r in record["results"]} == {"none", "ggd", "ggd+ssmax"}
    assert "--without" in record["left_out"]["ours: goat, auto"]
    assert "--no-peers" in record["left_out"]["ggd, sdpa dense bias"]
    record = recorded(tmp_path / "b.json", "--methods", "goat", "--lengths", "32")
    assert {r["method"] for r in record["results"]} == {"none", "goat"}


@pytest.mark.parametrize(
    "contender",
    [*contenders.ours_on(CPU), contenders.scaled_ggd(), Sdpa(), DenseBias()]
    + [
        Ours(prior.__name__, "auto", prior, gradient=gradient)
        for prior, gradient in ((contenders.ggd, "law"), (contenders.alibi, "none"), (contenders.cable, "given"))
    ],
    ids=lambda c: f"{c.name} {getattr(c, 'gradient', '')}",
)
def test_contenders_agree_with_float64(contender):
    """In float64 to rounding, so that the check compares the same function and not one like it."""
    verdict = check(contender, Problem(Shape(2, 4, 40, 32), torch.float64), backward=True)
    assert verdict.correct and verdict.error < 1e-6 and verdict.deterministic


@pytest.mark.parametrize("contender", [*contenders.decoders_on(CPU), Paged("triton")], ids=lambda c: c.name)
def test_decoding_agrees_with_float64(contender):
    problem = Problem(Shape(1, 4, 200, 32, queries=1), torch.float32)
    assert check(contender, problem, backward=False).error < 1e-5


def test_wrong_and_broken_contenders_are_reported_and_not_timed():
    baseline = attention.Attention(attention.AttentionSettings()).baseline
    sweep = swept(baseline, named(Wrong(), "lost", ours=True), named(Broken(), "broken"))
    assert sweep.findings.wrong["ours: lost"].startswith("output") and sweep.failed()
    assert "no such instruction" in sweep.findings.failed["broken"]
    assert {r["kernel"] for r in sweep.findings.results} == {"sdpa"}
    assert any("ours: lost" in line for line in sweep.findings.footnotes())
    assert not swept(baseline, named(Broken(), "broken")).failed()  # a peer's failure is not ours


def test_a_missing_gradient_is_wrong():
    verdict = check(WithoutGradients(), Problem(Shape(1, 2, 40, 16), torch.float32), backward=True)
    assert not verdict.correct and verdict.error == math.inf and verdict.worst.startswith("gradient of")


def test_promises_are_judged_from_the_rounds_of_the_run():
    """The second takes twice the first, and the third half of it."""
    a, b, c = ((("none", kernel)) for kernel in "abc")
    sweep = attention.Attention(attention.AttentionSettings())
    sweep.on_cuda, sweep.baseline = True, named(Sdpa(), "a")
    sweep.promises = [
        attention.Promise("b slow", b, None, ("forward",), most=1.5, shortest=1),
        attention.Promise("c fast", c, b, ("forward",), least=3.9, shortest=1),
        attention.Promise("long only", c, b, ("forward",), least=3.9, shortest=128),
    ]
    sweep.judge(SHAPE, "forward", Rounds([{a: x, b: y, c: x / 2} for x, y in ((1.0, 2.0), (2.0, 4.0), (1.0, 9.0))]))
    found = [(name.split(",")[0], j["value"], j["met"]) for name, j in sweep.findings.judgements.items()]
    assert found == [("b slow", 2.0, False), ("c fast", 4.0, True)]
    assert sweep.target(named(Sdpa(), "b"), SHAPE, "forward") == 1.5


def test_memory_that_grows_with_the_square_is_found():
    findings = Findings()
    for kernel, length, mib in (("triton", 8192, 2), ("triton", 32768, 8), ("triton table", 8192, 2),
                                ("triton table", 32768, 32)):  # fmt: skip
        shape = {"batch": 1, "heads": 4, "length": length, "width": 64, "queries": 0}
        row = {"shape": shape, "method": "ggd", "kernel": kernel, "what": "forward", "extra_mib": mib}
        findings.results.append(row)
    attention.judge_memory(findings)
    assert [(j["value"], j["met"]) for j in findings.judgements.values()] == [(1.0, True), (4.0, False)]


def test_operations_are_those_of_the_visible_pairs():
    assert Shape(2, 3, 8, 16).flops(False) == 4 * 2 * 3 * 16 * (8 * 9 / 2)
    assert Shape(1, 1, 8, 16, queries=1).flops(False) == 4 * 16 * 8
    assert Shape(1, 1, 8, 16).flops(True) == 3.5 * Shape(1, 1, 8, 16).flops(False)


def test_shapes_on_cuda_keep_to_their_memory():
    sweep = attention.Attention(attention.AttentionSettings())
    sweep.on_cuda, sweep.defaults = True, attention.DEFAULTS["cuda"]
    shapes = sweep._shapes([1024, 16384, 131072], [64, 128])
    assert [(s.batch, s.heads, s.length) for s in shapes[::2]] == [(4, 16, 1024), (4, 16, 16384), (1, 8, 131072)]
    assert {s.width for s in shapes} == {64, 128}


def test_everything_is_named_once_on_cuda():
    """What a GPU would run can be listed without one, and every promise is about contenders that exist."""
    peers = contenders.peers_on(CUDA)
    groups = [[*peers, *contenders.ours_on(CUDA)], [*peers, *contenders.decoders_on(CUDA)]]
    for group in groups:
        assert len({c.key for c in group}) == len(group)
    keys = {c.key for group in groups for c in group} | {None}
    assert all(p.ours in keys and p.theirs in keys for p in attention.PROMISES)


def test_the_fused_kernel_is_a_contender(monkeypatch):
    """Triton's interpreter runs what CUDA would: skipping tiles, gradients of the prior's parameters. One of six is skipped."""
    pytest.importorskip("triton")
    from zoo.attention import triton
    from zoo.attention.triton import common

    def steep(heads):
        """A slope so steep that 17 positions away nothing counts, and not so steep that gradients vanish."""
        prior = contenders.ggd(heads)
        with torch.no_grad():
            prior.theta_alpha.fill_(math.log(3))
        return prior

    monkeypatch.setattr(common, "TILE", 16)
    monkeypatch.setattr(triton, "LEAST_KEYS", 32)
    contender = next(c for c in contenders.ours_on(CUDA) if c.key == contenders.SKIPPING)
    monkeypatch.setattr(contender, "make", steep)
    problem = Problem(Shape(1, 1, 48, 16), torch.float32)
    assert contender.available(CPU) is None and contender.refuses(problem) is None
    verdict = check(contender, problem, backward=True)
    assert verdict.correct and verdict.error < 1e-5 and verdict.deterministic
    share = contender.prepare(problem).skipped
    assert share is not None and share() == pytest.approx(1 / 6)
