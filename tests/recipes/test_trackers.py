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


def read_tensorboard(run: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return {name: {e.step: e.value for e in events.Scalars(name)} for name in events.Tags()["scalars"]}


def read_mlflow(run: Path) -> dict[str, dict[int, float]]:
    from mlflow import MlflowClient

    client, number = MlflowClient(), (run / "mlflow.txt").read_text().strip()
    assert client.get_run(number).info.status == "FINISHED"
    assert client.get_run(number).data.params["model.name"] == "text_ggd_ssmax_tiny"
    names = client.get_run(number).data.metrics
    return {n.replace("/512", "@512"): {m.step: m.value for m in client.get_metric_history(number, n)} for n in names}


def tensorboard_texts(run: Path) -> list[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return [e.tensor_proto.string_val[0].decode() for e in events.Tensors("samples/text_summary")]


def wandb_texts(run: Path) -> list[str]:
    pages = sorted(run.glob("wandb/offline-run-*/files/media/html/samples_*.html"))
    return [html.unescape(re.findall("<pre>(.*)</pre>", page.read_text())[0]) for page in pages]


def mlflow_texts(run: Path) -> list[str]:
    from mlflow import MlflowClient

    number = (run / "mlflow.txt").read_text().strip()
    files = sorted(file.path for file in MlflowClient().list_artifacts(number, "samples"))
    return [Path(MlflowClient().download_artifacts(number, file)).read_text() for file in files]


TEXTS = {"tensorboard": tensorboard_texts, "wandb": wandb_texts, "mlflow": mlflow_texts}
IMAGES = {"tensorboard": 0, "wandb": 2, "mlflow": 2}  # files; TensorBoard's are in its events
READERS = {"tensorboard": read_tensorboard, "mlflow": read_mlflow}


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACKERS)
def test_records_arrive_and_a_resumed_run_goes_on(name, tmp_path):
    pytest.importorskip(TRACKERS[name].package, reason="needs the extra track")
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    plan = resolve(find_recipe("text.ggd_ssmax_tiny"), world=1, device="cpu")
    for step, record in enumerate(RECORDS):
        Image.new("RGB", (4, 4)).save(tmp_path / f"step_{step}.png")
        with open_trackers(name, run, plan, step) as trackers:
            trackers.log(record)
            trackers.log_text("samples", f"[1] <once> {record['step']}", record["step"])
            trackers.log_picture("pictures", tmp_path / f"step_{step}.png", record["step"])
    if name == "wandb":  # two parts of one run; the numbers are in a format of its own
        parts = sorted((run.path / "wandb").glob("offline-run-*/*.wandb"))
        assert len(parts) == 2 and {part.stem for part in parts} == {
            f"run-{(run.path / 'wandb.txt').read_text().strip()}"
        }
    else:
        scores = READERS[name](run.path)
        assert scores["loss"] == {1: 2.0, 2: 1.5} and scores["passkey/free@512"] == {2: 0.5}
        assert scores["lr"][1] == pytest.approx(0.1)
    assert sum("picture" in str(path) and path.suffix == ".png" for path in tmp_path.rglob("*")) == IMAGES[name]
    assert [text.strip() for text in TEXTS[name](run.path)] == ["[1] <once> 1", "[1] <once> 2"]


def test_an_unknown_tracker_is_told():
    with pytest.raises(ConfigError, match=r"no tracker 'wanbd'; .*'wandb'"):
        find_trackers("tensorboard, wanbd")


def test_a_missing_package_is_told_with_its_command(monkeypatch):
    monkeypatch.setattr(TRACKERS["mlflow"], "package", "not_installed_anywhere")
    with pytest.raises(ImportError, match=r"train.report_to=mlflow needs .*priorzoo\[track\]"):
        find_trackers("mlflow")


def test_nothing_is_opened_where_none_is_named(tmp_path):
    with open_trackers("", RunFolder(tmp_path), None, 0) as trackers:
        trackers.log({"step": 1, "loss": 1.0})
    assert not list(tmp_path.iterdir())
