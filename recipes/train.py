"""Train a model of the zoo by recipe. One flat file for every modality.

    deepspeed --num_gpus N --module priorzoo.train text.ggd_ssmax_tiny [--set train.steps=200 ...]
    torchrun --nproc-per-node N --module priorzoo.train text.ggd_ssmax_tiny
    priorzoo train text.ggd_ssmax_tiny
    priorzoo train my_recipe.py[:function]         your own recipe; its file may register priors

The run folder (recipes/run_folder.py) holds the resolved recipe, metrics, checkpoints and the final
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
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

if __name__ == "__main__":
    # Import `recipes` from this checkout, and none of this folder's files as top-level modules.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    # Spinning threads slow each other where cores are shared. The variable is read when torch is
    # loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import typer
from rich.padding import Padding

from modalities.contract import find_modality
from modalities.cost import Meter, Readout, keep_freed_tensors
from modalities.loading import State, to_device
from recipes.checkpoints import loadable
from recipes.commands import (
    ConfigError,
    call,
    clock,
    facts_table,
    handled_signals,
    lasting_output,
    short,
)
from recipes.engine import Engine
from recipes.models import load_weights, name_classes
from recipes.plan import Plan, resolve
from recipes.ranks import Ranks, check_sequence, leave, start, stop, wants_cuda
from recipes.recipe import Json
from recipes.registry import installed_recipes, open_recipe
from recipes.resume import own_run
from recipes.run_folder import RunFolder
from recipes.settings import apply_overrides
from zoo.console import Console, Import
from zoo.errors import printable, ran_out_of_memory, require
from zoo.files import sync
from zoo.plugins import import_named

if TYPE_CHECKING:
    from modalities.evaluation import Evaluator
    from zoo.model import ZooModel


class TrainingFailure(RuntimeError):
    """The loss or the gradient is not a finite number."""


class QueuedStep(NamedTuple):
    """A step on the device: its number, the first parameter group's rate, and the readout that
    loss, norm, targets and signals arrive in."""

    number: int
    lr: float
    readout: Readout


def with_worker(data: Any, device: str, cores: int) -> Any:
    """The data section, with one worker where it has none and the rank has a core for it.

    On CUDA the next batch is then made while the device computes. One worker makes the same batches
    as none.
    """
    without_workers = getattr(data, "num_workers", None) == 0
    if device == "cuda" and cores >= 2 and without_workers:
        return replace(data, num_workers=1)
    return data


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
        # Of the last step that was read.
        self.loss: float | None = None
        # The step whose numbers are not read yet.
        self.unread: QueuedStep | None = None
        # The latest held-out and evaluators' numbers.
        self.figures: dict[str, float] = {}

    def setup(self, checkpoint: Path | None) -> None:
        """Make model, data and engine, as they were in `checkpoint` where there is one."""
        recipe = self.recipe
        settings = self.settings
        ranks = self.ranks
        modality = self.modality
        torch.manual_seed(settings.seed)
        stored: Path | None = None
        universal = False
        if checkpoint:
            stored, universal = loadable(checkpoint, self.plan, ranks)
        model = modality.build(recipe.model.name, recipe.model.options, recipe.data)
        check_sequence(model, settings.sequence_parallel)
        loader_options = {
            "rank": ranks.group,
            "world": ranks.groups,
            "micro_batch": settings.micro_batch or 1,
        }
        data = with_worker(recipe.data, ranks.device.type, ranks.cores)
        self.loader = modality.loader(data, **loader_options)
        name_classes(model, getattr(self.loader, "class_names", ()), checkpoint)
        if checkpoint is None and recipe.model.init_from:
            note = load_weights(model, recipe.model.init_from)
            if note:
                self.print(note)
        self.evaluators = self.schedule_evaluators(model)
        self.heldout = None
        if recipe.evaluate.every:
            samples = recipe.evaluate.samples
            self.heldout = modality.heldout(recipe.data, samples=samples, **loader_options)
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

    def schedule_evaluators(self, model: ZooModel) -> list[tuple[int, Evaluator]]:
        """(steps between its runs, evaluator) of `evaluate.during`; ValueError for what cannot be
        measured of the model."""
        during = self.recipe.evaluate.during
        if not during:
            return []
        from modalities.evaluation import scheduled_evaluators

        known = self.modality.evaluators
        evaluators = scheduled_evaluators(during, known, asdict(self.recipe.data))
        for _, evaluator in evaluators:
            evaluator.cells(model)
        return evaluators

    def fit(self) -> int:
        """Train to the last step, or until a signal stops all ranks; returns the exit code."""
        settings = self.settings
        self.begun = time.perf_counter()
        self.first_step = self.steps_done
        self.announce()
        self.engine.train()
        while self.steps_done < settings.steps:
            stops = self.step()
            self.report(self.measure())
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
        """Whether an action that happens every so many steps (0: never), and after the last one,
        happens after this one."""
        if self.steps_done == self.settings.steps:
            return True
        return every > 0 and self.steps_done % every == 0

    def step(self) -> bool:
        """Take one step of the optimiser and record the step before it; whether to stop.

        Where the model is about to be evaluated or saved the step itself is recorded too: no state
        is saved whose loss or gradient is not finite. Else the device always has the next step
        queued.
        """
        before = self.unread
        self.unread = self.launch()
        stops = self.finish(before) if before else False
        # One rank alone sees its signals at once; several agree on them by numbers of the device.
        interrupted = bool(self.signals) if self.ranks.world == 1 else stops
        pauses = [self.recipe.evaluate.every, self.settings.save_every]
        pauses += [every for every, _ in self.evaluators]
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
        batches = [next(self.batches) for _ in range(accumulation)]
        # Micro-batches differ in what their targets weigh. Weighting each by its share of all makes
        # the loss, and so the gradient, the mean over the whole batch's targets, however the batch
        # is cut.
        weighed = [self.modality.weight(batch) for batch in batches]
        weights = [weight for weight, _ in weighed]
        counts = [count for _, count in weighed]
        batches = [to_device(batch, ranks.device) for batch in batches]
        # Ranks that share samples have the weight of all of them each.
        total, count = engine.sum(sum(weights) / ranks.shared, sum(counts) / ranks.shared)
        summed = torch.zeros((), dtype=torch.float64, device=ranks.device)
        for batch, weight in zip(batches, weights, strict=True):
            loss, _ = self.modality.loss(engine, batch)
            # DeepSpeed divides the sum by the ranks and the accumulation.
            share = weight / total * ranks.world * accumulation
            engine.backward(loss * share.to(loss.dtype))
            summed += loss.detach().double() * weight
            if batch is batches[-1]:
                number = signals[0] if signals else 0
                mean, stop = engine.sum(summed / total, float(number))
            lr = engine.lr
            norm = engine.step()
        readout.send(torch.stack([mean, norm, count, stop]))
        self.steps_done += 1
        return QueuedStep(self.steps_done, lr, readout)

    def finish(self, step: QueuedStep) -> bool:
        """Read and record the numbers of a step; whether a rank has a signal."""
        numbers, seconds = self.read(step)
        loss, norm, targets, stop = numbers
        self.loss = loss
        self.targets_seen += round(targets)
        spent = time.perf_counter() - self.begun
        unit = self.modality.unit
        rate = targets / seconds
        values: dict[str, float] = {"loss": loss, "lr": step.lr, unit: self.targets_seen}
        if self.engine.knows_gradients:
            values["grad_norm"] = norm
        values[f"{unit}_per_s"] = rate
        values["seconds"] = round(spent, 3)
        self.record(values, step.number)
        settings = self.settings
        if step.number % settings.log_every == 0 or step.number == settings.steps:
            seconds_per_step = spent / (self.steps_done - self.first_step)
            remaining = clock(seconds_per_step * (settings.steps - self.steps_done))
            gradient = f"grad {norm:.3g}  " if self.engine.knows_gradients else ""
            self.print(
                f"step {step.number}/{settings.steps}  loss {loss:.4f}  lr {step.lr:.2e}  "
                f"{gradient}{short(rate)} {unit}/s  left {remaining}"
            )
        return bool(stop)

    def read(self, step: QueuedStep) -> tuple[list[float], float]:
        """([loss, norm, targets, signal] of a step, seconds); TrainingFailure where loss or norm is
        not finite."""
        numbers, seconds = step.readout.read()
        for name, value in zip(("loss", "gradient norm"), numbers[:2], strict=True):
            if not math.isfinite(value):
                checkpoints = self.run.checkpoints()
                newest = checkpoints[-1] if checkpoints else "none yet"
                raise TrainingFailure(
                    f"{name} is {value} at step {step.number}; last good checkpoint: {newest}. "
                    "A lower optim.lr, a longer optim.warmup or train.precision=fp32 may help"
                )
        return numbers, seconds

    def measure(self) -> dict[str, float]:
        """The held-out and evaluators' numbers that are due after this step."""
        figures: dict[str, float] = {}
        if self.heldout and self.is_due(self.recipe.evaluate.every):
            figures |= self.heldout_loss()
        return figures | self.run_evaluators()

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
            # Every rank runs every batch, since ranks gather ZeRO-3's parameters together.
            for batch in self.heldout or ():
                batch_weight, _ = modality.weight(batch)
                loss, metrics = modality.loss(engine, to_device(batch, device))
                if batch_weight:
                    values = [loss] + [metrics[name] for name in modality.metrics]
                    totals += torch.stack(values).double() * batch_weight
                weight += batch_weight
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
        if not due:
            return figures
        model = self.engine.exported_model()
        # Rank 0 alone has one.
        if model is not None:
            for evaluator in due:
                figures |= evaluator.numbers(model)
        self.ranks.barrier()
        return figures

    def save(self) -> None:
        """Write a checkpoint and remove those beyond `train.keep`."""
        if self.ranks.lead:
            sync(self.run.metrics_path)
        data_states = self.engine.gather(self.loader.state_dict())
        state = {
            "step": self.steps_done,
            "seen": self.targets_seen,
            # Ranks that share samples have one state.
            "data": data_states[:: self.ranks.shared],
        }
        self.engine.save(self.run.checkpoint(self.steps_done), state)
        self.saved_step = self.steps_done
        if self.ranks.lead:
            self.run.prune(self.settings.keep)

    # ---- what is written and printed, by the lead rank

    def record(self, values: dict[str, float], step: int) -> None:
        """Write numbers of a step to metrics.jsonl, and to the monitors of a DeepSpeed file."""
        if self.ranks.lead:
            self.run.log({"step": step, **values})
            self.engine.monitor(values, step)

    def report(self, figures: dict[str, float]) -> None:
        """Record and print held-out and evaluators' numbers."""
        if figures:
            self.figures |= figures
            self.record(figures, self.steps_done)
            numbers = [f"{display_name(name)} {value:.4f}" for name, value in figures.items()]
            self.print(f"step {self.steps_done}: {', '.join(numbers)}")

    def print(self, text: str) -> None:
        if self.ranks.lead:
            print(printable(text), flush=True)

    def announce(self) -> None:
        """Print what is trained, how and where."""
        recipe = self.recipe
        settings = self.settings
        ranks = self.ranks
        # ZeRO-3 cuts parameters up: there `ds_numel` has their whole size.
        sizes = [getattr(p, "ds_numel", p.numel()) for p in self.engine.model.parameters()]
        batch = f"{settings.micro_batch} × {settings.accumulation} × {ranks.groups}"
        shared = f", {ranks.shared} ranks a line" if ranks.shared > 1 else ""
        self.print(
            f"{recipe.name}: {recipe.model.name}, {short(sum(sizes))} parameters, "
            f"{settings.precision}, ZeRO {settings.zero_stage}, batch {batch} on "
            f"{ranks.device.type}{shared}; run folder {self.run.path}"
        )
        if not self.engine.knows_gradients:
            self.print("no gradient norms: from ZeRO 1 on DeepSpeed's are of Muon's updates")
        if self.checkpoint:
            self.print(f"resuming after step {self.steps_done} from {self.checkpoint}")

    def summarise(self) -> None:
        """Draw the loss curve and print the run's figures."""
        loss = "(nothing left to train)" if self.loss is None else f"{self.loss:.4f}"
        rows = {
            "steps": f"{self.steps_done:,}",
            self.modality.unit: f"{self.targets_seen:,}",
            "training loss": loss,
        }
        for name, value in self.figures.items():
            rows[display_name(name)] = f"{value:.4f}"
        rows["time"] = clock(time.perf_counter() - self.begun)
        rows["weights"] = str(self.run.path / "model")
        rows["loss curve"] = str(self.run.plot())
        # Of this rank: what was converted, skipped or replaced.
        report = str(getattr(self.loader, "report", ""))
        if report:
            rows["data"] = report
        Console().print(facts_table(f"{self.recipe.name} finished", rows))


