"""Run folders: their files, who may write in one, how they are found, and their weights.

<run>/recipe.json deepspeed.json environment.json    what ran, and where
      metrics.jsonl                                  one JSON object a line: training and held-out records
      run.lock                                       who writes here, while its process lives
      checkpoints/step_00000200/ …                   see recipes/checkpoints.py; each has a safetensors model/
      model/                                         the final weights (save_pretrained)
      plots/loss.png
      tensorboard/ wandb/ wandb.txt                  of the trackers in train.report_to
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from modalities.contract import find_modality
from recipes.checkpoints import (
    ASIDE,
    complete_checkpoints,
    damage,
    quarantine,
    remnants,
    tidy,
    warn,
)
from recipes.config import ConfigError, Plan
from zoo.catalog import resolve_tag, verified_file
from zoo.errors import one_line
from zoo.files import (
    make_folder,
    read_object,
    read_tensors,
    remove_abandoned,
    save_figure,
    without_nan,
    write_json,
    write_text,
)
from zoo.model import ZooModel

if TYPE_CHECKING:
    from recipes.engine import Ranks

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
            file.write(_line(record))

    def metrics(self) -> list[dict[str, Any]]:
        """All readable records."""
        return self.read_metrics()[0]

    def read_metrics(self) -> tuple[list[dict[str, Any]], int]:
        """(records, number of lines that a crash or disk errors made unreadable)."""
        records = []
        lines = self.metrics_path.read_bytes().splitlines() if self.metrics_path.is_file() else []  # and not of a pipe
        for line in lines:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and type(record.get("step")) is int:
                records.append(record)
        return records, len(lines) - len(records)

    def rewind(self, step: int, keep: int) -> None:
        """Remove what a killed process left, and records after `step`."""
        records, unreadable = self.read_metrics()
        if unreadable:
            warn(f"{self.metrics_path}: {unreadable} unreadable line{'s' * (unreadable > 1)} left out")
        write_text(self.metrics_path, "".join(_line(r) for r in records if r["step"] <= step))
        tidy(self.checkpoint_root, keep)
        for name in (*DESCRIPTION, self.metrics_path.name, LOSS_CURVE):
            remove_abandoned(self.path / name, 0)

    def continuation(self) -> str:
        """The command that continues this run."""
        words = [*self.words, "--run-dir", str(self.path), "--resume", "auto"]
        return f"priorzoo train {shlex.join(words)}"

    def plot(self) -> Path | None:
        """plots/loss.png from metrics.jsonl: training and held-out loss, gradient norm, learning rate and throughput."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        records = self.metrics()
        rate = next((key for r in records for key in r if key.endswith("_per_s")), "")
        titles = {"loss": "loss (nats)", "grad_norm": "gradient norm", "lr": "learning rate", rate: f"{rate[:-6]}/s"}
        points = {
            key: [(r["step"], r[key]) for r in records if r.get(key) is not None] for key in (*titles, "heldout_loss")
        }
        if not points["loss"]:
            return None
        figure, axes = pyplot.subplots(2, 2, figsize=(9, 6), layout="constrained")
        figure.suptitle(self.path.name, fontsize=10)
        for axis, (key, title) in zip(axes.flat, titles.items(), strict=True):
            if points[key]:
                axis.plot(*zip(*points[key], strict=True), label="training")
            axis.set(title=title, xlabel="step")
            axis.grid(alpha=0.3)
        if points["heldout_loss"]:
            axes[0, 0].plot(*zip(*points["heldout_loss"], strict=True), "o-", label="held out")
            axes[0, 0].legend()
        save_figure(figure, self.path / LOSS_CURVE)
        return self.path / LOSS_CURVE


def _line(record: dict[str, Any]) -> str:
    """A line of metrics.jsonl; null for numbers that JSON does not have."""
    return json.dumps(without_nan(record), allow_nan=False) + "\n"


