"""Run folders: their files, how they are found, and the weights in them.

<run>/recipe.json deepspeed.json environment.json    what ran, and where
      metrics.jsonl                     one JSON object a line: training and held-out records
      run.lock                          who writes here, while its process lives
      checkpoints/step_00000200/        DeepSpeed's state, a safetensors model/, and complete.json:
                                        step, ranks, ZeRO stage, precision, every file's digest
                  step_00000200.partial      being written, or left by a killed process
                  step_00000200.universal    converted for another number of ranks, until loaded
                  step_00000400.aside        damaged, not used
                  latest                     names the newest complete one, for DeepSpeed's tools
      model/                            the final weights (save_pretrained)
      plots/loss.png
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from modalities.contract import find_modality
from recipes.commands import ConfigError, warn
from recipes.plan import Plan
from recipes.recipe import Json
from zoo.files import (
    read_object,
    remove_abandoned,
    without_nan,
    write_json,
    write_text,
)
from zoo.model import ZooModel, saved_model_damage

LOSS_CURVE = "plots/loss.png"
NAME = re.compile(r"step_\d{8,}")
REMNANT = re.compile(r"step_\d{8,}(\.partial|\.universal|\.universal\.partial)")
DESCRIPTION = ("recipe.json", "deepspeed.json", "environment.json")


class RunFolder:
    """Files of one run. `words`: of the command line that trains it, without its folder."""

    def __init__(self, path: str | Path, words: Sequence[str] = ()):
        self.path = Path(path)
        self.words = words
        self.metrics_path = self.path / "metrics.jsonl"
        self.checkpoint_root = self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoint_root / f"step_{step:08d}"

    def checkpoints(self) -> list[Path]:
        """Checkpoints with their final names, by step.

        `damage` tells whether one is still as it was written.
        """
        folders = self.checkpoint_root.glob("step_*")
        complete = [path for path in folders if NAME.fullmatch(path.name) and path.is_dir()]
        return sorted(complete, key=checkpoint_step)

    def describe(self, plan: Plan) -> None:
        """Write what runs, and where. A finished run keeps its own description.

        recipe.json comes first: with it the folder is a run.
        """
        write_json(self.path / "recipe.json", plan.to_dict())
        write_json(self.path / "deepspeed.json", plan.deepspeed)
        write_json(self.path / "environment.json", environment())

    def log(self, record: Mapping[str, object]) -> None:
        with open(self.metrics_path, "a", encoding="utf-8") as file:
            file.write(_line(record))

    def metrics(self) -> list[Json]:
        return self.read_metrics()[0]

    def read_metrics(self) -> tuple[list[Json], int]:
        """(readable records, number of unreadable lines, of a crash or disk errors)."""
        # is_file: a pipe of this name would block.
        if not self.metrics_path.is_file():
            return [], 0
        records = []
        lines = self.metrics_path.read_bytes().splitlines()
        for line in lines:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and type(record.get("step")) is int:
                records.append(record)
        return records, len(lines) - len(records)

    def rewind(self, step: int, keep: int) -> None:
        """Remove what a killed process left, converted checkpoints, and records after `step`.

        Needs the lock.
        """
        records, unreadable = self.read_metrics()
        if unreadable:
            lines = "line" if unreadable == 1 else "lines"
            warn(f"{self.metrics_path}: {unreadable} unreadable {lines} left out")
        records = [record for record in records if record["step"] <= step]
        write_text(self.metrics_path, "".join(map(_line, records)))
        for path in self.checkpoint_root.glob("step_*"):
            # Any other folder belongs to the user.
            if REMNANT.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
        for name in (*DESCRIPTION, self.metrics_path.name, LOSS_CURVE, "checkpoints/latest"):
            remove_abandoned(self.path / name, 0)
        self.prune(keep)
        complete = self.checkpoints()
        if complete:
            write_text(self.checkpoint_root / "latest", complete[-1].name)

    def prune(self, keep: int) -> None:
        """Remove all but the newest `keep` checkpoints."""
        for path in self.checkpoints()[:-keep]:
            if path.is_symlink():
                # The user moved it elsewhere.
                path.unlink()
            else:
                # Renamed first: a half-removed checkpoint must not look complete.
                partial = path.with_name(path.name + ".partial")
                path.rename(partial)
                shutil.rmtree(partial)

    def continuation(self) -> str:
        """The command that continues this run."""
        words = [*self.words, "--run-dir", str(self.path), "--resume", "auto"]
        return f"priorzoo train {shlex.join(words)}"

    def plot(self) -> Path:
        """Draw plots/loss.png from metrics.jsonl; returns its path.

        Panels: training and held-out loss, gradient norm, learning rate, throughput.
        """
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        from modalities.figures import save_figure

        records = self.metrics()
        figure, axes = pyplot.subplots(2, 2, figsize=(9, 6), layout="constrained")
        figure.suptitle(self.path.name, fontsize=10)
        panels = [["loss", "heldout_loss"], ["grad_norm"], ["lr"], [_throughput_name(records)]]
        for axis, names in zip(axes.flat, panels, strict=True):
            for name, style in zip(names, ("-", "o-"), strict=False):
                points = [(r["step"], r[name]) for r in records if r.get(name) is not None]
                steps = [step for step, _ in points]
                values = [value for _, value in points]
                axis.plot(steps, values, style, label=name)
            axis.set(title=names[0].replace("_", " "), xlabel="step")
            axis.grid(alpha=0.3)
        axes[0, 0].legend()
        save_figure(figure, self.path / LOSS_CURVE)
        return self.path / LOSS_CURVE

    def weights(self) -> Path:
        """The folder of the newest weights.

        It is that of the newest whole checkpoint, or the final model/ where no checkpoint is left.
        Damaged ones are reported and skipped. ConfigError where there are none.
        """
        message = ""
        for path in reversed(self.checkpoints()):
            folder = path / "model"
            reason = saved_model_damage(folder)
            if reason:
                message = f"{path} is damaged: {reason}"
                warn(f"{message}; reading an older one")
            elif (folder / "config.json").exists():
                return folder
        final = self.path / "model"
        if (final / "config.json").exists():
            return final
        raise ConfigError(
            message
            or f"{self.path}: neither a complete checkpoint nor model/; is this a run folder?"
        )


def checkpoint_step(path: Path) -> int:
    """The step of a checkpoint, by its folder's name."""
    return int(path.name.removeprefix("step_"))


