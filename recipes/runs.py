"""Run folders: their files, who may write in one, checkpoints that are verified and read as data,
and weights of runs.

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
import fcntl
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
from recipes.plan import Plan
from recipes.recipe import Json
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
from zoo.pretrained import verified_file

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


# ------------------------------------------------------------------------------------------------
# one writer


class RunLock:
    """An exclusive lock on `<run>/run.lock`, which says who writes.

    It is held until `release` or the end of the process. A file system without locks is reported.
    ConfigError where another process holds the lock.
    """

    def __init__(self, folder: Path):
        path = folder / "run.lock"
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise ConfigError(
                f"{path} is a link or no regular file, and is not followed: remove it"
            )
        make_folder(folder)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        self._file: int | None = os.open(path, flags, 0o666)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise ConfigError(
                f"{folder} is in use: {_holder(path)}, trains in it; wait for it or stop it"
            ) from None
        except OSError as error:
            warn(
                f"note: {folder} is on a file system without locks ({error}): "
                "start no other process in it"
            )
        # A data worker must not keep the lock alive.
        os.register_at_fork(after_in_child=self.release)
        facts = {"host": socket.gethostname(), "pid": os.getpid(), "started": utc_now()}
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, (json.dumps(facts) + "\n").encode(), 0)

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _holder(path: Path) -> str:
    """Who holds a lock, by its file."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        facts = read_object(path)
        return f"process {facts['pid']} on {facts['host']}, started {facts['started']}"
    return "another process"


@contextlib.contextmanager
def own_run(
    plan: Plan,
    ranks: Ranks,
    *,
    run_dir: str | None = None,
    resume: str | None = None,
    words: Sequence[str] = (),
) -> Iterator[tuple[RunFolder, Path | None]]:
    """(run folder, checkpoint to continue from, or None), the same on every rank.

    Rank 0 holds the folder's lock. resume=None refuses a folder that holds a run. "auto" takes the
    newest undamaged checkpoint of `run_dir` (or of this recipe's newest run), and starts anew where
    there is none. An OSError from inside becomes a ConfigError that names the checkpoint from which
    to go on, if there is one.
    """
    lock: RunLock | None = None
    answer: list[tuple[Path, Path | None] | ConfigError | None] = [None]
    if ranks.lead:
        try:
            folder = _run_path(plan, run_dir, resume)
            lock = RunLock(folder)
            answer = [(folder, _choose(plan, RunFolder(folder), resume))]
        except Exception as error:
            # The other ranks wait for this answer.
            answer = [ConfigError(one_line(error))]
    if ranks.world > 1:
        torch.distributed.broadcast_object_list(answer)
    try:
        if isinstance(answer[0], ConfigError):
            raise answer[0]
        assert answer[0] is not None
        path, checkpoint = answer[0]
        run = RunFolder(path, words)
        try:
            yield run, checkpoint
        except OSError as error:
            if not ranks.lead:
                # Only the lead's error is shown.
                warn(f"rank {ranks.rank}: {error}")
            raise ConfigError(_continuation_message(error, run)) from error
    finally:
        if lock is not None:
            lock.release()
            if run_dir is None:
                _remove_empty_run(folder)


def _run_path(plan: Plan, run_dir: str | None, resume: str | None) -> Path:
    """The folder to train in: the one that is named, or the newest or a new one of the recipe."""
    # An empty word is an unset variable of a shell.
    if resume not in (None, "auto"):
        raise ConfigError(f"--resume {resume!r}: expected 'auto'; the run's folder is --run-dir")
    newest = newest_run_dir(plan.recipe.name) if resume else None
    if run_dir:
        return Path(run_dir)
    return newest or new_run_dir(plan.recipe.name)


def _continuation_message(error: OSError, run: RunFolder) -> str:
    """The message of an error that ended a run, with the command that continues the run."""
    complete = run.checkpoints()
    if not complete:
        return str(error)
    return (
        f"{error}. The last good checkpoint is {complete[-1]}; once that is fixed, "
        f"continue with: {run.continuation()}"
    )


def _remove_empty_run(folder: Path) -> None:
    """Remove the new folder of a run that could not begin."""
    if not (folder / "recipe.json").exists():
        with contextlib.suppress(OSError):
            (folder / "run.lock").unlink()
            folder.rmdir()


