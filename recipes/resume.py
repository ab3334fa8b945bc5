"""The run folder that a training writes in, and the checkpoint that it continues from."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from recipes.checkpoints import damage, quarantine
from recipes.commands import ConfigError, warn
from recipes.lock import RunLock
from recipes.plan import Plan
from recipes.ranks import Ranks
from recipes.run_folder import (
    RunFolder,
    checkpoint_step,
    new_run_dir,
    newest_run_dir,
    stored_recipe,
)
from zoo.errors import one_line
from zoo.files import without_nan


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
