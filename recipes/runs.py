"""Run folders: their files, who may write in one, checkpoints that are verified and read as data,
and weights of runs.

<run>/recipe.json deepspeed.json environment.json    what ran, and where
      metrics.jsonl                                  one JSON object a line: training and held-out
      records
      run.lock                                       who writes here, while its process lives
      checkpoints/step_00000200/                     DeepSpeed's state, a safetensors model/, and
      complete.json: step, ranks,
                                                     ZeRO stage, precision, and the digest of every
                                                     file
                  step_00000200.partial              being written, or left by a process that was
                  killed
                  step_00000200.universal            converted for another number of ranks, until it
                  is loaded
                  step_00000400.aside                not used: damaged
                  latest                             the newest complete one; DeepSpeed's tools read
                  it
      model/                                         the final weights (save_pretrained)
      plots/loss.png
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import io
import itertools
import json
import os
import pickle
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch

from modalities.contract import find_modality
from modalities.figures import save_figure
from recipes.commands import ConfigError, warn
from recipes.config import Json, Plan
from zoo.catalog import verified_file
from zoo.errors import one_line
from zoo.files import (
    file_digests,
    find_damage,
    make_folder,
    read_object,
    read_tensors,
    remove_abandoned,
    sync,
    without_nan,
    write_json,
    write_text,
)
from zoo.model import ZooModel, saved_model_damage

if TYPE_CHECKING:
    from recipes.engine import Ranks

LOSS_CURVE = "plots/loss.png"
COMPLETE = "complete.json"
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
        """Those with their final names, by step; `damage` tells whether they are still as they were
        written."""
        folders = (
            p for p in self.checkpoint_root.glob("step_*") if NAME.fullmatch(p.name) and p.is_dir()
        )
        return sorted(folders, key=lambda path: int(path.name.removeprefix("step_")))

    def describe(self, plan: Plan) -> None:
        """Write what runs, and where: recipe.json first, which makes a folder a run. A finished run
        keeps its own."""
        packages = (
            sys.modules.get(name) for name in ("torch", "deepspeed", "numpy", "safetensors", "zoo")
        )
        git = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
        commit = ""
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            place = Path(__file__).parent
            silence = subprocess.DEVNULL
            commit = subprocess.check_output(
                git, cwd=place, stderr=silence, text=True, timeout=10
            ).strip()
        environment = {
            "versions": {"python": platform.python_version()}
            | {p.__name__: p.__version__ for p in packages if p},
            "commit": commit or "unknown",
            "command": sys.argv,
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
            "cuda": torch.version.cuda,
            "started": utc_now(),
        }
        for name, facts in zip(
            DESCRIPTION, (plan.to_dict(), plan.deepspeed, environment), strict=True
        ):
            write_json(self.path / name, facts)

    def log(self, record: Mapping[str, object]) -> None:
        with open(self.metrics_path, "a", encoding="utf-8") as file:
            file.write(_line(record))

    def metrics(self) -> list[Json]:
        return self.read_metrics()[0]

    def read_metrics(self) -> tuple[list[Json], int]:
        """(readable records, number of unreadable lines, of a crash or disk errors)."""
        records = []
        lines = (
            self.metrics_path.read_bytes().splitlines() if self.metrics_path.is_file() else []
        )  # and not of a pipe
        for line in lines:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and type(record.get("step")) is int:
                records.append(record)
        return records, len(lines) - len(records)

    def rewind(self, step: int, keep: int) -> None:
        """Remove what a killed process left, converted checkpoints, and records after `step`. Needs
        the lock."""
        records, unreadable = self.read_metrics()
        if unreadable:
            warn(
                f"{self.metrics_path}: {unreadable} unreadable line{'s' * (unreadable > 1)} left out"
            )
        write_text(self.metrics_path, "".join(_line(r) for r in records if r["step"] <= step))
        for path in self.checkpoint_root.glob("step_*"):  # any other folder belongs to the user
            if REMNANT.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
        for name in (*DESCRIPTION, self.metrics_path.name, LOSS_CURVE, "checkpoints/latest"):
            remove_abandoned(self.path / name, 0)
        self.prune(keep)
        if complete := self.checkpoints():
            write_text(self.checkpoint_root / "latest", complete[-1].name)

    def prune(self, keep: int) -> None:
        """Remove all but the newest `keep` checkpoints."""
        for path in self.checkpoints()[:-keep]:
            if path.is_symlink():  # the user moved it elsewhere
                path.unlink()
            else:
                partial = path.with_name(
                    path.name + ".partial"
                )  # a half-removed one is never taken for whole
                path.rename(partial)
                shutil.rmtree(partial)

    def continuation(self) -> str:
        """The command that continues this run."""
        return f"priorzoo train {shlex.join([*self.words, '--run-dir', str(self.path), '--resume', 'auto'])}"

    def plot(self) -> Path:
        """plots/loss.png from metrics.jsonl: training and held-out loss, gradient norm, learning
        rate and throughput."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        records = self.metrics()
        rate = next((name for record in records for name in record if name.endswith("_per_s")), "")
        figure, axes = pyplot.subplots(2, 2, figsize=(9, 6), layout="constrained")
        figure.suptitle(self.path.name, fontsize=10)
        for axis, names in zip(
            axes.flat, (["loss", "heldout_loss"], ["grad_norm"], ["lr"], [rate]), strict=True
        ):
            for name, style in zip(names, ("-", "o-"), strict=False):
                points = [(r["step"], r[name]) for r in records if r.get(name) is not None]
                axis.plot(
                    [step for step, _ in points], [value for _, value in points], style, label=name
                )
            axis.set(title=names[0].replace("_", " "), xlabel="step")
            axis.grid(alpha=0.3)
        axes[0, 0].legend()
        save_figure(figure, self.path / LOSS_CURVE)
        return self.path / LOSS_CURVE

    def weights(self) -> Path:
        """The newest weights: those of the newest whole checkpoint, or the final model/ where none
        is left.

        Damaged ones are reported and skipped. ConfigError where there are none.
        """
        damaged = ""
        for path in [*reversed(self.checkpoints()), self.path]:
            folder = path / "model"
            if path != self.path and (reason := saved_model_damage(folder)):
                damaged = f"{path} is damaged: {reason}"
                warn(f"{damaged}; reading an older one")
            elif (folder / "config.json").exists():
                return folder
        raise ConfigError(
            damaged
            or f"{self.path}: neither a complete checkpoint nor model/; is this a run folder?"
        )