def _choose(plan: Plan, run: RunFolder, resume: str | None) -> Path | None:
    """The newest undamaged checkpoint of a locked run; None to start anew."""
    _check_folder(run.path, resume)
    complete = run.checkpoints()
    if not complete:
        return None
    check_same(plan, run.path)
    damaged: dict[Path, str] = {}
    for path in reversed(complete):
        reason = damage(path)
        if reason is None:
            _check_steps(plan, path)
            for newer, message in damaged.items():
                warn(f"{message}; it is set aside as {quarantine(newer).name}")
            return path
        damaged[path] = f"{path} is damaged: {reason}"
    raise ConfigError(f"{'; '.join(damaged.values())}. Start anew with another --run-dir")


def _check_folder(path: Path, resume: str | None) -> None:
    """ConfigError for a folder in which this run cannot write."""
    traces = [path / name for name in ("recipe.json", "metrics.jsonl", "checkpoints")]
    if resume is None and any(trace.exists() for trace in traces):
        raise ConfigError(
            f"{path} already holds a run: --resume auto continues it, another --run-dir starts anew"
        )
    if not (path / "recipe.json").exists():
        others = sorted(path.glob("*/recipe.json"))
        if others:
            raise ConfigError(
                f"{path} holds other runs, such as {others[0].parent}; "
                "give it a --run-dir of its own"
            )
    # Of a link, what it points to is replaced.
    final = (path / "model").resolve()
    is_empty = not final.exists() or (final.is_dir() and not any(final.iterdir()))
    if not is_empty and not (final / "config.json").is_file():
        raise ConfigError(
            f"{path / 'model'} is no saved model: the final weights could not be written there"
        )


def _check_steps(plan: Plan, checkpoint: Path) -> None:
    """ConfigError where a checkpoint is of a later step than the run's last one."""
    steps = plan.recipe.train.steps
    if checkpoint_step(checkpoint) > steps:
        raise ConfigError(
            f"train.steps={steps}: {checkpoint} has more; "
            "expected at least as many, or another --run-dir"
        )


def check_same(plan: Plan, folder: Path) -> None:
    """ConfigError where model, data, batch, seed or optimiser differ from the run's.

    Steps, ranks and rates may change.
    """
    try:
        old = stored_recipe(folder)
    except ConfigError as error:
        raise ConfigError(f"cannot resume {folder}: {error}") from None
    # As recipe.json has it.
    new = json.loads(json.dumps(without_nan(plan.to_dict())))
    keys = ["name", "modality", "train.batch", "train.seed", "optim.name"]
    for section in ("model", "data"):
        keys += [f"{section}.{name}" for name in new[section] if name != "num_workers"]
        # A setting that the version of the run did not have was at its default.
        defaults = vars(type(getattr(plan.recipe, section)))
        if isinstance(old.get(section), dict):
            old[section] = {name: defaults.get(name) for name in new[section]} | old[section]
    for key in keys:
        old_value = _entry_at(old, key)
        new_value = _entry_at(new, key)
        if old_value != new_value:
            raise ConfigError(
                f"cannot resume {folder}: its {key} is {old_value!r:.300}, "
                f"this recipe has {new_value!r:.300}; "
                "set it back, or start anew with another --run-dir"
            )


def _entry_at(tree: object, key: str) -> object:
    """The entry at a key with dots; None where there is none."""
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


# ------------------------------------------------------------------------------------------------
# checkpoints

FACTS = {"step": int, "world": int, "zero_stage": int, "precision": str}