def environment() -> dict[str, Any]:
    """Versions, commit and hardware: what is needed to run this again."""
    packages = ("torch", "deepspeed", "numpy", "safetensors", "priorzoo")
    return {
        "versions": {"python": platform.python_version(), **{package: _version(package) for package in packages}},
        "commit": git_commit(),
        "command": sys.argv,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
        "started": utc_now(),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def git_commit() -> str:
    """The commit of the source tree, with `-dirty` where files differ; "unknown" outside a checkout."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return result.stdout.strip() or "unknown"


def utc_now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


# ------------------------------------------------------------------------------------------------ one writer


class RunLock:
    """An exclusive lock on `<run>/run.lock` until `release`, or until the process ends in any way.

    The system holds the lock; the file says who writes: host, pid, start. NFS from version 4 locks across hosts too; a file
    system without locks is reported, and nothing is refused. ConfigError where another process holds it.
    """

    # File descriptors, closed in forked children: a data worker must not keep the lock alive.
    open_files: ClassVar[set[int]] = set()

    def __init__(self, folder: Path):
        path = folder / "run.lock"
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise ConfigError(f"{path} is a link or no regular file, and is not followed: remove it")
        make_folder(folder)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        self._lock(folder)
        RunLock.open_files.add(self._file)
        facts = {"host": socket.gethostname(), "pid": os.getpid(), "started": utc_now()}
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, (json.dumps(facts) + "\n").encode(), 0)

    def _lock(self, folder: Path) -> None:
        for patience in (0.1, 0.1, 0.0):  # `holder`, in another process, has it for a moment
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(patience)
            except OSError as error:
                return warn(f"note: {folder} is on a file system without locks ({error}): start no other process in it")
        os.close(self._file)
        holder = RunLock.holder(folder) or "another process"
        raise ConfigError(f"{folder} is in use: {holder}, trains in it; wait for it or stop it")

    @staticmethod
    def holder(folder: Path) -> str | None:
        """The process that holds a folder's lock, "process 12 on host, started …"; None where none does."""
        lock = folder / "run.lock"
        if lock.is_symlink() or not lock.is_file():  # opening a pipe waits for its writer
            return None
        try:
            with open(lock) as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    facts = json.load(file)
                    return f"process {facts['pid']} on {facts['host']}, started {facts['started']}"
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError):
            return "another process"
        return None

    def release(self) -> None:
        RunLock.open_files.discard(self._file)
        os.close(self._file)


def _close_locks() -> None:
    for file in RunLock.open_files:
        os.close(file)
    RunLock.open_files.clear()


os.register_at_fork(after_in_child=_close_locks)


@contextmanager
def own_run(
    plan: Plan, ranks: Ranks, *, run_dir: str | None = None, resume: str | None = None, words: Sequence[str] = ()
) -> Iterator[tuple[RunFolder, Path | None]]:
    """(run folder, checkpoint to continue from, or None), the same on every rank; rank 0 holds the folder's lock.

    resume=None starts anew and refuses a folder that already holds a run. "auto" takes the newest undamaged checkpoint of
    `run_dir` (or of this recipe's newest run), and starts anew where there is none. Damaged checkpoints are reported and
    quarantined.

    Raises:
        ConfigError: where another process trains in the folder; where the run was made with another model or other data;
            where every checkpoint is damaged; and for an OSError from inside, with the checkpoint from which to go on.
    """
    lock: RunLock | None = None
    answer: list[tuple[Path, Path | None] | ConfigError | None] = [None]
    if ranks.lead:
        try:
            if resume not in (None, "auto"):  # an empty word is an unset variable of a shell
                raise ConfigError(f"--resume {resume!r}: expected 'auto'; the run's folder is --run-dir")
            newest_run = newest_run_dir(plan.recipe.name) if resume else None
            folder = Path(run_dir) if run_dir else newest_run or new_run_dir(plan.recipe.name)
            lock = RunLock(folder)
            answer = [(folder, _choose(plan, RunFolder(folder), resume))]
        except Exception as error:  # the other ranks wait for this answer
            answer = [ConfigError(one_line(error))]
    if ranks.world > 1:
        torch.distributed.broadcast_object_list(answer)
    try:
        if isinstance(answer[0], ConfigError):
            raise answer[0]
        assert answer[0] is not None
        run, checkpoint = RunFolder(answer[0][0], words), answer[0][1]
        try:
            yield run, checkpoint
        except OSError as error:
            if not ranks.lead:  # only the lead's error is shown
                warn(f"rank {ranks.rank}: {error}")
            newest = run.checkpoints()[-1:]
            last = f"The last good checkpoint is {newest[0]}" if newest else "There is no checkpoint yet"
            raise ConfigError(f"{error}. {last}; once that is fixed, continue with: {run.continuation()}") from error
    finally:
        if lock is not None:
            lock.release()
            if run_dir is None and not (folder / "recipe.json").exists():  # a new folder, of a run that could not begin
                with suppress(OSError):
                    (folder / "run.lock").unlink()
                    folder.rmdir()


