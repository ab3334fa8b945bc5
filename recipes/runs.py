"""Run folders. Only `recipes/` knows this layout; other packages call `load_run`.

<run>/recipe.json deepspeed.json environment.json    what ran, and where
      metrics.jsonl                                  one JSON object a line: training and held-out records
      checkpoints/step_00000200/ …, latest           complete ones only; each has a safetensors model/
      model/                                         the final weights (save_pretrained)
      plots/loss.png  tensorboard/
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from modalities.contract import find_modality
from recipes.config import ConfigError, Plan
from zoo.files import write_text
from zoo.model import ZooModel
from zoo.pretrained import resolve_tag, verified_file
from zoo.prior_plot import save_figure


class RunFolder:
    """The files of one run."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.metrics_path = self.path / "metrics.jsonl"
        self.checkpoint_root = self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoint_root / f"step_{step:08d}"

    def checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first. A torn one has no readable complete.json, whatever `latest` says."""
        found = []
        for path in sorted(self.checkpoint_root.glob("step_*")):
            if path.suffix not in (".partial", ".universal") and _complete(path):
                found.append(path)
        return found

    def prune(self, keep: int) -> None:
        """Remove all but the newest `keep` complete checkpoints."""
        for path in self.checkpoints()[:-keep]:
            (path / "complete.json").unlink()  # first, so that a half-removed one is never taken for whole
            shutil.rmtree(path)
            shutil.rmtree(path.with_name(path.name + ".universal"), ignore_errors=True)

    def log(self, record: dict[str, Any]) -> None:
        with open(self.metrics_path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """All records; a last line torn by a crash is left out."""
        records = []
        if self.metrics_path.exists():
            for line in self.metrics_path.read_text(encoding="utf-8").splitlines():
                try:
                    records.append(json.loads(line))
                except json.JSONDecodeError:
                    break
        return records

    def rewind_metrics(self, step: int) -> None:
        """Drop the records after `step`: a resumed run writes them again."""
        kept = [json.dumps(record) for record in self.metrics() if record["step"] <= step]
        write_text(self.metrics_path, "".join(line + "\n" for line in kept))

    def plot(self) -> Path | None:
        """plots/loss.png from metrics.jsonl: training loss, its running mean and the held-out loss."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        # "held_out_" is of runs before 0.5
        records = [{k.replace("held_out_", "heldout_"): v for k, v in r.items()} for r in self.metrics()]
        train = [(r["step"], r["loss"]) for r in records if "loss" in r]
        heldout = [(r["step"], r["heldout_loss"]) for r in records if "heldout_loss" in r]
        if not train:
            return None
        figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
        steps, losses = zip(*train, strict=True)
        mean, means = losses[0], []
        for loss in losses:
            mean = 0.9 * mean + 0.1 * loss
            means.append(mean)
        axes.plot(steps, losses, color="tab:blue", alpha=0.3, label="training")
        axes.plot(steps, means, color="tab:blue", label="training, running mean")
        if heldout:
            axes.plot(*zip(*heldout, strict=True), "o-", color="tab:orange", label="held out")
        axes.set(xlabel="step", ylabel="loss (nats)", title=self.path.name)
        axes.grid(alpha=0.3)
        axes.legend()
        path = self.path / "plots" / "loss.png"
        save_figure(figure, path)
        return path


def new_run_dir(recipe_name: str, root: str | Path = "runs") -> Path:
    return Path(root) / recipe_name / time.strftime("%Y%m%d-%H%M%S")


def newest_run_dir(recipe_name: str, root: str | Path = "runs", *, finished: bool = False) -> Path | None:
    """The most recent run of this recipe that has a complete checkpoint, or with `finished` its final weights."""
    for folder in sorted((Path(root) / recipe_name).glob("*"), reverse=True):
        if (folder / "model" / "config.json").exists() if finished else RunFolder(folder).checkpoints():
            return folder
    return None


def prepare_run(plan: Plan, ranks: Any, *, run_dir: str | None, resume: str | None) -> tuple[RunFolder, Path | None]:
    """(run folder, checkpoint to continue from, or None), the same on every rank.

    resume=None starts anew and refuses a folder that already holds a run. "auto" takes the newest complete checkpoint
    of `run_dir` (or of this recipe's newest run), and starts anew where there is none. Otherwise it names a run folder
    or a checkpoint. ConfigError where the run was made with another model or other data.
    """
    import torch

    answer: list[Any] = [None]
    if ranks.lead:
        try:
            answer = [_find_run(plan, run_dir, resume)]
        except (OSError, ValueError) as error:  # whatever stops this rank must reach those that wait for its answer
            answer = [ConfigError(str(error))]
    if ranks.world > 1:
        torch.distributed.broadcast_object_list(answer)
    if isinstance(answer[0], ConfigError):
        raise answer[0]
    folder, checkpoint = answer[0]
    return RunFolder(folder), checkpoint


