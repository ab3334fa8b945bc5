"""Where a run's records go besides metrics.jsonl: `train.report_to` of a recipe, such as "tensorboard,wandb".

A tracker's `log` gets every record, `log_text` and `log_picture` the samples. Each reads its own environment variables, as its
users know them: WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE (offline: nothing is sent), MLFLOW_TRACKING_URI,
MLFLOW_EXPERIMENT_NAME. A resumed run goes on in the tracker's same run: its number there is the run folder's file
`<tracker>.txt`.
"""

from __future__ import annotations

import html
import os
import textwrap
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from recipes.config import ConfigError, Plan
from recipes.runs import RunFolder
from zoo.errors import require
from zoo.files import write_text
from zoo.naming import nearest

__all__ = ["TRACKERS", "find_trackers", "open_trackers"]


class TensorBoard:
    """Event files in the run folder's `tensorboard/`."""

    package = "tensorboard"

    def __init__(self, run: RunFolder, plan: Plan, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(run.path / "tensorboard", purge_step=step + 1)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def log_picture(self, name: str, path: Path, step: int) -> None:
        import numpy as np
        from PIL import Image

        self.writer.add_image(name, np.asarray(Image.open(path).convert("RGB")), step, dataformats="HWC")

    def log_text(self, name: str, text: str, step: int) -> None:
        self.writer.add_text(name, textwrap.indent(text, "    "), step)  # Markdown's mark of text to be left as it is

    def close(self, *, failed: bool) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, named as the run folder. What it keeps before it is sent lies in the run folder's `wandb/`."""

    package = "wandb"

    def __init__(self, run: RunFolder, plan: Plan, step: int) -> None:
        import wandb

        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "priorzoo"),
            name=run.path.name,
            id=_identity(run.path / "wandb.txt"),
            resume="allow",
            dir=str(run.path),
            config=plan.to_dict(),
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, values: Mapping[str, Any], step: int) -> None:
        # Of a step it has already it keeps what came first: a resumed run measures the same again.
        self.run.log(dict(values), step=step)

    def log_picture(self, name: str, path: Path, step: int) -> None:
        import wandb

        self.run.log({name: wandb.Image(str(path))}, step=step)

    def log_text(self, name: str, text: str, step: int) -> None:
        import wandb

        self.run.log({name: wandb.Html(f"<pre>{html.escape(text)}</pre>")}, step=step)

    def close(self, *, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


class MLflow:
    """A run of MLflow, in the experiment and at the place that its environment variables name."""

    package = "mlflow"

    def __init__(self, run: RunFolder, plan: Plan, step: int) -> None:
        from mlflow import MlflowClient

        self.client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "priorzoo")
        found = self.client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self.client.create_experiment(name)
        known = run.path / "mlflow.txt"
        if known.exists():
            self.id = known.read_text(encoding="utf-8").strip()
            self.client.update_run(self.id, status="RUNNING")
        else:
            self.id = self.client.create_run(experiment, run_name=run.path.name).info.run_id
            write_text(known, self.id + "\n")
            for key, value in _flat(plan.to_dict()).items():
                self.client.log_param(self.id, key, str(value)[:500])

    def log(self, values: Mapping[str, Any], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        # Its names may not contain "@".
        metrics = [Metric(name.replace("@", "/"), float(value), now, step) for name, value in values.items()]
        self.client.log_batch(self.id, metrics=metrics)

    def log_picture(self, name: str, path: Path, step: int) -> None:
        self.client.log_artifact(self.id, str(path), name)

    def log_text(self, name: str, text: str, step: int) -> None:
        self.client.log_text(self.id, text, f"{name}/step_{step:08d}.txt")

    def close(self, *, failed: bool) -> None:
        self.client.set_terminated(self.id, status="FAILED" if failed else "FINISHED")


TRACKERS: dict[str, type[Any]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}


def find_trackers(text: str) -> list[str]:
    """The names in `train.report_to`; ConfigError for one that is not known, ImportError where its package is missing."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f"train.report_to: no tracker {name!r}; {nearest(name, TRACKERS)}")
        require(TRACKERS[name].package, f"train.report_to={name}", "train" if name == "tensorboard" else "track")
    return names


class Trackers:
    """Those of a run, opened; closing tells each whether an error ended the run."""

    def __init__(self, names: Sequence[str], run: RunFolder, plan: Plan, step: int) -> None:
        self.opened = [TRACKERS[name](run, plan, step) for name in names]

    def log(self, record: Mapping[str, Any]) -> None:
        values = {name: value for name, value in record.items() if name != "step"}
        for tracker in self.opened:
            tracker.log(values, record["step"])

    def log_text(self, name: str, text: str, step: int) -> None:
        for tracker in self.opened:
            tracker.log_text(name, text, step)

    def log_picture(self, name: str, path: Path, step: int) -> None:
        for tracker in self.opened:
            tracker.log_picture(name, path, step)

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with ExitStack() as closing:  # one that fails keeps none of the others open
            for tracker in self.opened:
                closing.callback(tracker.close, failed=kind is not None)


def open_trackers(text: str, run: RunFolder, plan: Plan, step: int) -> Trackers:
    """The trackers of `train.report_to` for a run that has come to `step`."""
    return Trackers(find_trackers(text), run, plan, step)


def _identity(path: Path) -> str:
    """A number of a run of its own, made once for each run folder."""
    if not path.exists():
        write_text(path, uuid.uuid4().hex + "\n")
    return path.read_text(encoding="utf-8").strip()


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves of nested dictionaries by their dotted names."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
