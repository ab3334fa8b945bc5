"""Trackers of a run besides metrics.jsonl: `train.report_to` of a recipe, such as "tensorboard,wandb".

W&B reads its environment variables: WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE (offline: nothing is sent). A resumed run continues
the same one.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager

from recipes.config import ConfigError, Plan
from recipes.runs import RunFolder
from zoo.errors import nearest, require
from zoo.files import write_text

Log = Callable[[Mapping[str, float], int], None]  # numbers by name, and their step


@contextmanager
def tensorboard(run: RunFolder, plan: Plan, step: int) -> Iterator[Log]:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(run.path / "tensorboard", purge_step=step + 1) as writer:

        def log(values: Mapping[str, float], step: int) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        yield log


@contextmanager
def wandb(run: RunFolder, plan: Plan, step: int) -> Iterator[Log]:
    import wandb

    number = run.path / "wandb.txt"
    if not number.exists():
        write_text(number, uuid.uuid4().hex + "\n")
    with wandb.init(
        project=os.environ.get("WANDB_PROJECT", "priorzoo"),
        name=run.path.name,
        id=number.read_text(encoding="utf-8").strip(),
        resume="allow",
        dir=str(run.path),
        config=plan.to_dict(),
        settings=wandb.Settings(console="off", silent=True),
    ) as tracker:
        yield lambda values, step: tracker.log(dict(values), step=step)


TRACKERS: dict[str, tuple[Callable[[RunFolder, Plan, int], AbstractContextManager[Log]], str]] = {
    "tensorboard": (tensorboard, "train"),  # with the extra that installs it
    "wandb": (wandb, "track"),
}


def find_trackers(text: str) -> list[str]:
    """The names in `train.report_to`; ConfigError for one that is not known, ImportError where its package is missing."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f"train.report_to: no tracker {name!r}; {nearest(name, TRACKERS)}")
        require(name, f"train.report_to={name}", TRACKERS[name][1])
    return names


@contextmanager
def open_trackers(text: str, run: RunFolder, plan: Plan, step: int) -> Iterator[list[Log]]:
    """Functions that log numbers, a tracker each, for a run that has come to `step`."""
    with ExitStack() as opened:  # one that fails keeps none of the others open
        yield [opened.enter_context(TRACKERS[name][0](run, plan, step)) for name in find_trackers(text)]