def _find_run(plan: Plan, run_dir: str | None, resume: str | None) -> tuple[Path, Path | None]:
    name = plan.recipe.name
    if resume and resume != "auto":
        path = Path(resume)
        folder = path if (path / "recipe.json").exists() else path.parent.parent
        wanted = RunFolder(folder).checkpoints() if folder == path else [p for p in [path] if _complete(p)]
        if not wanted:
            raise ConfigError(f"--resume {resume}: expected 'auto', a run folder or one of its complete checkpoints")
        _check_same(plan, folder)
        return folder, wanted[-1]
    if resume is None:
        folder = Path(run_dir) if run_dir else new_run_dir(name)
        if (folder / "recipe.json").exists():
            raise ConfigError(
                f"{folder} already holds a run; --resume auto continues it, another --run-dir starts anew"
            )
        _check_writable(folder)
        return folder, None
    folder = Path(run_dir) if run_dir else newest_run_dir(name) or new_run_dir(name)
    checkpoints = RunFolder(folder).checkpoints()
    if checkpoints:
        _check_same(plan, folder)
    _check_writable(folder)
    return folder, checkpoints[-1] if checkpoints else None


def _check_writable(folder: Path) -> None:
    """ConfigError where the folder cannot be written. It is made with the first file, so a run that fails leaves none."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ConfigError(f"run folder {folder}: {there} is not a folder that can be written")


def _check_same(plan: Plan, folder: Path) -> None:
    """A run keeps the model and data it began with; steps, ranks, logging and rates may change."""
    try:
        old = json.loads((folder / "recipe.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot resume {folder}: its recipe.json cannot be read: {error}") from None
    new = json.loads(json.dumps(plan.to_dict()))
    fixed = ["name", "modality"]
    fixed += [f"{section}.{key}" for section in ("model", "data") for key in new[section] if key != "num_workers"]
    fixed += ["train.batch", "train.seed", "optim.name"]
    for key in fixed:
        section, _, name = key.partition(".")
        before, now = (tree.get(section, {}).get(name) if name else tree.get(section) for tree in (old, new))
        if before != now:
            raise ConfigError(
                f"cannot resume {folder}: its {key} is {before!r}, this recipe has {now!r}. Set it back, start anew with "
                f"another --run-dir, or remove the folder"
            )


def _complete(path: Path) -> bool:
    try:
        json.loads((path / "complete.json").read_text())["step"]
    except (OSError, ValueError, KeyError):
        return False
    return True


def environment() -> dict[str, Any]:
    """Versions, commit and hardware: what is needed to run this again."""
    import torch

    versions = {"python": platform.python_version()}
    for package in ("torch", "deepspeed", "numpy", "safetensors", "priorzoo"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "versions": versions,
        "commit": git_commit(),
        "command": sys.argv,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def git_commit() -> str:
    """The commit of the source tree, with `-dirty` where files differ; "unknown" outside a checkout."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return found.stdout.strip() or "unknown"


def model_folder(run_dir: str | Path) -> Path:
    """The newest weights of a run: those of its newest complete checkpoint, or the final model/ where none is left."""
    run = RunFolder(run_dir)
    folders = [path / "model" for path in run.checkpoints()[-1:]] + [run.path / "model"]
    for folder in folders:
        if (folder / "config.json").exists():
            return folder
    raise ConfigError(f"{run_dir}: neither a complete checkpoint nor model/; is this a run folder?")


def load_run(run_dir: str | Path) -> tuple[ZooModel, dict[str, Any]]:
    """(model with its newest weights, resolved recipe as a dict) of a run folder."""
    path = Path(run_dir) / "recipe.json"
    if not path.exists():
        raise ConfigError(f"{run_dir}: no recipe.json; expected a run folder written by recipes/train.py")
    recipe = json.loads(path.read_text())
    return find_modality(recipe["modality"]).model.from_pretrained(model_folder(run_dir)), recipe


# ------------------------------------------------------------------------------------------------ first weights


def load_weights(model: ZooModel, source: str) -> None:
    """Copy weights into a model of the same shape, from a source that `model.init_from` names.

    A run folder, a save_pretrained folder, a model with shipped weights (text_ggd_ssmax_tiny.facts), or
    "newest:RECIPE". A classifier for another number of classes stays as it was initialised. ConfigError where there are none,
    or they do not fit.
    """
    if source.startswith("newest:"):
        path: Path | None = newest_weights(source.removeprefix("newest:"))
    else:
        path = Path(source) if Path(source).is_dir() else None
    try:
        if path is not None:
            folder = path if (path / "config.json").exists() else model_folder(path)
            state = type(model).from_pretrained(folder).state_dict()
        elif "." in source and "/" not in source:
            state = load_file(verified_file(resolve_tag(source)))
        else:
            raise ValueError(
                "expected a run folder, a save_pretrained folder, newest:RECIPE, or a model with weights such as "
                "text_ggd_ssmax_tiny.facts"
            )
        own = model.state_dict()
        for name in model.replaceable_parameters():
            if name in state and state[name].shape != own[name].shape:
                state[name] = own[name]
        model.load_state_dict(state)
    except RuntimeError as error:  # torch's, for shapes that differ
        raise ConfigError(f"model.init_from={source}: its weights do not fit this model: {error}") from error
    except ValueError as error:
        raise ConfigError(f"model.init_from={source}: {error}") from error


def newest_weights(recipe_name: str) -> Path:
    """The newest finished run of a recipe; ConfigError naming the command that makes one."""
    found = newest_run_dir(recipe_name, finished=True)
    if found is None:
        raise ConfigError(
            f"this recipe starts from a finished run of {recipe_name}, and there is none under {Path('runs') / recipe_name}; "
            f"make one with `deepspeed recipes/train.py {recipe_name}`, or name weights with --set model.init_from=…"
        )
    return found