def environment() -> Json:
    """What a run is computed with: versions, commit, command, machine."""
    versions = {"python": platform.python_version()}
    for name in ("torch", "deepspeed", "numpy", "safetensors", "zoo"):
        package = sys.modules.get(name)
        if package:
            versions[package.__name__] = package.__version__
    return {
        "versions": versions,
        "commit": _commit() or "unknown",
        "command": sys.argv,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
        "started": utc_now(),
    }


def _commit() -> str:
    """The commit of the checkout, with "-dirty" where files differ; empty outside of one."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        text = subprocess.check_output(
            command,
            cwd=Path(__file__).parent,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=10,
        )
        return text.strip()
    return ""


def _throughput_name(records: Sequence[Json]) -> str:
    """The name of the records' throughput, such as tokens_per_s; empty where there is none."""
    for record in records:
        for name in record:
            if name.endswith("_per_s"):
                return name
    return ""


def _line(record: Mapping[str, object]) -> str:
    """A line of metrics.jsonl; null for numbers that JSON does not have."""
    return json.dumps(without_nan(record), allow_nan=False) + "\n"


def utc_now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def new_run_dir(recipe_name: str) -> Path:
    """Make runs/<recipe>/<number>-<time>, also where several runs start at once."""
    parent = Path("runs", recipe_name)
    parent.mkdir(parents=True, exist_ok=True)
    last = max(map(_number, parent.iterdir()), default=0)
    for number in itertools.count(last + 1):
        folder = parent / f"{number:04d}-{time.strftime('%Y%m%d-%H%M%S')}"
        # Where another run has made this folder, the next number is tried.
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            break
    return folder


def newest_run_dir(recipe_name: str, *, finished: bool = False) -> Path | None:
    """The run of this recipe with the greatest number that has a complete checkpoint.

    With `finished` it has final weights instead.
    """
    folders = Path("runs", recipe_name).glob("*")
    for folder in sorted(folders, key=lambda folder: (_number(folder), folder.name), reverse=True):
        if finished:
            is_usable = (folder / "model" / "config.json").exists()
        else:
            is_usable = bool(RunFolder(folder).checkpoints())
        if is_usable:
            return folder
    return None


def _number(folder: Path) -> int:
    """The number that begins the name of a run's folder; 0 where none does, as in 0.5."""
    match = re.fullmatch(r"(\d{4,})-\d{8}-\d{6}", folder.name)
    return int(match[1]) if match else 0


def run_recipe(run_dir: str | Path) -> Json:
    """recipe.json of a folder that should be a run's; ConfigError for another folder."""
    if not (Path(run_dir) / "recipe.json").exists():
        raise ConfigError(
            f"{run_dir}: no recipe.json; expected a run folder written by priorzoo train"
        )
    return stored_recipe(run_dir)


def stored_recipe(run_dir: str | Path) -> Json:
    """recipe.json of a run folder."""
    path = Path(run_dir) / "recipe.json"
    try:
        recipe = read_object(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(recipe.get("modality"), str):
        raise ConfigError(f"{path} is no recipe: it names no modality")
    return recipe


def newest_model(run_dir: str | Path, read: Callable[[Path], ZooModel]) -> ZooModel:
    """What `read` makes of the newest weights of a run.

    A process that trains may remove them while they are read; then newer ones are read.
    """
    while True:
        folder = RunFolder(run_dir).weights()
        try:
            return read(folder)
        except (OSError, ValueError):
            if folder.exists():
                raise


def load_run(run_dir: str | Path) -> tuple[ZooModel, Json]:
    """(model with its newest weights, resolved recipe as a dict) of a run folder.

    A folder that `priorzoo hub` made of a run serves as well.
    """
    recipe = run_recipe(run_dir)
    read = find_modality(recipe["modality"]).model.from_pretrained
    if (Path(run_dir) / "config.json").is_file():
        return read(run_dir), recipe
    return newest_model(run_dir, read), recipe
