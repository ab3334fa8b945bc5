"""Run-folder locking and checkpoint selection: one process trains in a folder, from its newest undamaged checkpoint."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from recipes.checkpoints import ASIDE, damage, quarantine, remnants, warn
from recipes.config import ConfigError, Plan
from recipes.runs import DESCRIPTION, RunFolder, new_run_dir, newest_run_dir, stored_recipe
from zoo.errors import one_line

if TYPE_CHECKING:
    from recipes.engine import Ranks

__all__ = ["RunLock", "own_run"]


class RunLock:
    """An exclusive lock on `<run>/run.lock` until `release`, or until the process ends in any way.

    The system holds the lock, so a file that a killed process left locks nothing. It says who writes: host, pid, start.
    NFS from version 4 locks across hosts too; a file system without locks is reported, and nothing is refused.

    Raises:
        ConfigError: where another process holds it.
    """

    # File descriptors, closed in forked children: a data worker must not keep the lock alive.
    open_files: ClassVar[set[int]] = set()

    def __init__(self, folder: Path):
        self.path = folder / "run.lock"
        for attempts_left in reversed(range(100)):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            except (FileNotFoundError, FileExistsError):  # another run is removing its folder at this moment
                if attempts_left and not folder.is_file():
                    continue
                raise
            self._lock(folder)
            if self.path.exists() and os.path.samestat(self.path.stat(), os.fstat(self._file)):
                break
            os.close(self._file)  # another run ended before its first step, and removed its folder meanwhile
        RunLock.open_files.add(self._file)
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        facts = {"host": socket.gethostname(), "pid": os.getpid(), "started": started}
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
        try:
            with open(folder / "run.lock") as file:
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
    `run_dir` (or of this recipe's newest run), and starts anew where there is none. Otherwise it names a run folder or a
    checkpoint. Damaged checkpoints are reported, quarantined and passed over. A run that fails before its first step leaves
    nothing. `words`: of the command line without the run's folder; with it they continue the run.

    Raises:
        ConfigError: where another process trains in the folder; where the run was made with another model or other data;
            where every checkpoint is damaged; and for an OSError from inside, with the checkpoint from which to go on.
    """
    claim: _Claim | None = None
    answer: list[tuple[Path, Path | None] | ConfigError | None] = [None]
    if ranks.lead:
        try:
            claim = _Claim(plan, run_dir, resume)
            answer = [(claim.run.path, claim.checkpoint)]
        except Exception as error:  # the other ranks wait for this answer
            answer = [ConfigError(one_line(error))]
    if ranks.world > 1:
        torch.distributed.broadcast_object_list(answer)
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
        raise ConfigError(f"{error}. {last}; once that is mended, continue with: {run.continuation()}") from error
    finally:
        if claim is not None:
            claim.end()


class _Claim:
    """The run folder of this process, locked: a new one, described, or one with the checkpoint to continue from."""

    def __init__(self, plan: Plan, run_dir: str | None, resume: str | None):
        name = plan.recipe.name
        folder, wanted = _find_folder(name, run_dir, resume)
        place = folder or Path("runs") / name
        existing = next(path for path in (place, *place.absolute().parents) if path.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            raise ConfigError(f"run folder {place}: {existing} is not a folder that can be written")
        # What a run that cannot begin removes again, from the innermost folder on; and files that were there before.
        self._new_folders = [path for path in (place, *place.absolute().parents) if not path.exists()]
        if folder is None:
            folder = new_run_dir(name)
            self._new_folders.insert(0, folder)
        self.run, self.checkpoint = RunFolder(folder), None
        self._files_before = {path.name for path in folder.iterdir()} if folder.exists() else set()
        self._lock: RunLock | None = None
        try:
            self._lock = RunLock(folder)
            if not resume:
                _check_new(folder)  # again: another process may have run here meanwhile
            self.checkpoint = self._choose(plan, wanted)
        except BaseException:
            self.end()
            raise

    def _choose(self, plan: Plan, wanted: Path | None) -> Path | None:
        """The newest undamaged checkpoint, or `wanted` where it is undamaged; describes the run where there is none."""
        run = self.run
        complete = [wanted] if wanted else run.checkpoints()
        if not complete and not remnants(run.checkpoint_root, ASIDE):
            run.describe(plan)
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
        hint = "--resume auto takes the newest whole one" if wanted else "Start anew with another --run-dir"
        message = "; ".join(damaged.values()) or f"{run.checkpoint_root} holds checkpoints that were set aside alone"
        raise ConfigError(f"{message}. {hint}")

    def end(self) -> None:
        """Release the lock; of a run that never began, remove what it made."""
        folder = self.run.path
        if not self.run.metrics_path.exists() and not self.run.checkpoint_root.exists() and folder.is_dir():
            # Without the lock the files are another process's.
            for name in (*DESCRIPTION, "run.lock") if self._lock else ():
                if name not in self._files_before:
                    (folder / name).unlink(missing_ok=True)
            for path in self._new_folders:
                try:
                    path.rmdir()
                except OSError:  # not empty: another process uses it
                    break
        if self._lock:
            self._lock.release()


def _find_folder(name: str, run_dir: str | None, resume: str | None) -> tuple[Path | None, Path | None]:
    """(run folder, or None for a new one; the checkpoint that `resume` names, or None)."""
    if resume == "":  # an unset variable of a shell
        raise ConfigError("--resume is empty; expected 'auto', a run folder or one of its complete checkpoints")
    if not resume:
        if run_dir:
            _check_new(Path(run_dir))
        return (Path(run_dir) if run_dir else None), None
    if resume == "auto":
        return (Path(run_dir) if run_dir else newest_run_dir(name)), None
    wanted = Path(resume)
    folder = wanted if (wanted / "recipe.json").exists() else wanted.absolute().parent.parent
    checkpoints = [path.resolve() for path in RunFolder(folder).checkpoints()]
    if not checkpoints or (wanted != folder and wanted.resolve() not in checkpoints):
        raise ConfigError(f"--resume {resume}: expected 'auto', a run folder or one of its complete checkpoints")
    if run_dir and Path(run_dir).resolve() != folder.resolve():
        raise ConfigError(f"--resume {resume} is of the run {folder}; leave out --run-dir {run_dir}")
    return folder, wanted if wanted != folder else None


def _check_new(folder: Path) -> None:
    if any((folder / name).exists() for name in ("recipe.json", "metrics.jsonl", "checkpoints")):
        raise ConfigError(f"{folder} already holds a run; --resume auto continues it, another --run-dir starts anew")


def check_same(plan: Plan, folder: Path) -> None:
    """ConfigError where model, data, batch, seed or optimiser differ from the run's; steps, ranks and rates may change."""
    try:
        old = stored_recipe(folder)
    except ConfigError as error:
        raise ConfigError(f"cannot resume {folder}: {error}") from None
    new = json.loads(json.dumps(plan.to_dict()))
    fixed = ["name", "modality", "train.batch", "train.seed", "optim.name"]
    fixed += [f"{section}.{key}" for section in ("model", "data") for key in new[section] if key != "num_workers"]
    for key in fixed:
        section, _, name = key.partition(".")
        before, now = (tree.get(section) for tree in (old, new))
        if name:
            before, now = (tree.get(name) if isinstance(tree, dict) else None for tree in (before, now))
        if before != now:
            raise ConfigError(
                f"cannot resume {folder}: its {key} is {before!r}, this recipe has {now!r}. Set it back, start anew with "
                f"another --run-dir, or remove the folder"
            )
