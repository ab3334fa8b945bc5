"""Checkpoints: sealed with digests, verified, read as data, converted for other ranks."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import re
import shutil
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest.mock import patch

import torch

from recipes.commands import ConfigError, warn
from recipes.plan import Plan
from recipes.ranks import Ranks
from recipes.recipe import Json
from zoo.errors import one_line
from zoo.files import file_digests, find_damage, read_object, sync, write_json

COMPLETE = "complete.json"
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