def _choose(plan: Plan, run: RunFolder, resume: str | None) -> Path | None:
    """The newest undamaged checkpoint of a locked run; None to start anew."""
    if resume is None and any((run.path / name).exists() for name in ("recipe.json", "metrics.jsonl", "checkpoints")):
        raise ConfigError(f"{run.path} already holds a run; --resume auto continues it, another --run-dir starts anew")
    final = (run.path / "model").resolve()  # of a link, what it points to is replaced
    empty = not final.exists() or (final.is_dir() and not any(final.iterdir()))
    if not empty and not (final / "config.json").is_file():
        raise ConfigError(f"{run.path / 'model'} is no saved model: the final weights could not be written there")
    complete = run.checkpoints()
    if not complete and not remnants(run.checkpoint_root, ASIDE):
        return None
    check_same(plan, run.path)
    damaged: dict[Path, str] = {}
    for path in reversed(complete):
        if reason := damage(path):
            damaged[path] = f"{path} is damaged: {reason}"
            continue
        for older, message in damaged.items():
            warn(f"{message}; it is set aside as {quarantine(older).name}")
        return path
    message = "; ".join(damaged.values()) or f"{run.checkpoint_root} holds checkpoints that were set aside alone"
    raise ConfigError(f"{message}. Start anew with another --run-dir")


def check_same(plan: Plan, folder: Path) -> None:
    """ConfigError where model, data, batch, seed or optimiser differ from the run's; steps, ranks and rates may change."""
    try:
        old = stored_recipe(folder)
    except ConfigError as error:
        raise ConfigError(f"cannot resume {folder}: {error}") from None
    new = json.loads(json.dumps(without_nan(plan.to_dict())))  # as recipe.json has it
    keys = ["name", "modality", "train.batch", "train.seed", "optim.name"]
    keys += [f"{section}.{key}" for section in ("model", "data") for key in new[section] if key != "num_workers"]
    for key in keys:
        before: Any = old
        now: Any = new
        for part in key.split("."):
            before, now = (tree.get(part) if isinstance(tree, dict) else None for tree in (before, now))
        if before != now:
            raise ConfigError(
                f"cannot resume {folder}: its {key} is {before!r:.300}, this recipe has {now!r:.300}. "
                "Set it back, start anew with another --run-dir, or remove the folder"
            )


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
    """(model with its newest weights, resolved recipe as a dict) of a run folder, or of one that `priorzoo hub` made of it."""
    if not (Path(run_dir) / "recipe.json").exists():
        raise ConfigError(f"{run_dir}: no recipe.json; expected a run folder written by recipes/train.py")
    recipe = stored_recipe(run_dir)
    read = find_modality(recipe["modality"]).model.from_pretrained
    return read(run_dir) if (Path(run_dir) / "config.json").is_file() else newest_model(run_dir, read), recipe


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

    A run folder, a save_pretrained folder, a model with shipped weights (text_ggd_ssmax_tiny.facts), or "newest:RECIPE". A
    classifier for another number of classes stays as it was initialised. ConfigError where there are none, or they do not fit.
    """
    recipe_name = source.removeprefix("newest:")
    path = newest_weights(recipe_name) if recipe_name != source else Path(source)
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
    except (RuntimeError, ValueError) as error:
        reason = str(error) if isinstance(error, ValueError) else f"its weights do not fit this model: {error}"
        raise ConfigError(f"model.init_from={source}: {reason}") from error


def newest_weights(recipe_name: str) -> Path:
    """The newest finished run of a recipe; ConfigError naming the command that makes one."""
    folder = newest_run_dir(recipe_name, finished=True)
    if folder is None:
        raise ConfigError(
            f"this recipe starts from a finished run of {recipe_name}, and there is none under {Path('runs') / recipe_name}; "
            f"make one with `priorzoo train {recipe_name}`, or name weights with --set model.init_from=…"
        )
    return folder
