"""Whose a run folder is: one process trains in it at a time, from the checkpoint that is the newest whole one."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from recipes.checkpoints import ASIDE, damage, remnants, say, set_aside
from recipes.config import ConfigError, Plan
from recipes.runs import DESCRIPTION, RunFolder, new_run_dir, newest_run_dir, stored_recipe
from zoo.errors import one_line

__all__ = ["RunLock", "own_run"]


class RunLock:
    """An exclusive lock on `<run>/run.lock` until `release`, or the end of the process, however it ends.

    The system keeps it and not the file, so one that a killed process left is no lock and needs no removing. The file tells
    whose it is: host, pid, start. NFS from version 4 (version 3 with lockd) locks across hosts too; where a file system has no
    locks at all, that is said and nothing is refused.

    Raises:
        ConfigError: where another process holds it.
    """

    # File descriptors, closed in forked children: a data worker must not keep the lock alive.
    held: ClassVar[set[int]] = set()

    def __init__(self, folder: Path):
        self.path = folder / "run.lock"
        for left in reversed(range(100)):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            except (FileNotFoundError, FileExistsError):  # of a run that takes its folder away at this moment
                if left and not folder.is_file():
                    continue
                raise
            self._lock(folder)
            if _same_file(self.path, self._file):
                break
            os.close(self._file)  # of a run that ended before its first step, and took its folder away meanwhile
        RunLock.held.add(self._file)
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
                return say(
                    f"note: {folder} is on a file system without locks ({error}): keep other processes out of it yourself"
                )
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
        RunLock.held.discard(self._file)
        os.close(self._file)


def _same_file(path: Path, opened: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(opened))
    except FileNotFoundError:
        return False


def _let_go() -> None:
    for file in RunLock.held:
        os.close(file)
    RunLock.held.clear()


os.register_at_fork(after_in_child=_let_go)


@contextmanager
def own_run(
    plan: Plan, ranks: Any, *, run_dir: str | None = None, resume: str | None = None, words: Sequence[str] = ()
) -> Iterator[tuple[RunFolder, Path | None]]:
    """(run folder, checkpoint to continue from, or None), the same on every rank; rank 0 holds the folder's lock.

    resume=None starts anew and refuses a folder that already holds a run. "auto" takes the newest whole checkpoint of
    `run_dir` (or of this recipe's newest run), and starts anew where there is none. Otherwise it names a run folder or a
    checkpoint. Damaged checkpoints are told, set aside and passed over for older ones. A run that fails before its first
    step leaves nothing.

    Args:
        words: of the command line without the run's folder; with it they continue the run.

    Raises:
        ConfigError: where another process trains in the folder; where the run was made with another model or other data;
            where no checkpoint is whole; and for an OSError from inside, with the checkpoint from which to go on.
    """
    import torch

    claim: _Claim | None = None
    answer: list[Any] = [None]
    if ranks.lead:
        try:
            claim = _Claim(plan, run_dir, resume)
            answer = [(claim.run.path, claim.checkpoint)]
        except Exception as error:  # whatever stops this rank must reach those that wait for its answer
            answer = [ConfigError(one_line(error))]
    if ranks.world > 1:
        torch.distributed.broadcast_object_list(answer)
    if isinstance(answer[0], ConfigError):
        raise answer[0]
    folder, checkpoint = answer[0]
    run = RunFolder(folder, words)
    try:
        yield run, checkpoint
    except OSError as error:
        good = run.checkpoints()[-1:]
        if (
            not ranks.lead
        ):  # one of several whose disk or file system failed: the lead, which reports, only waits for it
            say(f"rank {ranks.rank}: {error}")
        last = f"The last good checkpoint is {good[0]}" if good else "There is no checkpoint yet"
        raise ConfigError(f"{error}. {last}; once that is mended, continue with: {run.continuation()}") from error
    finally:
        if claim is not None:
            claim.end()


class _Claim:
    """The run folder of this process: found or made, locked and described."""

    def __init__(self, plan: Plan, run_dir: str | None, resume: str | None):
        self.checkpoint: Path | None = None
        if resume == "":  # an unset variable of a shell
            raise ConfigError("--resume is empty; expected 'auto', a run folder or one of its complete checkpoints")
        name, wanted = plan.recipe.name, Path(resume) if resume and resume != "auto" else None
        if wanted:
            folder = wanted if (wanted / "recipe.json").exists() else wanted.absolute().parent.parent
            checkpoints = [path.resolve() for path in RunFolder(folder).checkpoints()]
            if not checkpoints or (wanted != folder and wanted.resolve() not in checkpoints):
                raise ConfigError(
                    f"--resume {resume}: expected 'auto', a run folder or one of its complete checkpoints"
                )
            if run_dir and Path(run_dir).resolve() != folder.resolve():
                raise ConfigError(f"--resume {resume} is of the run {folder}; leave out --run-dir {run_dir}")
        else:
            found = Path(run_dir) if run_dir else newest_run_dir(name) if resume else None
            folder = found or Path("runs") / name
            if found and not resume:
                _check_new(found)
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise ConfigError(f"run folder {folder}: {there} is not a folder that can be written")
        # What a run that cannot begin takes away again, from the innermost folder on; and files of a folder that was there.
        self._made = [path for path in (folder, *folder.absolute().parents) if not path.exists()]
        if not wanted and not found:
            folder = new_run_dir(name)
            self._made.insert(0, folder)
        self.run = RunFolder(folder)
        self._had = {path.name for path in folder.iterdir()} if folder.exists() else set()
        self._lock: RunLock | None = None
        try:
            self._lock = RunLock(folder)
            if not resume:
                _check_new(folder)  # again: another process may have been here first, and have ended
            self._choose(plan, wanted if wanted != folder else None)
        except BaseException:
            self.end()
            raise

    def _choose(self, plan: Plan, wanted: Path | None) -> None:
        """Describe a new run; of one that has checkpoints find the newest whole one, or see that `wanted` is."""
        run = self.run
        complete = [wanted] if wanted else run.checkpoints()
        if not complete and not remnants(run.checkpoint_root, ASIDE):
            run.describe(plan)
            return
        check_same(plan, run.path)
        damaged = {}
        for path in reversed(complete):
            wrong = damage(path)
            if not wrong:
                self.checkpoint = path
                break
            damaged[path] = f"{path} is damaged: {wrong}"
        if self.checkpoint is not None:
            for path, told in damaged.items():
                say(f"{told}; it is set aside as {set_aside(path).name}")
            return
        hint = "--resume auto takes the newest whole one" if wanted else "Start anew with another --run-dir"
        told = "; ".join(damaged.values()) or f"{run.checkpoint_root} holds checkpoints that were set aside alone"
        raise ConfigError(f"{told}. {hint}")

    def end(self) -> None:
        """Release the lock; of a run that never began, take away what was made."""
        folder = self.run.path
        begun = self.run.metrics_path.exists() or self.run.checkpoint_root.exists()
        if not begun and folder.is_dir():
            # Without the lock the files are another process's.
            for name in (*DESCRIPTION, "run.lock") if self._lock else ():
                if name not in self._had:
                    (folder / name).unlink(missing_ok=True)
            for path in self._made:
                try:
                    path.rmdir()
                except OSError:  # somebody else uses it
                    break
        if self._lock:
            self._lock.release()


def _check_new(folder: Path) -> None:
    if any((folder / name).exists() for name in ("recipe.json", "metrics.jsonl", "checkpoints")):
        raise ConfigError(f"{folder} already holds a run; --resume auto continues it, another --run-dir starts anew")


def check_same(plan: Plan, folder: Path) -> None:
    """A run keeps the model and data it began with; steps, ranks, logging and rates may change."""
    try:
        old = stored_recipe(folder)
    except ConfigError as error:
        raise ConfigError(f"cannot resume {folder}: {error}") from None
    new = json.loads(json.dumps(plan.to_dict()))
    fixed = ["name", "modality"]
    fixed += [f"{section}.{key}" for section in ("model", "data") for key in new[section] if key != "num_workers"]
    fixed += ["train.batch", "train.seed", "optim.name"]
    for key in fixed:
        section, _, name = key.partition(".")
        before, now = (_entry(tree, section, name) for tree in (old, new))
        if before != now:
            raise ConfigError(
                f"cannot resume {folder}: its {key} is {before!r}, this recipe has {now!r}. Set it back, start anew with "
                f"another --run-dir, or remove the folder"
            )


def _entry(tree: dict[str, Any], section: str, name: str) -> Any:
    inner = tree.get(section)
    if not name:
        return inner
    return inner.get(name) if isinstance(inner, dict) else None