def display_name(name: str) -> str:
    """heldout_loss -> held-out loss."""
    return name.replace("heldout_", "held-out ").replace("_", " ")


def rank_state(states: Sequence[State], ranks: Ranks) -> State:
    """This rank's data state: the common one, or its own where the source streams."""
    if len(states) not in (1, ranks.groups):
        raise ConfigError(
            f"streamed data was saved for {len(states)} readers: resume with as many, "
            f"not {ranks.groups}"
        )
    return states[0] if len(states) == 1 else states[ranks.group]


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """A list that the signals of `STOPS` append to. After a step the ranks agree to stop, and the
    loop saves."""
    received: list[int] = []

    def handle(number: int, _: object) -> None:
        received.append(number)
        # A launcher passes Ctrl-C on as two or three signals; a fourth signal aborts immediately.
        if len(received) > 3:
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
        print_recipes()
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
        plan = resolve(recipe, world, device, user_config, overridden_keys)
        print_plan(plan, as_json=json_)
        return 0
    require("deepspeed", "training", "train")
    require("matplotlib", "the loss curve", "figures")
    keep_freed_tensors(below=32 << 20)
    ranks = start(verbose=verbose)
    plan = resolve(recipe, ranks.world, ranks.device.type, user_config, overridden_keys)
    ranks = replace(ranks, shared=plan.recipe.train.sequence_parallel)
    if calibrate and world is not None:
        raise ConfigError("--calibrate measures the ranks there are; expected it without --world")
    words = command_words(name, set_, import_, deepspeed_config)
    try:
        if calibrate:
            print_calibrated(plan, ranks, calibrate, as_json=json_)
            return 0
        with (
            lasting_output(),
            stop_signals() as signals,
            own_run(plan, ranks, run_dir=run_dir, resume=resume, words=words) as (run, checkpoint),
        ):
            trainer = Trainer(plan, ranks, run, signals)
            trainer.setup(checkpoint)
            return trainer.fit()
    except TrainingFailure as error:
        # Once per machine.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"training failed: {error}", file=sys.stderr)
        return 1


