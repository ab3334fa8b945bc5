"""Train a model of the zoo by recipe. One flat file for every modality.

    deepspeed --num_gpus N --module priorzoo.train text.ggd_ssmax_tiny [--set train.steps=200 ...]
    torchrun --nproc-per-node N --module priorzoo.train text.ggd_ssmax_tiny
    priorzoo train text.ggd_ssmax_tiny
    priorzoo train my_recipe.py[:function]         a recipe of your own, in a file that may register
    priors

The run folder (recipes/runs.py) holds the resolved recipe, metrics, checkpoints and the final
weights. Exit codes: 0 done, 1 training failed (loss or gradient not finite), 2 the recipe cannot be
run as written, 128 + n stopped by signal n after saving a checkpoint.

SIGTERM or Ctrl-C asks the ranks to finish a step, save and stop; `--resume auto` continues from
there. SIGTERM to the outer `deepspeed` command does not reach its ranks: send it to the process
group (`kill -TERM -- -PGID`), to the process `deepspeed.launcher.launch` below it, or to
`torchrun`.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

if (
    __name__ == "__main__"
):  # import `recipes` from this checkout, and none of this folder's files as top-level modules
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    # Spinning threads slow each other where cores are shared. The variable is read when torch is
    # loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import typer
from rich.padding import Padding

from modalities.contract import find_modality
from modalities.cost import Readout, keep_freed_tensors
from modalities.loading import State, to_device
from recipes.commands import (
    ConfigError,
    Console,
    call,
    clock,
    facts_table,
    handled_signals,
    lasting_output,
    short,
)
from recipes.engine import Engine, Ranks, check_sequence, leave, start, stop, wants_cuda
from recipes.plan import Plan, resolve
from recipes.recipe import Json
from recipes.registry import installed_recipes, open_recipe
from recipes.runs import RunFolder, load_weights, loadable, own_run
from recipes.settings import apply_overrides
from zoo.catalog import import_named
from zoo.cli import Import
from zoo.errors import printable, require
from zoo.files import sync

if TYPE_CHECKING:
    from modalities.evaluation import Evaluator


class TrainingFailure(RuntimeError):
    """The loss or the gradient is not a finite number."""


class QueuedStep(NamedTuple):
    """A step on the device: its number, its first parameter group's rate, and where loss, norm,
    targets and signals arrive."""

    number: int
    lr: float
    readout: Readout


def with_worker(data: Any, device: str, cores: int) -> Any:
    """A data section whose `num_workers` is 0, with 1 on CUDA if the rank has a second core, so
    that the next batch is made while the device computes; any other as it is. One process makes the
    same batches as none."""
    free = device == "cuda" and cores >= 2 and getattr(data, "num_workers", None) == 0
    return replace(data, num_workers=1) if free else data


class Trainer:
    """A run of a recipe: `setup`, then `fit`, which repeats `step` and `save`. Every rank calls
    every method."""

    def __init__(self, plan: Plan, ranks: Ranks, run: RunFolder, signals: Sequence[int] = ()):
        self.plan = plan
        self.ranks = ranks
        self.run = run
        self.signals = signals
        self.recipe = plan.recipe
        self.settings = plan.recipe.train
        self.modality = find_modality(self.recipe.modality)
        self.steps_done = 0
        self.targets_seen = 0
        self.saved_step: int | None = None
        self.loss: float | None = None  # of the last step read
        self.unread: QueuedStep | None = None  # the step whose numbers are not read yet
        self.figures: dict[str, float] = {}  # the latest held-out and evaluators' numbers

    def setup(self, checkpoint: Path | None) -> None:
        """Make model, data and engine, as they were in `checkpoint` where there is one."""
        recipe = self.recipe
        settings = self.settings
        ranks = self.ranks
        modality = self.modality
        torch.manual_seed(settings.seed)
        stored, universal = loadable(checkpoint, self.plan, ranks) if checkpoint else (None, False)
        loader_options = {
            "rank": ranks.group,
            "world": ranks.groups,
            "micro_batch": settings.micro_batch or 1,
        }
        model = modality.build(recipe.model.name, recipe.model.options, recipe.data)
        check_sequence(model, settings.sequence_parallel)
        if checkpoint is None and recipe.model.init_from:
            load_weights(model, recipe.model.init_from)
        self.evaluators: list[tuple[int, Evaluator]] = []
        if recipe.evaluate.during:
            from modalities.evaluation import scheduled_evaluators

            self.evaluators = scheduled_evaluators(
                recipe.evaluate.during, modality.evaluators, asdict(recipe.data)
            )
            for _, evaluator in self.evaluators:
                evaluator.cells(model)  # ValueError for what cannot be measured
        self.loader = modality.loader(
            with_worker(recipe.data, ranks.device.type, ranks.cores), **loader_options
        )
        self.heldout = None
        if recipe.evaluate.every:
            self.heldout = modality.heldout(
                recipe.data, samples=recipe.evaluate.samples, **loader_options
            )
        self.engine = Engine(model, self.plan, ranks, universal=universal)
        self.checkpoint = checkpoint
        if checkpoint and stored:
            state = self.engine.load(checkpoint, stored)
            self.steps_done = state["step"]
            self.targets_seen = state["seen"]
            self.saved_step = state["step"]
            self.loader.load_state_dict(rank_state(state["data"], ranks))
        self.batches = iter(self.loader)
        if ranks.lead:
            if self.steps_done < settings.steps:
                self.run.describe(self.plan)
            self.run.rewind(self.steps_done, settings.keep)

    def fit(self) -> int:
        """Train to the last step, or until a signal stops all ranks; returns the exit code."""
        settings = self.settings
        every = self.recipe.evaluate.every
        self.begun, self.first_step = time.perf_counter(), self.steps_done
        self.announce()
        self.engine.train()
        while self.steps_done < settings.steps:
            stops = self.step()
            self.report(
                (self.heldout_loss() if self.heldout and self.is_due(every) else {})
                | self.run_evaluators()
            )
            if stops or self.is_due(settings.save_every):
                self.save()
            if stops and self.steps_done < settings.steps:
                number = next(iter(self.signals), signal.SIGTERM)
                place = self.run.checkpoint(self.steps_done)
                self.print(
                    f"stopped by signal {number} after step {self.steps_done}, saved as {place}. "
                    f"Continue with: {self.run.continuation()}"
                )
                return 128 + number
        if self.saved_step != self.steps_done:
            self.save()
        self.engine.export_final(self.run.path / "model")
        if self.ranks.lead:
            self.summarise()
        return 0

    def is_due(self, every: int) -> bool:
        """Whether what happens every so many steps (0: never), and after the last one, happens
        now."""
        return self.steps_done == self.settings.steps or (
            every > 0 and self.steps_done % every == 0
        )

    def step(self) -> bool:
        """Take one step of the optimiser, and record the step before it, whose numbers have come;
        whether to stop.

        Where the model is about to be evaluated or saved the step itself is recorded too: no state
        is saved whose loss or gradient is not finite. Else the device always has the next step
        queued.
        """
        before = self.unread
        self.unread = self.launch()
        stops = self.finish(before) if before else False
        # One rank alone sees its signals at once; several agree on them by numbers of the device.
        interrupted = bool(self.signals) if self.ranks.world == 1 else stops
        pauses = [
            self.recipe.evaluate.every,
            self.settings.save_every,
            *(every for every, _ in self.evaluators),
        ]
        if interrupted or any(map(self.is_due, pauses)):
            stops = self.finish(self.unread)
            self.unread = None
        return stops

    def launch(self) -> QueuedStep:
        """Queue a step on the device. Nothing here waits for it."""
        ranks = self.ranks
        settings = self.settings
        engine = self.engine
        signals = self.signals
        # A seed per step and rank, so that dropout resumes exactly with no stored random state.
        torch.manual_seed((settings.seed * 1_000_003 + self.steps_done) * ranks.world + ranks.rank)
        accumulation = settings.accumulation or 1
        readout = Readout(ranks.device)
        micro = [next(self.batches) for _ in range(accumulation)]
        # Micro-batches differ in what their targets weigh. Weighting each by its share of all makes
        # the loss, and so the gradient, the mean over the whole batch's targets, however the batch
        # is cut.
        weights, counts = zip(*(self.modality.weight(batch) for batch in micro), strict=True)
        micro = [to_device(batch, ranks.device) for batch in micro]
        total, count = engine.sum(sum(weights) / ranks.shared, sum(counts) / ranks.shared)
        summed = torch.zeros((), dtype=torch.float64, device=ranks.device)
        for batch, weight in zip(micro, weights, strict=True):
            loss, _ = self.modality.loss(engine, batch)
            engine.backward(loss * (weight / total * ranks.world * accumulation).to(loss.dtype))
            summed += loss.detach().double() * weight
            if batch is micro[-1]:
                mean, stop = engine.sum(summed / total, float(signals[0] if signals else 0))
            lr = engine.lr
            norm = engine.step()
        readout.send(torch.stack([mean, norm, count, stop]))
        self.steps_done += 1
        return QueuedStep(self.steps_done, lr, readout)

    def finish(self, step: QueuedStep) -> bool:
        """Read and record the numbers of a step; whether a rank has a signal."""
        (loss, norm, targets, stop), seconds = self.read(step)
        self.targets_seen += round(targets)
        spent = time.perf_counter() - self.begun
        unit = self.modality.unit
        rate = targets / seconds
        values: dict[str, float] = {"loss": loss, "lr": step.lr, unit: self.targets_seen}
        if self.engine.knows_gradients:
            values["grad_norm"] = norm
        self.record(values | {f"{unit}_per_s": rate, "seconds": round(spent, 3)}, step.number)
        if step.number % self.settings.log_every == 0 or step.number == self.settings.steps:
            left = (
                spent
                / (self.steps_done - self.first_step)
                * (self.settings.steps - self.steps_done)
            )
            gradient = f"grad {norm:.3g}  " if "grad_norm" in values else ""
            self.print(
                f"step {step.number}/{self.settings.steps}  loss {loss:.4f}  lr {step.lr:.2e}  {gradient}"
                f"{short(rate)} {unit}/s  left {clock(left)}"
            )
        self.loss = loss
        return bool(stop)

    def read(self, step: QueuedStep) -> tuple[list[float], float]:
        """(Loss, norm, targets and signals of a step; seconds). TrainingFailure for one that is not
        finite."""
        numbers, seconds = step.readout.read()
        for name, value in zip(("loss", "gradient norm"), numbers[:2], strict=True):
            if not math.isfinite(value):
                good = self.run.checkpoints()
                raise TrainingFailure(
                    f"{name} is {value} at step {step.number}; last good checkpoint: {good[-1] if good else 'none yet'}. "
                    "A lower optim.lr, a longer optim.warmup or train.precision=fp32 may help"
                )
        return numbers, seconds

    def heldout_loss(self) -> dict[str, float]:
        """Held-out loss and the modality's further metrics, means over all targets."""
        engine = self.engine
        modality = self.modality
        device = self.ranks.device
        engine.train(False)
        names = ("loss", *modality.metrics)
        weight = 0.0
        totals = torch.zeros(len(names), dtype=torch.float64, device=device)
        with torch.no_grad(), engine.averaged():
            for batch in self.heldout or ():  # every rank runs every batch: ZeRO-3 gathers together
                count = modality.weight(batch)[0]
                loss, metrics = modality.loss(engine, to_device(batch, device))
                if count:
                    totals += (
                        torch.stack([loss, *(metrics[name] for name in modality.metrics)]).double()
                        * count
                    )
                weight += count
        engine.train()
        # Every rank of a group has the weight of all its samples, and a share of their losses.
        *sums, weight = engine.sum(*totals, weight / self.ranks.shared).tolist()
        means = [value / weight if weight else math.nan for value in sums]
        return {f"heldout_{name}": mean for name, mean in zip(names, means, strict=True)}

    def run_evaluators(self) -> dict[str, float]:
        """Scores of the evaluators in `evaluate.during` that are due, by rank 0, of what would be
        exported now."""
        due = [evaluator for every, evaluator in self.evaluators if self.is_due(every)]
        figures: dict[str, float] = {}
        if due:
            if model := self.engine.exported_model():
                for evaluator in due:
                    figures |= evaluator.numbers(model)
            self.ranks.barrier()
        return figures

    def save(self) -> None:
        """Write a checkpoint and remove those beyond `train.keep`."""
        if self.ranks.lead:
            sync(self.run.metrics_path)
        data = self.engine.gather(self.loader.state_dict())[:: self.ranks.shared]
        state = {"step": self.steps_done, "seen": self.targets_seen, "data": data}
        self.engine.save(self.run.checkpoint(self.steps_done), state)
        self.saved_step = self.steps_done
        if self.ranks.lead:
            self.run.prune(self.settings.keep)

    # ---- what is written and printed, by the lead rank
    # --------------------------------------------------------

    def record(self, values: dict[str, float], step: int) -> None:
        """Write numbers of a step to metrics.jsonl, and to the monitors of a DeepSpeed file."""
        if self.ranks.lead:
            self.run.log({"step": step, **values})
            self.engine.monitor(values, step)

    def report(self, figures: dict[str, float]) -> None:
        if figures:
            self.figures |= figures
            self.record(figures, self.steps_done)
            numbers = ", ".join(
                f"{display_name(name)} {value:.4f}" for name, value in figures.items()
            )
            self.print(f"step {self.steps_done}: {numbers}")

    def print(self, text: str) -> None:
        if self.ranks.lead:
            print(printable(text), flush=True)

    def announce(self) -> None:
        recipe = self.recipe
        settings = self.settings
        ranks = self.ranks
        parameters = sum(getattr(p, "ds_numel", p.numel()) for p in self.engine.model.parameters())
        shared = f", {ranks.shared} ranks a line" if ranks.shared > 1 else ""
        self.print(
            f"{recipe.name}: {recipe.model.name}, {short(parameters)} parameters, {settings.precision}, "
            f"ZeRO {settings.zero_stage}, batch {settings.micro_batch} × {settings.accumulation} × {ranks.groups} on "
            f"{ranks.device.type}{shared}; run folder {self.run.path}"
        )
        if not self.engine.knows_gradients:
            self.print("no gradient norms: from ZeRO 1 on DeepSpeed's are of Muon's updates")
        if self.checkpoint:
            self.print(f"resuming after step {self.steps_done} from {self.checkpoint}")

    def summarise(self) -> None:
        """Draw the loss curve and print the run's figures."""
        rows = {
            "steps": f"{self.steps_done:,}",
            self.modality.unit: f"{self.targets_seen:,}",
            "training loss": f"{self.loss:.4f}"
            if self.loss is not None
            else "(nothing left to train)",
            **{display_name(name): f"{value:.4f}" for name, value in self.figures.items()},
            "time": clock(time.perf_counter() - self.begun),
            "weights": str(self.run.path / "model"),
            "loss curve": str(self.run.plot()),
        }
        if report := str(getattr(self.loader, "report", "")):
            rows["data"] = report  # of this rank: what was converted, skipped or replaced
        Console().print(facts_table(f"{self.recipe.name} finished", rows))


