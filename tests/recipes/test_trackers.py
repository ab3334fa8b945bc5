"""Records of a run reach the trackers of `train.report_to`, and a resumed run goes on where it was."""

from __future__ import annotations

import html
import json
import re
import struct
import time
from pathlib import Path
from typing import Any

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


def wandb_records(path: Path) -> list[Any]:
    """Of LevelDB's log format: 7 bytes before the first block, a protocol buffer a record."""
    from wandb.proto.wandb_internal_pb2 import Record

    records, data, place, whole = [], path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # a block's last bytes, too few for a header
            place += 32768 - place % 32768
        length, part = struct.unpack_from("<HB", data, place + 4)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if part in (1, 4):  # whole, or its last part
            records.append(Record.FromString(whole))
            whole = b""
    return records


def read_wandb(run: Path) -> dict[str, dict[int, float]]:
    """From the files of an offline run, whose process may still write their ends."""
    found: dict[str, dict[int, float]] = {}
    for path in sorted(run.glob("wandb/offline-run-*/run-*.wandb")):
        until = time.monotonic() + 20
        while not (records := wandb_records(path)) or not records[-1].HasField("exit"):
            assert time.monotonic() < until, f"{path} has no end"
            time.sleep(0.05)
        for record in records:
            items = {(i.key or i.nested_key[0]): json.loads(i.value_json) for i in record.history.item}
            for name in (key for key in items if not key.startswith("_")):
                found.setdefault(name, {})[items["_step"]] = items[name]
    return found


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
READERS = {"tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow}


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
    found = READERS[name](run.path)
    assert found["loss"] == {1: 2.0, 2: 1.5} and found["passkey/free@512"] == {2: 0.5}
    assert found["lr"][1] == pytest.approx(0.1)
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
