"""`bench.py attention` at lengths too short to mean anything: it checks, measures, and names what is missing."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from typer.testing import CliRunner

from tools import bench
from tools.benches import attention, contenders, harness
from tools.benches.contenders import Contender, Problem, Run, Shape, by_prior, contenders_on
from tools.benches.oracle import check

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPE = Shape(1, 2, 64, 16)
BASELINE, *OTHERS = contenders_on(CPU)


def swept(*others: Contender) -> attention.Setting:
    """Check and measure contenders beside plain attention at SHAPE."""
    record = harness.Record({}, commit="abc")
    setting = attention.Setting(record, CPU, torch.float32, harness.by_clock(CPU), 0.01, 1.0)
    usable = attention.correct(setting, [BASELINE, *others], [Shape(1, 2, 48, 16)])
    record.results += attention.measure(setting, SHAPE, usable)
    return setting


def lost(problem: Problem) -> Run:
    """Plain attention with its last row lost."""
    run = contenders.sdpa(problem)
    whole = run.forward
    run.forward = lambda: torch.cat([whole()[:, :, :-1], whole()[:, :, -1:] * 0], dim=2)
    return run


def without_gradients(problem: Problem) -> Run:
    """Forward as it should be; backward computes a gradient of the queries alone, and that is 0."""
    run = contenders.sdpa(problem)
    whole = run.forward
    run.forward = lambda: whole().detach() + 0 * run.leaves["q"]
    return run


def broken(problem: Problem) -> Run:
    raise RuntimeError("no such instruction")


@pytest.mark.slow
def test_the_command_saves_what_it_prints(tmp_path, monkeypatch):
    monkeypatch.setitem(attention.DEFAULTS, "cpu", replace(attention.DEFAULTS["cpu"], check=48))
    out = tmp_path / "a.json"
    words = ["--lengths", "48,64", "--decode", "64", "--seconds", "0.01", "--minutes", "5", "--commit", "abc"]
    options = [*words, "--without", "flex", "--device", "cpu", "--out", str(out)]
    done = CliRunner().invoke(bench.application("attention"), ["attention", *options])
    assert done.exit_code == 0, done.output
    record = json.loads(out.read_text())
    assert (record["commit"], record["dtype"]) == ("abc", "float32")
    assert {r["baseline"] for r in record["results"]} == {"sdpa"}
    found = {(r["shape"]["length"], r["method"], r["kernel"], r["what"]) for r in record["results"]}
    keys = (("none", "sdpa"), ("goat", "sdpa"), ("ggd", "toeplitz"), ("ggd", "sdpa dense bias"))
    assert {(n, *key, what) for n in (48, 64) for what in harness.PASSES for key in keys} <= found
    assert (64, "ggd", "toeplitz", "decode") in found
    assert all(r["ratio"] > 0 and r["ms"] > 0 and r["tflops"] > 0 and r["pairs"] >= 3 for r in record["results"])
    # No peer is silently missing: each is measured, or its reason is in the record and below the table.
    assert "left out by --without" in record["left_out"]["ggd, flex table"]
    for peer in (c for c in OTHERS if not c.ours):
        missing = record["left_out"].get(peer.name)
        assert missing or any((r["method"], r["kernel"]) == (peer.method, peer.kernel) for r in record["results"])
        assert missing is None or f"{peer.name}: {missing}" in done.output
    assert record["wrong"] == record["failed"] == {} and record["dropped"] == []


EXACT = [
    *(c for c in OTHERS if c.ours and c.whole),
    *(Contender(name, "parametric", partial(by_prior, make=getattr(contenders, name), kernel="auto", parametric=True))
      for name in ("ggd", "alibi", "cable")),
    BASELINE,
    Contender("ggd", "sdpa dense bias", contenders.dense_bias),
]  # fmt: skip


@pytest.mark.parametrize("contender", EXACT, ids=lambda c: c.name)
def test_contenders_agree_with_float64(contender):
    """In float64 to rounding, so that the check compares the same function and not one like it."""
    verdict = check(contender, Problem(Shape(2, 4, 40, 32), torch.float64, CPU), backward=True)
    assert verdict.correct and verdict.error < 1e-6


STEPS = [c for c in OTHERS if c.ours and c.decodes] + [Contender("ggd", "triton paged", contenders.paged)]


@pytest.mark.slow
@pytest.mark.parametrize("contender", STEPS, ids=lambda c: c.name)
def test_decoding_agrees_with_float64(contender):
    problem = Problem(Shape(1, 4, 200, 32, queries=1), torch.float32, CPU)
    assert check(contender, problem, backward=False).error < 1e-5


def test_wrong_and_broken_contenders_are_reported_and_not_timed():
    record = swept(Contender("none", "lost", lost, ours=True), Contender("none", "broken", broken)).record
    assert record.wrong["ours: lost"].startswith("output") and "no such instruction" in record.failed["broken"]
    assert {r["kernel"] for r in record.results} == {"sdpa"}
    verdict = check(Contender("none", "x", without_gradients), Problem(SHAPE, torch.float32, CPU), backward=True)
    assert not verdict.correct and verdict.error == math.inf and verdict.worst.startswith("gradient of")


def test_ratios_are_to_the_fastest_plain_attention():
    def slow(problem: Problem) -> Run:
        run = contenders.sdpa(problem)
        whole = run.forward
        run.forward = lambda: (time.sleep(0.05), whole())[1]
        return run

    ours = contenders.ours("ggd", "auto with prior", contenders.ggd, whole=True)
    record = swept(Contender("none", "slow", slow), ours).record
    ratios = {(r["kernel"], r["what"]): r["ratio"] for r in record.results}
    assert {r["baseline"] for r in record.results} == {"sdpa"} and ratios["sdpa", "forward"] == 1
    assert ratios["slow", "forward"] > 2 and ("toeplitz with prior", "fwd+bwd") in ratios
    assert all(r["host_us"] is None for r in record.results)


def test_a_shape_that_is_refused_is_named():
    narrow = Contender("goat", "auto", partial(by_prior, make=contenders.goat, kernel="auto"), ours=True)
    problem = Problem(Shape(1, 2, 48, 4), torch.float32, CPU)
    with pytest.raises(harness.Refused, match="leave no room for content in heads of 4"):
        narrow.prepare(problem)


def test_operations_are_those_of_the_visible_pairs():
    assert Shape(2, 3, 8, 16).flops(False) == 4 * 2 * 3 * 16 * (8 * 9 / 2)
    assert Shape(1, 1, 8, 16, queries=1).flops(False) == 4 * 16 * 8
    assert Shape(1, 1, 8, 16).flops(True) == 3.5 * Shape(1, 1, 8, 16).flops(False)


def test_shapes_on_cuda_keep_to_their_memory():
    shapes = attention.shapes_of(CUDA, [1024, 16384, 131072], [64, 128])
    assert [(s.batch, s.heads, s.length) for s in shapes[::2]] == [(4, 16, 1024), (4, 16, 16384), (1, 8, 131072)]
    assert {s.width for s in shapes} == {64, 128}


def test_everything_is_named_once_on_cuda():
    """What a GPU would run can be listed without one; nothing is measured twice under a name."""
    for part in ("whole", "decodes"):
        names = [c.name for c in contenders_on(CUDA) if getattr(c, part)]
        assert len(set(names)) == len(names) and names[0] == "sdpa flash"


@pytest.mark.slow
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
    monkeypatch.setattr(triton.TRITON, "least_keys", 32)
    contender = contenders.ours("ggd", "triton skipping", steep, parametric=True, skip=True)
    problem = Problem(Shape(1, 1, 48, 16), torch.float32, CPU)
    verdict = check(contender, problem, backward=True)
    assert verdict.correct and verdict.error < 1e-5
    assert contender.prepare(problem).skipped() == pytest.approx(1 / 6)


def test_a_slopes_gradient_is_not_compared_in_16_bits_but_has_to_be_there() -> None:
    """Its rounding is as large as itself; in float32 it is compared."""

    def without(problem: Problem, worth: float | None) -> Run:
        run = by_prior(problem, make=contenders.goat, kernel="sdpa", whole=True)
        whole, names = run.step, list(run.leaves)

        def step(grad: torch.Tensor) -> tuple:
            given = dict(zip(names, whole(grad), strict=True))
            slope = next(name for name in names if name.endswith("raw_slope"))
            given[slope] = None if worth is None else given[slope] * worth
            return tuple(given.values())

        run.step = step
        return run

    def verdict(dtype: torch.dtype, worth: float | None) -> tuple[bool, str]:
        made = Contender("goat", "sdpa", partial(without, worth=worth))
        found = check(made, Problem(SHAPE, dtype, CPU), backward=True)
        return found.correct, found.worst

    assert verdict(torch.bfloat16, 1.0)[0] and verdict(torch.bfloat16, 2.0)[0]
    assert verdict(torch.float32, 1.0)[0]
    wrong = (False, "gradient of key_bias.raw_slope")
    assert verdict(torch.float32, 2.0) == verdict(torch.bfloat16, None) == verdict(torch.bfloat16, math.nan) == wrong