def display_name(name: str) -> str:
    """heldout_loss -> held-out loss."""
    return name.replace("heldout_", "held-out ").replace("_", " ")


def rank_state(states: Sequence[State], ranks: Ranks) -> State:
    """This rank's data state: the common one, or its own where the source streams."""
    if len(states) not in (1, ranks.groups):
        raise ConfigError(
            f"streamed data was saved for {len(states)} readers: resume with as many, not {ranks.groups}"
        )
    return states[0] if len(states) == 1 else states[ranks.group]


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """A list that the signals of `STOPS` append to. After a step the ranks agree to stop, and the
    loop saves."""
    received: list[int] = []

    def handle(number: int, _: object) -> None:
        received.append(number)
        if (
            len(received) > 3
        ):  # a launcher passes Ctrl-C on as two or three signals; a fourth signal aborts immediately
            raise KeyboardInterrupt

    with handled_signals(handle):
        yield received


JSON = typer.Option("--deepspeed_config", "--deepspeed-config", metavar="JSON", help="merged in")
NEWEST = typer.Option(
    metavar="auto", help="continue from the newest complete checkpoint of --run-dir, if any"
)


def train_command(
    name: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="such as text.ggd_ssmax_tiny, see --list; or FILE.py[:function]"
        ),
    ] = "",
    *,
    list_: Annotated[
        bool, typer.Option("--list", help="say what every recipe is, and stop")
    ] = False,
    set_: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="change a recipe value")
    ] = [],  # noqa: B006
    import_: Import = [],  # noqa: B006
    deepspeed_config: Annotated[str | None, JSON] = None,
    run_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="default: runs/<recipe>/<number>-<time>")
    ] = None,
    resume: Annotated[str | None, NEWEST] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print what would run; touch no data and no disk")
    ] = False,
    json_: Annotated[
        bool, typer.Option("--json", help="with --dry-run: every setting, as JSON")
    ] = False,
    world: Annotated[
        int | None, typer.Option(metavar="N", help="with --dry-run: plan for N ranks")
    ] = None,
    calibrate: Annotated[
        int, typer.Option(metavar="STEPS", min=0, help="a dry run with so many real steps timed")
    ] = 0,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="let DeepSpeed log, and show an error's trace")
    ] = False,
) -> int:
    import_named(import_)
    if list_:
        console = Console()
        for recipes in installed_recipes():
            for title, text, methods in recipes.described():
                console.print(f"{recipes.modality}.{title}: {text}")
                if methods:
                    console.print(Padding(f"<method>: {' '.join(methods)}", (0, 0, 0, 4)))
        return 0
    if not name:
        raise ConfigError("name a recipe, such as text.ggd_ssmax_tiny (--list names all)")
    recipe, overridden_keys = apply_overrides(open_recipe(name), set_)
    user_config: Json = {}
    if deepspeed_config:
        from recipes.deepspeed_json import load_deepspeed_json

        user_config = load_deepspeed_json(deepspeed_config)
    if dry_run and not calibrate:
        from recipes.estimate import print_plan

        world = world or int(os.environ.get("WORLD_SIZE", 1))
        device = "cuda" if wants_cuda() else "cpu"
        print_plan(resolve(recipe, world, device, user_config, overridden_keys), as_json=json_)
        return 0
    require("deepspeed", "training", "train")
    require("matplotlib", "the loss curve", "figures")
    words = [name, *(word for setting in set_ for word in ("--set", setting))]
    words += [word for module in import_ for word in ("--import", module)]
    words += ["--deepspeed_config", deepspeed_config] if deepspeed_config else []
    keep_freed_tensors(below=32 << 20)
    ranks = start(verbose=verbose)
    plan = resolve(recipe, ranks.world, ranks.device.type, user_config, overridden_keys)
    ranks = replace(ranks, shared=plan.recipe.train.sequence_parallel)
    if calibrate and world is not None:
        raise ConfigError("--calibrate measures the ranks there are; expected it without --world")
    try:
        if calibrate:
            from recipes.estimate import MONITORS, calibrated, print_plan

            quiet = {key: value for key, value in plan.deepspeed.items() if key not in MONITORS}
            with TemporaryDirectory() as folder:
                trainer = Trainer(replace(plan, deepspeed=quiet), ranks, RunFolder(Path(folder)))
                print_plan(plan, as_json=json_, measured=calibrated(trainer, calibrate))
            return 0
        with (
            lasting_output(),
            stop_signals() as signals,
            own_run(plan, ranks, run_dir=run_dir, resume=resume, words=words) as (run, checkpoint),
        ):
            trainer = Trainer(plan, ranks, run, signals)
            trainer.setup(checkpoint)  # None for a new run
            return trainer.fit()
    except TrainingFailure as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # once per machine
            print(f"training failed: {error}", file=sys.stderr)
        return 1


def main(argv: Sequence[str] | None = None, *, prog: str = "priorzoo train") -> int:
    words = sys.argv[1:] if argv is None else argv
    launchers = ("--local_rank=", "--local-rank=")  # ranks come from the environment
    return call(
        train_command, [word for word in words if not word.startswith(launchers)], prog=prog
    )


def run(argv: Sequence[str] | None = None, **named: str) -> int:
    """`main` as a whole process: leaves the process group, and ends without Python's finalisation
    (see `engine.leave`)."""
    code = main(argv, **named)
    if code in (0, 129, 130, 143):  # finished, or stopped by SIGHUP, SIGINT, SIGTERM
        stop()  # only where every rank comes here: after a failure it could wait for one that does not
    leave(code)


if __name__ == "__main__":
    sys.exit(run())
