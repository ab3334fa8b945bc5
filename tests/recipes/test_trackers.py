"""Records of a run reach the trackers of `train.report_to`, and a resumed run goes on where it was."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest
from PIL import Image

from recipes.config import ConfigError, resolve
from recipes.registry import find_recipe
from recipes.runs import RunFolder
from recipes.trackers import TRACKERS, find_trackers, open_trackers

RECORDS = [{"step": 1, "loss": 2.0, "lr": 0.1}, {"step": 2, "loss": 1.5, "passkey/free@512": 0.5}]


def read_tensorboard(run: Path) -> tuple[dict[str, dict[int, float]], list[str]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    scores = {name: {e.step: e.value for e in events.Scalars(name)} for name in events.Tags()["scalars"]}
    return scores, [e.tensor_proto.string_val[0].decode() for e in events.Tensors("samples/text_summary")]


def read_mlflow(run: Path) -> tuple[dict[str, dict[int, float]], list[str]]:
    from mlflow import MlflowClient

    client, number = MlflowClient(), (run / "mlflow.txt").read_text().strip()
    data = client.get_run(number).data
    assert data.params["model.name"] == "text_ggd_ssmax_tiny"
    scores = {n: {m.step: m.value for m in client.get_metric_history(number, n)} for n in data.metrics}
    files = sorted(file.path for file in client.list_artifacts(number, "samples"))
    texts = [Path(client.download_artifacts(number, file)).read_text() for file in files]
    return {name.replace("/512", "@512"): values for name, values in scores.items()}, texts


def read_wandb(run: Path) -> tuple[None, list[str]]:
    """Its numbers are in a format of its own; two parts of one run."""
    parts = sorted((run / "wandb").glob("offline-run-*/*.wandb"))
    assert len(parts) == 2 and {part.stem for part in parts} == {f"run-{(run / 'wandb.txt').read_text().strip()}"}
    pages = sorted(run.glob("wandb/offline-run-*/files/media/html/samples_*.html"))
    return None, [html.unescape(re.findall("<pre>(.*)</pre>", page.read_text())[0]) for page in pages]


IMAGES = {"tensorboard": 0, "wandb": 2, "mlflow": 2}  # files; TensorBoard's are in its events
READERS = {"tensorboard": read_tensorboard, "mlflow": read_mlflow, "wandb": read_wandb}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACKERS)
def test_records_arrive_and_a_resumed_run_goes_on(name, tmp_path, monkeypatch):
    pytest.importorskip(TRACKERS[name].package, reason="needs the extra track")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    plan = resolve(find_recipe("text.ggd_ssmax_tiny"), world=1, device="cpu")
    for step, record in enumerate(RECORDS):
        Image.new("RGB", (4, 4)).save(tmp_path / f"step_{step}.png")
        with open_trackers(name, run, plan, step) as trackers:
            trackers.log(record)
            trackers.log_text("samples", f"[1] <once> {record['step']}", record["step"])
            trackers.log_picture("pictures", tmp_path / f"step_{step}.png", record["step"])
    scores, texts = READERS[name](run.path)
    if scores:
        assert scores["loss"] == {1: 2.0, 2: 1.5} and scores["passkey/free@512"] == {2: 0.5}
    assert sum("picture" in str(path) and path.suffix == ".png" for path in tmp_path.rglob("*")) == IMAGES[name]
    assert [text.strip() for text in texts] == ["[1] <once> 1", "[1] <once> 2"]


def test_an_unknown_tracker_is_told():
    with pytest.raises(ConfigError, match=r"no tracker 'wanbd'; .*'wandb'"):
        find_trackers("tensorboard, wanbd")