def print_recipes() -> None:
    """Print what every recipe is, and the methods that it exists for."""
    console = Console()
    for recipes in installed_recipes():
        for title, text, methods in recipes.described():
            console.print(f"{recipes.modality}.{title}: {text}")
            if methods:
                console.print(Padding(f"<method>: {' '.join(methods)}", (0, 0, 0, 4)))


def command_words(
    name: str, settings: Sequence[str], imports: Sequence[str], deepspeed_config: str | None
) -> list[str]:
    """The words of a command line that trains this recipe again."""
    words = [name]
    for setting in settings:
        words += ["--set", setting]
    for module in imports:
        words += ["--import", module]
    if deepspeed_config:
        words += ["--deepspeed_config", deepspeed_config]
    return words


# Steps before those that are timed: moments are allocated, kernels compiled and chosen.
WARM_UP = 2
# Sections of a DeepSpeed file that write files.
MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler")


def calibrated(trainer: Trainer, steps: int) -> dict[str, str]:
    """Figures of so many real steps of a trainer before its `setup`. Every rank must call.

    Memory is what `memory_per_rank` estimates: weights, the optimiser's copies of them, and what
    steps add at their peak. Code of libraries is not counted: on the CPU that is several hundred
    MiB of a process. Raises ConfigError where the device has not the memory.
    """
    device = trainer.ranks.device
    settings = trainer.settings
    seconds: list[float] = []
    targets = 0.0
    try:
        trainer.setup(None)
        trainer.engine.train()
        if device.type == "cuda":
            held = torch.cuda.memory_allocated(device)
        else:
            held = trainer.engine.held_bytes()
        with Meter(device) as meter:
            for _ in range(WARM_UP + steps):
                numbers, spent = trainer.read(trainer.launch())
                _, _, targets, _ = numbers
                seconds.append(spent)
    except (RuntimeError, MemoryError) as error:
        if not ran_out_of_memory(error):
            raise
        raise ConfigError(
            f"a step of train.micro_batch={settings.micro_batch} does not fit on {device}: "
            "expected a smaller one, more train.zero_stage, or "
            "model.options.activation_checkpointing=true"
        ) from error
    peaks = [held + peak for peak in trainer.engine.gather(meter.peak_bytes) if peak is not None]
    memory = f"{max(peaks) / 2**30:.2f} GiB at the peak" if peaks else "not to be read here"
    timed = seconds[WARM_UP:]
    median = statistics.median(timed)
    spread = f"from {min(timed):.3g} to {max(timed):.3g}"
    return {
        "measured memory per rank": memory,
        "measured speed": f"{short(targets / median)} {trainer.modality.unit}/s",
        "measured seconds a step": f"{median:.3g}, the median of {len(timed)}, {spread}",
        "time to the end": f"{clock(median * settings.steps)}, without evaluation and saving",
    }


