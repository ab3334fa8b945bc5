"""Checkpoints on disk: verified before they are read, and read as data.

<run>/checkpoints/step_00000200/            complete.json: step, ranks, ZeRO stage, precision, and the digest of every file
                  step_00000200.partial     being written, or left by a process that was killed
                  step_00000200.universal   converted for another number of ranks
                  step_00000400.aside       not used: damaged
                  latest                    the newest complete one; DeepSpeed's tools read it
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from recipes.config import ConfigError, Plan
from zoo.errors import printable
from zoo.files import file_digests, find_damage, read_object, remove_abandoned, sync, sync_tree, write_json, write_text

if TYPE_CHECKING:
    from recipes.engine import Ranks

COMPLETE, ASIDE = "complete.json", ".aside"
NAME = re.compile(r"step_\d{8,}")
WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
FACTS = {"step": int, "world": int, "zero_stage": int, "precision": str}


def seal(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts with their own SHA-256: what complete.json holds."""
    return facts | {"sha256": hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()}


def checkpoint_facts(folder: Path) -> dict[str, Any] | None:
    """Contents of complete.json; None where it is missing, or is not as it was written."""
    try:
        facts = read_object(folder / COMPLETE)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    if not all(type(facts.get(name)) is kind for name, kind in FACTS.items()):
        return None
    digest = facts.pop("sha256", None)
    early_version = facts.keys() == FACTS.keys() and digest is None
    return facts if early_version or seal(facts)["sha256"] == digest else None


