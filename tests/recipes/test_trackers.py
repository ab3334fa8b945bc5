"""Records of a run reach the trackers of `train.report_to`, and a resumed run goes on where it was."""

from __future__ import annotations

import pytest

from recipes.config import ConfigError, resolve
from recipes.registry import find_recipe
from recipes.runs import RunFolder
from recipes.trackers import TRACKERS, find_trackers, open_trackers


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACKERS)
def test_records_arrive_and_a_resumed_run_goes_on(name, tmp_path, monkeypatch):
    pytest.importorskip(name, reason="needs the extra track")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = RunFolder(tmp_path)
    plan = resolve(find_recipe("text.ggd_ssmax_tiny"), world=1, device="cpu")
    for step, record in enumerate([{"loss": 2.0}, {"loss": 1.5, "passkey/free@512": 0.5}]):
        with open_trackers(name, run, plan, step) as trackers:
            for log in trackers:
                log(record, step + 1)
    if name == "wandb":  # its numbers are in a format of its own; two parts of one run
        parts = sorted((run.path / "wandb").glob("offline-run-*/*.wandb"))
        number = (run.path / "wandb.txt").read_text().strip()
        assert len(parts) == 2 and {part.stem for part in parts} == {f"run-{number}"}
        return
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    scores = {name: {e.step: e.value for e in events.Scalars(name)} for name in events.Tags()["scalars"]}
    assert scores == {"loss": {1: 2.0, 2: 1.5}, "passkey/free@512": {2: 0.5}}


def test_an_unknown_tracker_is_told():
    with pytest.raises(ConfigError, match=r"no tracker 'wanbd'; .*'wandb'"):
        find_trackers("tensorboard, wanbd")