def seal(folder: Path, facts: Mapping[str, object]) -> None:
    """Write complete.json: the facts, every file's digest, and a digest of both."""
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
    # Versions before 0.6 wrote no digests.
    if digest is None and facts.keys() == FACTS.keys():
        return facts
    if _digest(facts) == digest and isinstance(facts.get("files"), dict):
        return facts
    return None


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, by its files' sizes and SHA-256; None where nothing is."""
    facts = checkpoint_facts(folder)
    if facts is not None:
        return find_damage(folder, facts.get("files", {}))
    if (folder / COMPLETE).exists():
        return f"{COMPLETE} is not as it was written"
    return f"{COMPLETE} is missing"


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
        # Only what was refused: torch's message goes on with advice to allow it.
        match = re.search(r"GLOBAL (\S+)|Unsupported \S+ \S+", str(error))
        refused = match[0] if match else type(error).__name__
        raise ConfigError(
            f"{folder} holds more than tensors and plain values ({refused}); "
            "nothing in it was executed"
        ) from error
    except Exception as error:
        # Whatever a damaged file meets in torch's and DeepSpeed's code.
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
    old_world = facts["world"]
    old_stage = facts["zero_stage"]
    anew = f"start a new run from its weights with --set model.init_from={folder / 'model'}"
    if facts["precision"] != train.precision or bool(old_stage) != bool(train.zero_stage):
        raise ConfigError(
            f"{folder}: its optimiser's state is of another precision or kind of stage. "
            f"Resume with --set train.precision={facts['precision']} "
            f"--set train.zero_stage={old_stage}, or {anew}"
        )
    same_cut = old_world == ranks.world and old_stage == train.zero_stage
    if train.zero_stage == 0 or same_cut:
        return folder, False
    difference = (
        f"{folder} was written by {old_world} ranks at ZeRO stage {old_stage}; "
        f"this run has {ranks.world} at stage {train.zero_stage}"
    )
    if plan.recipe.optim.name == "muon":
        raise ConfigError(
            f"{difference}, and DeepSpeed converts no state of Muon. "
            f"Resume with the same ranks, or {anew}"
        )
    # A folder of its own: DeepSpeed also writes a pointer beside the target.
    target = folder.with_name(folder.name + ".universal") / folder.name
    if ranks.lead:
        try:
            convert(folder, target)
        except (ConfigError, OSError) as error:
            # Printed by the lead; the error below reaches every rank.
            warn(str(error))
            shutil.rmtree(target.parent, ignore_errors=True)
    ranks.barrier()
    if not target.exists():
        raise ConfigError(
            f"{difference}. Converting it failed. Resume with the same ranks and stage, or {anew}"
        )
    return target, True


def convert(folder: Path, target: Path) -> None:
    """Write DeepSpeed's universal form of a checkpoint, which `RunFolder.rewind` removes again.

    Runs no code from a file.
    """
    from deepspeed.checkpoint import ds_to_universal

    shutil.rmtree(target.parent, ignore_errors=True)
    target.mkdir(parents=True)
    options = Namespace(
        input_folder=str(folder),
        output_folder=str(target),
        inject_missing_state=True,
        strict=True,
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
    )
    silence = io.StringIO()
    with (
        data_only(folder),
        contextlib.redirect_stdout(silence),
        contextlib.redirect_stderr(silence),
    ):
        ds_to_universal.main(options)


# ------------------------------------------------------------------------------------------------
# finding runs


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


# ------------------------------------------------------------------------------------------------
# weights of runs


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
    if not (Path(run_dir) / "recipe.json").exists():
        raise ConfigError(
            f"{run_dir}: no recipe.json; expected a run folder written by priorzoo train"
        )
    recipe = stored_recipe(run_dir)
    read = find_modality(recipe["modality"]).model.from_pretrained
    if (Path(run_dir) / "config.json").is_file():
        return read(run_dir), recipe
    return newest_model(run_dir, read), recipe


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
    folder = _init_folder(source)
    try:
        state = _read_state(type(model), folder, source)
        initial = model.state_dict()
        for name in model.replaceable_parameters():
            if name in state and state[name].shape != initial[name].shape:
                state[name] = initial[name]
        model.load_state_dict(state)
    except RuntimeError as error:
        reason = f"its weights do not fit this model: {error}"
        raise ConfigError(f"model.init_from={source}: {reason}") from error
    except ValueError as error:
        raise ConfigError(f"model.init_from={source}: {error}") from error


def _init_folder(source: str) -> Path:
    """The folder that `model.init_from` means; it need not exist."""
    recipe_name = source.removeprefix("newest:")
    if recipe_name == source:
        return Path(source)
    folder = newest_run_dir(recipe_name, finished=True)
    if folder is None:
        raise ConfigError(
            f"runs/{recipe_name} has no finished run to start from: "
            f"`priorzoo train {recipe_name}`, or --set model.init_from=…"
        )
    return folder


def _read_state(kind: type[ZooModel], folder: Path, source: str) -> dict[str, torch.Tensor]:
    """The weights in a saved model's folder or a run folder, or those of a name."""
    if folder.is_dir():
        is_saved_model = (folder / "config.json").exists()
        read = kind.from_pretrained
        model = read(folder) if is_saved_model else newest_model(folder, read)
        return model.state_dict()
    if "." in source and "/" not in source:
        return read_tensors(verified_file(source))
    raise ValueError(
        "expected a folder, newest:RECIPE, or a name such as text_ggd_ssmax_tiny.facts"
    )