def complete_checkpoints(root: Path) -> list[Path]:
    """Checkpoints that have their final names, by step. `damage` tells whether they are still as they were written."""
    folders = [path for path in root.glob("step_*") if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(folders, key=checkpoint_step)


def checkpoint_step(path: Path) -> int:
    """The step in the name of a checkpoint, or of a folder that was made from one."""
    return int(path.name.removeprefix("step_").partition(".")[0])


def damage(folder: Path, *, below: str = "") -> str | None:
    """What is wrong with a checkpoint, by its files' sizes and SHA-256; None where nothing is.

    `below`: check only files whose path begins with it. Checkpoints without digests (of early versions) pass.
    """
    facts = checkpoint_facts(folder)
    if facts is None:
        return f"{COMPLETE} {'is not as it was written' if (folder / COMPLETE).exists() else 'is missing'}"
    files = facts.get("files", {})
    if not isinstance(files, dict):
        return f"{COMPLETE} has no digests"
    return find_damage(folder, {name: digest for name, digest in files.items() if name.startswith(below)})


def remnants(root: Path, suffix: str) -> list[Path]:
    """Folders called step_N with this suffix. Any other folder belongs to the user."""
    pattern = re.compile(NAME.pattern + re.escape(suffix))
    return [p for p in sorted(root.glob("step_*")) if pattern.fullmatch(p.name) and p.is_dir() and not p.is_symlink()]


def quarantine(folder: Path) -> Path:
    """Rename a checkpoint so that nothing uses it; returns the new path."""
    aside = folder.with_name(folder.name + ASIDE)
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    sync(aside.parent)
    return aside


def prune(root: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, and quarantined ones that training has passed again."""
    complete = complete_checkpoints(root)
    for path in complete[:-keep]:
        if path.is_symlink():  # the user moved it elsewhere
            path.unlink()
        else:
            partial = path.with_name(path.name + ".partial")  # a half-removed one is never taken for whole
            path.rename(partial)
            shutil.rmtree(partial)
        shutil.rmtree(path.with_name(path.name + ".universal"), ignore_errors=True)
    for path in remnants(root, ASIDE):
        if complete and checkpoint_step(path) <= checkpoint_step(complete[-1]):
            shutil.rmtree(path)


def tidy(root: Path, keep: int) -> None:
    """Remove what killed processes left: partial and surplus checkpoints, and a stale `latest`. Needs the run's lock."""
    complete = complete_checkpoints(root)
    orphans = [
        p for p in remnants(root, ".universal") if p.with_name(p.name.removesuffix(".universal")) not in complete
    ]
    for path in [*remnants(root, ".partial"), *remnants(root, ".universal.partial"), *orphans]:
        shutil.rmtree(path)
    remove_abandoned(root / "latest", 0)
    prune(root, keep)
    if complete:
        write_text(root / "latest", complete[-1].name)


@contextlib.contextmanager
def data_only(folder: Path) -> Iterator[None]:
    """Make `torch.load` read tensors, plain values and DeepSpeed's own classes, and never run code from a file.

    DeepSpeed asks for unrestricted pickles in every place; torch's environment variable overrules it. ConfigError where a file
    of the checkpoint `folder` holds anything else, or cannot be read.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    torch.serialization.add_safe_globals([DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address])
    before = os.environ.get(WEIGHTS_ONLY)
    os.environ[WEIGHTS_ONLY] = "1"
    try:
        yield
    except ConfigError:
        raise
    except pickle.UnpicklingError as error:
        # torch's words for what it met, without its advice to allow it
        lines = (line.strip() for line in str(error).splitlines() if "GLOBAL" in line or "nsupported" in line)
        reason = next(lines, "").partition(" was not an allowed global")[0].partition(". Please")[0]
        raise ConfigError(
            f"{folder} holds more than tensors and plain values, and is not loaded; nothing in it was executed "
            f"({reason or type(error).__name__})"
        ) from error
    except (RuntimeError, EOFError, OSError, KeyError, AssertionError, AttributeError, TypeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(f"{folder} cannot be loaded: {reason}") from error
    finally:
        del os.environ[WEIGHTS_ONLY]
        if before is not None:
            os.environ[WEIGHTS_ONLY] = before


def loadable(folder: Path, plan: Plan, ranks: Ranks) -> tuple[Path, bool]:
    """(folder to load, is it universal) for this plan; converts where ranks or ZeRO stage changed.

    Checkpoints of stage 0 load anywhere. Those of stages 1–3 are cut by rank: at another number of ranks rank 0 converts them,
    once, into `<name>.universal`. ConfigError where that fails, or where precision or the kind of stage differs.
    """
    facts = checkpoint_facts(folder)
    if facts is None:
        raise ConfigError(f"{folder} has no readable {COMPLETE}")
    train = plan.recipe.train
    anew = f"start a new run from its weights with --set model.init_from={folder / 'model'}"
    stages = (facts["zero_stage"], train.zero_stage)
    if facts["precision"] != train.precision or all(stages) != any(stages):
        written = f"train.precision={facts['precision']} --set train.zero_stage={stages[0]}"
        raise ConfigError(
            f"{folder}: the state of its optimiser is of another precision, or of stage 0 and not 1–3. Resume with "
            f"--set {written}, or {anew}"
        )
    if train.zero_stage == 0 or (facts["world"], facts["zero_stage"]) == (ranks.world, train.zero_stage):
        return folder, False
    differs = (
        f"{folder} was written by {facts['world']} ranks at ZeRO stage {facts['zero_stage']}; this run has {ranks.world} "
        f"at stage {train.zero_stage}"
    )
    if plan.recipe.optim.name == "muon":
        raise ConfigError(f"{differs}, and DeepSpeed converts no state of Muon. Resume with the same ranks, or {anew}")
    universal = folder.with_name(folder.name + ".universal")
    if ranks.lead and damage(universal):
        shutil.rmtree(universal, ignore_errors=True)
        try:
            convert(folder, universal)
        except (ConfigError, OSError) as error:  # printed here; the error below reaches every rank
            warn(str(error))
    if ranks.world > 1:
        torch.distributed.barrier()
    if not universal.exists():
        raise ConfigError(f"{differs}. Converting it failed. Resume with the same ranks and stage, or {anew}")
    return universal, True


def convert(source: Path, universal: Path) -> None:
    """Write DeepSpeed's universal form of `source`, with digests, in place of what is there. Runs no code from a file."""
    from deepspeed.checkpoint import ds_to_universal

    partial = universal.with_name(universal.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    target = partial / universal.name  # DeepSpeed also writes a pointer beside it
    target.mkdir(parents=True)
    options = {"input_folder": str(source), "output_folder": str(target), "inject_missing_state": True, "strict": True}
    workers = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
    silence = io.StringIO()
    try:
        with data_only(source), contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
            ds_to_universal.main(Namespace(**options, **workers))
        if (target / "tmp").exists():  # DeepSpeed's removal of it ignores errors
            shutil.rmtree(target / "tmp")
        sync_tree(target)
        names = sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
        write_json(target / COMPLETE, seal((checkpoint_facts(source) or {}) | {"files": file_digests(target, names)}))
        shutil.rmtree(universal, ignore_errors=True)
        os.rename(target, universal)
        sync(universal.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def warn(message: str) -> None:
    """Print a line to standard error."""
    print(printable(message), file=sys.stderr, flush=True)
