"""Run folders: their files, how they are found, and their weights. Who may write in one: recipes/ownership.py.

Only `recipes/` knows this layout; other packages call `load_run`.

<run>/recipe.json deepspeed.json environment.json    what ran, and where
      metrics.jsonl                                  one JSON object a line: training and held-out records
      run.lock                                       who writes here, while its process lives
      checkpoints/step_00000200/ …                   see recipes/checkpoints.py; each has a safetensors model/
      model/                                         the final weights (save_pretrained)
      plots/loss.png
      samples/step_00000200.txt .png …               what the model wrote or saw then, where `evaluate.during` asks for it
      tensorboard/ wandb/ wandb.txt mlflow.txt       of the trackers in train.report_to
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from modalities.contract import find_modality
from modalities.files import command_name
from recipes.checkpoints import checkpoint_step, complete_checkpoints, damage, quarantine, tidy, warn
from recipes.config import ConfigError, Plan
from zoo.files import remove_abandoned, write_json, write_text
from zoo.inputs import read_object, read_tensors
from zoo.model import ZooModel
from zoo.pretrained import resolve_tag, verified_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOSS_CURVE = "plots/loss.png"
DESCRIPTION = ("recipe.json", "deepspeed.json", "environment.json")


class RunFolder:
    """Files of one run. `words`: of the command line that trains it, without its folder."""

    def __init__(self, path: str | Path, words: Sequence[str] = ()):
        self.path, self.words = Path(path), words
        self.metrics_path = self.path / "metrics.jsonl"
        self.checkpoint_root = self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoint_root / f"step_{step:08d}"

    def checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first, whatever `latest` says; `damage` tells whether they still are."""
        return complete_checkpoints(self.checkpoint_root)

    def describe(self, plan: Plan) -> None:
        """Write what runs, and where: recipe.json first, which makes a folder a run."""
        for name, facts in zip(DESCRIPTION, (plan.to_dict(), plan.deepspeed, environment()), strict=True):
            write_json(self.path / name, facts)

    def log(self, record: dict[str, Any]) -> None:
        with open(self.metrics_path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """All readable records."""
        return self.read_metrics()[0]

    def read_metrics(self) -> tuple[list[dict[str, Any]], int]:
        """(records, number of lines that a crash or disk errors made unreadable)."""
        records, unreadable = [], 0
        lines = self.metrics_path.read_bytes().splitlines() if self.metrics_path.exists() else []
        for line in lines:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if isinstance(record, dict) and type(record.get("step")) is int:
                records.append(record)
            else:
                unreadable += 1
        return records, unreadable

    def write_samples(self, step: int, text: str) -> None:
        write_text(self.path / "samples" / f"step_{step:08d}.txt", text)

    def write_picture(self, step: int, figure: Figure) -> Path:
        from zoo.prior_plot import save_figure

        path = self.path / "samples" / f"step_{step:08d}.png"
        save_figure(figure, path)
        return path

    def rewind(self, step: int, keep: int) -> None:
        """Make the folder that of a run which has come to `step`: without what a killed process left, and without
        records, samples and checkpoints of later steps, which come again."""
        records, unreadable = self.read_metrics()
        if unreadable:
            warn(f"{self.metrics_path}: {unreadable} unreadable line{'s' * (unreadable > 1)} left out")
        write_text(self.metrics_path, "".join(json.dumps(r) + "\n" for r in records if r["step"] <= step))
        for path in self.checkpoints():
            if checkpoint_step(path) > step:
                quarantine(path)
        for path in (self.path / "samples").glob("step_*"):
            if checkpoint_step(path) > step:
                path.unlink()
        tidy(self.checkpoint_root, keep)
        for name in (*DESCRIPTION, self.metrics_path.name, LOSS_CURVE):
            remove_abandoned(self.path / name, 0)
        shutil.rmtree(self.path / "model.partial", ignore_errors=True)

    def continuation(self) -> str:
        """The command that continues this run."""
        words = [*self.words, "--run-dir", str(self.path), "--resume", "auto"]
        return f"{command_name('train').removeprefix('python ')} {shlex.join(words)}"

    def plot(self) -> Path | None:
        """plots/loss.png from metrics.jsonl: training and held-out loss; gradient norm, learning rate and throughput."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        from zoo.prior_plot import save_figure

        records = self.metrics()
        rate = next((key for r in records for key in r if key.endswith("_per_s")), "")
        titles = {"loss": "loss (nats)", "grad_norm": "gradient norm", "lr": "learning rate", rate: f"{rate[:-6]}/s"}
        lines = {key: [(r["step"], r[key]) for r in records if key in r] for key in (*titles, "heldout_loss")}
        if not lines["loss"]:
            return None
        panels = [key for key in titles if lines[key] and key != "loss"]
        layout: Any = [["loss"] * len(panels)] * 2 + [panels] if panels else [["loss"]]
        figure, axes = pyplot.subplot_mosaic(layout, figsize=(8, 6.4 if panels else 4.2), layout="constrained")
        for key, axis in axes.items():
            axis.plot(*zip(*lines[key], strict=True), color="tab:blue", alpha=0.3, label="training")
            axis.plot(*running_mean(lines[key]), color="tab:blue", label="training, running mean")
            axis.set_title(self.path.name if key == "loss" else titles[key], fontsize=10)
            axis.set_xlabel("step")
            axis.grid(alpha=0.3)
        if lines["heldout_loss"]:
            axes["loss"].plot(*zip(*lines["heldout_loss"], strict=True), "o-", color="tab:orange", label="held out")
        axes["loss"].set_ylabel(titles["loss"])
        axes["loss"].legend()
        if "grad_norm" in axes:
            axes["grad_norm"].set_yscale("log")
        save_figure(figure, self.path / LOSS_CURVE)
        return self.path / LOSS_CURVE


def running_mean(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Steps, and for each the mean of the values so far, weighted by 0.9 to the power of their age."""
    mean, means = points[0][1], []
    for _, value in points:
        mean = 0.9 * mean + 0.1 * value
        means.append(mean)
    return [step for step, _ in points], means


def environment() -> dict[str, Any]:
    """Versions, commit and hardware: what is needed to run this again."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "deepspeed", "numpy", "safetensors", "priorzoo"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "versions": versions,
        "commit": git_commit(),
        "command": sys.argv,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def git_commit() -> str:
    """The commit of the source tree, with `-dirty` where files differ; "unknown" outside a checkout."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return result.stdout.strip() or "unknown"


# ------------------------------------------------------------------------------------------------ finding runs


def new_run_dir(recipe_name: str, root: str | Path = "runs") -> Path:
    """Make runs/<recipe>/<number>-<time>: a folder of its own for each of any number of runs that start at once."""
    parent = Path(root) / recipe_name
    parent.mkdir(parents=True, exist_ok=True)
    number = 1 + max((_number(folder) for folder in parent.iterdir()), default=0)
    while True:
        folder = parent / f"{number:04d}-{time.strftime('%Y%m%d-%H%M%S')}"
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


def newest_run_dir(recipe_name: str, root: str | Path = "runs", *, finished: bool = False) -> Path | None:
    """The run of this recipe with the greatest number that has a complete checkpoint, or with `finished` final weights."""
    folders = sorted((Path(root) / recipe_name).glob("*"), key=lambda folder: (_number(folder), folder.name))
    for folder in reversed(folders):
        if (folder / "model" / "config.json").exists() if finished else RunFolder(folder).checkpoints():
            return folder
    return None


def _number(folder: Path) -> int:
    """The number that begins the name of a run's folder; 0 where none does, as in 0.5."""
    match = re.fullmatch(r"(\d{4,})-\d{8}-\d{6}", folder.name)
    return int(match[1]) if match else 0


# ------------------------------------------------------------------------------------------------ weights of runs


def model_folder(run_dir: str | Path) -> Path:
    """The newest weights of a run: those of its newest whole checkpoint, or the final model/ where none is left.

    Damaged ones are reported and skipped. ConfigError where there are none.
    """
    run, damaged, removed = RunFolder(run_dir), "", False
    for path in reversed(run.checkpoints()):
        if not (reason := damage(path, below="model/")):
            if (path / "model" / "config.json").exists():
                return path / "model"
        elif path.exists():
            damaged = f"{path} is damaged: {reason}"
            warn(f"{damaged}; reading an older one")
        else:  # the process that trains removed it meanwhile, because it has a newer one
            removed = True
    if removed:
        return model_folder(run_dir)
    if (run.path / "model" / "config.json").exists():
        return run.path / "model"
    raise ConfigError(damaged or f"{run_dir}: neither a complete checkpoint nor model/; is this a run folder?")


def newest_model(run_dir: str | Path, read: Callable[[Path], ZooModel]) -> ZooModel:
    """What `read` makes of the newest weights of a run, which a process that trains may remove while they are read."""
    while True:
        folder = model_folder(run_dir)
        try:
            return read(folder)
        except (OSError, ValueError):
            if folder.exists():
                raise


def load_run(run_dir: str | Path) -> tuple[ZooModel, dict[str, Any]]:
    """(model with its newest weights, resolved recipe as a dict) of a run folder."""
    path = Path(run_dir) / "recipe.json"
    if not path.exists():
        raise ConfigError(f"{run_dir}: no recipe.json; expected a run folder written by recipes/train.py")
    recipe = stored_recipe(run_dir)
    return newest_model(run_dir, find_modality(recipe["modality"]).model.from_pretrained), recipe


def stored_recipe(run_dir: str | Path) -> dict[str, Any]:
    """recipe.json of a run folder. ConfigError where it cannot be read, or is none."""
    path = Path(run_dir) / "recipe.json"
    try:
        recipe = read_object(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(recipe.get("modality"), str):
        raise ConfigError(f"{path} is no recipe: it names no modality")
    return recipe


def load_weights(model: ZooModel, source: str) -> None:
    """Copy weights into a model of the same shape, from a source that `model.init_from` names.

    A run folder, a save_pretrained folder, a model with shipped weights (text_ggd_ssmax_tiny.facts), or
    "newest:RECIPE". A classifier for another number of classes stays as it was initialised. ConfigError where there are none,
    or they do not fit.
    """
    newest = source.removeprefix("newest:")
    path = newest_weights(newest) if newest != source else Path(source)
    read = type(model).from_pretrained
    try:
        if path.is_dir():
            state = (read(path) if (path / "config.json").exists() else newest_model(path, read)).state_dict()
        elif "." in source and "/" not in source:
            state = read_tensors(verified_file(resolve_tag(source)))
        else:
            raise ValueError(
                "expected a run folder, a save_pretrained folder, newest:RECIPE, or a model with weights such as "
                "text_ggd_ssmax_tiny.facts"
            )
        initial = model.state_dict()
        for name in model.replaceable_parameters():
            if name in state and state[name].shape != initial[name].shape:
                state[name] = initial[name]
        model.load_state_dict(state)
    except RuntimeError as error:  # torch's, for shapes that differ
        raise ConfigError(f"model.init_from={source}: its weights do not fit this model: {error}") from error
    except ValueError as error:
        raise ConfigError(f"model.init_from={source}: {error}") from error


def newest_weights(recipe_name: str) -> Path:
    """The newest finished run of a recipe; ConfigError naming the command that makes one."""
    folder = newest_run_dir(recipe_name, finished=True)
    if folder is None:
        raise ConfigError(
            f"this recipe starts from a finished run of {recipe_name}, and there is none under {Path('runs') / recipe_name}; "
            f"make one with `{command_name('train')} {recipe_name}`, or name weights with --set model.init_from=…"
        )
    return folder