def print_calibrated(plan: Plan, ranks: Ranks, steps: int, *, as_json: bool) -> None:
    """Print a plan with the memory and speed of so many real steps, which leave nothing on the
    disk."""
    from recipes.estimate import print_plan

    quiet = {key: value for key, value in plan.deepspeed.items() if key not in MONITORS}
    with TemporaryDirectory() as folder:
        trainer = Trainer(replace(plan, deepspeed=quiet), ranks, RunFolder(Path(folder)))
        print_plan(plan, as_json=as_json, measured=calibrated(trainer, steps))


def main(argv: Sequence[str] | None = None, *, prog: str = "priorzoo train") -> int:
    words = sys.argv[1:] if argv is None else argv
    # Ranks come from the environment, not from a launcher's options.
    launcher_options = ("--local_rank=", "--local-rank=")
    words = [word for word in words if not word.startswith(launcher_options)]
    return call(train_command, words, prog=prog)


def run(argv: Sequence[str] | None = None, **named: str) -> int:
    """`main` as a whole process: leaves the process group, and ends without Python's finalisation
    (see `ranks.leave`)."""
    code = main(argv, **named)
    # Finished, or stopped by SIGHUP, SIGINT or SIGTERM: every rank comes here. After a failure
    # `stop` could wait for a rank that does not.
    if code in (0, 129, 130, 143):
        stop()
    leave(code)


if __name__ == "__main__":
    sys.exit(run())