def _line(record: Mapping[str, object]) -> str:
    """A line of metrics.jsonl; null for numbers that JSON does not have."""
    return json.dumps(without_nan(record), allow_nan=False) + "\n"


def utc_now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


# ------------------------------------------------------------------------------------------------
# one writer


class RunLock:
    """An exclusive lock on `<run>/run.lock`, which says who writes, until `release` or the end of
    the process.

    A file system without locks is reported. ConfigError where another process holds it.
    """

    def __init__(self, folder: Path):
        path = folder / "run.lock"
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise ConfigError(
                f"{path} is a link or no regular file, and is not followed: remove it"
            )
        make_folder(folder)
        self._file: int | None = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666
        )
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            holder = "another process"
            with contextlib.suppress(OSError, ValueError, KeyError):
                facts = read_object(path)
                holder = f"process {facts['pid']} on {facts['host']}, started {facts['started']}"
            raise ConfigError(
                f"{folder} is in use: {holder}, trains in it; wait for it or stop it"
            ) from None
        except OSError as error:
            warn(
                f"note: {folder} is on a file system without locks ({error}): start no other process in it"
            )
        os.register_at_fork(
            after_in_child=self.release
        )  # a data worker must not keep the lock alive
        facts = {"host": socket.gethostname(), "pid": os.getpid(), "started": utc_now()}
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, (json.dumps(facts) + "\n").encode(), 0)

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


