"""Checkpoints on disk: verified before they are read, and read as data.

<run>/checkpoints/step_00000200/            complete.json: step, ranks, ZeRO stage, precision, and the digest of every file
                  step_00000200.partial     being written, or left by a process that was killed
                  step_00000200.universal   converted for another number of ranks
                  step_00000400.aside       not used: damaged, or later than the step that the run continues from
                  latest                    the newest complete one; DeepSpeed's tools read it
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recipes.config import ConfigError, has_deepspeed
from zoo.files import find_damage, remove_abandoned, sync, write_text
from zoo.inputs import read_object

__all__ = [
    "ASIDE",
    "COMPLETE",
    "checkpoint_facts",
    "checkpoint_step",
    "complete_checkpoints",
    "damage",
    "data_only",
    "prune",
    "remnants",
    "say",
    "seal",
    "set_aside",
    "tidy",
]

COMPLETE = "complete.json"
ASIDE = ".aside"
_NAME = re.compile(r"step_\d{8,}")
FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # torch's: no torch.load runs code, whatever its caller asks for


def seal(facts: dict[str, Any]) -> dict[str, Any]:
    """What complete.json holds: the facts, and the SHA-256 of them."""
    return facts | {"sha256": hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()}


def checkpoint_facts(folder: Path) -> dict[str, Any] | None:
    """What complete.json says; None where it is not there, or is not what was written.

    Raises:
        OSError: where it is there and cannot be read.
    """
    try:
        facts = read_object(folder / COMPLETE)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    known = {"step": int, "world": int, "zero_stage": int, "precision": str}
    if not all(type(facts.get(name)) is kind for name, kind in known.items()):
        return None
    digest = facts.pop("sha256", None)
    old = facts.keys() == known.keys() and digest is None  # of versions before 0.6
    return facts if old or seal(facts)["sha256"] == digest else None


def complete_checkpoints(root: Path) -> list[Path]:
    """Those that have got their names, by step. Whether they are still as they were written, `damage` tells."""
    found = [path for path in root.glob("step_*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=checkpoint_step)


def checkpoint_step(folder: Path) -> int:
    """The step in the name of a checkpoint, or of what was made of one."""
    return int(folder.name.removeprefix("step_").partition(".")[0])


def damage(folder: Path, *, below: str = "") -> str | None:
    """What is wrong with a checkpoint, by its files' sizes and SHA-256; None where nothing is.

    Those of versions before 0.6 have no digests: of them nothing can be told. `below`: of the files below this path alone.
    """
    facts = checkpoint_facts(folder)
    if facts is None:
        there = (folder / COMPLETE).exists()
        return f"{COMPLETE} {'is not as it was written' if there else 'is missing'}"
    files = facts.get("files", {})
    if not isinstance(files, dict):
        return f"{COMPLETE} has no digests"
    return find_damage(folder, {name: of for name, of in files.items() if name.startswith(below)})


def remnants(root: Path, suffix: str) -> list[Path]:
    """What was made of checkpoints: folders called step_N with this suffix. Others are somebody else's."""
    named = re.compile(_NAME.pattern + re.escape(suffix))
    return [p for p in sorted(root.glob("step_*")) if named.fullmatch(p.name) and p.is_dir() and not p.is_symlink()]


def set_aside(folder: Path) -> Path:
    """Rename a checkpoint so that nothing uses it; the new path."""
    aside = folder.with_name(folder.name + ASIDE)
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    sync(aside.parent)
    return aside


def prune(root: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, and those set aside that they have passed."""
    complete = complete_checkpoints(root)
    for path in complete[:-keep]:
        if path.is_symlink():  # to where somebody moved it
            path.unlink()
        else:
            half = path.with_name(path.name + ".partial")  # so that a half-removed one is never taken for whole
            path.rename(half)
            shutil.rmtree(half)
        shutil.rmtree(path.with_name(path.name + ".universal"), ignore_errors=True)
    for path in remnants(root, ASIDE):
        if complete and checkpoint_step(path) <= checkpoint_step(complete[-1]):
            shutil.rmtree(path)


def tidy(root: Path, keep: int) -> None:
    """What processes that were killed left: half-written, half-removed and surplus checkpoints, and a stale `latest`.

    For the process that holds the run's lock.
    """
    complete = complete_checkpoints(root)
    orphans = [
        p for p in remnants(root, ".universal") if p.with_name(p.name.removesuffix(".universal")) not in complete
    ]
    for path in [*remnants(root, ".partial"), *remnants(root, ".universal.partial"), *orphans]:
        shutil.rmtree(path)
    remove_abandoned(root / "latest", 0)
    prune(root, keep)
    if complete and _latest(root) != complete[-1].name:
        write_text(root / "latest", complete[-1].name)


def _latest(root: Path) -> str:
    try:
        return (root / "latest").read_text()
    except (OSError, ValueError):
        return ""


def allow_deepspeed_classes() -> None:
    """Name to torch the classes, of plain values, that DeepSpeed's checkpoints hold beside tensors; where it is installed."""
    if not has_deepspeed():
        return
    import torch
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    torch.serialization.add_safe_globals([DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address])


@contextmanager
def data_only(folder: Path) -> Iterator[None]:
    """Inside, `torch.load` reads tensors, plain values and DeepSpeed's own classes, and never runs code from a file.

    DeepSpeed asks for unrestricted pickles in every place; torch's environment variable overrules it.

    Raises:
        ConfigError: where a file of the checkpoint `folder` holds anything else, or cannot be read.
    """
    allow_deepspeed_classes()
    before = os.environ.get(FORCE)
    os.environ[FORCE] = "1"
    try:
        yield
    except pickle.UnpicklingError as error:
        raise ConfigError(refusal(folder, error)) from error
    except (RuntimeError, EOFError, OSError, KeyError, AssertionError, AttributeError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(f"{folder} cannot be loaded: {reason}") from error
    finally:
        if before is None:
            del os.environ[FORCE]
        else:
            os.environ[FORCE] = before


def refusal(folder: Path, error: Exception) -> str:
    """One line on a pickle that asks for more than data: torch's words for what it met, without its advice to allow it."""
    said = next((line.strip() for line in str(error).splitlines() if "GLOBAL" in line or "nsupported" in line), "")
    said = said.partition(" was not an allowed global")[0].partition(". Please")[0] or type(error).__name__
    return f"{folder} holds more than tensors and plain values, and is not loaded; nothing in it was executed ({said})"


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
