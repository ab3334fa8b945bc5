"""Trackers of a run besides metrics.jsonl: `train.report_to` of a recipe, such as "tensorboard,wandb".

Each reads its environment variables: WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE (offline: nothing is sent), MLFLOW_TRACKING_URI,
MLFLOW_EXPERIMENT_NAME. A resumed run continues the tracker's run, whose number is in the run folder's `<tracker>.txt`.
"""

from __future__ import annotations

import html
import os
import textwrap
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from recipes.config import ConfigError, Plan
from recipes.runs import RunFolder
from zoo.errors import require
from zoo.files import write_text
from zoo.naming import nearest


class TensorBoard:
    """Event files in the run folder's `tensorboard/`."""

    package, extra = "tensorboard", "train"

    def __init__(self, run: RunFolder, plan: Plan, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(run.path / "tensorboard", purge_step=step + 1)

    def log(self, values: Mapping[str, float], step: int) -> None:
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
    """A run of Weights & Biases, named as the run folder; its files are in the run folder's `wandb/`."""

    package, extra = "wandb", "track"

    def __init__(self, run: RunFolder, plan: Plan, step: int) -> None:
        import wandb

        number = run.path / "wandb.txt"
        if not number.exists():
            write_text(number, uuid.uuid4().hex + "\n")
        self.wandb = wandb
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "priorzoo"),
            name=run.path.name,
            id=number.read_text(encoding="utf-8").strip(),
            resume="allow",
            dir=str(run.path),
            config=plan.to_dict(),
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        # It keeps what came first for a step: a resumed run measures the same again.
        self.run.log(dict(values), step=step)

    def log_picture(self, name: str, path: Path, step: int) -> None:
        self.run.log({name: self.wandb.Image(str(path))}, step=step)

    def log_text(self, name: str, text: str, step: int) -> None:
        self.run.log({name: self.wandb.Html(f"<pre>{html.escape(text)}</pre>")}, step=step)

    def close(self, *, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


class MLflow:
    """A run of MLflow, in the experiment and at the place that its environment variables name."""

    package, extra = "mlflow", "track"

    def __init__(self, run: RunFolder, plan: Plan, step: int) -> None:
        import mlflow

        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "priorzoo"))
        self.mlflow, number = mlflow, run.path / "mlflow.txt"
        if number.exists():
            mlflow.start_run(number.read_text(encoding="utf-8").strip())
        else:
            write_text(number, mlflow.start_run(run_name=run.path.name).info.run_id + "\n")
            for section, values in plan.to_dict().items():
                settings = values if isinstance(values, dict) else {"": values}
                mlflow.log_params({f"{section}.{key}".rstrip("."): str(value)[:500] for key, value in settings.items()})

    def log(self, values: Mapping[str, float], step: int) -> None:
        # Its names may not contain "@".
        self.mlflow.log_metrics({name.replace("@", "/"): float(value) for name, value in values.items()}, step)

    def log_picture(self, name: str, path: Path, step: int) -> None:
        self.mlflow.log_artifact(str(path), name)

    def log_text(self, name: str, text: str, step: int) -> None:
        self.mlflow.log_text(text, f"{name}/step_{step:08d}.txt")

    def close(self, *, failed: bool) -> None:
        self.mlflow.end_run("FAILED" if failed else "FINISHED")


Tracker = TensorBoard | WeightsAndBiases | MLflow
TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}


def find_trackers(text: str) -> list[str]:
    """The names in `train.report_to`; ConfigError for one that is not known, ImportError where its package is missing."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f"train.report_to: no tracker {name!r}; {nearest(name, TRACKERS)}")
        require(TRACKERS[name].package, f"train.report_to={name}", TRACKERS[name].extra)
    return names


class Trackers:
    """Open trackers of a run."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = trackers

    def log(self, record: Mapping[str, float]) -> None:
        values = {name: value for name, value in record.items() if name != "step"}
        for tracker in self.trackers:
            tracker.log(values, int(record["step"]))

    def log_text(self, name: str, text: str, step: int) -> None:
        for tracker in self.trackers:
            tracker.log_text(name, text, step)

    def log_picture(self, name: str, path: Path, step: int) -> None:
        for tracker in self.trackers:
            tracker.log_picture(name, path, step)


@contextmanager
def open_trackers(text: str, run: RunFolder, plan: Plan, step: int) -> Iterator[Trackers]:
    """The trackers of `train.report_to` for a run that has come to `step`; closing tells each whether an error ended it."""
    trackers = [TRACKERS[name](run, plan, step) for name in find_trackers(text)]
    failed = True
    try:
        yield Trackers(trackers)
        failed = False
    finally:
        with ExitStack() as closing:  # one that fails keeps none of the others open
            for tracker in trackers:
                closing.callback(tracker.close, failed=failed)