@contextlib.contextmanager
def own_run(
    plan: Plan,
    ranks: Ranks,
    *,
    run_dir: str | None = None,
    resume: str | None = None,
    words: Sequence[str] = (),
) -> Iterator[tuple[RunFolder, Path | None]]:
    """(run folder, checkpoint to continue from, or None), the same on every rank; rank 0 holds the
    folder's lock.

    resume=None refuses a folder that holds a run. "auto" takes the newest undamaged checkpoint of
    `run_dir` (or of this recipe's newest run), and starts anew where there is none. An OSError from
    inside becomes a ConfigError that names the checkpoint from which to go on, if there is one.
    """
    lock: RunLock | None = None
    answer: list[tuple[Path, Path | None] | ConfigError | None] = [None]
    if ranks.lead:
        try:
            if resume not in (None, "auto"):  # an empty word is an unset variable of a shell
                raise ConfigError(
                    f"--resume {resume!r}: expected 'auto'; the run's folder is --run-dir"
                )
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
        run = RunFolder(answer[0][0], words)
        checkpoint = answer[0][1]
        try:
            yield run, checkpoint
        except OSError as error:
            if not ranks.lead:  # only the lead's error is shown
                warn(f"rank {ranks.rank}: {error}")
            if not (newest := run.checkpoints()[-1:]):
                raise ConfigError(str(error)) from error
            last = f"The last good checkpoint is {newest[0]}; once that is fixed, continue with: {run.continuation()}"
            raise ConfigError(f"{error}. {last}") from error
    finally:
        if lock is not None:
            lock.release()
            if (
                run_dir is None and not (folder / "recipe.json").exists()
            ):  # a new folder, of a run that could not begin
                with contextlib.suppress(OSError):
                    (folder / "run.lock").unlink()
                    folder.rmdir()


def _choose(plan: Plan, run: RunFolder, resume: str | None) -> Path | None:
    """The newest undamaged checkpoint of a locked run; None to start anew."""
    if resume is None and any(
        (run.path / name).exists() for name in ("recipe.json", "metrics.jsonl", "checkpoints")
    ):
        raise ConfigError(
            f"{run.path} already holds a run: --resume auto continues it, another --run-dir starts anew"
        )
    if not (run.path / "recipe.json").exists() and (
        others := sorted(run.path.glob("*/recipe.json"))
    ):
        raise ConfigError(
            f"{run.path} holds other runs, such as {others[0].parent}; give it a --run-dir of its own"
        )
    final = (run.path / "model").resolve()  # of a link, what it points to is replaced
    empty = not final.exists() or (final.is_dir() and not any(final.iterdir()))
    if not empty and not (final / "config.json").is_file():
        raise ConfigError(
            f"{run.path / 'model'} is no saved model: the final weights could not be written there"
        )
    complete = run.checkpoints()
    if not complete:
        return None
    check_same(plan, run.path)
    damaged: dict[Path, str] = {}
    for path in reversed(complete):
        if reason := damage(path):
            damaged[path] = f"{path} is damaged: {reason}"
            continue
        if int(path.name.removeprefix("step_")) > (steps := plan.recipe.train.steps):
            raise ConfigError(
                f"train.steps={steps}: {path} has more; expected at least as many, or another --run-dir"
            )
        for newer, message in damaged.items():
            warn(f"{message}; it is set aside as {quarantine(newer).name}")
        return path
    raise ConfigError(f"{'; '.join(damaged.values())}. Start anew with another --run-dir")


def check_same(plan: Plan, folder: Path) -> None:
    """ConfigError where model, data, batch, seed or optimiser differ from the run's; steps, ranks
    and rates may change."""
    try:
        old = stored_recipe(folder)
    except ConfigError as error:
        raise ConfigError(f"cannot resume {folder}: {error}") from None
    new = json.loads(json.dumps(without_nan(plan.to_dict())))  # as recipe.json has it
    for section in (
        "model",
        "data",
    ):  # a setting that the version of the run did not have was at its default
        defaults = vars(type(getattr(plan.recipe, section)))
        if isinstance(old.get(section), dict):
            old[section] = {key: defaults.get(key) for key in new[section]} | old[section]
    keys = ["name", "modality", "train.batch", "train.seed", "optim.name"]
    keys += [
        f"{section}.{key}"
        for section in ("model", "data")
        for key in new[section]
        if key != "num_workers"
    ]
    for key in keys:
        before, now = (functools.reduce(_entry, key.split("."), tree) for tree in (old, new))
        if before != now:
            differ = f"its {key} is {before!r:.300}, this recipe has {now!r:.300}"
            raise ConfigError(
                f"cannot resume {folder}: {differ}; set it back, or start anew with another --run-dir"
            )


def _entry(tree: object, name: str) -> object:
    return tree.get(name) if isinstance(tree, dict) else None


# ------------------------------------------------------------------------------------------------
# checkpoints

FACTS = {"step": int, "world": int, "zero_stage": int, "precision": str}


