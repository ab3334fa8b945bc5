"""The comparison that precedes a kernel's first call."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from zoo.attention import KERNELS, selfcheck
from zoo.attention.call import AttentionCall
from zoo.attention.reference import ReferenceKernel
from zoo.attention.selfcheck import check_kernel, find_distrust
from zoo.priors.terms import PriorTerms


@pytest.fixture(autouse=True)
def nothing_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "_REASONS", {})


class Broken(ReferenceKernel):
    """The oracle with a fault, and a count of its runs."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.runs = 0

    def run(self, call: AttentionCall) -> Tensor:
        self.runs += 1
        if self.fault == "compiler":
            raise RuntimeError("ptxas died\nwith more lines")
        if self.fault == "a gradient":
            call = replace(call, v=call.v + 0.5 * (call.v - call.v.detach()))
        if self.fault == "the prior":
            call = replace(call, terms=PriorTerms())
        out = super().run(call)
        if self.fault == "a row":
            out = out.clone()
            out[:, :, -1] *= 1.5
        if self.fault == "NaN":
            out = torch.where(out > 3, torch.nan, out)
        return out


@pytest.mark.parametrize("fault", ["a row", "a gradient", "the prior", "NaN", "compiler"])
def test_a_fault_is_found(fault: str) -> None:
    verdict = check_kernel(Broken(fault), "cpu", torch.bfloat16)
    assert verdict.wrong
    words = {
        "a gradient": "content: v is off",
        "compiler": "content: RuntimeError: ptxas died",
    }.get(fault, "")
    assert verdict.wrong[0].startswith(words)


def test_a_kernel_is_checked_once() -> None:
    kernel = Broken("a row")
    reason = find_distrust("broken", kernel, "cpu", torch.float32)
    assert reason is not None
    assert "on cpu in float32" in reason
    assert "off by" in reason
    runs = kernel.runs
    assert find_distrust("broken", kernel, "cpu", torch.float32) == reason
    assert kernel.runs == runs


@pytest.mark.slow
def test_doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # tools/gpu.py runs these tests where typer is not installed.
    pytest.importorskip("typer")
    from zoo import cli, console

    right = {name: KERNELS[name] for name in ("reference", "sdpa", "toeplitz")}
    monkeypatch.setattr(
        "zoo.cli.KERNELS", {"toeplitz": KERNELS["toeplitz"], "other": Broken("NaN")}
    )
    assert console.call(cli.app, ["doctor"], prog="zoo") == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "cpu, other, float32: content: output is off by inf" in out
    assert "wrong: cpu, toeplitz" not in out
    monkeypatch.setattr("zoo.cli.KERNELS", right)
    assert console.call(cli.app, ["doctor"], prog="zoo") == 0
    assert "can be trusted" in capsys.readouterr().out
