"""Runs broken at file operations end as unbroken ones; a few of the places that `tools/inject_faults.py` tries."""

from __future__ import annotations

import pytest
from modalities.native import compiler

from tools.faults import trials
from tools.faults.injector import Fault, Server, server
from tools.faults.trials import Outcome

pytestmark = [pytest.mark.slow, pytest.mark.skipif(compiler() is None, reason="needs a C compiler")]


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    with server(tmp_path_factory.mktemp("server"), trials.IMPORTS) as found:
        yield found


@pytest.fixture(scope="module")
def whole(broken: Server, tmp_path_factory):
    """Of each modality an unbroken run, and how many file operations it does."""
    folder, found = tmp_path_factory.mktemp("whole"), {}
    for modality in trials.RECIPES:
        run = folder / modality
        trial = broken.run(trials.train, *trials.words(modality, run), fault=Fault(run))
        assert trial.code == 0, trial.said
        found[modality] = (run, trial.operations)
    return found


def nothing_lost(outcome: Outcome) -> None:
    assert outcome.trials and not outcome.wrong, "\n".join(outcome.wrong)


def test_the_fault_is_where_it_was_asked_for(broken, whole, tmp_path):
    """Or every other test here could pass without one."""
    run, operations = whole["dna"]
    assert operations > 100
    for kind, code in (("kill", -9), ("half", -9), ("no space", 2)):
        trial = broken.run(trials.train, *trials.words("dna", tmp_path / kind), fault=Fault(tmp_path / kind, kind, 60))
        assert trial.code == code, trial.said
    assert "MB are free" in trial.said and "--resume auto" in trial.said
    damaged = trials.contents(run) | {"latest": "step_00000001"}
    assert trials.broken_runs(broken, "dna", "kill", [60], damaged, tmp_path).wrong


@pytest.mark.parametrize(
    ("modality", "kind", "stride"),
    [
        *[("dna", "kill", 37), ("dna", "half", 83), ("dna", "no space", 73), ("dna", "fail once", 67)],
        *[("vision", "kill", 101), ("vision", "fail once", 131), ("text", "half", 97), ("text", "no space", 127)],
    ],
)
def test_a_broken_run_continues_as_if_it_had_not(modality, kind, stride, broken, whole, tmp_path):
    run, operations = whole[modality]
    places = range(stride // 2, operations, stride)
    nothing_lost(trials.broken_runs(broken, modality, kind, places, trials.contents(run), tmp_path))


def test_damaged_files_are_told_and_passed_over(broken, whole, tmp_path):
    nothing_lost(trials.damaged_files(broken, "dna", whole["dna"][0], tmp_path))


def test_launches_at_once_are_as_many_runs_or_refusals(broken, whole, tmp_path):
    nothing_lost(trials.launches(broken, "dna", 8, trials.contents(whole["dna"][0]), tmp_path / "many"))


def test_ranks_conversion_and_evaluation(broken, whole, tmp_path):
    expected = trials.both_ranks(broken, "dna", tmp_path / "ranks")
    for kind, rank, place in (("kill", 0, 75), ("no space", 1, 4)):
        nothing_lost(trials.two_ranks(broken, "dna", kind, rank, [place], expected, tmp_path))
    nothing_lost(trials.conversions(broken, "dna", tmp_path / "ranks", ["kill"], 300, tmp_path))
    nothing_lost(trials.evaluations(broken, "dna", whole["dna"][0], ["half", "no space"], 40, tmp_path))