def seal(folder: Path, facts: Mapping[str, object]) -> None:
    """Write complete.json: the facts, the digest of every file in `folder`, and a digest of
    both."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    facts = {**facts, "files": file_digests(folder, names)}
    write_json(folder / COMPLETE, facts | {"sha256": _digest(facts)})


def _digest(facts: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def checkpoint_facts(folder: Path) -> Json | None:
    """Contents of complete.json; None where it is missing, or is not as it was written."""
    try:
        facts = read_object(folder / COMPLETE)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    digest = facts.pop("sha256", None)
    if not all(type(facts.get(name)) is kind for name, kind in FACTS.items()):
        return None
    early_version = digest is None and facts.keys() == FACTS.keys()  # before 0.6: no digests
    return (
        facts
        if early_version or (_digest(facts) == digest and isinstance(facts.get("files"), dict))
        else None
    )


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, by its files' sizes and SHA-256; None where nothing is."""
    facts = checkpoint_facts(folder)
    if facts is None:
        return f"{COMPLETE} {'is not as it was written' if (folder / COMPLETE).exists() else 'is missing'}"
    return find_damage(folder, facts.get("files", {}))


def quarantine(folder: Path) -> Path:
    """Rename a checkpoint so that nothing uses it; returns the new path."""
    aside = folder.with_name(folder.name + ".aside")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    sync(aside.parent)
    return aside


@contextlib.contextmanager
def data_only(folder: Path) -> Iterator[None]:
    """Make `torch.load` read tensors, plain values and DeepSpeed's own classes, and never run code
    from a file.

    DeepSpeed asks for unrestricted pickles; torch's environment variable overrules it. ConfigError
    where a file of the checkpoint `folder` holds anything else, or cannot be read.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    torch.serialization.add_safe_globals(
        [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    )
    try:
        with patch.dict(os.environ, {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"}):
            yield
    except pickle.UnpicklingError as error:
        refused = re.search(
            r"GLOBAL (\S+)|Unsupported \S+ \S+", str(error)
        )  # without torch's advice to allow it
        raise ConfigError(
            f"{folder} holds more than tensors and plain values ({refused[0] if refused else type(error).__name__}); "
            "nothing in it was executed"
        ) from error
    except Exception as error:  # whatever a damaged file meets in torch's and DeepSpeed's code
        raise ConfigError(f"{folder} cannot be loaded: {one_line(error)}") from error


def loadable(folder: Path, plan: Plan, ranks: Ranks) -> tuple[Path, bool]:
    """(folder to load, is it universal) for this plan.

    Checkpoints of stage 0 load anywhere. Those of stages 1–3 are cut by rank: at another number of
    ranks rank 0 converts them.
    """
    facts = checkpoint_facts(folder)
    if facts is None:
        raise ConfigError(f"{folder} has no readable {COMPLETE}")
    train = plan.recipe.train
    anew = f"start a new run from its weights with --set model.init_from={folder / 'model'}"
    if facts["precision"] != train.precision or bool(facts["zero_stage"]) != bool(train.zero_stage):
        written = (
            f"train.precision={facts['precision']} --set train.zero_stage={facts['zero_stage']}"
        )
        raise ConfigError(
            f"{folder}: its optimiser's state is of another precision or kind of stage. Resume with --set {written}, or {anew}"
        )
    if train.zero_stage == 0 or (facts["world"], facts["zero_stage"]) == (
        ranks.world,
        train.zero_stage,
    ):
        return folder, False
    differs = (
        f"{folder} was written by {facts['world']} ranks at ZeRO stage {facts['zero_stage']}; this run has {ranks.world} "
        f"at stage {train.zero_stage}"
    )
    if plan.recipe.optim.name == "muon":
        raise ConfigError(
            f"{differs}, and DeepSpeed converts no state of Muon. Resume with the same ranks, or {anew}"
        )
    target = (
        folder.with_name(folder.name + ".universal") / folder.name
    )  # DeepSpeed also writes a pointer beside it
    if ranks.lead:
        try:
            convert(folder, target)
        except (ConfigError, OSError) as error:  # printed here; the error below reaches every rank
            warn(str(error))
            shutil.rmtree(target.parent, ignore_errors=True)
    ranks.barrier()
    if not target.exists():
        raise ConfigError(
            f"{differs}. Converting it failed. Resume with the same ranks and stage, or {anew}"
        )
    return target, True


def convert(folder: Path, target: Path) -> None:
    """Write DeepSpeed's universal form of a checkpoint, which `RunFolder.rewind` removes again.
    Runs no code from a file."""
    from deepspeed.checkpoint import ds_to_universal

    shutil.rmtree(target.parent, ignore_errors=True)
    target.mkdir(parents=True)
    options = {
        "input_folder": str(folder),
        "output_folder": str(target),
        "inject_missing_state": True,
        "strict": True,
    }
    workers = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
    silence = io.StringIO()
    with (
        data_only(folder),
        contextlib.redirect_stdout(silence),
        contextlib.redirect_stderr(silence),
    ):
        ds_to_universal.main(Namespace(**options, **workers))


# ------------------------------------------------------------------------------------------------
# finding runs


def new_run_dir(recipe_name: str) -> Path:
    """Make runs/<recipe>/<number>-<time>, also where several runs start at once."""
    parent = Path("runs", recipe_name)
    parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(
        1 + max((_number(folder) for folder in parent.iterdir()), default=0)
    ):
        folder = parent / f"{number:04d}-{time.strftime('%Y%m%d-%H%M%S')}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            break
    return folder


def newest_run_dir(recipe_name: str, *, finished: bool = False) -> Path | None:
    """The run of this recipe with the greatest number that has a complete checkpoint, or with
    `finished` final weights."""
    folders = sorted(
        Path("runs", recipe_name).glob("*"), key=lambda folder: (_number(folder), folder.name)
    )
    for folder in reversed(folders):
        if (
            (folder / "model" / "config.json").exists()
            if finished
            else RunFolder(folder).checkpoints()
        ):
            return folder
    return None


def _number(folder: Path) -> int:
    """The number that begins the name of a run's folder; 0 where none does, as in 0.5."""
    match = re.fullmatch(r"(\d{4,})-\d{8}-\d{6}", folder.name)
    return int(match[1]) if match else 0


# ------------------------------------------------------------------------------------------------
# weights of runs


def newest_model(run_dir: str | Path, read: Callable[[Path], ZooModel]) -> ZooModel:
    """What `read` makes of the newest weights of a run, which a process that trains may remove
    while they are read."""
    while True:
        folder = RunFolder(run_dir).weights()
        try:
            return read(folder)
        except (OSError, ValueError):
            if folder.exists():
                raise


def load_run(run_dir: str | Path) -> tuple[ZooModel, Json]:
    """(model with its newest weights, resolved recipe as a dict) of a run folder, or of one that
    `priorzoo hub` made of it."""
    if not (Path(run_dir) / "recipe.json").exists():
        raise ConfigError(
            f"{run_dir}: no recipe.json; expected a run folder written by priorzoo train"
        )
    recipe = stored_recipe(run_dir)
    read = find_modality(recipe["modality"]).model.from_pretrained
    return read(run_dir) if (Path(run_dir) / "config.json").is_file() else newest_model(
        run_dir, read
    ), recipe


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


def load_weights(model: ZooModel, source: str) -> None:
    """Copy weights into a model of the same shape, from a source that `model.init_from` names.

    A classifier for another number of classes stays as it was initialised.
    """
    recipe_name = source.removeprefix("newest:")
    path = newest_run_dir(recipe_name, finished=True) if recipe_name != source else Path(source)
    if path is None:
        raise ConfigError(
            f"runs/{recipe_name} has no finished run to start from: `priorzoo train {recipe_name}`, or --set model.init_from=…"
        )
    read = type(model).from_pretrained
    try:
        if path.is_dir():
            state = (
                read(path) if (path / "config.json").exists() else newest_model(path, read)
            ).state_dict()
        elif "." in source and "/" not in source:
            state = read_tensors(verified_file(source))
        else:
            raise ValueError(
                "expected a folder, newest:RECIPE, or a name such as text_ggd_ssmax_tiny.facts"
            )
        initial = model.state_dict()
        for name in model.replaceable_parameters():
            if name in state and state[name].shape != initial[name].shape:
                state[name] = initial[name]
        model.load_state_dict(state)
    except (RuntimeError, ValueError) as error:
        reason = (
            str(error)
            if isinstance(error, ValueError)
            else f"its weights do not fit this model: {error}"
        )
        raise ConfigError(f"model.init_from={source}: {reason}") from error
